"""Prompts of a task by difficulty level. A task without a curriculum has one level."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from titanrl.base.plugins import Plugins
from titanrl.carriers.types import Prompt
from titanrl.config.data import CurriculumConfig, DataConfig
from titanrl.config.errors import BrokenRule, BrokenRules
from titanrl.data.streams import Encode, PromptStream, make_encoder, make_gym_dataset, open_stream
from titanrl.data.tokenizer import Tokenizer


class LeveledPrompts:
    """Training prompts of a task by level and position, and its held-out prompts."""

    def __init__(self, name: str, stream: PromptStream, levels: Sequence[PromptStream]) -> None:
        """Store the streams.

        Args:
            name: Name of the task.
            stream: Prompts of the task without levels, including the held-out ones.
            levels: Training prompts by level.
        """
        self.name = name
        self.stream = stream
        """Prompts of the task without levels, including the held-out ones."""
        self._levels = levels

    def prompt(self, index: int, level: int, place: int) -> Prompt:
        """Return a training prompt.

        Args:
            index: Index of the prompt in the run, which determines its sampling seeds.
            level: Level of the prompt.
            place: Index in the stream of the level.
        """
        return replace(self._levels[level][place], index=index, task=self.name)


def open_prompts(
    name: str, config: DataConfig, tokenizer: Tokenizer, seed: int, plugins: Plugins = MappingProxyType({})
) -> LeveledPrompts:
    """Open the prompts of a task by level.

    Args:
        name: Name of the task.
        config: Section `data` of the task.
        tokenizer: Tokenizer of the policy.
        seed: Seed of the run.
        plugins: Custom objects; `data.source` is a prompt source.

    Raises:
        ValueError: The source is invalid, or a level has no prompts.
    """
    encode = make_encoder(config, tokenizer)
    stream = open_stream(config, encode, seed, plugins)
    return LeveledPrompts(name, stream, open_levels(config, encode, seed, stream))


def open_levels(config: DataConfig, encode: Encode, seed: int, stream: PromptStream) -> list[PromptStream]:
    """Return the training prompts of each level. `stream` contains the prompts of the task without levels.

    Raises:
        ValueError: A level has no prompts, or the task does not have these levels.
    """
    curriculum = config.curriculum
    if curriculum is None:
        return [stream]
    if curriculum.field is not None:
        return stream.split(_groups(stream.training_prompts(), curriculum, curriculum.field))
    changes = curriculum.task_configs or gym_levels(config.task, config.task_config, curriculum.num_levels)
    return [
        open_stream(config.model_copy(update={"task_config": {**config.task_config, **change}}), encode, seed)
        for change in changes
    ]


def gym_levels(task: str, task_config: Mapping[str, Any], num_levels: int) -> list[dict[str, Any]]:
    """Return the options of a reasoning-gym task at the first levels of the curriculum that reasoning-gym defines for it.

    All attributes of the task rise together. Options in `task_config` are not changed.

    Raises:
        ValueError: The task has no curriculum, or fewer levels.
    """
    make_gym_dataset(task, dict(task_config), seed=0, size=1)  # raises a specific error for an invalid task
    from reasoning_gym.factory import create_curriculum  # takes a second

    values = {"data.curriculum.levels": num_levels, "data.task": task}
    try:
        curriculum = create_curriculum(task)
    except ValueError as error:
        raise BrokenRules(
            BrokenRule(values, "reasoning-gym has no curriculum for this task", "set task_configs instead")
        ) from error
    most = max(len(attribute.levels) for attribute in curriculum.attributes.values())
    if num_levels > most:
        rule = f"the curriculum of this task has {most} levels"
        raise BrokenRules(BrokenRule(values, rule, f"set levels to at most {most}"))
    options = []
    for level in range(num_levels):
        curriculum.set_global_level(level)
        chosen = vars(curriculum.generate_configuration())
        options.append({key: value for key, value in chosen.items() if key not in ("seed", "size", *task_config)})
    return options


def _groups(prompts: Sequence[Prompt], curriculum: CurriculumConfig, field: str) -> list[list[Prompt]]:
    """Group prompts by level, according to the value of a metadata field."""
    found = [_value(prompt, field) for prompt in prompts]
    missing = next((prompt for prompt, value in zip(prompts, found, strict=True) if value is None), None)
    if missing is not None:
        rule = f"every prompt must have this metadata field, but {missing.text[:60]!r} does not"
        raise _broken({"field": field}, rule, "use another field, or add it to all prompts")
    groups: list[list[Prompt]] = [[] for _ in range(curriculum.num_levels)]
    for prompt, level in zip(prompts, _levels_of(found, curriculum, field), strict=True):
        groups[level].append(prompt)
    empty = [level for level, group in enumerate(groups) if not group]
    if empty:
        rule = f"every level must have a training prompt, but level {empty[0]} of {len(groups)} has none"
        raise _broken({"field": field}, rule, "change the edges, values or number of levels")
    return groups


def _levels_of(found: Sequence[Any], curriculum: CurriculumConfig, field: str) -> list[int]:
    """Return the level of each value of the field."""
    if curriculum.values:
        unknown = next((value for value in found if str(value) not in curriculum.values), None)
        if unknown is not None:
            rule = f"every value of {field} must belong to a level, but {unknown!r} does not"
            raise _broken({"values": curriculum.values, "field": field}, rule, "add it to values")
        return [curriculum.values.index(str(value)) for value in found]
    wrong = next((value for value in found if isinstance(value, bool) or not isinstance(value, int | float)), None)
    if wrong is not None:
        rule = f"with levels or edges, the field must be a number, but a prompt has {wrong!r}"
        raise _broken({"field": field}, rule, "set values instead, to the values in order of difficulty")
    if curriculum.edges:
        return [bisect_right(curriculum.edges, value) for value in found]
    order = sorted(range(len(found)), key=lambda place: found[place])  # equal values keep the order of the prompts
    levels = [0] * len(found)
    for rank, place in enumerate(order):
        levels[place] = rank * curriculum.num_levels // len(found)
    return levels


def _value(prompt: Prompt, field: str) -> Any:
    metadata: Any = prompt.entry["metadata"]
    if field in metadata:
        return metadata[field]
    for key in field.split("."):
        metadata = metadata.get(key) if isinstance(metadata, Mapping) else None
    return metadata


def _broken(values: Mapping[str, object], rule: str, fix: str) -> BrokenRules:
    return BrokenRules(BrokenRule({f"data.curriculum.{key}": value for key, value in values.items()}, rule, fix))
