"""Hooks: the user's actions around the steps of a run. They run in the controller, one after another."""

import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

from titanrl.errors import TitanRLError
from titanrl.plugins import Plugins, check_call, plugins_under
from titanrl.types import EvaluationResult, StepMetrics

EXPECTED = "class MyHook(titanrl.Hook)"


class HookError(TitanRLError):
    """A hook raised; the text names it, and the exception of the hook is the cause."""


class Hook:
    """Actions around the steps of a run. A subclass overrides the methods it needs, each plain or `async`.

    `run` is the running `titanrl.GRPO`: `run.state.step` is the number of steps taken, `run.config` the configuration, and
    `run.set_learning_rate(rate)` changes the learning rate from the next optimizer step on. An exception ends the run.

    Example:
        class Halve(titanrl.Hook):
            def after_step(self, run, metrics):
                if metrics.values["mismatch/kl"] > 0.01:
                    run.set_learning_rate(0.5 * metrics.values["optim/lr"])
    """

    def before_step(self, run: Any) -> Awaitable[None] | None:
        """Act before a step takes its batch."""

    def after_step(self, run: Any, metrics: StepMetrics) -> Awaitable[None] | None:
        """Act after a step was recorded."""

    def after_evaluation(self, run: Any, result: EvaluationResult) -> Awaitable[None] | None:
        """Act after an evaluation was recorded."""

    def after_checkpoint(self, run: Any, folder: Path) -> Awaitable[None] | None:
        """Act after a checkpoint is complete in `folder`."""


METHODS: Mapping[str, Callable[..., Any]] = {
    "before_step": Hook.before_step,
    "after_step": Hook.after_step,
    "after_evaluation": Hook.after_evaluation,
    "after_checkpoint": Hook.after_checkpoint,
}
"""The methods of a hook."""


class Hooks:
    """The hooks of a run, in the order of the configuration."""

    def __init__(self, hooks: Sequence[tuple[str, Hook]]) -> None:
        """Call these hooks; each comes with its name for error messages."""
        self._hooks = tuple(hooks)

    @classmethod
    def of(cls, plugins: Plugins) -> Self:
        """Load the hooks of a run. A class is called without arguments.

        Raises:
            HookError: A class raised.
        """
        hooks = []
        for plugin in plugins_under(plugins, "hooks"):
            hook = plugin.load()
            with _named(plugin.name):
                hooks.append((plugin.name, hook() if isinstance(hook, type) else hook))
        return cls(hooks)

    def __len__(self) -> int:
        """Return the number of hooks."""
        return len(self._hooks)

    async def before_step(self, run: object) -> None:
        """Call `before_step` of every hook.

        Raises:
            HookError: A hook raised.
        """
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
        for name, hook in self._hooks:
            with _named(f"{name}.{method}"):
                result = call(hook)
                if result is not None:
                    await result


def check_hook(candidate: object, *, key: str, name: str) -> None:
    """Check that an object is a hook, or a class of hooks, whose methods have known names and fitting signatures.

    Raises:
        ValueError: It is not.
    """
    kind = candidate if isinstance(candidate, type) else type(candidate)
    if not issubclass(kind, Hook):
        raise ValueError(f"{key}: not a hook (got {name}, of type {type(candidate).__name__}). Write it as `{EXPECTED}`.")
    if candidate is kind:
        try:
            inspect.signature(kind).bind()
        except TypeError as error:
            fix = "Give its arguments defaults, or give the constructed object to GRPO(config, hooks=[...])."
            raise ValueError(f"{key}: the class must not need arguments: {error} (got {name}). {fix}") from error
    for method in dir(kind):
        if method.startswith(("before_", "after_")) and method not in METHODS:
            raise ValueError(f"{key}: no such method of a hook (got {name}.{method}). Its methods are {', '.join(METHODS)}.")
    for method, expected in METHODS.items():
        function = getattr(kind, method)
        if function is not expected:
            shown = f"def {method}{inspect.signature(expected)}"
            check_call(partial(function, None), expected, key=key, name=f"{name}.{method}", expected=shown)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Raise an exception of the body as a `HookError` that names the hook."""
    try:
        yield
    except Exception as error:  # the hook is the user's and may raise anything
        raise HookError(f"hooks: {name} raised {type(error).__name__}: {error}") from error
