"""The base class of configuration sections, and the types of their fields."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationInfo, model_validator
from pydantic_core import CoreSchema, core_schema

from titanrl.config.errors import BrokenRule, BrokenRules

# Sections are strict: they accept no text for a number and no number for a truth value. YAML has no paths and no tuples, so
# pydantic may make only these from text and from lists.
FilePath = Annotated[Path, Field(strict=False)]
Fraction = Annotated[float, Field(gt=0.0, lt=1.0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]

# Upper bounds are far beyond any real run. They turn a slip such as 1e12 workers into an error before anything starts.
Count = Annotated[int, Field(ge=1, le=1_000_000)]
CountOrZero = Annotated[int, Field(ge=0, le=1_000_000)]
Processes = Annotated[int, Field(ge=1, le=10_000)]
Steps = Annotated[int, Field(ge=1, le=100_000_000)]
StepsOrZero = Annotated[int, Field(ge=0, le=100_000_000)]
Tokens = Annotated[int, Field(ge=1, le=10_000_000)]
Bytes = Annotated[int, Field(ge=1, le=10**15)]
Seconds = Annotated[float, Field(gt=0.0, le=10_000_000.0)]

MAX_PATH_BYTES = 3_000
"""Limit of a path. Linux allows 4,096 bytes, with the names of the files below it."""
MAX_NAME_BYTES = 255
"""Limit of Linux for one name in a path."""


@dataclass(frozen=True, slots=True)
class OrImportPath:
    """Annotation of a text that is one of some names, or the import path of an object of the user.

    Example: `loss: Annotated[str, OrImportPath(tuple(LOSSES))]`

    A file in a path is relative to the configuration file or, if there is none, to the current directory. Validation makes it
    absolute, since other processes import it.
    """

    names: tuple[str, ...] = ()
    """Names of the built-in objects; empty if only import paths are allowed."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the validator: one of the names, or a path with a colon before its last name."""
        pattern = "|".join([*map(re.escape, self.names), r".+:[A-Za-z_]\w*"])
        return core_schema.with_info_after_validator_function(
            _with_absolute_file, core_schema.str_schema(pattern=f"^({pattern})$", strict=True)
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON schema: the names, or a string in the format `import-path`."""
        path = {"type": "string", "format": "import-path"}
        return {"anyOf": [{"type": "string", "enum": list(self.names)}, path]} if self.names else path


def _with_absolute_file(path: str, info: ValidationInfo) -> str:
    file, _, name = path.rpartition(":")
    if not file.endswith(".py"):
        return path
    beside_config, here = Path((info.context or {}).get("folder", Path()), file), Path(file)
    is_here = os.path.exists(here) and not os.path.exists(beside_config)
    return f"{(here if is_here else beside_config).absolute()}:{name}"


def _path_problem(path: Path) -> str | None:
    """Return the rule of Linux that a path breaks; None if a file can have it."""
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        return "a path must be text that UTF-8 can hold"
    if b"\0" in encoded:
        return "a path must not contain the character U+0000"
    if len(encoded) > MAX_PATH_BYTES:
        return f"a path must not have more than {MAX_PATH_BYTES:,} bytes, but has {len(encoded):,}"
    if max(map(len, encoded.split(b"/"))) > MAX_NAME_BYTES:
        return f"a name in a path must not have more than {MAX_NAME_BYTES} bytes"
    return None


class Section(BaseModel):
    """A section of the configuration: unknown keys are errors, and values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False)

    def _broken_rules(self) -> Iterator[BrokenRule]:
        """Yield the rules over several keys of this section that its values break."""
        return iter(())

    def _broken_by_paths(self) -> Iterator[BrokenRule]:
        """Yield a rule for every path that no file can have."""
        for name, path in self:
            if isinstance(path, Path) and (problem := _path_problem(path)):
                yield BrokenRule(values={name: str(path)}, rule=problem, fix="shorten or correct it")

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        # A path that is too long would raise in rules that look for a file.
        broken = tuple(self._broken_by_paths()) or tuple(self._broken_rules())
        if broken:
            raise BrokenRules(*broken)
        return self
