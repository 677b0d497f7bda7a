"""Supervision of a session: requests with deadlines, detection of dead, stopped and hanging processes, and their replacement.

A learned deadline is a multiple of the slowest recent reply to requests of the same kind. A *role* is the name of a mesh of
processes, such as `trainer` or `generator_0`. A `Part` is a generator replica, or a rollout worker with its storage shard. When
one of its processes dies or hangs, the part is respawned while the run continues. Requests that were lost can be retried
(`Part.until_done`). A client declares each request to its actors in one line (`Verb`). All of it runs on the controller's event
loop, except `Supervisor._on_fault`.
"""

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeVar, overload

import monarch.actor

from titanrl.base.errors import FaultError, TitanRLError
from titanrl.carriers.record import span
from titanrl.config.sections import FaultsConfig
from titanrl.processes.actors import ActorError, SupervisionError, ask_ranks, cause_of, resolve
from titanrl.processes.children import Process, Respawns, describe

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
M = TypeVar("M")

WINDOW = 100
"""Number of recent replies per kind from which the deadline is computed."""
WARM_UP = 3
"""Replies of a kind before it has a learned deadline. They are included in it, because compilation can happen again."""
DISK_S = 300.0
"""Shortest learned deadline of requests that read or write files, because network file systems pause for minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Parameters of a request's learned deadline."""

    kind: str | None = None
    """Requests of one kind take about the same time and share a deadline. By default, the name of the request."""
    min_s: float = 0.0
    """Shortest learned deadline in seconds, if the configured minimum is too short."""
    since: float | None = None
    """Start of the measured time, on the clock of `time.perf_counter`; by default, the start of the wait."""
    progress: Callable[[], Awaitable[object]] | None = None
    """Returns a value that changes as the work progresses. The deadline restarts whenever the value has changed."""


PACE, DISK = Pace(), Pace(min_s=DISK_S)
"""Paces of requests, and of those that read or write files."""
_ROLES = {
    "buffer": ("store",),
    "buffer.take_batch": ("rollout", "generator", "store"),
    "generator": ("generator", "teacher"),
    "rollout.evaluate": ("rollout", "generator", "evaluator"),
    "shards": ("rollout",),
}
"""Roles whose processes work on a request, by request name or by actor; by default, the role named like the actor."""


class StallError(FaultError):
    """A process of the run does not respond; the message names it and the file with its stacks."""


class OnEvent(Protocol):
    """Callback that records events such as faults and stalls."""

    def __call__(self, kind: str, **fields: Any) -> None:
        """Record one event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A request without a reply, or a process stopped by a signal."""

    request: str
    """Pending request, such as `trainer.forward_backward`; empty if there is none."""
    seconds: float
    """Seconds without a reply."""
    suspects: tuple[Process, ...] = ()
    """Processes that may be the cause."""
    reason: str = ""
    """Reason to call this a stall, as a clause."""
    are_stopped: bool = False
    """True if a signal has stopped the suspects."""

    @property
    def actor(self) -> str:
        """Name of the actor that does not reply; for stopped processes, their role."""
        return self.suspects[0].role if self.are_stopped else self.request.partition(".")[0]

    @property
    def endpoint(self) -> str:
        """Endpoint that does not reply, prefixed with its actor if that differs from `actor`."""
        actor, _, endpoint = self.request.partition(".")
        return endpoint if actor == self.actor else self.request

    def __str__(self) -> str:
        """Return a description in one line."""
        reason, seconds = f" ({self.reason})" if self.reason else "", f"{round(self.seconds, 1):g}"
        if self.are_stopped:
            waiting = f", while waiting for: {self.request}" if self.request else ""
            verb = "was" if len(self.suspects) == 1 else "were"
            return f"{_ranks(self.suspects)} {verb} stopped by a signal {seconds} s ago{reason}{waiting}"
        return f"no reply to '{self.request}' for {seconds} s{reason} from {_ranks(self.suspects)}"


def _ranks(processes: Iterable[Process]) -> str:
    """Return the processes as text, such as `trainer rank 0, 1 and store rank 0`."""
    by_role: dict[str, list[str]] = defaultdict(list)
    for process in processes:
        by_role[process.role].append(str(process.rank))
    return " and ".join(f"{role} rank {', '.join(ranks)}" for role, ranks in by_role.items()) or "unknown processes"


@dataclass(slots=True)
class Stopped:
    """State of a process that a signal has stopped. Times are on the event loop's clock."""

    since: float
    limit_s: float
    """Seconds after which the process is reported; doubled by each report."""


@dataclass(slots=True)
class Report:
    """Report of a stall."""

    text: str
    """Description of the stall in one line, with the path of its stacks."""
    file: str
    """Path of the stacks."""
    time: float
    """Time of the report, on the event loop's clock."""
    is_shown: bool = False


