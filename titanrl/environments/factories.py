"""Loads environments by name, by import path, or from Python classes and functions, and checks them.

This module imports no third-party library.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from titanrl.base.plugins import Plugin, Plugins, Point, check_call, import_object, is_async, name_of, plugin_of
from titanrl.environments.interface import Done, Environment, Episode, JudgesTruncated, Limit, Message, Observation, opening

KEY = "data.environment"
"""Configuration section, for error messages."""
FUNCTION_KEY = f"{KEY}.function"
"""Configuration key of the environment, which is also its plugin key."""

BUILTIN = {
    "single_turn": "titanrl.environments.factories:SingleTurn",
    "tools": "titanrl.environments.factories:tools",
    "calculator": "titanrl.environments.tools:calculator",
    "python": "titanrl.environments.python_tool:python",
    "tic_tac_toe": "titanrl.environments.tic_tac_toe:TicTacToe",
    "openenv": "titanrl.environments.openenv:openenv",
    "verifiers": "titanrl.environments.verifiers:Verifiers",
}
"""Import paths of the built-in environments by name."""
BUILTIN_TOOLS = {
    "calculator": "titanrl.environments.tools:Calculator",
    "python": "titanrl.environments.python_tool:Python",
}
"""Import paths of the built-in tools by name."""

_METHODS = {
    "reset": "async def reset(self, episode: Episode) -> Observation",
    "step": "async def step(self, message: Message) -> Observation | Done",
    "close": "async def close(self) -> None",
}
EXPECTED = "\n    ".join(["class MyEnvironment:", *_METHODS.values()])
_JUDGES = "async def judge_truncated(self, message: Message | None, limit: Limit) -> Done | None"


class EnvironmentFactory(Protocol):
    """A class or function that creates the environment for one episode. `data.environment.options` are its keyword arguments.

    A class without `reset`, `step` and `close` is a toolset: its public methods are the tools that the policy may call. A
    function may return such an object, or a list of them. One extra environment is created at the start, to check it.

    Example:
        def hard_game(skill: float = 0.9) -> Environment:
            return TicTacToe(skill=skill, first="opponent")
    """

    def __call__(self) -> Environment:
        """Return a new environment. The caller then calls `reset`."""
        ...


def make_environment(
    function: object, options: Mapping[str, Any] = MappingProxyType({}), plugins: Plugins = MappingProxyType({})
) -> Environment:
    """Return an environment for one episode.

    Args:
        function: Name of a built-in environment, import path, class or function.
        options: Keyword arguments of the function.
        plugins: User-defined objects; the one under `data.environment.function` takes precedence over `function`.

    Raises:
        ValueError: The environment cannot be loaded, or does not implement the interface.

    Example: `make_environment("tic_tac_toe", {"skill": 1.0})`
    """
    return load_factory(function, options, plugins)()


def load_factory(
    function: object, options: Mapping[str, Any] = MappingProxyType({}), plugins: Plugins = MappingProxyType({})
) -> Callable[[], Environment]:
    """Load and check an environment, and return a function that creates one for each episode.

    Raises:
        ValueError: The environment cannot be loaded, or does not implement the interface.
    """
    plugin = plugin_for(function, plugins)
    if plugin is None and isinstance(function, str):
        path, name = BUILTIN.get(function), function
        if path is None:
            fix = f"Choose one of {', '.join(BUILTIN)}, or write an import path."
            raise ValueError(f"{FUNCTION_KEY}: no such environment (got {function!r}). {fix}")
        candidate: Any = import_object(path, key=FUNCTION_KEY)
    else:
        candidate = function if plugin is None else plugin.load()
        name = name_of(function) if plugin is None else plugin.name
    check_environment(candidate, key=FUNCTION_KEY, name=name, options=options)
    options = dict(options)
    return lambda: _environment_of(candidate(**options))


def plugin_for(function: object, plugins: Plugins) -> Plugin | None:
    """Return the plugin of a user-defined environment; None for a built-in one."""
    return plugins.get(FUNCTION_KEY) or plugin_of(FUNCTION_KEY, function)


def check_environment(candidate: object, *, key: str, name: str, options: Mapping[str, Any]) -> None:
    """Check that a class or function creates environments: create one, and compare its methods with the interface.

    Error messages have the configuration key and the name.

    Raises:
        ValueError: The candidate cannot be called with the options, or its result does not implement the interface.
    """
    arguments = ", ".join(options)
    expected = f"def environment({arguments}) -> Environment"
    check_call(candidate, EnvironmentFactory.__call__, key=key, name=name, expected=expected, options=options)
    assert callable(candidate)
    try:
        environment: object = _environment_of(candidate(**options))
    except Exception as error:  # user code may raise anything
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(f"{key}: creating an environment raised {cause} (got {name}). Correct it or its options.") from error
    missing = [method for method in _METHODS if not callable(inspect.getattr_static(environment, method, None))]
    if missing:
        rule = f"{type(environment).__name__} has no {' and no '.join(missing)}"
        raise ValueError(f"{key}: {rule} (got {name}). Write it as\n{EXPECTED}")
    assert isinstance(environment, Environment)
    protocols: dict[str, Callable[..., Any]] = {method: getattr(Environment, method) for method in _METHODS}
    if isinstance(environment, JudgesTruncated):
        protocols["judge_truncated"] = JudgesTruncated.judge_truncated
    for method, protocol in protocols.items():
        function, expected = getattr(environment, method), _METHODS.get(method, _JUDGES)
        check_call(function, protocol, key=key, name=f"{name}.{method}", expected=expected)
        if not is_async(function):
            raise ValueError(f"{key}: {method} is not async (got {name}). Write it as `{expected}`.")


POINT = Point(
    key=FUNCTION_KEY,
    argument="environment",
    protocol=EnvironmentFactory.__call__,
    expected=EXPECTED,
    checked=lambda candidate, plugin, config: check_environment(
        candidate, key=plugin.key, name=plugin.name, options=config.data.environment.options
    ),
)


class SingleTurn:
    """Asks the question and ends the episode after the answer."""

    def __init__(self, *, system_prompt: str | None = None) -> None:
        """Set the system message that precedes the question."""
        self._system_prompt = system_prompt

    async def reset(self, episode: Episode) -> Observation:
        """Return the question."""
        return Observation(messages=opening(episode, self._system_prompt))

    async def step(self, message: Message) -> Done:
        """End the episode."""
        return Done()

    async def judge_truncated(self, message: Message | None, limit: Limit) -> Done:
        """Add nothing to the configured rewards, which score the answer that was cut off."""
        return Done()

    async def close(self) -> None:
        """Release nothing."""


def tools(*, tools: Sequence[str | Mapping[str, Any]] | Mapping[str, Any], **options: Any) -> Environment:
    """Return a `ToolEnvironment` with the given tools.

    Args:
        tools: Names of built-in tools, import paths of classes or functions, and MCP servers, such as
            `{"mcp": "mcp-server-time"}`. One server needs no list.
        options: Other arguments of `ToolEnvironment`.

    Raises:
        ValueError: A tool cannot be loaded or used.
    """
    from titanrl.environments.tools import ToolEnvironment

    key = f"{KEY}.options.tools"
    sources: list[object] = []
    for name in [tools] if isinstance(tools, Mapping) else tools:
        if isinstance(name, Mapping):
            from titanrl.config.data import McpOptions
            from titanrl.environments.mcp import McpTools

            sources.append(McpTools(McpOptions.model_validate(name)))
            continue
        if ":" not in name and name not in BUILTIN_TOOLS:
            fix = f"Choose one of {', '.join(BUILTIN_TOOLS)}, or write an import path, or {{mcp: COMMAND or URL}}."
            raise ValueError(f"{key}: no such tool (got {name!r}). {fix}")
        loaded = import_object(BUILTIN_TOOLS.get(name, name), key=key)
        sources.append(loaded() if isinstance(loaded, type) else loaded)
    return ToolEnvironment(sources, **options)


def _environment_of(made: object) -> Any:
    """Return `made` if it is an environment. Wrap a list, or an object without any environment method, as tools."""
    if any(callable(inspect.getattr_static(made, method, None)) for method in _METHODS):
        return made
    if type(made).__module__ == "builtins" and not isinstance(made, list | tuple):
        return made
    from titanrl.environments.tools import ToolEnvironment

    return ToolEnvironment(made)
