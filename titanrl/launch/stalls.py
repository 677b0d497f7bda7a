"""Stall reports: which processes do not respond, with their stacks in a file."""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from titanrl.base.errors import FaultError
from titanrl.config.faults import FaultsConfig
from titanrl.launch.deadlines import Pace, ReplyTimes
from titanrl.launch.stacks import Process, describe

logger = logging.getLogger(__name__)

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
