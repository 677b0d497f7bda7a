"""Stalls: learned deadlines, and reports of processes that do not respond, with their stacks in a file.

A learned deadline is a multiple of the slowest recent reply to requests of the same kind. States and stacks of processes are
read from the outside, which works for any kind of hang.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sysconfig
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from titanrl.base.errors import FaultError
from titanrl.config.sections import FaultsConfig
from titanrl.processes.actors import STACKS_SIGNAL
from titanrl.processes.machine import process_state

logger = logging.getLogger(__name__)

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


class ReplyTimes:
    """Recent reply times by kind, and the deadlines computed from them.

    Example: With factor 10 and floor 30, replies after 0.4, 7 and 2 s give a deadline of 70 s. Three replies after 0.4 s give
    30 s.
    """

    def __init__(self, factor: float, floor_s: float) -> None:
        """Start without replies.

        Args:
            factor: multiple of the slowest reply time.
            floor_s: shortest deadline, in seconds.
        """
        self._factor = factor
        self._floor_s = floor_s
        self._seconds: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))

    def add(self, kind: str, seconds: float) -> None:
        """Record the time of a reply, in seconds."""
        self._seconds[kind].append(seconds)

    def limit(self, kind: str, hard_s: float, min_s: float = 0.0) -> float:
        """Return the deadline of the next request of a kind in seconds, at most `hard_s`; after too few replies, `hard_s`."""
        seconds = self._seconds.get(kind, ())
        if len(seconds) < WARM_UP:
            return hard_s
        return min(hard_s, max(self._floor_s, min_s, self._factor * max(seconds)))

    def describe(self, kind: str) -> str:
        """Return a clause about the recent replies of a kind; empty if there are none."""
        seconds = self._seconds.get(kind)
        return f"the slowest of the last {len(seconds)} took {max(seconds):.2g} s" if seconds else ""


def size_class(amount: int) -> int:
    """Return the bit length of an amount. Amounts of the same class differ by less than a factor of two."""
    return amount.bit_length()


DUMP_S = 10.0
"""Limit for one dump of a process's stacks, in seconds."""
_AT_ONCE = 4
_STATES = {"R": "alive", "S": "alive", "D": "in the kernel", "T": "stopped by a signal", "t": "stopped by a debugger"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process of a run."""

    name: str
    """Role and rank, such as `trainer_0`."""
    pid: int
    """Process id on its host."""
    host: str | None = None
    """Name of its host; None for this machine."""

    @property
    def role(self) -> str:
        """Name of its mesh, such as `generator_0`."""
        return self.name.rpartition("_")[0]

    @property
    def rank(self) -> int:
        """Rank in its mesh."""
        return int(self.name.rpartition("_")[2])

    def __str__(self) -> str:
        """Return name and process id, such as `trainer_0 (process 77)`."""
        return f"{self.name} (process {self.pid})"

    def state(self) -> str:
        """Return the kernel's letter for the process state; empty if the process is dead or on another machine."""
        return process_state(self.pid) if self.host is None else ""

    def is_stopped(self) -> bool:
        """Return True if a signal (SIGSTOP, SIGTSTP) has stopped the process."""
        return self.state() == "T"

    def is_debugged(self) -> bool:
        """Return True if a debugger or tracer is attached."""
        return self.host is None and self._status("TracerPid") not in ("", "0")

    def _status(self, key: str) -> str:
        """Return a value of `/proc/<pid>/status`; empty if the process is dead."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
                if line.startswith(f"{key}:"):
                    return line.partition(":")[2].strip()
        return ""

    def handles(self, number: signal.Signals) -> bool:
        """Return True if the process has a handler for a signal; without one, the signal would kill it."""
        return bool(int(self._status("SigCgt") or "0", 16) >> (number - 1) & 1)


async def describe(processes: Sequence[Process]) -> str:
    """Return the states and stacks of processes as text. Each dump has a separate deadline."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def section(process: Process) -> str:
        state = _STATES.get(letter := process.state(), letter or "exited")  # before the dump, which stops the process
        async with places:
            return f"== {process}, {state if process.host is None else f'on {process.host}'}\n{await _stacks(process)}\n"

    return "\n".join(await asyncio.gather(*map(section, processes)))


async def _stacks(process: Process) -> str:
    """Return Python and native stacks of all threads. If py-spy fails, make the process write its Python stacks to its log.

    py-spy can only suspend a running process. A stopped one is read without suspending it, and without native frames.
    """
    if process.host is not None:
        return f"No stacks from another machine. There: py-spy dump --native --pid {process.pid}"
    reasons: list[str] = []
    # Reading native symbols can fail or take too long.
    ways = [("--nonblocking",)] if process.is_stopped() else [("--native",), ()]
    for options in ways:
        text, reason = await _py_spy(process.pid, *options)
        if text:
            return "\n".join([*reasons, text])
        reasons.append(f"py-spy dump {' '.join(options)}: {reason}".replace(" :", ":"))
    if not process.handles(STACKS_SIGNAL):
        return "\n".join([*reasons, "The process cannot write its stacks: it has not installed its signal handler yet."])
    os.kill(process.pid, STACKS_SIGNAL)
    when = "once it continues" if process.is_stopped() else "now"
    return "\n".join([*reasons, f"The process appends the Python stacks of its threads to logs/{process.name}.log {when}."])


async def _py_spy(pid: int, *options: str) -> tuple[str, str]:
    """Run `py-spy dump`; return its output and an empty reason, or an empty output and the reason of the failure."""
    program = shutil.which("py-spy", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]))
    if program is None:
        return "", "not installed"
    dump = await asyncio.create_subprocess_exec(
        program,
        "dump",
        *options,
        "--pid",
        str(pid),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, errors = await asyncio.wait_for(dump.communicate(), DUMP_S)
    except TimeoutError:
        return "", f"no result within {DUMP_S:g} s"
    finally:
        if dump.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                dump.kill()
    if dump.returncode == 0:
        return output.decode(errors="replace"), ""
    lines = errors.decode(errors="replace").strip().splitlines()
    return "", lines[-1] if lines else "failed without a message"


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
    """State of a process that a signal has stopped."""

    since: float
    """Time at which the stop was detected, on the event loop's clock."""
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
    """True if the user has been warned."""


class Watchdog:
    """Learns deadlines from earlier replies, and writes reports of stalls."""

    def __init__(self, config: FaultsConfig, run_dir: Path, warn: Callable[[str], None] = logger.warning) -> None:
        """Start without replies.

        Args:
            config: reaction to stalls.
            run_dir: run directory; reports go to its `logs` folder.
            warn: called with a message for the user about a stall that does not end the run.
        """
        self.config = config
        self.warn = warn
        self._run_dir = run_dir
        self._times = ReplyTimes(config.stall_factor, config.min_stall_s)
        self._last_fault = float("-inf")

    def limit(self, name: str, pace: Pace, hard_s: float) -> float:
        """Return the learned deadline of a request."""
        return self._times.limit(pace.kind or name, hard_s, pace.min_s)

    def note_reply(self, name: str, pace: Pace, started: float) -> None:
        """Learn from a reply to a request that was sent at `started` on the clock of `time.perf_counter`."""
        begun = started if pace.since is None else pace.since
        if begun > self._last_fault:
            self._times.add(pace.kind or name, time.perf_counter() - begun)

    def note_fault(self) -> None:
        """Learn nothing from requests that are pending now, because a fault or the following replacement delays them."""
        self._last_fault = time.perf_counter()

    def known(self, name: str, pace: Pace) -> str:
        """Return a clause about earlier replies to a request; empty if there are none."""
        return self._times.describe(pace.kind or name)

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