class Watchdog:
    """Learns deadlines from earlier replies, and writes reports of stalls.

    Example: With `stall_factor: 10` and `min_stall_s: 30`, replies after 0.4, 7 and 2 s give a deadline of 70 s. Three replies
    after 0.4 s give 30 s.
    """

    def __init__(self, config: FaultsConfig, run_dir: Path, warn: Callable[[str], None] = logger.warning) -> None:
        """Start without replies. Reports go to `logs` of `run_dir`; `warn` is called for stalls that do not end the run."""
        self.config = config
        self.warn = warn
        self._run_dir = run_dir
        self._seconds: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))  # of replies, by kind
        self._last_fault = float("-inf")

    def limit(self, name: str, pace: Pace, hard_s: float) -> float:
        """Return the deadline of a request in seconds, at most `hard_s`; after too few replies of its kind, `hard_s`."""
        seconds = self._seconds.get(pace.kind or name, ())
        if len(seconds) < WARM_UP:
            return hard_s
        return min(hard_s, max(self.config.min_stall_s, pace.min_s, self.config.stall_factor * max(seconds)))

    def note_reply(self, name: str, pace: Pace, started: float) -> None:
        """Learn from a reply to a request that was sent at `started` on the clock of `time.perf_counter`."""
        begun = started if pace.since is None else pace.since
        if begun > self._last_fault:
            self._seconds[pace.kind or name].append(time.perf_counter() - begun)

    def note_fault(self) -> None:
        """Learn nothing from requests that are pending now, because a fault or the following replacement delays them."""
        self._last_fault = time.perf_counter()

    def known(self, name: str, pace: Pace) -> str:
        """Return a clause about earlier replies to a request; empty if there are none."""
        seconds = self._seconds.get(pace.kind or name)
        return f"the slowest of the last {len(seconds)} took {max(seconds):.2g} s" if seconds else ""

    async def write(self, stall: Stall) -> Path:
        """Write the states and stacks of the suspects to `logs/stall_<n>.txt`; return the path."""
        text = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {stall}\n\n{await describe(stall.suspects)}"
        logs, number = self._run_dir / "logs", 1
        while (file := logs / f"stall_{number}.txt").exists():
            number += 1
        file.write_text(text, encoding="utf-8")
        return file


def works_on(role: str, request: str) -> bool:
    """Return True if the processes of a role work on a request."""
    actor = request.partition(".")[0]
    roles = _ROLES.get(request, _ROLES.get(actor, (actor,)))
    return any(f"{role}_".startswith(f"{worker}_") for worker in roles)


def suspects(request: str, processes: Sequence[Process]) -> tuple[Process, ...]:
    """Return the processes that work on a request, sorted by role and rank; all processes if none is known to."""
    found = [process for process in processes if works_on(process.role, request)]
    return tuple(sorted(found or processes, key=lambda process: (process.role, process.rank)))


PROCESS_FAILED = "the process this actor was running on"
"""Text of torchmonarch's fault report after a process exited; `failed` or `exited with` its code follows."""
SILENT = "timeout waiting for message from proc mesh agent"
"""Text of a second report, seconds later. By then, the run may have restarted without the process."""
STOP_FAILED = "error stopping proc mesh"
"""Text of the report 30 s after stopping a mesh whose host was already gone."""
TICK_S = 1.0
"""Seconds between two checks of the processes' states."""
PROGRESS_S = PROBE_S = 10.0
"""Limits of the two checks, in seconds."""
SIGNAL_S = 0.1
"""Longest delay, in seconds, between a timer that expired while this process was suspended and the handling of SIGCONT."""
KILL_S = 60.0
"""Longest wait for the exit of killed processes, in seconds. A broken device can keep one in the kernel forever."""
LATE_S = 3.0
"""Delay of a check, in seconds, from which this process was suspended or in a debugger. A busy machine delays it less."""
LAST = "the limit of the configuration"
"""Reason of a stall at the configured limit, which ends the wait regardless of `faults.on_stall`."""
_Failures = tuple["asyncio.Future[TitanRLError]", "asyncio.Future[str] | None"]
"""Futures that fail a request: the failure of the run, and the death of the receiver if it is replaceable."""


class DeadlineError(TitanRLError):
    """A request was not completed in time; the message names it."""


class ActorDiedError(FaultError):
    """A process or actor of the run died; the message names it and gives the cause."""


