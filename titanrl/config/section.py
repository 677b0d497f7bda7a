"""What every section of a configuration is made of."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from titanrl.config.errors import BrokenRule, BrokenRules

# Strict sections take no text for a number and no number for a truth value. Paths and tuples have no YAML form of their
# own, so only these are made from text and from lists.
FilePath = Annotated[Path, Field(strict=False)]
Fraction = Annotated[float, Field(gt=0.0, lt=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
Dtype = Literal["float32", "bfloat16"]


class Section(BaseModel):
    """A part of the configuration: unknown keys are errors, values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False)

    def _broken_rules(self) -> Iterator[BrokenRule]:
        """Rules over several keys of this section that its values break."""
        return iter(())

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        broken = tuple(self._broken_rules())
        if broken:
            raise BrokenRules(*broken)
        return self
