"""Which replica gets a group: the one with the least work, or the one that a session is at. Numbers only, no actors."""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Seat:
    """What a router knows of one replica."""

    place: int
    """Which one."""
    num_running: int = 0
    """Requests it was given and has not answered."""
    num_sessions: int = 0
    """Sessions that are at it, and will come back with their next turn."""
    admits: bool = True
    """Whether it lets new requests in at once, as far as it last told."""
    failed: bool = False
    """Whether the last call to it failed."""


@dataclass(eq=False, slots=True)
class SessionKey:
    """One conversation with the policy, over however many turns."""

    seat: Seat | None = field(default=None, repr=False)
    """Where its last turn went, and so where the tokens up to there are cached; None before the first."""


class Router:
    """Least-loaded routing in which a session stays where it is.

    A replica that is broken, or that waits for weights and admits nothing, gets work only if all others are no better; what it
    had cached is lost then anyway. It counts as waiting until everything it was given from here has ended, which is when its
    weights have come or are about to.
    """

    def __init__(self, num_replicas: int) -> None:
        """Start with idle replicas."""
        self._seats = [Seat(place) for place in range(num_replicas)]

    def __iter__(self) -> Iterator[Seat]:
        """All replicas, in order."""
        return iter(self._seats)

    def assign(self, num_requests: int, session: SessionKey) -> Seat:
        """Choose a replica for a whole group, which is the next turn of a session; `answered` or `failed` must follow."""
        usable = self.usable()
        if session.seat not in usable:
            self.leave(session)
            session.seat = min(usable, key=lambda seat: (seat.num_running, seat.num_sessions, seat.place))
            session.seat.num_sessions += 1
        session.seat.num_running += num_requests
        return session.seat

    def usable(self) -> list[Seat]:
        """The replicas that are as well as any; never none."""
        least = min(map(_trouble, self._seats))
        return [seat for seat in self._seats if _trouble(seat) == least]

    def answered(self, seat: Seat, num_requests: int, *, admits: bool) -> None:
        """Note that a replica has answered a group, and whether it said that it admits others."""
        seat.num_running -= num_requests
        seat.failed = False
        seat.admits = admits or seat.num_running == 0

    def failed(self, seat: Seat, num_requests: int) -> None:
        """Note that a replica has failed to answer a group."""
        seat.num_running -= num_requests
        seat.failed = True

    def leave(self, session: SessionKey) -> None:
        """End a session; harmless for one that has."""
        if session.seat is not None:
            session.seat.num_sessions -= 1
            session.seat = None


def _trouble(seat: Seat) -> int:
    return 2 * seat.failed + (not seat.admits)