class PartDiedError(ActorDiedError):
    """A replaceable part of the run died, such as a generator replica; the message names it and gives the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaceable:
    """Callbacks of a role whose processes are replaced together, instead of ending the run, when one dies or hangs."""

    on_death: Callable[[str], None]
    """Called with the cause of death, possibly more than once."""
    probe: Callable[[], Awaitable[object]]
    """Sends a request to which every process replies immediately unless it hangs."""
    is_up: Callable[[], bool]
    """Returns False while the processes are being started or replaced."""


class Supervisor:
    """Awaits requests to actors, and fails all pending ones when the run cannot continue.

    The death of a process raises `ActorDiedError` in every pending `ask`, and a stall raises `StallError`, unless the affected
    role can be replaced (`replace`).

    By default, torchmonarch interrupts the controller's main thread on an unhandled fault. A supervisor replaces that hook for
    the rest of the process's life.
    """

    def __init__(self, on_event: OnEvent | None = None, watchdog: Watchdog | None = None) -> None:
        """Install the fault hook for the running event loop.

        `on_event` is called with `fault` (`cause`) and `stall` (`actor`, `endpoint`, `ranks`, `seconds`, `file`). Without a
        watchdog, which learns deadlines and reports stalls, only the caller's deadline applies.
        """
        self._loop = asyncio.get_running_loop()
        self._on_event, self._watchdog = on_event or (lambda kind, **fields: None), watchdog
        self._pidfds: dict[int, Process] = {}
        self._exits: dict[int, asyncio.Event] = {}  # by pidfd
        self._replaceable: dict[str, Replaceable] = {}  # by role
        self._remote: dict[str, Process] = {}
        self._helpers: dict[int, tuple[Process, Callable[[str], None]]] = {}  # by pidfd
        self._all_exited, self._reporting = asyncio.Event(), asyncio.Lock()
        self._failure: asyncio.Future[TitanRLError] = self._loop.create_future()
        self._guards: dict[asyncio.Task[None], str] = {}  # roles
        self._requests: dict[asyncio.Future[Any], str] = {}
        self._stopped: dict[Process, Stopped] = {}
        self._reports: set[asyncio.Task[None]] = set()
        self._reported: dict[tuple[Process, ...], Report] = {}
        self._closing, self._num_continued = False, 0
        self._expected_exits: set[int] = set()  # pidfds
        self._late_deaths: dict[str, str] = {}  # causes of deaths since the run failed, by role
        monarch.actor.unhandled_fault_hook = self._on_fault
        if threading.current_thread() is threading.main_thread():
            self._loop.add_signal_handler(signal.SIGCONT, self._on_continue)
        self._tick(self._loop.time())

    @property
    def failure(self) -> TitanRLError | None:
        """Error that failed all requests, such as the death of a process or a stall; None if there was none."""
        return self._failure.result() if self._failure.done() else None

    async def failed(self) -> TitanRLError:
        """Wait for the error that fails all requests, and return it."""
        return await asyncio.shield(self._failure)

    async def ask(
        self,
        name: str,
        call: Awaitable[T],
        timeout_s: float,
        pace: Pace = PACE,
        lost: "asyncio.Future[str] | None" = None,
    ) -> T:
        """Return the reply to a request, or raise the actor's exception. Cancelling the wait does not stop the actor's work.

        Args:
            name: actor and endpoint, such as `trainer.optim_step`.
            call: the request.
            timeout_s: longest wait, in seconds, without the time in which stalls are reported.
            pace: parameters of the shorter deadline that the watchdog learns.
            lost: future that gets the cause of death when the receiver dies; for receivers that are replaced.

        Raises:
            DeadlineError: No reply within `timeout_s`.
            PartDiedError: `lost` completed first.
            StallError: No reply within the learned deadline, or a process was stopped while waiting.
            ActorDiedError: A process of the run died while waiting.
        """
        task, started = asyncio.ensure_future(resolve(call)), time.perf_counter()
        failures: _Failures = (self._failure, lost)
        self._requests[task] = name
        try:
            with span(f"wait for {name}", "wait"):
                if self._watchdog is None or self._closing:
                    if not await self._is_done(task, name, timeout_s, failures):
                        self._record_stall(Stall(request=name, seconds=timeout_s), None)
                        raise DeadlineError(f"no reply to '{name}' within {timeout_s:g} s")
                else:
                    await self._until_done(self._watchdog, task, name, timeout_s, pace, failures)
                    if not task.cancelled() and task.exception() is None:  # a request can fail long before its work is done
                        self._watchdog.note_reply(name, pace, started)
            try:
                return task.result()
            except ActorError as error:
                raise cause_of(error) from error
            except SupervisionError as error:
                raise ActorDiedError(_one_line(error)) from error
        finally:
            del self._requests[task]
            task.cancel()

    async def _is_done(self, task: "asyncio.Future[Any]", name: str, timeout_s: float, failures: "_Failures") -> bool:
        """Wait for a reply; return False on timeout. Raise if the run has failed or the receiver died."""
        failure, lost = failures
        waiting: set[asyncio.Future[Any]] = {task, failure} if lost is None else {task, failure, lost}
        done, num_continued = set[asyncio.Future[Any]](), -1
        while not done and num_continued != self._num_continued:  # wait again if this process was suspended
            num_continued = self._num_continued
            due = self._loop.time() + timeout_s
            done, _ = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not done and self._loop.time() > due + SIGNAL_S / 2:
                done, _ = await asyncio.wait(waiting, timeout=SIGNAL_S, return_when=asyncio.FIRST_COMPLETED)
        if failure.done():
            error = failure.result()
            text = str(error) if name in str(error) else f"{error} (while waiting for: {name})"
            raise type(error)(text, error.part) if isinstance(error, FaultError) else type(error)(text)
        if lost is not None and lost.done() and not task.done():
            raise PartDiedError(f"{lost.result()} (while waiting for: {name})")
        return bool(done)

    async def _until_done(
        self, watchdog: Watchdog, task: "asyncio.Future[Any]", name: str, timeout_s: float, pace: Pace, failures: "_Failures"
    ) -> None:
        """Wait for a reply under the learned deadline; handle each stall."""
        limit_s, waited_s = watchdog.limit(name, pace, timeout_s), 0.0
        seen: object = None  # last progress value
        while not await self._is_done(task, name, min(limit_s, timeout_s - waited_s), failures):
            waited_s = min(timeout_s, waited_s + limit_s)
            before, seen = seen, None
            if pace.progress is not None:
                with contextlib.suppress(TimeoutError, SupervisionError):
                    seen = await asyncio.wait_for(resolve(pace.progress()), PROGRESS_S)
            if waited_s >= timeout_s and seen != before:
                self._record_stall(Stall(request=name, seconds=timeout_s), None)
                raise DeadlineError(f"no reply to '{name}' within {timeout_s:g} s")
            involved = suspects(name, [*self._pidfds.values(), *self._remote.values()])
            # `_look_at_states` reports stopped processes; a process in a debugger is not a stall.
            excused = seen != before or self._stopped or any(process.is_debugged() for process in involved)
            for role, part in self._replaceable.items():  # a request to a role that is being replaced is not excused itself
                excused = excused or (role != name.partition(".")[0] and works_on(role, name) and not part.is_up())
            if excused and waited_s < timeout_s:
                continue
            reason = LAST if waited_s >= timeout_s else watchdog.known(name, pace)
            stall = Stall(request=name, seconds=waited_s, suspects=involved, reason=reason)
            report = await self._report_stall(watchdog, stall, limit_s / 2)
            if failures[0].done():
                continue
            if task.done():
                logger.info("late reply to %s", name)
            elif waited_s >= timeout_s:
                raise DeadlineError(f"{stall}; stacks: {report.file}")
            else:
                await self._act_on_stall(watchdog, stall, report)
                limit_s *= 2

    def watch(self, name: str, pid: int, host: str | None = None) -> None:
        """Watch a process of this machine through a pidfd, which reports any kind of exit immediately.

        torchmonarch takes seconds, or only reports an undelivered message after 30 s. A second call does nothing. Only
        torchmonarch reports the death of a process on another `host`.
        """
        process = Process(name=name, pid=pid, host=host)
        if host is not None:
            self._remote[name] = process
            return
        if process in self._pidfds.values():
            return
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._handle_death(process.role, f"{process} exited")
            return
        self._late_deaths.pop(process.role, None)  # this process replaces the dead one
        self._pidfds[pidfd] = process
        self._exits[pidfd] = asyncio.Event()
        self._all_exited.clear()
        self._loop.add_reader(pidfd, self._on_exit, pidfd)

    def attend(self, name: str, pid: int, on_fault: Callable[[str], None]) -> None:
        """Watch a process of this machine that works on no request, and whose death ends nothing, such as a template.

        `on_fault` is called once with the cause, when the process has exited or counts as stopped by a signal. Raise
        `ProcessLookupError` if it has exited already.
        """
        pidfd = os.pidfd_open(pid)
        self._helpers[pidfd] = Process(name=name, pid=pid), on_fault
        self._loop.add_reader(pidfd, self._end_helper, pidfd)

    def replace(self, role: str, replaceable: Replaceable) -> None:
        """Declare that a role's processes are replaced, instead of ending the run, when one of them dies or hangs."""
        self._replaceable[role] = replaceable

    def lose_host(self, host: str, cause: str, *, is_replaceable: bool) -> None:
        """Handle the loss of another machine: replace every role that had a process on it, or end the run.

        `cause` has the display name of the host and the reason; `is_replaceable` is False if other hosts have no free devices.
        """
        processes = [process for process in self._remote.values() if process.host == host]
        names = sorted(process.name for process in processes)
        roles = sorted({process.role for process in processes}, key=lambda role: role in self._replaceable)
        cause = f"{cause}; on it: {', '.join(names) or 'no process yet'}"
        self.record("host_lost", host=host, ranks=names, cause=cause)
        if not is_replaceable or not roles:
            self._replaceable.clear()
            roles = roles[:1] or ["host"]
        for role in roles:
            self._handle_death(role, cause)

    async def kill(self, role: str) -> None:
        """Kill the processes of a role on this machine; raise `TitanRLError` if one has not exited after `KILL_S`."""
        # torchmonarch can fail its guarded calls seconds later, which must not count as the death of the next processes.
        for task in [task for task, guarded in self._guards.items() if guarded == role]:
            task.cancel()
        pidfds = [pidfd for pidfd, process in self._pidfds.items() if process.role == role]
        _send(signal.SIGKILL, pidfds)
        try:
            await asyncio.wait_for(asyncio.gather(*(self._exits[pidfd].wait() for pidfd in pidfds)), KILL_S)
        except TimeoutError:
            stuck = ", ".join(str(self._pidfds[pidfd]) for pidfd in pidfds if pidfd in self._pidfds)
            raise TitanRLError(
                f"{stuck}: killed, but did not exit within {KILL_S:g} s; the kernel waits for a device"
            ) from None
        self._remote = {name: process for name, process in self._remote.items() if process.role != role}

    def guard(self, role: str, name: str, call: Awaitable[None]) -> None:
        """Treat failure of this long-running call as a death in the role."""
        task = asyncio.create_task(resolve(call), name=name)
        self._guards[task] = role
        task.add_done_callback(self._on_guard_done)

    def expect_deaths(self) -> None:
        """Ignore deaths from now on, because the session is closing.

        The hook stays installed: torchmonarch reports faults even after the last process has exited, and its default hook would
        interrupt the program. Processes stopped by a signal get SIGCONT, because they could not exit otherwise.
        """
        self._closing = True
        _send(signal.SIGCONT, self._pidfds)

    async def start_over(self, kept: Collection[str]) -> None:
        """Fail every request, kill every process outside the kept roles, and clear the failure of the run.

        A kept role is replaced if one of its processes died after the run failed.
        """
        self.fail(ActorDiedError("the run restarts", "session"))
        self._replaceable = {role: part for role, part in self._replaceable.items() if role in kept}
        self._expected_exits = {pidfd for pidfd, process in self._pidfds.items() if process.role not in kept}
        roles = {process.role for process in [*self._pidfds.values(), *self._remote.values()]} | {*self._guards.values()}
        await asyncio.gather(*map(self.kill, roles - set(kept)))
        self._expected_exits = set()  # the kernel reuses the descriptors
        self._failure = self._loop.create_future()
        late, self._late_deaths = self._late_deaths, {}
        for role in late.keys() & self._replaceable.keys():
            self._handle_death(role, late[role])

    async def reap(self, timeout_s: float) -> list[str]:
        """Wait until every watched process has exited; kill the others after `timeout_s`, and return their names."""
        if self._pidfds:
            with contextlib.suppress(TimeoutError):  # the remaining processes are killed below
                await asyncio.wait_for(self._all_exited.wait(), timeout_s)
        if killed := [str(process) for process in self._pidfds.values()]:
            _send(signal.SIGKILL, self._pidfds)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_exited.wait(), KILL_S)
        if not self._failure.done():  # pending requests will never get a reply
            self._failure.set_result(ActorDiedError("the session was closed", "session"))
        return killed

    def _on_continue(self) -> None:
        """Restart the deadlines of all pending requests: this process was stopped (Ctrl-Z) and has continued (`fg`)."""
        self._num_continued += 1
        self._stopped.clear()  # other processes may continue a moment later

    def _tick(self, due: float) -> None:
        """Check the processes, and schedule the next check. A late check means that this process was at a breakpoint."""
        if self._closing:
            return
        now = self._loop.time()
        if now - due > LATE_S:
            self._on_continue()
        if self._watchdog is not None:
            self._look_at_states(self._watchdog, now)
        self._loop.call_at(now + TICK_S, self._tick, now + TICK_S)

    def _look_at_states(self, watchdog: Watchdog, now: float) -> None:
        """Report processes that a signal stopped long enough ago to count as a stall."""
        known, self._stopped = self._stopped, {}
        for process in [*self._pidfds.values(), *(process for process, _ in self._helpers.values())]:
            if process.is_stopped():
                stopped = known.get(process) or Stopped(since=now, limit_s=watchdog.config.min_stall_s)
                self._stopped[process] = stopped
                if now - stopped.since >= stopped.limit_s:
                    stopped.limit_s *= 2
                    report = asyncio.create_task(self._report_stopped(watchdog, process, now - stopped.since))
                    self._reports.add(report)
                    report.add_done_callback(self._reports.discard)

    async def _report_stopped(self, watchdog: Watchdog, process: Process, seconds: float) -> None:
        names = list(self._requests.values())
        request = next(iter([name for name in names if works_on(process.role, name)] or names), "")
        stall = Stall(request=request, seconds=seconds, suspects=(process,), are_stopped=True)
        report = await self._report_stall(watchdog, stall, interval_s=0.0)
        if not process.is_stopped():
            return
        pidfd = next((pidfd for pidfd, (helper, _) in self._helpers.items() if helper == process), None)
        if pidfd is not None and watchdog.config.on_stall == "respawn":
            self._end_helper(pidfd, report.text)
        else:
            await self._act_on_stall(watchdog, stall, report)

    async def _report_stall(self, watchdog: Watchdog, stall: Stall, interval_s: float) -> Report:
        """Write the stacks of a stall and record an event, unless the same processes were reported in the last `interval_s`.

        Requests that depend on each other stall together, and need only one report.
        """
        after = self._loop.time() - interval_s
        async with self._reporting:
            report = self._reported.get(stall.suspects)
            if report is not None and report.time > after:
                return report
            try:
                file = str(await watchdog.write(stall))
            except OSError as error:  # for example a full disk, which must not hide the stall
                file = f"not written ({error})"
            report = Report(text=f"{stall}; stacks: {file}", file=file, time=self._loop.time())
            self._reported[stall.suspects] = report
            self._record_stall(stall, file)
            return report

    async def _act_on_stall(self, watchdog: Watchdog, stall: Stall, report: Report) -> None:
        """Replace the hanging roles, fail the run, or warn the user and continue waiting, as `faults.on_stall` requests."""
        if watchdog.config.on_stall == "wait":
            if not report.is_shown:
                report.is_shown = True
                watchdog.warn(f"{report.text}; still waiting (faults.on_stall)")
            return
        hung: list[str] = []  # replaceable roles that are stopped, or that do not reply to a probe
        if watchdog.config.on_stall == "respawn":
            hung = [*({process.role for process in stall.suspects} & self._replaceable.keys())]
            if not stall.are_stopped:
                replies = await asyncio.gather(*(responds(self._replaceable[role].probe()) for role in hung))
                hung = [role for role, reply in zip(hung, replies, strict=True) if not reply]
        helpers = {process for process, _ in self._helpers.values()}
        if not set(stall.suspects) <= {*self._pidfds.values(), *self._remote.values(), *helpers}:
            return  # a suspect was replaced in the meantime, and its replacement may complete the request
        if not hung:
            self.fail(StallError(report.text, stall.actor))
        for role in hung:
            self._handle_death(role, report.text)

    def _on_exit(self, pidfd: int) -> None:
        self._loop.remove_reader(pidfd)
        process = self._pidfds.pop(pidfd)
        self._exits.pop(pidfd).set()
        os.close(pidfd)
        if not self._pidfds:
            self._all_exited.set()
        if pidfd not in self._expected_exits:
            self._handle_death(process.role, f"{process} exited")

    def _end_helper(self, pidfd: int, cause: str = "") -> None:
        """Stop watching a helper that has exited, or is stopped because of a cause."""
        self._loop.remove_reader(pidfd)
        process, on_fault = self._helpers.pop(pidfd)
        os.close(pidfd)
        if not self._closing:
            on_fault(cause or f"{process} exited")

    def _on_guard_done(self, task: "asyncio.Task[None]") -> None:
        role = self._guards.pop(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._handle_death(role, f"{task.get_name()} failed: {_one_line(cause_of(error))}")

    def _on_fault(self, failure: Any) -> None:
        """Handle torchmonarch's fault report, which arrives on one of its threads.

        It reports a death after ten seconds, once for every actor of the process, so the process may belong to an earlier run.
        For processes on this machine the pidfds are used instead. Actors are named after the role of their process, except
        the actors that torchmonarch and the fleet start in every process.
        """
        report, actor = " ".join(failure.report().split()), str(failure.mesh_name).rpartition("-")[0]
        remote = {process.role for process in self._remote.values() if f"{actor}_".startswith(f"{process.role}_")}
        is_seen = not remote and (PROCESS_FAILED in report or SILENT in report)
        if not (self._closing or is_seen or STOP_FAILED in report):
            role = next(iter(remote), actor)
            self._loop.call_soon_threadsafe(self._handle_death, role, f"{failure.mesh_name} failed: {_one_line(report)}")

    def _handle_death(self, role: str, cause: str) -> None:
        """Handle a death in a role: replace the role if possible, else fail the run."""
        if self._closing:
            return
        if self._failure.done():
            self._late_deaths.setdefault(role, cause)
        elif role in self._replaceable:
            self._replaceable[role].on_death(cause)
        else:
            self.fail(ActorDiedError(cause, role))
            self.record("fault", cause=cause)

    def fail(self, error: TitanRLError) -> None:
        """Raise an error in every pending request, and in later ones."""
        if not self._closing and not self._failure.done():
            self._failure.set_result(error)

    def _record_stall(self, stall: Stall, file: str | None) -> None:
        fields = {"actor": stall.actor, "endpoint": stall.endpoint, "ranks": [process.name for process in stall.suspects]}
        self.record("stall", **fields, seconds=round(stall.seconds, 3), file=file)

    def record(self, kind: str, **fields: Any) -> None:
        """Record an event. The watchdog ignores the times of requests that were pending, because faults delay them."""
        if self._watchdog is not None and kind != "stall":  # after a stall, requests may be permanently slower
            self._watchdog.note_fault()
        self._on_event(kind, **fields)


def _send(number: signal.Signals, pidfds: Iterable[int]) -> None:
    for pidfd in pidfds:
        with contextlib.suppress(ProcessLookupError):  # it has exited, and the event loop has yet to handle that
            signal.pidfd_send_signal(pidfd, number)


def _one_line(text: object) -> str:
    """Return a report without line breaks; of one of more than 600 characters the ends, as a traceback ends with its cause."""
    line = " ".join(str(text).split())
    return line if len(line) <= 600 else f"{line[:150]} ... {line[-450:]}"


async def responds(probe: Awaitable[object]) -> bool:
    """Return True if a probe gets a reply within `PROBE_S`; False on timeout or if the process is dead."""
    try:
        await asyncio.wait_for(resolve(probe), PROBE_S)
    except (TimeoutError, ActorError, SupervisionError):
        return False
    return True


async def ask_each(
    parts: Iterable["Part"], endpoint: str, call: Callable[[Any], Awaitable[Any]], timeout_s: float
) -> list[Any]:
    """Send a request to some parts; return the replies, except those of parts that die."""

    async def reply(part: Part) -> list[Any]:
        with contextlib.suppress(PartDiedError):
            return [await part.ask(f"{part.role}.{endpoint}", call, timeout_s)]
        return []

    return [value for values in await asyncio.gather(*map(reply, parts)) for value in values]


class Recovery(Protocol):
    """Callbacks of a part's owner: recover from the part's death, and connect the replacement."""

    async def on_lost(self, part: "Part") -> None:
        """Queue the part's work again. Its processes have exited."""

    async def bring_up(self, part: "Part") -> None:
        """Start the part's actors, and connect them to their callers."""

    def probe(self, part: "Part") -> Awaitable[object]:
        """Send a request to which every process of the part replies immediately unless it hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedContext:
    """Objects that all parts of a run share."""

    supervisor: Supervisor
    retire: Callable[[str], Awaitable[None]]
    """Stops and forgets the processes of a role; see `Fleet.retire`."""
    respawns: Respawns
    warn: Callable[[str], None]
    """Shows the user a message about a replacement."""
    start_s: float
    """Longest wait for a part to start, in seconds."""


class Part:
    """Processes that are replaced together, and their actors. When one process dies or hangs, all of them are respawned.

    A request sent with `ask` raises `PartDiedError` if the part dies. `until_done` resends it to the replacement.
    """

    def __init__(self, role: str, shared: SharedContext, spawn: Callable[["Part"], Awaitable[Any]], recovery: Recovery) -> None:
        self.role = role
        self.num_lives = 0
        """Number of times that the part was spawned."""
        self.actors: Any = None
        self._shared, self._spawn, self._recovery = shared, spawn, recovery
        self._lost: asyncio.Future[str]
        self._is_started, self._is_up = asyncio.Event(), asyncio.Event()
        self._replacing: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def num_deaths(self) -> int:
        """Number of times that the part has died."""
        return self.num_lives - (not self._lost.done())

    @property
    def is_started(self) -> bool:
        """True after `mark_started`, until the part dies."""
        return self._is_started.is_set()

    @property
    def is_up(self) -> bool:
        """True if the part has started, its callers know it, and it has not died since."""
        return self._is_up.is_set()

    async def spawn(self) -> None:
        """Spawn the processes for the first time."""
        replaceable = Replaceable(on_death=self.die, probe=partial(self._recovery.probe, self), is_up=self._is_up.is_set)
        self._shared.supervisor.replace(self.role, replaceable)
        await self._spawn_once()

    async def start(self) -> None:
        """Start the actors. If the processes die while starting, wait for their replacement.

        If a replacement is already running, wait for it. Do nothing if the part is up because it outlived a restart of the run.
        """
        if self._is_up.is_set() or self._replacing is not None:
            await self.wait_until_up()
            return
        try:
            await self._recovery.bring_up(self)
        except PartDiedError:
            await self.wait_until_up()
        else:
            if not self._lost.done():
                self._is_up.set()

    async def ask(self, name: str, call: Callable[[Any], Awaitable[T]], timeout_s: float, pace: Pace = PACE) -> T:
        """Return the reply to a request; raise `PartDiedError` if the part dies first. `name` is role and endpoint."""
        life = self.num_lives
        try:
            return await self._shared.supervisor.ask(name, call(self.actors), timeout_s, pace, self._lost)
        except PartDiedError:
            raise
        except ActorDiedError as error:
            if self._shared.supervisor.failure:
                raise
            if life == self.num_lives:  # the actor died, but its process did not
                self.die(str(error))
            raise PartDiedError(str(error)) from None

    async def until_done(self, name: str, call: Callable[[Any], Awaitable[T]], timeout_s: float, pace: Pace = PACE) -> T:
        """Return the reply to a request like `ask`, but resend it to the replacement whenever the part dies."""
        while True:
            await self.wait_until_up()
            try:
                return await self.ask(name, call, timeout_s, pace)
            except PartDiedError as error:
                logger.info("resending %s: %s", name, error)

    async def wait_until_up(self) -> None:
        """Wait until the part or its replacement is up."""
        if not self._is_up.is_set():
            timeout_s = self._shared.start_s * 2  # the first start may fail shortly before it completes
            await self._shared.supervisor.ask(f"{self.role}.replacement", self._is_up.wait(), timeout_s)

    def mark_started(self) -> None:
        """Declare that the actors accept requests. `Recovery.bring_up` calls it before it connects them to their callers."""
        if not self._lost.done():
            self._is_started.set()

    def die(self, cause: str) -> None:
        """Replace the processes, regardless of their state. Further calls do nothing until the replacement has started."""
        if not self._lost.done():
            self._lost.set_result(cause)
        self._is_started.clear()
        self._is_up.clear()
        if not self._is_closed and (self._replacing is None or self._replacing.done()):
            self._replacing = asyncio.create_task(self._replace(), name=f"replace {self.role}")

    async def survives(self) -> bool:
        """Return True if the part is still up after a fault that failed all requests; else start its replacement over."""
        if self._replacing is not None and not self._is_up.is_set():
            self._replacing.cancel()
            await asyncio.gather(self._replacing, return_exceptions=True)
        if not self._is_up.is_set():
            self.die(self._lost.result() if self._lost.done() else "its start was interrupted by a restart of the run")
        return self._is_up.is_set()

    async def close(self) -> None:
        """Cancel an unfinished replacement, and do not replace the part any more."""
        self._is_closed = True
        if self._replacing is not None:
            self._replacing.cancel()
            await asyncio.gather(self._replacing, return_exceptions=True)

    async def _replace(self) -> None:
        """Respawn the processes until a start succeeds; fail the run if the limit on replacements is exceeded."""
        supervisor, started, cause = self._shared.supervisor, time.perf_counter(), self._lost.result()
        try:
            while self._lost.done():
                cause = self._lost.result()
                supervisor.record("fault", cause=cause)
                self._shared.respawns.add(self.role, cause)
                await supervisor.kill(self.role)
                await self._shared.retire(self.role)
                await self._recovery.on_lost(self)
                await self._spawn_once()
                with contextlib.suppress(PartDiedError):
                    await self._recovery.bring_up(self)
            self._is_up.set()
            seconds, respawns = time.perf_counter() - started, self._shared.respawns
            supervisor.record("respawn", part=self.role, cause=cause, seconds=round(seconds, 3))
            self._shared.warn(
                f"{cause}; replaced after {seconds:.1f} s ({respawns.num_recent} of {respawns.limit} replacements)"
            )
        except TitanRLError as error:
            supervisor.fail(error if self._shared.respawns.limit else ActorDiedError(cause, self.role))
        except Exception as error:  # of any kind, or requests would wait for the replacement indefinitely
            logger.exception("the replacement of %s failed", self.role)
            supervisor.fail(ActorDiedError(f"{cause}, and could not be replaced: {error!r}", self.role))

    async def _spawn_once(self) -> None:
        self.num_lives += 1
        self._lost = asyncio.get_running_loop().create_future()
        self.actors = await self._spawn(self)


# Requests of clients to their actors

Limit = Literal["start_s", "step_s", "sync_s"]
"""Name of the longest wait in the section `timeouts`."""


class Verb(Generic[P, R, M]):
    """A request to the endpoint of the same name, as an attribute of a client's class. The endpoint's docstring describes it.

    The client has `mesh`, the actors, and `ask`, which awaits their replies. If it has a `model`, each request names it.

    Example: `keep_weights = Verb(PolicyTrainer.keep_weights, agreed)`
    """

    def __init__(
        self,
        endpoint: Callable[Concatenate[Any, P], Awaitable[R]],
        merge: Callable[[str, Sequence[R]], M],
        *,
        limit: Limit = "step_s",
        pace: Pace = PACE,
    ) -> None:
        """Declare the request to an endpoint; a private attribute has its name after an underscore.

        `merge` is a function of the name and of the ranks' replies, which returns the reply of the client.
        """
        self._merge, self._limit, self._pace = merge, limit, pace

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name.removeprefix("_")

    @overload
    def __get__(self, client: None, owner: type) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, M]]: ...
    @overload
    def __get__(self, client: object, owner: type) -> Callable[P, Coroutine[Any, Any, M]]: ...
    def __get__(self, client: object, owner: type) -> Callable[..., Coroutine[Any, Any, M]]:
        return self._request if client is None else partial(self._request, client)  # bound to the client like a method

    async def _request(self, client: Any, /, *args: P.args, **kwargs: P.kwargs) -> M:
        model = getattr(client, "model", None)
        named = {} if model is None else {"model": model}
        call = ask_ranks(getattr(client.mesh, self._name), *args, **kwargs, **named)
        return self._merge(self._name, await client.ask(self._name, call, self._limit, self._pace))


def done(name: str, replies: Sequence[object]) -> None:
    """Return nothing once all ranks have replied."""


def only(name: str, replies: Sequence[R]) -> R:
    """Return the reply of the only actor."""
    (reply,) = replies
    return reply


def per_rank(name: str, replies: Sequence[R]) -> Sequence[R]:
    """Return the replies in rank order."""
    return replies


def agreed(name: str, replies: Sequence[R]) -> R:
    """Return the reply on which all ranks agree; different replies mean that the ranks have diverged."""
    assert all(reply == replies[0] for reply in replies), f"ranks disagree after {name}: {replies}"
    return replies[0]


def start_request(request: Coroutine[Any, Any, T], name: str) -> "asyncio.Task[T]":
    """Start a request as a task that may never be awaited, for example because the caller was interrupted."""
    task = asyncio.create_task(request, name=name)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # marks an exception as retrieved
    return task
