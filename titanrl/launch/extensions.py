"""Extension points: from configuration keys and arguments of `GRPO` to the user-defined objects of a run.

Each point is declared beside its Protocol, next to the code that calls the object; `POINTS` lists all of them. A key holds one
object, such as `algorithm.loss`; a list of them, such as `hooks`; or the rewards by name.
"""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from titanrl.algorithms import contracts
from titanrl.base.plugins import OBJECT, Plugin, Plugins, Point, loaded, name_of, object_path, plugin_of
from titanrl.carriers import rewards
from titanrl.carriers.rewards import Reward
from titanrl.config.algorithm import LossTraits
from titanrl.config.data import MIXTURE, SETS
from titanrl.config.errors import BrokenRules, ConfigError, inline, message
from titanrl.config.load import dotted, explain_rule
from titanrl.config.schema import Config
from titanrl.config.sections import Section
from titanrl.data import entries, mixture
from titanrl.environments import factories
from titanrl.metrics import trackers
from titanrl.rollout import group

POINTS = (
    entries.POINT,
    rewards.POINT,
    factories.POINT,
    mixture.POINT,
    group.FILTER,
    contracts.ADVANTAGE,
    contracts.LOSS,
    contracts.PRIORITY,
    trackers.POINT,
    trackers.HOOK_POINT,
)
"""All extension points."""


def point_of(key: str) -> Point:
    """Return the extension point of a full key. Keys of evaluation sets and of a mixture's tasks map to the run's keys."""
    key = re.sub(rf"^{re.escape(SETS)}\.[^.]+\.", "", key)
    key = re.sub(rf"^{re.escape(MIXTURE)}\.[^.]+\.", "data.", key)
    key = "algorithm.advantage" if key == "data.advantage" else key
    points = [point for point in POINTS if key == point.key or key.startswith(f"{point.key}.")]
    assert points, f"{key} is the key of no extension point"
    return points[0]


def config_of(key: str, config: Config) -> Config:
    """Return the configuration that applies to a full key: the task's for a key of a mixture, else the run's."""
    if not key.startswith(f"{MIXTURE}."):
        return config
    return config.of_task(config.data.mixture[key.removeprefix(f"{MIXTURE}.").partition(".")[0]])


# Plugins


def plugins_of(config: Config, objects: Mapping[str, object]) -> dict[str, Plugin]:
    """Return the plugins of a run by full key. Python objects, by argument of `GRPO`, take precedence over the configuration.

    The configuration records the objects; see `with_objects`. Raise `ValueError` if an object cannot be pickled, or does not
    fit its extension point.
    """
    plugins: dict[str, Plugin] = {}
    for point in POINTS:
        argument = objects.get(point.argument)
        for key, value in (_configured(point, config) | ({} if argument is None else _given(point, argument, config))).items():
            plugin = plugin_of(key, value, is_local=point.in_controller)
            if plugin is not None:
                plugins[key] = plugin
                if plugin.is_object:  # import paths are checked in a child process, because an import may crash or hang
                    point.check(plugin, config)
    paths: dict[str, object] = {}
    for name, task in config.data.mixture.items():
        of_task = config.of_task(task)
        values = {
            key: value for point in POINTS for key, value in _configured(point, of_task).items() if key.startswith("data.")
        }
        values |= {"data.advantage": task.advantage}
        paths |= {f"{MIXTURE}.{name}.{key.removeprefix('data.')}": value for key, value in values.items()}
    for eval_set in config.evaluation_sets.values():
        if eval_set.has_own_data:
            of_set = config.model_copy(update={"data": eval_set.data})
            for point in (entries.POINT, rewards.POINT):
                paths |= {f"{eval_set.key}.{key}": value for key, value in _configured(point, of_set).items()}
    found = [plugin_of(key, value) for key, value in paths.items()]
    return plugins | {plugin.key: plugin for plugin in found if plugin is not None}


def with_declared_traits(config: Config, plugins: Plugins) -> Config:
    """Return the configuration with the traits that a custom loss declares. `preflight` must have checked the loss."""
    loss = loaded(plugins, "algorithm.loss")
    return config if loss is None else config.with_loss_traits(contracts.declared_traits(loss) or LossTraits())


def _configured(point: Point, config: Config) -> dict[str, object]:
    value = _value(point, config)
    if point is factories.POINT and config.data.environment is not None and config.data.environment.python is not None:
        return {}  # another interpreter imports it
    if isinstance(value, Mapping):
        return {f"{point.key}.{name}": reward.function for name, reward in value.items()}
    if isinstance(value, tuple):
        return {f"{point.key}.{i}": item for i, item in enumerate(value)}
    return {point.key: value}


