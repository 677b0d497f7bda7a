"""Deadlines of requests, from the time that earlier requests of the same kind took."""

from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

WINDOW = 100
"""Replies of a kind that count, the newest ones."""
WARM_UP = 3
"""Replies of a kind before its deadline is learned. They count towards it: what compiles at first may compile again."""
DISK_S = 300.0
"""Shortest learned deadline of requests that read or write files, because network file systems pause for minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Parameters of a request's learned deadline."""

    kind: str | None = None
    """Requests with the same kind take about the same time; the name of the request by default."""
    min_s: float = 0.0
    """Shortest deadline, in seconds, where the configuration's is too short."""
    since: float | None = None
    """Start of the time that is learned, on the clock of `time.perf_counter`; the start of the wait by default."""
    progress: Callable[[], Awaitable[object]] | None = None
    """Returns a value that changes while the work goes on. The deadline starts again whenever it has changed."""


class ReplyTimes:
    """Seconds of the newest replies by kind, and the deadlines that follow from them.

    Example: With factor 10 and floor 30, replies after 0.4, 7 and 2 s give a deadline of 70 s; replies after 0.4 s one of 30 s.
    """

    def __init__(self, factor: float, floor_s: float) -> None:
        """Start without replies.

        Args:
            factor: multiple of the slowest reply.
            floor_s: shortest deadline.
        """
        self._factor = factor
        self._floor_s = floor_s
        self._seconds: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))

    def add(self, kind: str, seconds: float) -> None:
        """Add a reply."""
        self._seconds[kind].append(seconds)

    def limit(self, kind: str, hard_s: float, min_s: float = 0.0) -> float:
        """Return the deadline of the next request of a kind, at most `hard_s`; while there are few replies, `hard_s`."""
        seconds = self._seconds.get(kind, ())
        if len(seconds) < WARM_UP:
            return hard_s
        return min(hard_s, max(self._floor_s, min_s, self._factor * max(seconds)))

    def describe(self, kind: str) -> str:
        """Return what is known of a kind as a clause; empty if nothing is."""
        seconds = self._seconds.get(kind)
        return f"the slowest of the last {len(seconds)} took {max(seconds):.2g} s" if seconds else ""


def size_class(amount: int) -> int:
    """Return the number of bits of an amount. Amounts of the same class differ by less than a factor of two."""
    return amount.bit_length()
