"""Learned deadlines: a multiple of the slowest recent reply to requests of the same kind."""

from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

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
