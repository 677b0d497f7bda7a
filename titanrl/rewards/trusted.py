"""Trusted rewards, which run in this process with access to the network and to devices.

Use them only for functions that do not execute model output.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from titanrl.carriers.rewards import Answers, BoundReward
from titanrl.carriers.scores import Score

MAX_CALLS = 64
"""Maximum number of concurrent calls of one reward. The time limit of a waiting call starts when the call starts."""
_MAX_DETAIL_CHARS = 200


class TrustedReward:
    """A user-defined reward. An async function is awaited in the event loop; a synchronous one is called in a thread.

    Example: `TrustedReward(BoundReward("judge", ask_the_judge), timeout_s=5.0)`
    """

    def __init__(self, reward: BoundReward, timeout_s: float) -> None:
        """Keep the reward, and the time limit of each call."""
        self._reward = reward
        self._timeout_s = timeout_s
        self._running = asyncio.Semaphore(MAX_CALLS)

    async def score(self, answers: Answers) -> list[Score]:
        """Score the answers to one prompt, in order."""
        num = len(answers.completions)
        answers = answers.with_raw() if self._reward.takes_raw else answers
        if not self._reward.is_group:
            return list(await asyncio.gather(*(self._score_one(answers, index) for index in range(num))))
        try:
            returned = await self._call(partial(self._reward.call_group, answers), "the whole group")
            values = self._reward.values(returned, num)
        except (Exception, SystemExit) as error:  # user code may raise anything
            return [_failed(error)] * num
        return [self._checked(value) for value in values]

    async def _score_one(self, answers: Answers, index: int) -> Score:
        try:
            value = await self._call(partial(self._reward.call_one, answers, index), "one completion")
        except (Exception, SystemExit) as error:  # as above
            return _failed(error)
        return self._checked(value)

    def _checked(self, value: object) -> Score:
        try:
            return Score.of(self._reward.parts(value))
        except Exception as error:  # as above: the value may be an object of the user
            return _failed(error)

    async def _call(self, call: Callable[[], Any], what: str) -> Any:
        """Return the result of a call.

        Args:
            call: Function to call.
            what: Description of what it scores, for the error message.

        Raises:
            _TimeLimit: The call took too long.
        """
        async with self._running:
            try:
                async with asyncio.timeout(self._timeout_s) as limit:
                    value = call() if self._reward.is_async else await in_thread(call)
                    return await value if isinstance(value, Awaitable) else value
            except TimeoutError:
                if not limit.expired():  # the function itself raised TimeoutError
                    raise
                raise _TimeLimit(
                    f"the reward did not return in time (sandbox.timeout_s={self._timeout_s:g}, for {what})"
                ) from None


class _TimeLimit(Exception):
    """Raised if a reward exceeds its time limit."""


def _failed(error: BaseException) -> Score:
    if isinstance(error, _TimeLimit):
        return Score(parts={}, status="timeout", detail=f"timeout: {error}")
    detail = f"{type(error).__name__}: {error}"[:_MAX_DETAIL_CHARS]
    return Score(parts={}, status="error", detail=ascii(detail)[1:-1])


async def in_thread(call: Callable[[], Any]) -> Any:
    """Call a function in a new thread. A thread cannot be stopped, so if the wait is cancelled, its result is dropped."""
    done: concurrent.futures.Future[Any] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()  # now cancelling the wait cannot cancel the future, so the thread can always set it

    def run() -> None:
        try:
            result = call()
        except BaseException as error:  # futures reject StopIteration, and SystemExit would end the worker
            is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            done.set_exception(error if is_plain else RuntimeError(f"{type(error).__name__}: {error}"))
        else:
            done.set_result(result)

    threading.Thread(target=run, name="reward", daemon=True).start()
    return await asyncio.wrap_future(done)
