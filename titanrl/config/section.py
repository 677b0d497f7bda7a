"""The base class of configuration sections, and the types of their fields."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

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


class Section(BaseModel):
    """A section of the configuration: unknown keys are errors, and values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False)

    def _broken_rules(self) -> Iterator[BrokenRule]:
        """Yield the rules over several keys of this section that its values break."""
        return iter(())

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        broken = tuple(self._broken_rules())
        if broken:
            raise BrokenRules(*broken)
        return self
