"""Clocks: one that a test moves, and an event loop whose clock jumps to the next timer, for fast and repeatable simulations."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class Clock:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that advances a clock instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "deadlock: every task waits, and no timer is set"
        self.now += max(0.0, timeout)
        return super().select(0)


class _JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def simulate(main: Coroutine[Any, Any, Result], timeout_s: float = 60) -> Result:
    """Run a coroutine on a simulated clock. It fails after `timeout_s` simulated seconds."""
    with asyncio.Runner(loop_factory=_JumpingLoop) as runner:
        return runner.run(asyncio.wait_for(main, timeout_s))
