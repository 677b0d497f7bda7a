"""Waiting with a name and a deadline, and learning at once that a process has died."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable
from typing import Any, TypeVar

import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

T = TypeVar("T")

PROCESS_FAILED = "the process this actor was running on failed"
"""What torchmonarch's report says when a process has ended."""


class DeadlineError(Exception):
    """A call was not answered in time; the text names it."""


class ActorDiedError(Exception):
    """A process or actor of the run died; the text says which and how."""


class Supervisor:
    """Awaits calls to actors. A death anywhere in the run ends every wait with `ActorDiedError`.

    torchmonarch's own reaction to an unhandled fault is to interrupt the controller's main thread; while a supervisor is
    installed it is told instead. `SupervisionError` is torchmonarch's private name, used in this module alone.
    """

    def __init__(self) -> None:
        """Install the fault hook; belongs to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._pidfds: dict[int, str] = {}
        self._none_left = asyncio.Event()
        self._death: asyncio.Future[str] = self._loop.create_future()
        self._guards: set[asyncio.Task[None]] = set()
        self._closing = False
        self._some_elsewhere = False
        monarch.actor.unhandled_fault_hook = self._on_fault

    @property
    def saw_death(self) -> bool:
        """Whether a process or actor of the run has died without being told to."""
        return self._death.done()

    async def ask(self, name: str, call: Awaitable[T], timeout_s: float) -> T:
        """The answer to a call; an exception in the actor is raised here as it was raised there.

        Raises:
            DeadlineError: no answer within `timeout_s`.
            ActorDiedError: a process of the run died meanwhile.
        """
        task = asyncio.ensure_future(_resolve(call))
        try:
            waiting: set[asyncio.Future[Any]] = {task, self._death}
            await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not self._death.done():
                return _unwrapped(task)
            if self._death.done():
                raise ActorDiedError(f"{self._death.result()} (while waiting for: {name})")
            raise DeadlineError(f"no answer to '{name}' within {timeout_s:g} s")
        finally:
            task.cancel()

    def watch(self, name: str, pid: int) -> None:
        """Learn of the end of a process of this machine from the kernel, at once and however it ends.

        torchmonarch alone takes seconds, and sometimes reports only that a message could not be delivered, after 30 s.
        """
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._note_death(f"{name} (process {pid}) has ended")
            return
        self._pidfds[pidfd] = f"{name} (process {pid})"
        self._none_left.clear()
        self._loop.add_reader(pidfd, self._on_end, pidfd)

    def trust_reports(self) -> None:
        """Processes of the run are on other machines: that one of them has ended is learnt from torchmonarch alone."""
        self._some_elsewhere = True

    def guard(self, name: str, call: Awaitable[None]) -> None:
        """Take the failure of a call for the death of its actor; it is to last as long as that."""
        task = asyncio.create_task(_resolve(call), name=name)
        self._guards.add(task)
        task.add_done_callback(self._on_guard_end)

    def expect_deaths(self) -> None:
        """From here on processes are being stopped on purpose.

        The hook stays: faults are still reported after the last process has ended, and must not interrupt the program.
        """
        self._closing = True

    async def reap(self, timeout_s: float) -> list[str]:
        """Wait until every watched process has ended; kill those that have not in time, and return their names."""
        if self._pidfds:
            with contextlib.suppress(TimeoutError):  # then there is somebody to kill
                await asyncio.wait_for(self._none_left.wait(), timeout_s)
        killed = list(self._pidfds.values())
        for pidfd in self._pidfds:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        if killed:
            await self._none_left.wait()
        return killed

    def _on_end(self, pidfd: int) -> None:
        self._loop.remove_reader(pidfd)
        name = self._pidfds.pop(pidfd)
        os.close(pidfd)
        if not self._pidfds:
            self._none_left.set()
        if not self._closing:
            self._note_death(f"{name} has ended")

    def _on_guard_end(self, task: "asyncio.Task[None]") -> None:
        self._guards.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._closing:
            cause = error.exception if isinstance(error, ActorError) else error
            self._note_death(f"{task.get_name()} failed: {' '.join(str(cause).split())[:600]}")

    def _on_fault(self, failure: Any) -> None:
        """Called by torchmonarch on a thread of its own, ten seconds after a process has ended, so perhaps one of a run before.

        The kernel tells of this run's own, and at once.
        """
        report = " ".join(failure.report().split())
        if self._closing or (PROCESS_FAILED in report and not self._some_elsewhere):
            return
        text = f"{failure.mesh_name} failed: {report[:600]}"
        self._loop.call_soon_threadsafe(self._note_death, text)

    def _note_death(self, text: str) -> None:
        if not self._death.done():
            self._death.set_result(text)


async def _resolve(call: Awaitable[T]) -> T:
    return await call


def _unwrapped(task: "asyncio.Task[T]") -> T:
    try:
        return task.result()
    except ActorError as error:
        raise error.exception from error
    except SupervisionError as error:
        raise ActorDiedError(" ".join(str(error).split())[:600]) from error
