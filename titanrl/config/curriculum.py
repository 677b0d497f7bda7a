"""The section `data.curriculum`: difficulty levels, and the sampler that chooses among them."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field

from titanrl.config.errors import BrokenRule
from titanrl.config.section import Count, OrImportPath, Section, Share

SAMPLERS = ("success_rate",)
"""Built-in level samplers."""
Levels = Annotated[int, Field(ge=2, le=1_000)]
BUILT_IN_KEYS = ("raise_at", "lower_at", "window", "solved_from", "start_level", "review")
"""Keys of the built-in sampler."""


class CurriculumConfig(Section):
    """Curriculum: difficulty levels from easy to hard, and a sampler that chooses the level of each prompt. One key defines the
    levels: `levels` for those of a reasoning-gym task, `task_configs` for its options per level, or `field` with `edges`,
    `values` or `levels` for a field of the prompts."""

    levels: Levels | None = None
    """Number of levels: the easiest ones of the curriculum that reasoning-gym defines for the task or, with `field`, groups of
    equal size."""
    task_configs: Annotated[tuple[dict[str, Any], ...], Field(strict=False)] = ()
    """Options of a reasoning-gym task for each level, on top of `data.task_config`, such as `[{max_terms: 2}, {max_terms:
    6}]`."""
    field: str | None = None
    """Metadata field that orders the prompts of a file or of a custom source by difficulty. A dot selects a nested field."""
    edges: Annotated[tuple[float, ...], Field(strict=False)] = ()
    """Boundaries of `field` between the levels, ascending. A prompt at a boundary belongs to the higher level; n boundaries
    make n + 1 levels."""
    values: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Values of `field`, one per level, such as `[easy, medium, hard]`."""
    sampler: Annotated[str, OrImportPath(SAMPLERS)] = "success_rate"
    """Sampler that chooses the level of each prompt. `success_rate` moves up or down by the success rate at the current level.
    Or the import path of a custom sampler (docs/howto/curriculum.md)."""
    options: dict[str, Any] = {}
    """Keyword arguments of a custom sampler."""
    raise_at: Share = 0.8
    """Success rate from which `success_rate` moves to the next level."""
    lower_at: Share = 0.1
    """Success rate at or below which it moves to the previous level. With 0, only if nothing is solved."""
    window: Count = 32
    """Number of recent groups of the current level that the success rate is computed over. It restarts after each move."""
    solved_from: float = 1.0
    """Minimum reward of a successful completion."""
    start_level: Annotated[int, Field(ge=0, le=999)] = 0
    """Initial level, counted from 0."""
    review: Annotated[float, Field(ge=0.0, le=0.9)] = 0.0
    """Share of the prompts that are drawn from lower levels, so that the policy does not forget them."""

    @property
    def num_levels(self) -> int:
        """Number of levels."""
        if self.task_configs:
            return len(self.task_configs)
        if self.edges:
            return len(self.edges) + 1
        return len(self.values) or self.levels or 1

    def _broken_rules(self) -> Iterator[BrokenRule]:
        yield from self._broken_by_levels()
        if self.lower_at >= self.raise_at:
            yield BrokenRule(
                values={"lower_at": self.lower_at, "raise_at": self.raise_at},
                rule="lower_at must be below raise_at",
                fix="lower lower_at, or raise raise_at",
            )
        if self.start_level >= self.num_levels:
            yield BrokenRule(
                values={"start_level": self.start_level},
                rule=f"start_level must be one of the {self.num_levels} levels, counted from 0",
                fix=f"set start_level to at most {self.num_levels - 1}",
            )
        if self.sampler in SAMPLERS and self.options:
            yield BrokenRule(
                values={"options": self.options, "sampler": self.sampler},
                rule="options are the arguments of a custom sampler",
                fix="remove options",
            )
        changed = {
            key: getattr(self, key) for key in BUILT_IN_KEYS if getattr(self, key) != type(self).model_fields[key].default
        }
        if self.sampler not in SAMPLERS and changed:
            yield BrokenRule(
                values={**changed, "sampler": self.sampler},
                rule="only the sampler success_rate uses these keys",
                fix="remove them, or pass them to your sampler in options",
            )

    def _broken_by_levels(self) -> Iterator[BrokenRule]:
        given: Mapping[str, object] = {
            "levels": self.levels,
            "task_configs": self.task_configs,
            "edges": self.edges,
            "values": self.values,
        }
        set_keys = {key: value for key, value in given.items() if value}
        if len(set_keys) != 1:
            yield BrokenRule(
                values=set_keys or {"levels": None},
                rule="exactly one of levels, task_configs, edges and values must define the levels",
                fix="keep one of them" if set_keys else "set levels to the number of levels",
            )
        for key in ("edges", "values"):
            if given[key] and self.field is None:
                yield BrokenRule(
                    values={key: given[key], "field": None},
                    rule=f"{key} requires field, whose values it refers to",
                    fix="set field to the name of a metadata field",
                )
        if self.field is not None and self.task_configs:
            yield BrokenRule(
                values={"field": self.field, "task_configs": self.task_configs},
                rule="field and task_configs are different ways to define the levels",
                fix="remove one of them",
            )
        if list(self.edges) != sorted(set(self.edges)):
            yield BrokenRule(values={"edges": self.edges}, rule="edges must be ascending, without duplicates", fix="sort them")
        if len(set(self.values)) != len(self.values):
            yield BrokenRule(
                values={"values": self.values}, rule="values must not contain duplicates", fix="list each value once"
            )
        if len(self.task_configs) == 1 or len(self.values) == 1:
            key = "task_configs" if self.task_configs else "values"
            yield BrokenRule(values={key: given[key]}, rule="a curriculum needs at least two levels", fix="add a level")

    def broken_by_source(self, source: str, task_config: Mapping[str, Any]) -> Iterator[BrokenRule]:
        """Yield the rules that the levels break together with the prompt source."""
        is_gym = source == "reasoning_gym"
        if is_gym and self.field is not None:
            yield BrokenRule(
                values={"curriculum.field": self.field, "source": source},
                rule="prompts of a reasoning-gym task are generated on demand and cannot be sorted by a field",
                fix="remove field, and set levels or task_configs",
            )
        if not is_gym and self.field is None:
            keys = {"curriculum.task_configs": self.task_configs} if self.task_configs else {"curriculum.levels": self.levels}
            yield BrokenRule(
                values={**keys, "source": source},
                rule="only reasoning-gym tasks define levels",
                fix="set curriculum.field to the name of a metadata field of the prompts",
            )
