"""Requests with a name and a deadline, and the detection of processes and actors that died."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable
from typing import Any, Protocol, TypeVar

import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from titanrl.actors import resolve

T = TypeVar("T")

PROCESS_FAILED = "the process this actor was running on failed"
"""Text of torchmonarch's fault report when a process has ended."""


class DeadlineError(Exception):
    """A request was not completed in time; the text names it."""


class ActorDiedError(Exception):
    """A process or actor of the run died; the text names it and gives the cause."""


class OnEvent(Protocol):
    """Receives faults and stalls, to be recorded."""

    def __call__(self, kind: str, **fields: Any) -> None:
        """Record one event."""


class Supervisor:
    """Awaits requests to actors. The death of any process of the run ends every wait with `ActorDiedError`.

    By default, torchmonarch reacts to an unhandled fault by interrupting the controller's main thread. A supervisor replaces
    that hook for the rest of the process's life. `SupervisionError` is a private name of torchmonarch, used in this module
    only.
    """

    def __init__(self, on_event: OnEvent | None = None) -> None:
        """Install the fault hook for the running event loop.

        Args:
            on_event: called with `fault` (`cause`) and `stall` (`waiting_for`, `seconds`).
        """
        self._loop = asyncio.get_running_loop()
        self._on_event = on_event
        self._pidfds: dict[int, str] = {}
        self._all_ended = asyncio.Event()
        self._death: asyncio.Future[str] = self._loop.create_future()
        self._guards: set[asyncio.Task[None]] = set()
        self._closing = False
        self._has_remote_processes = False
        monarch.actor.unhandled_fault_hook = self._on_fault

    @property
    def saw_death(self) -> bool:
        """True if a process or actor of the run has died unexpectedly."""
        return self._death.done()

    async def ask(self, name: str, call: Awaitable[T], timeout_s: float) -> T:
        """Return the reply to a request; raise an exception of the actor as the actor raised it.

        Raises:
            DeadlineError: no reply within `timeout_s`.
            ActorDiedError: a process of the run died in the meantime.
        """
        task = asyncio.ensure_future(resolve(call))
        try:
            waiting: set[asyncio.Future[Any]] = {task, self._death}
            await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self._death.done():
                raise ActorDiedError(f"{self._death.result()} (while waiting for: {name})")
            if task.done():
                return _result_of(task)
            self._report("stall", waiting_for=name, seconds=timeout_s)
            raise DeadlineError(f"no reply to '{name}' within {timeout_s:g} s")
        finally:
            task.cancel()

    def watch(self, name: str, pid: int) -> None:
        """Watch a process of this machine through a pidfd, which reports its end at once, however it ends.

        torchmonarch alone takes seconds. Sometimes it reports only that a message could not be delivered, after 30 s.
        """
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._note_death(f"{name} (process {pid}) has ended")
            return
        self._pidfds[pidfd] = f"{name} (process {pid})"
        self._all_ended.clear()
        self._loop.add_reader(pidfd, self._on_end, pidfd)

    def trust_reports(self) -> None:
        """Use torchmonarch's reports of ended processes, because some run on other machines."""
        self._has_remote_processes = True

    def guard(self, name: str, call: Awaitable[None]) -> None:
        """Treat failure of this long-running call as the actor's death."""
        task = asyncio.create_task(resolve(call), name=name)
        self._guards.add(task)
        task.add_done_callback(self._on_guard_end)

    def expect_deaths(self) -> None:
        """Ignore deaths from now on, because processes are being stopped.

        The hook stays installed: torchmonarch reports faults even after the last process has ended, and its default hook would
        interrupt the program.
        """
        self._closing = True

    async def reap(self, timeout_s: float) -> list[str]:
        """Wait until every watched process has ended; kill the others after `timeout_s`, and return their names."""
        if self._pidfds:
            with contextlib.suppress(TimeoutError):  # the rest is killed below
                await asyncio.wait_for(self._all_ended.wait(), timeout_s)
        killed = list(self._pidfds.values())
        for pidfd in self._pidfds:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        if killed:
            await self._all_ended.wait()
        return killed

    def _on_end(self, pidfd: int) -> None:
        self._loop.remove_reader(pidfd)
        name = self._pidfds.pop(pidfd)
        os.close(pidfd)
        if not self._pidfds:
            self._all_ended.set()
        self._note_death(f"{name} has ended")

    def _on_guard_end(self, task: "asyncio.Task[None]") -> None:
        self._guards.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            cause = error.exception if isinstance(error, ActorError) else error
            self._note_death(f"{task.get_name()} failed: {_one_line(cause)}")

    def _on_fault(self, failure: Any) -> None:
        """Handle torchmonarch's fault report, which it delivers on a thread of its own.

        It reports the end of a process after ten seconds, so the process may have belonged to an earlier run. The pidfds report
        those of this run on this machine.
        """
        report = " ".join(failure.report().split())
        if self._closing or (PROCESS_FAILED in report and not self._has_remote_processes):
            return
        self._loop.call_soon_threadsafe(self._note_death, f"{failure.mesh_name} failed: {_one_line(report)}")

    def _note_death(self, cause: str) -> None:
        if not self._closing and not self._death.done():
            self._death.set_result(cause)
            self._report("fault", cause=cause)

    def _report(self, kind: str, **fields: Any) -> None:
        if self._on_event is not None:
            self._on_event(kind, **fields)


def _result_of(task: "asyncio.Task[T]") -> T:
    try:
        return task.result()
    except ActorError as error:
        raise error.exception from error
    except SupervisionError as error:
        raise ActorDiedError(_one_line(error)) from error


def _one_line(text: object) -> str:
    """Return a report without line breaks, cut to 600 characters."""
    return " ".join(str(text).split())[:600]
