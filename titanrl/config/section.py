"""The base class of configuration sections, and the types of their fields."""

import ast
import glob
import inspect
import os
import re
import string
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from titanrl.config.errors import BrokenRule, BrokenRules, without_credentials

# Sections are strict: a string is not accepted for a number, nor a number for a boolean. YAML has neither paths nor tuples, so
# pydantic converts only these, from strings and lists.
FilePath = Annotated[Path, Field(strict=False)]
"""A file or directory that a run writes, relative to the current directory."""
Fraction = Annotated[float, Field(gt=0.0, lt=1.0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]

# The upper bounds are far beyond any real run. They reject a typo such as 1e12 workers before anything starts.
Count = Annotated[int, Field(ge=1, le=1_000_000)]
CountOrZero = Annotated[int, Field(ge=0, le=1_000_000)]
Processes = Annotated[int, Field(ge=1, le=10_000)]
Steps = Annotated[int, Field(ge=1, le=100_000_000)]
StepsOrZero = Annotated[int, Field(ge=0, le=100_000_000)]
Tokens = Annotated[int, Field(ge=1, le=10_000_000)]
Bytes = Annotated[int, Field(ge=1, le=10**15)]
Seconds = Annotated[float, Field(gt=0.0, le=10_000_000.0)]

LIVE = Field(json_schema_extra={"live": True})
"""Annotation of a key that can be changed during the run (`titanrl.run.steering`)."""

FOR_KEYS = "put the key into an environment variable, and set key_variable to its name"
"""Fix for a URL with credentials."""

FOLDER = Path(__file__).parents[1] / "configs"
"""Directory of the shipped configurations. In a checkout, a link to `configs/`."""
MAX_PATH_BYTES = 3_000
"""Maximum length of a path. Linux allows 4,096 bytes; the rest is for files below the path."""
MAX_NAME_BYTES = 255
"""Maximum length of a file or directory name on Linux."""


@dataclass(frozen=True, slots=True)
class OrImportPath:
    """Annotation of a string that is a built-in name or the import path of a custom object.

    Example: `loss: Annotated[str, OrImportPath(tuple(LOSSES))]`

    A `.py` file in an import path is found as `InputPath` is. Validation makes the path absolute, because other processes
    import it.
    """

    names: tuple[str, ...] = ()
    """Built-in names; empty if only import paths are allowed."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return a validator that accepts a built-in name, or a path with a colon before its last name."""
        pattern = "|".join([*map(re.escape, self.names), r".+:[A-Za-z_]\w*"])
        return core_schema.with_info_after_validator_function(
            _with_absolute_file, core_schema.str_schema(pattern=f"^({pattern})$", strict=True)
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON schema: the built-in names, or a string in the format `import-path`."""
        path = {"type": "string", "format": "import-path"}
        return {"anyOf": [{"type": "string", "enum": list(self.names)}, path]} if self.names else path


def _with_absolute_file(path: str, info: ValidationInfo) -> str:
    file, _, name = path.rpartition(":")
    if not file.endswith(".py"):
        return path
    return f"{_found(Path(file), info).absolute()}:{name}"


def _found(path: Path, info: ValidationInfo) -> Path:
    """Return the path of an input: as given, or beside the configuration file; raise `BrokenRules` if two files differ."""
    folder = (info.context or {}).get("folder")
    if folder is None or path.is_absolute():
        return path
    beside = Path(folder, path)
    is_here, is_beside = _exists(path), _exists(beside)
    # A file of the user takes precedence over one that is shipped.
    is_same = is_here and is_beside and os.path.realpath(path) == os.path.realpath(beside)
    if is_here and is_beside and not is_same and Path(folder).resolve() != FOLDER.resolve():
        rule = "a relative path must name one file, but it exists in the current directory and beside the configuration file"
        fix = f"write the absolute path of the one that you mean: {path.absolute()} or {beside.absolute()}"
        raise BrokenRules(BrokenRule({"": str(path)}, rule, fix))
    return beside.absolute() if is_beside and not is_here else path


def _exists(path: Path) -> bool:
    """Return True if a file or a match of a pattern exists."""
    return os.path.exists(path) or (glob.has_magic(str(path)) and any(glob.iglob(str(path))))


InputPath = Annotated[Path, Field(strict=False), AfterValidator(_found)]
"""A file or directory that a run reads, relative to the current directory or, if it does not exist there, to the configuration
file."""


def _path_problem(path: Path) -> str | None:
    """Return the reason why a path cannot be used, such as a limit of Linux; None if it can."""
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        return "a path must be valid UTF-8"
    if b"\0" in encoded:
        return "a path must not contain the character U+0000"
    if len(encoded) > MAX_PATH_BYTES:
        return f"a path must not be longer than {MAX_PATH_BYTES:,} bytes, but has {len(encoded):,}"
    if re.match(r"~|\$", os.fspath(path)) and not os.path.lexists(path):
        return "a path is used as written: ~ and environment variables are not expanded"
    if max(map(len, encoded.split(b"/"))) > MAX_NAME_BYTES:
        return f"a file or directory name must not be longer than {MAX_NAME_BYTES} bytes"
    return None


class Section(BaseModel):
    """A section of the configuration. Unknown keys are errors, and values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def _broken_rules(self) -> Iterator[BrokenRule]:
        """Yield the rules between several keys of this section that are broken."""
        return iter(())

    def broken(self, keys: str, rule: str, fix: str) -> BrokenRule:
        """Return a broken rule with the values of these keys, which are separated by spaces; the first one is to be changed."""
        return BrokenRule({key: self.value_of(key) for key in keys.split()}, rule, fix)

    def changed(self, *keys: str) -> list[str]:
        """Return those of the keys whose values are not the defaults."""
        return [key for key in keys if getattr(self, key) != type(self).model_fields[key].get_default()]

    def value_of(self, key: str) -> Any:
        """Return the value at a dotted key, such as `kl.reference`; sections become mappings."""
        value: Any = self
        for part in key.split("."):
            value = value[part] if isinstance(value, Mapping) else getattr(value, part)
        if isinstance(value, Mapping):
            return {name: child.model_dump() if isinstance(child, BaseModel) else child for name, child in value.items()}
        return value.model_dump() if isinstance(value, BaseModel) else value

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        broken = []
        for name, path in self:
            if isinstance(path, Path) and (problem := _path_problem(path)):
                expanded = os.path.expandvars(os.path.expanduser(path))
                fix = "shorten or correct it" if expanded == str(path) else f"write {expanded}"
                broken.append(BrokenRule({name: str(path)}, problem, fix))
        # Other rules look for files, which would raise for a path that is too long.
        if broken := broken or list(self._broken_rules()):
            raise BrokenRules(*broken)
        return self


def meanings(section: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings of the fields of a section, by field.

    Only references and messages need them. pydantic would read them in every process that imports the configuration, which
    takes a third of the import.
    """
    found = dict[str, str]()
    for base in reversed(section.__mro__):
        for field, text in pairwise(_classes(base.__module__).get(base.__name__, [])):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(meaning))):
                    found[name] = inspect.cleandoc(meaning)
    return {name: meaning for name, meaning in found.items() if name in section.model_fields}


@cache
def _classes(module: str) -> dict[str, list[ast.stmt]]:
    """Return the statements of the classes of a module, by name; those of other packages have no sections."""
    if module.partition(".")[0] in sys.stdlib_module_names | {"pydantic"}:
        return {}
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}


def fields_of(template: str) -> set[str]:
    """Return the placeholders of a template. Raise `ValueError` if its braces are not paired."""
    names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    return {re.split(r"[.\[]", name, maxsplit=1)[0] for name in names}


def broken_by_names(section: str, names: Iterable[str], what: str) -> Iterator[BrokenRule]:
    """Yield a rule for each name of a key in a section that has a character other than letters, digits, _ and -."""
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}", name):
            rule = f"the name of a {what} must consist of letters, digits, _ and -, and start with a letter or digit"
            yield BrokenRule({f"{section}.{name}": {}}, rule, "rename it")


def broken_by_url(key: str, url: str, example: str, for_credentials: str) -> Iterator[BrokenRule]:
    """Yield the rules that a URL breaks. `for_credentials` is the fix for a URL with credentials."""
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:
        has_host = False
    if not has_host:
        yield BrokenRule({key: url}, f"{key} must contain a host", f"write it like {example}")
    if "@" in url:
        rule = f"{key} must not contain credentials, because the configuration is saved in the run directory"
        yield BrokenRule({key: without_credentials(url)}, rule, for_credentials)
