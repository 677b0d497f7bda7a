"""Registry of extension points: the configuration keys and `GRPO` arguments that accept user-defined objects.

Each point has one Protocol, defined next to the code that calls the object. `POINTS` lists all extension points.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

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
from titanrl.base.plugins import OBJECT, Plugin, Plugins, check_call, loaded, name_of, object_path, plugin_of
from titanrl.carriers.rewards import EXPECTED, Reward, RewardFunction, check_reward
from titanrl.config.data import MIXTURE
from titanrl.config.errors import BrokenRules, ConfigError, inline, message
from titanrl.config.evaluation import SETS
from titanrl.config.explain import explain_rule
from titanrl.config.keys import dotted
from titanrl.config.registry import LossTraits
from titanrl.config.schema import Config
from titanrl.config.section import Section
from titanrl.data import curriculum, custom_prompts
from titanrl.environments import factories as environments
from titanrl.metrics import hooks, trackers
from titanrl.rollout import filters
from titanrl.rollout.filters import GroupFilter


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """An extension point.

    Example: `Point(key="algorithm.loss", argument="loss", protocol=PolicyLoss.__call__, expected="def loss(...) -> Tensor")`
    """

    key: str
    """Configuration key whose value is the name of a built-in or an import path."""
    argument: str
    """Argument of `GRPO` that takes the object."""
    protocol: Callable[..., Any]
    """`__call__` of the Protocol that the object must satisfy."""
    expected: str
    """Signature of such an object, as code for the error message."""
    values: Callable[[Config], Mapping[str, object]] | None = None
    """Function that returns the configured values by full key, for a `key` with several values; None reads the value of
    `key`."""
    objects: Callable[[Any, Config], Mapping[str, object]] | None = None
    """Function that returns the objects by full key, given the argument of `GRPO` and the configuration that records it; None
    treats a mapping as several objects by name."""
    written: Callable[[Config, Any], Config] | None = None
    """Function that returns the configuration with the argument of `GRPO` recorded, as far as YAML can express it; None leaves
    the configuration unchanged."""
    checked: Callable[[object, Plugin, Config], None] | None = None
    """Check of the object; None compares its signature with `protocol`."""
    in_controller: bool = False
    """True if only the controller uses the object, so that it need not be pickled."""

    def configured(self, config: Config) -> Mapping[str, object]:
        """Return the configured values by full key."""
        if self.values is not None:
            return self.values(config)
        value: Any = config
        for name in self.key.split("."):
            value = getattr(value, name)
        return {self.key: value}

    def given(self, argument: object, config: Config) -> Mapping[str, object]:
        """Return the objects of a `GRPO` argument by full key.

        Args:
            argument: Value of the argument.
            config: Configuration that records the argument; see `with_objects`.
        """
        if self.objects is not None:
            return self.objects(argument, config)
        if isinstance(argument, Mapping):
            return {f"{self.key}.{name}": value for name, value in argument.items()}
        return {self.key: argument}

    def check(self, plugin: Plugin, config: Config) -> None:
        """Load a plugin of this point, and check that it satisfies the Protocol.

        Raises:
            ValueError: The plugin cannot be imported, or has the wrong signature.
        """
        candidate = plugin.load()
        if self.checked is not None:
            self.checked(candidate, plugin, config)
        else:
            check_call(candidate, self.protocol, key=plugin.key, name=plugin.name, expected=self.expected)


def _rewards(argument: Any) -> dict[str, Reward]:
    """Return the rewards of the argument by name; a single reward is named `answer`."""
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
    """Return the configured environment by key; none if another Python interpreter imports it."""
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
                "define the levels in data.curriculum",
            )
        )
    return _with_section(config, "data", curriculum=levels.model_dump() | {"sampler": _written_name(argument)})


def _check_sampler(candidate: Any, plugin: Plugin, config: Config) -> None:
    assert config.data.curriculum is not None
    curriculum.check_sampler(candidate, key=plugin.key, name=plugin.name, options=config.data.curriculum.options)


def _with_section(config: Config, name: str, **changes: object) -> Config:
    """Return the configuration with changed values in a section, after validation.

    Raises:
        ConfigError: A value is invalid, or the configuration breaks a rule.
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
    """Append the objects of an argument to a list of names, replacing entries for objects recorded by a resumed run."""
    return (*(name for name in names if not name.startswith(f"{OBJECT}:")), *map(_written_name, _list(argument)))


def _listed(key: str, values: Sequence[object]) -> dict[str, object]:
    return {f"{key}.{i}": value for i, value in enumerate(values)}


def _last(key: str, argument: object, length: int) -> dict[str, object]:
    """Return the objects of an argument by full key, given that they are the last entries of a list of this length."""
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
    """Return the text that represents a value in the configuration. Names of built-ins and import paths stay unchanged."""
    return value if isinstance(value, str) else object_path(name_of(value))


