"""Work that starts when all of its callers are there, whatever the order in which they come."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Generic, TypeVar

PartT = TypeVar("PartT")
ResultT = TypeVar("ResultT")


class Gathering(Generic[PartT, ResultT]):
    """Collects the parts of several callers, then runs a function on all of them, in order; every caller gets its result.

    The next round can begin as soon as the function has been called. All calls come from one event loop.
    """

    def __init__(self, run: Callable[[Mapping[int, PartT]], Coroutine[Any, Any, ResultT]]) -> None:
        """Start without parts.

        Args:
            run: function of all parts by number, in ascending order.
        """
        self._run = run
        self._parts: dict[int, PartT] = {}
        self._result: asyncio.Future[ResultT] | None = None
        self._running: dict[asyncio.Task[None], asyncio.Future[ResultT]] = {}

    async def add(self, parts: Mapping[int, PartT], num_parts: int) -> ResultT:
        """Add a caller's parts, wait until there are `num_parts` of them, and return the function's result for all.

        Cancelling a caller does not take its parts back. If the function fails, every caller gets its exception.
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
        """Forget all parts, because a caller has ended: fail the calls that wait, and cancel the function if it runs."""
        for result in [self._result, *self._running.values()]:
            if result is not None and not result.done():
                result.set_exception(error)
                result.exception()  # a caller that has ended does not retrieve it
        for task in self._running:
            task.cancel()
        self._parts, self._result = {}, None

    async def _finish(self, parts: Mapping[int, PartT], result: "asyncio.Future[ResultT]") -> None:
        try:
            value = await self._run(parts)
        except Exception as error:  # of any kind: all callers get it
            if not result.done():
                result.set_exception(error)
        else:
            if not result.done():
                result.set_result(value)
