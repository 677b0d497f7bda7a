"""Choice of the replica for a group: the least loaded one, or the one of the group's session. Numbers only, no actors."""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Seat:
    """The router's state of one replica."""

    place: int
    """Number of the replica."""
    num_running: int = 0
    """Requests sent to the replica and not finished."""
    num_sessions: int = 0
    """Open sessions whose next turn goes to the replica."""
    admits: bool = True
    """True if the replica admits new requests at once, according to its last reply."""
    failed: bool = False
    """True if the last call to the replica failed."""
    is_up: bool = True
    """False while the replica has ended and its replacement does not serve."""


@dataclass(eq=False, slots=True)
class SessionKey:
    """One conversation with the policy, of any number of turns."""

    seat: Seat | None = field(default=None, repr=False)
    """Replica of the last turn, which has the session's tokens in its cache; None before the first turn."""


class Router:
    """Least-loaded routing that keeps a session on its replica.

    A replica that failed, or that waits for weights and admits no requests, gets work only if all others are in the same state.
    Its cache is lost in both cases. A replica counts as waiting until all requests of this worker have finished there, since it
    pulls the weights then at the latest.
    """

    def __init__(self, num_replicas: int) -> None:
        """Start with idle replicas."""
        self._seats = [Seat(place) for place in range(num_replicas)]

    def __iter__(self) -> Iterator[Seat]:
        """Iterate over all replicas, in order."""
        return iter(self._seats)

    def assign(self, num_requests: int, session: SessionKey, fixed: int | None = None) -> Seat:
        """Choose a replica that is up for a group, the next turn of a session. A call of `finished` or `failed` must follow.

        Args:
            num_requests: requests of the group.
            session: the session.
            fixed: number of the replica, if the caller has chosen it; None chooses the least loaded one.
        """
        usable = self.usable() if fixed is None else [self._seats[fixed]]
        if session.seat not in usable:
            self.leave(session)
            session.seat = min(usable, key=lambda seat: (seat.num_running, seat.num_sessions, seat.place))
            session.seat.num_sessions += 1
        session.seat.num_running += num_requests
        return session.seat

    def usable(self) -> list[Seat]:
        """Return the healthiest replicas; none if none is up."""
        up = [seat for seat in self._seats if seat.is_up]
        least = min(map(_trouble, up), default=0)
        return [seat for seat in up if _trouble(seat) == least]

    def set_up(self, seat: Seat, *, is_up: bool) -> None:
        """Record that a replica has ended, or that its replacement serves. `failed` is called for every request it had."""
        seat.is_up, seat.failed, seat.admits = is_up, False, True

    def finished(self, seat: Seat, num_requests: int, *, admits: bool) -> None:
        """Record that a replica finished a group, and whether it admits new requests."""
        seat.num_running -= num_requests
        seat.failed = False
        seat.admits = admits or seat.num_running == 0

    def failed(self, seat: Seat, num_requests: int) -> None:
        """Record that a call for a group failed."""
        seat.num_running -= num_requests
        seat.failed = True

    def leave(self, session: SessionKey) -> None:
        """End a session. Calling this again has no effect."""
        if session.seat is not None:
            session.seat.num_sessions -= 1
            session.seat = None


def _trouble(seat: Seat) -> int:
    return 2 * seat.failed + (not seat.admits)