POINTS: tuple[Point, ...] = (
    Point(
        key="data.source",
        argument="prompts",
        protocol=custom_prompts.PromptSource.__call__,
        expected=custom_prompts.EXPECTED,
        objects=lambda prompts, _: {"data.source": prompts},
        written=_with_prompts,
        checked=lambda source, plugin, config: custom_prompts.check_prompt_source(
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
"""Arguments of `GRPO` that set values in the section `data`."""


def config_of(key: str, config: Config) -> Config:
    """Return the configuration that applies to a full key: the task's for a key of a mixture, else the run's."""
    if not key.startswith(f"{MIXTURE}."):
        return config
    return config.of_task(config.data.mixture[key.removeprefix(f"{MIXTURE}.").partition(".")[0]])


def point_of(key: str) -> Point:
    """Return the extension point of a full key. Keys of evaluation sets and of a mixture's tasks map to the run's keys."""
    key = re.sub(rf"^{re.escape(SETS)}\.[^.]+\.", "", key)
    key = re.sub(rf"^{re.escape(MIXTURE)}\.[^.]+\.", "data.", key)
    key = "algorithm.advantage" if key == "data.advantage" else key
    return next(point for point in POINTS if key == point.key or key.startswith(f"{point.key}."))


def with_objects(config: Config, objects: Mapping[str, object]) -> Config:
    """Return the configuration with Python objects recorded, as it is saved in the run directory.

    The result has the options of each object, and `object:NAME` in place of an import path. To resume the run, pass the objects
    again.

    Args:
        config: Configuration.
        objects: Objects by argument of `GRPO`.

    Raises:
        TypeError: An argument does not exist.
        ConfigError: The options of an object are invalid.
    """
    known = [point.argument for point in POINTS]
    for argument in (*DATA_ARGUMENTS, "advantage") if config.data.mixture else ():
        if objects.get(argument) is not None:
            what = f"each task of {MIXTURE} has its own value, so a Python object could belong to any task"
            fix = f"write the import path into {MIXTURE}.<name>"
            raise ConfigError(message(f"argument {argument}", f"{MIXTURE}={', '.join(config.data.mixture)}", what, fix))
    for argument in objects:
        if argument not in known:
            raise TypeError(f"{argument}: no such argument. Choose one of {', '.join(known)}.")
    for point in POINTS:
        if point.written is not None and objects.get(point.argument) is not None:
            config = point.written(config, objects[point.argument])
    return config


def plugins_of(config: Config, objects: Mapping[str, object]) -> dict[str, Plugin]:
    """Return the plugins of a run by full key. Python objects take precedence over the configuration.

    Args:
        config: Configuration.
        objects: Objects by argument of `GRPO`. A mapping passes several objects; their names are appended to the key.

    Raises:
        ValueError: An object cannot be pickled, or does not fit its extension point.
    """
    plugins: dict[str, Plugin] = {}
    for point in POINTS:
        argument = objects.get(point.argument)
        values = {**point.configured(config), **({} if argument is None else point.given(argument, config))}
        for key, value in values.items():
            plugin = plugin_of(key, value, is_local=point.in_controller)
            if plugin is not None:
                plugins[key] = plugin
                if plugin.is_object:  # import paths are checked in a child process, because an import may crash or hang
                    point.check(plugin, config)
    for name, task in config.data.mixture.items():
        of_task = config.of_task(task)
        values = {key: value for point in POINTS for key, value in point.configured(of_task).items() if key.startswith("data.")}
        values = {f"{MIXTURE}.{name}.{key.removeprefix('data.')}": value for key, value in values.items()}
        found = [plugin_of(key, value) for key, value in (values | {f"{MIXTURE}.{name}.advantage": task.advantage}).items()]
        plugins |= {plugin.key: plugin for plugin in found if plugin is not None}
    for subset in config.evaluation_sets.values():
        if subset.has_own_data:
            of_set = config.model_copy(update={"data": subset.data})
            values = {key: value for point in POINTS[:2] for key, value in point.configured(of_set).items()}
            found = [plugin_of(f"{subset.key}.{key}", value) for key, value in values.items()]
            plugins |= {plugin.key: plugin for plugin in found if plugin is not None}
    return plugins


def with_declared_traits(config: Config, plugins: Plugins) -> Config:
    """Return the configuration with the traits that a custom loss declares. `preflight` must have checked the loss.

    Raises:
        BrokenRules: The traits conflict with other keys.
    """
    loss = loaded(plugins, "algorithm.loss")
    return config if loss is None else config.with_loss_traits(declared_traits(loss) or LossTraits())