def _given(point: Point, argument: object, config: Config) -> dict[str, object]:
    """Return the objects of an argument of `GRPO` by full key. The objects of a list are the last entries of the key."""
    value = _value(point, config)
    if point is rewards.POINT:
        return {f"{point.key}.{name}": reward.function for name, reward in _rewards(argument).items()}
    if isinstance(value, tuple):
        items = _list(argument)
        return {f"{point.key}.{len(value) - len(items) + i}": item for i, item in enumerate(items)}
    return {point.key: argument}


def _value(point: Point, config: Config) -> Any:
    value: Any = config
    for name in point.key.split("."):
        value = None if value is None else getattr(value, name)
    return value


def _rewards(argument: Any) -> dict[str, Reward]:
    named = argument if isinstance(argument, Mapping) else {"answer": argument}
    return {name: reward if isinstance(reward, Reward) else Reward(reward) for name, reward in named.items()}


def _list(argument: object) -> list[object]:
    return list(argument) if isinstance(argument, list | tuple) else [argument]


# Recording of Python objects in the configuration


def with_objects(config: Config, objects: Mapping[str, object]) -> Config:
    """Return the configuration with Python objects (by argument of `GRPO`) recorded, as it is saved in the run directory.

    The result has the options of each object, and `object:NAME` in place of an import path. To resume the run, pass the objects
    again.

    Raises:
        TypeError: An argument does not exist.
        ConfigError: The options of an object are invalid.
    """
    for point in POINTS if config.data.mixture else ():
        if objects.get(point.argument) is not None and (point.key.startswith("data.") or point is contracts.ADVANTAGE):
            what = f"each task of {MIXTURE} has its own value, so a Python object could belong to any task"
            fix = f"write the import path into {MIXTURE}.<name>"
            raise ConfigError(message(f"argument {point.argument}", f"{MIXTURE}={', '.join(config.data.mixture)}", what, fix))
    known = [point.argument for point in POINTS]
    for argument in objects:
        if argument not in known:
            raise TypeError(f"{argument}: no such argument. Choose one of {', '.join(known)}.")
    for point in POINTS:
        if objects.get(point.argument) is not None:
            config = _recorded(point, objects[point.argument], config)
    return config


def _recorded(point: Point, argument: object, config: Config) -> Config:
    """Return the configuration with the argument of a point recorded, as far as YAML can express it."""
    before = _value(point, config)
    value: Any = _written_name(argument)
    if point is rewards.POINT:
        value = {
            name: {
                "function": _written_name(reward.function),
                "weight": reward.weight,
                "weights": dict(reward.weights),
                "trusted": reward.trusted,
                "options": dict(reward.options),
            }
            for name, reward in _rewards(argument).items()
        }
    elif isinstance(before, tuple):  # a resumed run has recorded the objects of its start
        kept = (name for name in before if not name.startswith(f"{OBJECT}:"))
        value = (*kept, *map(_written_name, _list(argument)))
    match point.key.split("."):
        case [key]:
            return config.model_copy(update={key: value})
        case ["data", "source"]:
            return _with_section(config, "data", source=value, path=None)
        case [section, key]:
            return _with_section(config, section, **{key: value})
        case ["data", "environment", key]:
            environment = config.data.environment
            settings = {} if environment is None else environment.model_dump()
            return _with_section(config, "data", environment=settings | {key: value})
    levels = config.data.curriculum
    if levels is None:
        rule, fix = "a sampler chooses among the levels of a curriculum", "define the levels in data.curriculum"
        raise ConfigError(message("argument sampler", "data.curriculum=null", rule, fix))
    return _with_section(config, "data", curriculum=levels.model_dump() | {"sampler": value})


def _with_section(config: Config, name: str, **changes: object) -> Config:
    """Return the configuration with changed values in a section, after validation."""
    section: tuple[str, ...] = (name,)
    before: Section = getattr(config, name)
    try:
        after = type(before).model_validate(before.model_dump() | changes)
        section = ()
        return Config.model_validate(config.model_copy(update={name: after}))  # rules over several sections
    except ValidationError as error:
        raise ConfigError(*(text for details in error.errors() for text in _explain(details, section))) from None


def _explain(details: Any, section: tuple[str, ...]) -> list[str]:
    cause, path = details.get("ctx", {}).get("error"), (*section, *details["loc"])
    if isinstance(cause, BrokenRules):
        return [explain_rule(rule, None, path) for rule in cause.broken]
    return [message("config", f"{dotted(path)}={inline(details['input'])}", details["msg"], "correct it")]


def _written_name(value: object) -> str:
    """Return the text that represents a value in the configuration. Names of built-ins and import paths stay unchanged."""
    return value if isinstance(value, str) else object_path(name_of(value))
