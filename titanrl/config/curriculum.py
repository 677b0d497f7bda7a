"""The section `data.curriculum`: levels of difficulty, and the rule that chooses the level of each prompt."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field

from titanrl.config.errors import BrokenRule
from titanrl.config.section import Count, OrImportPath, Section, Share

SAMPLERS = ("success_rate",)
"""Built-in samplers of levels."""
Levels = Annotated[int, Field(ge=2, le=1_000)]
BUILT_IN_KEYS = ("raise_at", "lower_at", "window", "solved_from", "start_level", "review")
"""Keys of the built-in sampler."""


class CurriculumConfig(Section):
    """Levels of difficulty, from easy to hard, and the sampler that chooses among them. The levels are either those of the
    reasoning-gym task (`levels`), values of `task_config` (`task_configs`), or groups of prompts by a field (`field`)."""

    levels: Levels | None = None
    """Number of levels of reasoning-gym's own curriculum of the task to use, from its easiest one up; with `field`, the number
    of groups of equal size."""
    task_configs: Annotated[tuple[dict[str, Any], ...], Field(strict=False)] = ()
    """Changes of `task_config` by level, for a reasoning-gym task, such as `[{max_terms: 2}, {max_terms: 6}]`."""
    field: str | None = None
    """Name of a field of the prompts' metadata, whose values order the prompts of a file or of your own; a dot leads into an
    object."""
    edges: Annotated[tuple[float, ...], Field(strict=False)] = ()
    """Values of `field` at which the next level starts, ascending: n edges make n + 1 levels."""
    values: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Values of `field` by level, for one that has names, such as `[easy, medium, hard]`."""
    sampler: Annotated[str, OrImportPath(SAMPLERS)] = "success_rate"
    """Rule that chooses the level of each prompt: `success_rate` moves by the success rate of the present level. Also an import
    path of your own (docs/howto/curriculum.md)."""
    options: dict[str, Any] = {}
    """Keyword arguments of a sampler of your own."""
    raise_at: Share = 0.8
    """Success rate from which the next level follows."""
    lower_at: Share = 0.1
    """Success rate up to which the level before follows; 0 never returns unless nothing is solved."""
    window: Count = 32
    """Number of groups of the present level over which the success rate is measured. It starts again after a move."""
    solved_from: float = 1.0
    """Reward from which a completion is a success."""
    start_level: Annotated[int, Field(ge=0, le=999)] = 0
    """First level, from 0."""
    review: Annotated[float, Field(ge=0.0, le=0.9)] = 0.0
    """Share of the prompts that are drawn from the levels below the present one, so that they are not forgotten."""

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
                fix="lower it",
            )
        if self.start_level >= self.num_levels:
            yield BrokenRule(
                values={"start_level": self.start_level},
                rule=f"there are {self.num_levels} levels, counted from 0",
                fix=f"set it to at most {self.num_levels - 1}",
            )
        if self.sampler in SAMPLERS and self.options:
            yield BrokenRule(
                values={"options": self.options, "sampler": self.sampler},
                rule="options are the arguments of a sampler of your own",
                fix="remove options",
            )
        changed = {
            key: getattr(self, key) for key in BUILT_IN_KEYS if getattr(self, key) != type(self).model_fields[key].default
        }
        if self.sampler not in SAMPLERS and changed:
            yield BrokenRule(
                values={**changed, "sampler": self.sampler},
                rule="these keys belong to the sampler success_rate",
                fix="put them into options, which are the arguments of your sampler",
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
                rule="one key must say which levels there are: levels, task_configs, edges or values",
                fix="remove the others" if set_keys else "set levels to a number of levels",
            )
        for key in ("edges", "values"):
            if given[key] and self.field is None:
                yield BrokenRule(
                    values={key: given[key], "field": None},
                    rule=f"{key} are values of a field of the prompts",
                    fix="set field to its name",
                )
        if self.field is not None and self.task_configs:
            yield BrokenRule(
                values={"field": self.field, "task_configs": self.task_configs},
                rule="the levels come either from a field or from task_configs",
                fix="remove one of them",
            )
        if list(self.edges) != sorted(set(self.edges)):
            yield BrokenRule(values={"edges": self.edges}, rule="must be ascending", fix="sort them, each once")
        if len(set(self.values)) != len(self.values):
            yield BrokenRule(values={"values": self.values}, rule="a value must belong to one level", fix="list each once")
        if len(self.task_configs) == 1 or len(self.values) == 1:
            key = "task_configs" if self.task_configs else "values"
            yield BrokenRule(values={key: given[key]}, rule="a curriculum needs two levels", fix="add one")

    def broken_by_source(self, source: str, task_config: Mapping[str, Any]) -> Iterator[BrokenRule]:
        """Yield the rules that the levels break together with the source of the prompts."""
        is_gym = source == "reasoning_gym"
        if is_gym and self.field is not None:
            yield BrokenRule(
                values={"curriculum.field": self.field, "source": source},
                rule="the prompts of a reasoning-gym task are generated on demand, so they cannot be sorted by a field",
                fix="remove field, and set levels or task_configs",
            )
        if not is_gym and self.field is None:
            keys = {"curriculum.task_configs": self.task_configs} if self.task_configs else {"curriculum.levels": self.levels}
            yield BrokenRule(
                values={**keys, "source": source},
                rule="only a reasoning-gym task has levels of its own",
                fix="set curriculum.field to the name of a field of the prompts",
            )
