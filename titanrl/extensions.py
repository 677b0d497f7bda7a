"""The extension points of a run: which key of the configuration, and which argument of `GRPO`, takes the user's object.

Each point has one Protocol, defined where its objects are used. `POINTS` is the only list of them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from titanrl import hooks
from titanrl.algorithms.contracts import (
    ADVANTAGE_EXPECTED,
    LOSS_EXPECTED,
    Advantage,
    PolicyLoss,
    check_advantage,
    check_loss,
    declared_traits,
)
from titanrl.algorithms.replay import PRIORITY_EXPECTED, Priority
from titanrl.config.errors import BrokenRules, ConfigError, inline, message
from titanrl.config.evaluation import SETS
from titanrl.config.explain import explain_rule
from titanrl.config.keys import dotted
from titanrl.config.mixture import MIXTURE
from titanrl.config.registry import LossTraits
from titanrl.config.schema import Config
from titanrl.config.section import Section
from titanrl.data import curriculum, own_prompts
from titanrl.environments import registry as environments
from titanrl.metrics import trackers
from titanrl.plugins import OBJECT, Plugin, Plugins, check_call, loaded, name_of, object_path, plugin_of
from titanrl.rewards import EXPECTED, Reward, RewardFunction, check_reward
from titanrl.rollout import filters
from titanrl.rollout.filters import GroupFilter


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """An extension point.

    Example: `Point(key="algorithm.loss", argument="loss", protocol=PolicyLoss.__call__, expected="def loss(...) -> Tensor")`
    """

    key: str
    """Configuration key that names a built-in or an import path."""
    argument: str
    """Argument of `GRPO` that takes the object."""
    protocol: Callable[..., Any]
    """`__call__` of the Protocol that the object must satisfy."""
    expected: str
    """Code of such an object, for the error message."""
    values: Callable[[Config], Mapping[str, object]] | None = None
    """Function that returns the configured values by full key, if `key` holds several; None reads the value of `key`."""
    objects: Callable[[Any, Config], Mapping[str, object]] | None = None
    """Function from the argument of `GRPO`, and the configuration it is written in, to the objects by full key; None takes a
    mapping for several objects by name."""
    written: Callable[[Config, Any], Config] | None = None
    """Function that writes the argument of `GRPO` into the configuration, as far as it can hold it; None leaves it as it is."""
    checked: Callable[[object, Plugin, Config], None] | None = None
    """Check of an object that needs more than a comparison with `protocol`."""
    in_controller: bool = False
    """True if only the controller uses the object, so that it is not pickled."""

    def configured(self, config: Config) -> Mapping[str, object]:
        """Return the configured values by full key."""
        if self.values is not None:
            return self.values(config)
        value: Any = config
        for name in self.key.split("."):
            value = getattr(value, name)
        return {self.key: value}

    def given(self, argument: object, config: Config) -> Mapping[str, object]:
        """Return the objects of an argument of `GRPO`, which `with_objects` wrote into the configuration, by full key."""
        if self.objects is not None:
            return self.objects(argument, config)
        if isinstance(argument, Mapping):
            return {f"{self.key}.{name}": value for name, value in argument.items()}
        return {self.key: argument}

    def check(self, plugin: Plugin, config: Config) -> None:
        """Load a plugin of this point, and check that it can be called as its Protocol says.

        Raises:
            ValueError: It cannot be imported or called so.
        """
        candidate = plugin.load()
        if self.checked is not None:
            self.checked(candidate, plugin, config)
        else:
            check_call(candidate, self.protocol, key=plugin.key, name=plugin.name, expected=self.expected)


def _rewards(argument: Any) -> dict[str, Reward]:
    """Return rewards given in Python by name; a single one is `answer`."""
    rewards = argument if isinstance(argument, Mapping) else {"answer": argument}
    return {name: reward if isinstance(reward, Reward) else Reward(reward) for name, reward in rewards.items()}


def _with_rewards(config: Config, argument: Any) -> Config:
    rewards = {
        name: {
            "function": _written_name(reward.function),
            "weight": reward.weight,
            "weights": dict(reward.weights),
            "trusted": reward.trusted,
            "options": dict(reward.options),
        }
        for name, reward in _rewards(argument).items()
    }
    return _with_section(config, "data", rewards=rewards)


def _with_prompts(config: Config, argument: Any) -> Config:
    return _with_section(config, "data", source=_written_name(argument), path=None)


def _environment_values(config: Config) -> dict[str, object]:
    """Return the environment, unless another interpreter imports it."""
    environment = config.data.environment
    if environment is None or environment.python is not None:
        return {}
    return {"data.environment.function": environment.function}


def _with_environment(config: Config, argument: Any) -> Config:
    before = {} if config.data.environment is None else config.data.environment.model_dump()
    return _with_section(config, "data", environment=before | {"function": _written_name(argument)})


def _check_environment(candidate: Any, plugin: Plugin, config: Config) -> None:
    assert config.data.environment is not None
    environments.check_environment(candidate, key=plugin.key, name=plugin.name, options=config.data.environment.options)


def _sampler_values(config: Config) -> dict[str, object]:
    levels = config.data.curriculum
    return {} if levels is None else {"data.curriculum.sampler": levels.sampler}


def _with_sampler(config: Config, argument: Any) -> Config:
    levels = config.data.curriculum
    if levels is None:
        raise ConfigError(
            message(
                "argument sampler",
                "data.curriculum=null",
                "a sampler chooses among the levels of a curriculum",
                "say in data.curriculum which levels there are",
            )
        )
    return _with_section(config, "data", curriculum=levels.model_dump() | {"sampler": _written_name(argument)})


def _check_sampler(candidate: Any, plugin: Plugin, config: Config) -> None:
    assert config.data.curriculum is not None
    curriculum.check_sampler(candidate, key=plugin.key, name=plugin.name, options=config.data.curriculum.options)


def _with_section(config: Config, name: str, **changes: object) -> Config:
    """Return the configuration with other values in a section, validated.

    Raises:
        ConfigError: A value is invalid, or a rule is broken.
    """
    section: tuple[str, ...] = (name,)
    before: Section = getattr(config, name)
    try:
        after = type(before).model_validate(before.model_dump() | changes)
        section = ()
        return Config.model_validate(config.model_copy(update={name: after}))  # rules over several sections
    except ValidationError as error:
        raise ConfigError(*(text for details in error.errors() for text in _explain(details, section))) from None


def _list(argument: object) -> list[object]:
    return list(argument) if isinstance(argument, list | tuple) else [argument]


def _appended(names: Sequence[str], argument: object) -> tuple[str, ...]:
    """Return the entries of a list with the objects of an argument, in place of those of the run that is resumed."""
    return (*(name for name in names if not name.startswith(f"{OBJECT}:")), *map(_written_name, _list(argument)))


def _listed(key: str, values: Sequence[object]) -> dict[str, object]:
    return {f"{key}.{i}": value for i, value in enumerate(values)}


def _last(key: str, argument: object, length: int) -> dict[str, object]:
    """Return the objects of an argument by full key, as the last entries of a list."""
    objects = _list(argument)
    return {f"{key}.{length - len(objects) + i}": value for i, value in enumerate(objects)}


def _check_loss(loss: Any, plugin: Plugin, config: Config) -> None:
    check_loss(loss, name=plugin.name, algorithm=config.algorithm)
    config.with_loss_traits(declared_traits(loss) or LossTraits())


def _explain(details: Any, section: tuple[str, ...]) -> list[str]:
    cause, path = details.get("ctx", {}).get("error"), (*section, *details["loc"])
    if isinstance(cause, BrokenRules):
        return [explain_rule(rule, None, path) for rule in cause.broken]
    return [message("config", f"{dotted(path)}={inline(details['input'])}", details["msg"], "correct it")]


def _written_name(value: object) -> str:
    """Return the text of an object in a configuration; the import path or the name of a built-in itself."""
    return value if isinstance(value, str) else object_path(name_of(value))


POINTS: tuple[Point, ...] = (
    Point(
        key="data.source",
        argument="prompts",
        protocol=own_prompts.PromptSource.__call__,
        expected=own_prompts.EXPECTED,
        objects=lambda prompts, _: {"data.source": prompts},
        written=_with_prompts,
        checked=lambda source, plugin, config: own_prompts.check_prompt_source(
            source, key=plugin.key, name=plugin.name, options=config.data.options
        ),
    ),
    Point(
        key="data.rewards",
        argument="rewards",
        protocol=RewardFunction.__call__,
        expected=EXPECTED,
        values=lambda config: {f"data.rewards.{name}": reward.function for name, reward in config.data.rewards.items()},
        objects=lambda rewards, _: {f"data.rewards.{name}": reward.function for name, reward in _rewards(rewards).items()},
        written=_with_rewards,
        checked=lambda reward, plugin, _: check_reward(reward, key=plugin.key, name=plugin.name),
    ),
    Point(
        key="data.environment.function",
        argument="environment",
        protocol=environments.EnvironmentFactory.__call__,
        expected=environments.EXPECTED,
        values=_environment_values,
        objects=lambda environment, _: {"data.environment.function": environment},
        written=_with_environment,
        checked=_check_environment,
    ),
    Point(
        key="data.curriculum.sampler",
        argument="sampler",
        protocol=curriculum.SamplerFactory.__call__,
        expected=curriculum.EXPECTED,
        values=_sampler_values,
        objects=lambda sampler, _: {"data.curriculum.sampler": sampler},
        written=_with_sampler,
        checked=_check_sampler,
    ),
    Point(
        key="rollout.group_filter",
        argument="group_filter",
        protocol=GroupFilter.__call__,
        expected=filters.EXPECTED,
        written=lambda config, keep: _with_section(config, "rollout", group_filter=_written_name(keep)),
    ),
    Point(
        key="algorithm.advantage",
        argument="advantage",
        protocol=Advantage.__call__,
        expected=ADVANTAGE_EXPECTED,
        written=lambda config, advantage: _with_section(config, "algorithm", advantage=_written_name(advantage)),
        checked=lambda advantage, plugin, config: check_advantage(advantage, name=plugin.name, algorithm=config.algorithm),
        in_controller=True,
    ),
    Point(
        key="algorithm.loss",
        argument="loss",
        protocol=PolicyLoss.__call__,
        expected=LOSS_EXPECTED,
        written=lambda config, loss: _with_section(config, "algorithm", loss=_written_name(loss)),
        checked=_check_loss,
    ),
    Point(
        key="replay.priority",
        argument="priority",
        protocol=Priority.__call__,
        expected=PRIORITY_EXPECTED,
        written=lambda config, priority: _with_section(config, "replay", priority=_written_name(priority)),
        in_controller=True,
    ),
    Point(
        key="logging.loggers",
        argument="trackers",
        protocol=trackers.TrackerFactory.__call__,
        expected=trackers.EXPECTED,
        values=lambda config: _listed("logging.loggers", config.logging.loggers),
        objects=lambda given, config: _last("logging.loggers", given, len(config.logging.loggers)),
        written=lambda config, given: _with_section(config, "logging", loggers=_appended(config.logging.loggers, given)),
        checked=lambda tracker, plugin, _: trackers.check_tracker(tracker, key=plugin.key, name=plugin.name),
        in_controller=True,
    ),
    Point(
        key="hooks",
        argument="hooks",
        protocol=hooks.Hook,
        expected=hooks.EXPECTED,
        values=lambda config: _listed("hooks", config.hooks),
        objects=lambda given, config: _last("hooks", given, len(config.hooks)),
        written=lambda config, given: config.model_copy(update={"hooks": _appended(config.hooks, given)}),
        checked=lambda hook, plugin, _: hooks.check_hook(hook, key=plugin.key, name=plugin.name),
        in_controller=True,
    ),
)


DATA_ARGUMENTS = tuple(point.argument for point in POINTS if point.key.startswith("data."))
"""Arguments of `GRPO` with objects of the section `data`."""


def config_of(key: str, config: Config) -> Config:
    """Return the configuration that a full key belongs to: that of a task of a mixture, or that of the run."""
    name = key.removeprefix(f"{MIXTURE}.").partition(".")[0]
    return config.of_task(config.data.mixture[name]) if key.startswith(f"{MIXTURE}.") else config


def point_of(key: str) -> Point:
    """Return the extension point of a full key, which may be that of an evaluation set or of a task of a mixture."""
    key = re.sub(rf"^{re.escape(SETS)}\.[^.]+\.", "", key)
    key = re.sub(rf"^{re.escape(MIXTURE)}\.[^.]+\.", "data.", key)
    key = "algorithm.advantage" if key == "data.advantage" else key
    return next(point for point in POINTS if key == point.key or key.startswith(f"{point.key}."))


def with_objects(config: Config, objects: Mapping[str, object]) -> Config:
    """Return the configuration of a run with objects given in Python, as the run directory records it.

    It holds the options of an object, and its name in place of an import path. A resumed run needs the object again.

    Args:
        config: Configuration.
        objects: Objects by argument of `GRPO`.

    Raises:
        TypeError: There is no such argument.
        ConfigError: The options of an object are invalid.
    """
    known = [point.argument for point in POINTS]
    for argument in (*DATA_ARGUMENTS, "advantage") if config.data.mixture else ():
        if objects.get(argument) is not None:
            what = f"a run with {MIXTURE} has several of them, so an object of Python could belong to any task"
            fix = f"write its import path into {MIXTURE}.<name>"
            raise ConfigError(message(f"argument {argument}", f"{MIXTURE}={', '.join(config.data.mixture)}", what, fix))
    for argument in objects:
        if argument not in known:
            raise TypeError(f"{argument}: no such argument. The objects of a run are {', '.join(known)}.")
    for point in POINTS:
        if point.written is not None and objects.get(point.argument) is not None:
            config = point.written(config, objects[point.argument])
    return config


def plugins_of(config: Config, objects: Mapping[str, object]) -> dict[str, Plugin]:
    """Return the plugins of a run by full key. An object of Python takes precedence over the configuration.

    Args:
        config: Configuration.
        objects: Objects by argument of `GRPO`. A mapping gives several, each with a name that is appended to the key.

    Raises:
        ValueError: An object cannot be sent to other processes, or does not fit its extension point.
    """
    plugins: dict[str, Plugin] = {}
    for point in POINTS:
        argument = objects.get(point.argument)
        values = {**point.configured(config), **({} if argument is None else point.given(argument, config))}
        for key, value in values.items():
            plugin = plugin_of(key, value, is_local=point.in_controller)
            if plugin is not None:
                plugins[key] = plugin
                if plugin.is_object:  # import paths are checked in a child process, since they may crash or hang
                    point.check(plugin, config)
    for name, task in config.data.mixture.items():
        of_task = config.of_task(task)
        values = {key: value for point in POINTS for key, value in point.configured(of_task).items() if key.startswith("data.")}
        own = {f"{MIXTURE}.{name}.{key.removeprefix('data.')}": value for key, value in values.items()}
        found = [plugin_of(key, value) for key, value in (own | {f"{MIXTURE}.{name}.advantage": task.advantage}).items()]
        plugins |= {plugin.key: plugin for plugin in found if plugin is not None}
    for subset in config.evaluation_sets.values():
        if subset.has_own_data:
            of_set = config.model_copy(update={"data": subset.data})
            values = {key: value for point in POINTS[:2] for key, value in point.configured(of_set).items()}
            found = [plugin_of(f"{subset.key}.{key}", value) for key, value in values.items()]
            plugins |= {plugin.key: plugin for plugin in found if plugin is not None}
    return plugins


def with_declared_traits(config: Config, plugins: Plugins) -> Config:
    """Return the configuration with the traits that a loss of the user declares; `preflight` has checked the loss.

    Raises:
        BrokenRules: The traits contradict other keys.
    """
    loss = loaded(plugins, "algorithm.loss")
    return config if loss is None else config.with_loss_traits(declared_traits(loss) or LossTraits())
