"""A barrier for asyncio callers that runs one function on the combined inputs of all callers."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Generic, TypeVar

PartT = TypeVar("PartT")
ResultT = TypeVar("ResultT")


class Gathering(Generic[PartT, ResultT]):
    """Collects numbered parts from several callers, runs a function on all parts, and returns its result to every caller.

    Callers may arrive in any order. The next round can start as soon as the function has been called. All calls must come from
    one event loop.
    """

    def __init__(self, run: Callable[[Mapping[int, PartT]], Coroutine[Any, Any, ResultT]]) -> None:
        """Start without parts. `run` gets all parts by number, in ascending order."""
        self._run = run
        self._parts: dict[int, PartT] = {}
        self._result: asyncio.Future[ResultT] | None = None
        self._running: dict[asyncio.Task[None], asyncio.Future[ResultT]] = {}

    async def add(self, parts: Mapping[int, PartT], num_parts: int) -> ResultT:
        """Add a caller's parts, wait until `num_parts` parts have arrived, and return the function's result.

        Cancelling a caller does not withdraw its parts. If the function raises, every caller gets the exception.
        """
        assert not parts.keys() & self._parts.keys(), "part added twice"
        result = self._result = self._result or asyncio.get_running_loop().create_future()
        self._parts |= parts
        if len(self._parts) == num_parts:
            complete, self._parts, self._result = dict(sorted(self._parts.items())), {}, None
            task = asyncio.create_task(self._finish(complete, result), name="gathered work")
            self._running[task] = result
            task.add_done_callback(self._running.pop)
        return await asyncio.shield(result)

    def reset(self, error: Exception) -> None:
        """Discard all parts after a caller died: fail the waiting calls with `error`, and cancel a running function."""
        for result in [self._result, *self._running.values()]:
            if result is not None and not result.done():
                result.set_exception(error)
                result.exception()  # mark it as retrieved, because a dead caller does not
        for task in self._running:
            task.cancel()
        self._parts, self._result = {}, None

    async def _finish(self, parts: Mapping[int, PartT], result: "asyncio.Future[ResultT]") -> None:
        try:
            value = await self._run(parts)
        except Exception as error:  # any exception goes to all callers
            if not result.done():
                result.set_exception(error)
        else:
            if not result.done():
                result.set_result(value)
