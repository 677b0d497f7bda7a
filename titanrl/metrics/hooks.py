"""Hooks: user-defined callbacks around the steps of a run. The controller calls them one after another."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

from titanrl.base.errors import TitanRLError
from titanrl.base.plugins import Plugins, Point, check_call
from titanrl.carriers.types import EvaluationResult, StepMetrics

EXPECTED = "class MyHook(titanrl.Hook)"


class HookError(TitanRLError):
    """A hook raised an exception; the message names the hook, and `__cause__` is its exception."""


class Hook:
    """Base class of callbacks around the steps of a run. Override the methods you need, as plain or `async` functions.

    `run` is the running `titanrl.GRPO`. `run.state.step` is the number of steps taken, `run.config` is the configuration, and
    `run.set_learning_rate(rate)` sets the learning rate from the next optimizer step on. An exception ends the run.

    Example:
        class Halve(titanrl.Hook):
            def after_step(self, run, metrics):
                if metrics.values["mismatch/kl"] > 0.01:
                    run.set_learning_rate(0.5 * metrics.values["optim/lr"])
    """

    def before_step(self, run: Any) -> Awaitable[None] | None:
        """Handle the start of a step, before it takes its batch."""

    def after_step(self, run: Any, metrics: StepMetrics) -> Awaitable[None] | None:
        """Handle the end of a step, after its metrics were recorded."""

    def after_evaluation(self, run: Any, result: EvaluationResult) -> Awaitable[None] | None:
        """Handle the result of an evaluation, after it was recorded."""

    def after_checkpoint(self, run: Any, folder: Path) -> Awaitable[None] | None:
        """Handle a checkpoint, after it is complete in `folder`."""


METHODS: Mapping[str, Callable[..., Any]] = {name: value for name, value in vars(Hook).items() if not name.startswith("_")}
"""Methods of a hook by name."""


class Hooks:
    """The hooks of a run, in configuration order."""

    def __init__(self, hooks: Sequence[tuple[str, Hook]]) -> None:
        """Wrap named hooks; error messages use the names."""
        self._hooks = tuple(hooks)
        self._caller: asyncio.Task[Any] | None = None

    @classmethod
    def of(cls, plugins: Plugins) -> Self:
        """Load the hooks of a run, and instantiate those given as classes; raise `HookError` if a constructor raises."""
        hooks = []
        for plugin in (plugin for key, plugin in plugins.items() if key.startswith("hooks.")):
            hook = plugin.load()
            with _named(plugin.name):
                hooks.append((plugin.name, hook() if isinstance(hook, type) else hook))
        return cls(hooks)

    @property
    def is_caller(self) -> bool:
        """True if a hook is running and has called the current function."""
        return self._caller is not None and self._caller is asyncio.current_task()

    async def before_step(self, run: object) -> None:
        """Call `before_step` of every hook; raise HookError if one raises."""
        await self._each("before_step", lambda hook: hook.before_step(run))

    async def after_step(self, run: object, metrics: StepMetrics) -> None:
        """Call `after_step` of every hook; raise HookError if one raises."""
        await self._each("after_step", lambda hook: hook.after_step(run, metrics))

    async def after_evaluation(self, run: object, result: EvaluationResult) -> None:
        """Call `after_evaluation` of every hook; raise HookError if one raises."""
        await self._each("after_evaluation", lambda hook: hook.after_evaluation(run, result))

    async def after_checkpoint(self, run: object, folder: Path) -> None:
        """Call `after_checkpoint` of every hook; raise HookError if one raises."""
        await self._each("after_checkpoint", lambda hook: hook.after_checkpoint(run, folder))

    async def _each(self, method: str, call: Callable[[Hook], Awaitable[None] | None]) -> None:
        self._caller = asyncio.current_task()
        try:
            for name, hook in self._hooks:
                with _named(f"{name}.{method}"):
                    result = call(hook)
                    if result is not None:
                        await result
        finally:
            self._caller = None


def check_hook(candidate: object, *, key: str, name: str) -> None:
    """Raise `ValueError` unless an object is a `Hook`, or a class of them, with known method names and valid signatures."""
    kind = candidate if isinstance(candidate, type) else type(candidate)
    if not issubclass(kind, Hook):
        raise ValueError(f"{key}: not a hook (got {name}, of type {type(candidate).__name__}). Write it as `{EXPECTED}`.")
    if candidate is kind:
        try:
            inspect.signature(kind).bind()
        except TypeError as error:
            fix = "Give its arguments defaults, or pass an instance to GRPO(config, hooks=[...])."
            raise ValueError(f"{key}: the class must not require arguments: {error} (got {name}). {fix}") from error
    for method in dir(kind):
        if method.startswith(("before_", "after_")) and method not in METHODS:
            raise ValueError(f"{key}: hooks have no such method (got {name}.{method}). Choose one of {', '.join(METHODS)}.")
    for method, expected in METHODS.items():
        function = getattr(kind, method)
        if function is not expected:
            shown = f"def {method}{inspect.signature(expected)}"
            check_call(partial(function, None), expected, key=key, name=f"{name}.{method}", expected=shown)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Convert any exception raised in the body to a `HookError` that names the hook."""
    try:
        yield
    except Exception as error:  # user code may raise anything
        raise HookError(f"hooks: {name} raised {type(error).__name__}: {error}") from error


POINT = Point(
    key="hooks",
    argument="hooks",
    protocol=Hook,
    expected=EXPECTED,
    checked=lambda hook, plugin, config: check_hook(hook, key=plugin.key, name=plugin.name),
    in_controller=True,
)
