"""Routing of groups to generator replicas: the replica of the group's session, or else the least loaded one.

The router only counts requests; it does not depend on actors.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class ReplicaState:
    """The router's state of one replica."""

    index: int
    """Index of the replica."""
    num_running: int = 0
    """Number of unfinished requests sent to the replica."""
    num_sessions: int = 0
    """Number of open sessions whose next turn goes to the replica."""
    admits: bool = True
    """True if the replica admits new requests immediately, according to its last reply."""
    failed: bool = False
    """True if the last call to the replica failed."""
    is_up: bool = True
    """False after the replica died, until its replacement serves."""


@dataclass(eq=False, slots=True)
class SessionKey:
    """Identity of a session: one conversation with the policy, of any number of turns."""

    replica: ReplicaState | None = field(default=None, repr=False)
    """Replica of the last turn, whose KV cache holds the session's tokens; None before the first turn."""


class Router:
    """Least-loaded routing that keeps a session on its replica.

    A replica that failed, or that waits for weights and admits no requests, is chosen only if all others are in the same state.
    In both cases its KV cache is lost. A replica is considered waiting at most until all requests of this worker have finished
    there, because it pulls the weights then at the latest.
    """

    def __init__(self, num_replicas: int) -> None:
        """Start with idle replicas."""
        self._replicas = [ReplicaState(index) for index in range(num_replicas)]

    def __iter__(self) -> Iterator[ReplicaState]:
        """Iterate over all replicas, in order."""
        return iter(self._replicas)

    def assign(self, num_requests: int, session: SessionKey, fixed: int | None = None) -> ReplicaState:
        """Assign the next turn of a session to a replica that is up. The caller must call `finished` or `failed` afterwards.

        Args:
            num_requests: Number of requests in the turn.
            session: Session of the turn.
            fixed: Index of the replica, if the caller has chosen it; None keeps the replica of the session, or chooses the
                least loaded one.
        """
        usable = self.usable() if fixed is None else [self._replicas[fixed]]
        if session.replica not in usable:
            self.end_session(session)
            session.replica = min(usable, key=lambda replica: (replica.num_running, replica.num_sessions, replica.index))
            session.replica.num_sessions += 1
        session.replica.num_running += num_requests
        return session.replica

    def usable(self) -> list[ReplicaState]:
        """Return the healthiest replicas; empty if no replica is up."""
        up = [replica for replica in self._replicas if replica.is_up]
        least = min(map(_penalty, up), default=0)
        return [replica for replica in up if _penalty(replica) == least]

    def mark(self, replica: ReplicaState, *, is_up: bool) -> None:
        """Record that a replica died, or that its replacement serves. The caller calls `failed` for each request it had."""
        replica.is_up, replica.failed, replica.admits = is_up, False, True

    def finished(self, replica: ReplicaState, num_requests: int, *, admits: bool) -> None:
        """Record that a replica finished the requests of a group, and whether it admits new ones."""
        replica.num_running -= num_requests
        replica.failed = False
        replica.admits = admits or replica.num_running == 0

    def failed(self, replica: ReplicaState, num_requests: int) -> None:
        """Record that the requests of a group failed."""
        replica.num_running -= num_requests
        replica.failed = True

    def end_session(self, session: SessionKey) -> None:
        """End a session. A second call has no effect."""
        if session.replica is not None:
            session.replica.num_sessions -= 1
            session.replica = None


def _penalty(replica: ReplicaState) -> int:
    return 2 * replica.failed + (not replica.admits)
