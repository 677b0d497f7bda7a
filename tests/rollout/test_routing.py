"""Routing of groups to replicas, after events in any order."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from titanrl.rollout.routing import ReplicaState, Router, SessionKey


def test_least_loaded_replica_is_chosen_and_paused_sessions_break_ties() -> None:
    router, keys = Router(2), [SessionKey() for _ in range(4)]
    first, second = (router.assign(num, key) for num, key in zip((8, 2), keys, strict=False))
    assert (first.index, second.index) == (0, 1)
    assert router.assign(2, keys[2]).index == 1
    for replica, num_requests in ((first, 8), (second, 2), (second, 2)):
        router.finished(replica, num_requests, admits=True)
    assert router.assign(1, keys[3]).index == 0  # it has one session, the other replica has two


def test_turn_goes_to_the_replica_of_its_session_even_if_busy() -> None:
    router, session = Router(2), SessionKey()
    replica = router.assign(1, session)
    for _ in range(3):
        router.finished(replica, 1, admits=True)
        replica.num_running += 100
        assert router.assign(1, session) is replica


def test_session_leaves_failed_or_waiting_replica_unless_all_are() -> None:
    router, session = Router(2), SessionKey()
    first = router.assign(2, session)
    router.finished(first, 1, admits=False)
    second = router.assign(1, session)
    assert second is not first
    router.finished(first, 1, admits=False)  # it has no requests of this router any more, so it can pull its weights
    assert first.admits
    router.failed(second, 1)
    assert router.assign(1, session) is first
    router.failed(first, 1)
    assert router.assign(1, session) is first
    assert (first.num_sessions, second.num_sessions) == (1, 0)


class Sessions(RuleBasedStateMachine):
    """Groups and turns that start, finish and fail in any order on three replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(3)
        self.replicas = list(self.router)
        self.sessions: list[SessionKey] = []
        self.in_flight: list[tuple[SessionKey, ReplicaState, int]] = []

    def pick(self, data: st.DataObject, count: int) -> int:
        return data.draw(st.integers(0, count - 1))

    @rule()
    def open_session(self) -> None:
        self.sessions.append(SessionKey())

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), num_requests=st.integers(1, 8))
    def take_turn(self, data: st.DataObject, num_requests: int) -> None:
        session = self.sessions[self.pick(data, len(self.sessions))]
        before, running = session.replica, [replica.num_running for replica in self.replicas]
        usable = self.router.usable()
        replica = self.router.assign(num_requests, session)
        assert replica in usable
        if before in usable:
            assert replica is before
        else:
            assert running[replica.index] == min(running[other.index] for other in usable)
        assert replica.num_running == running[replica.index] + num_requests, "a group goes to one replica"
        self.in_flight.append((session, replica, num_requests))

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), admits=st.booleans())
    def finish(self, data: st.DataObject, admits: bool) -> None:
        _, replica, num_requests = self.in_flight.pop(self.pick(data, len(self.in_flight)))
        self.router.finished(replica, num_requests, admits=admits)
        assert replica.admits or replica.num_running, "a replica without requests would never get one again"

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        _, replica, num_requests = self.in_flight.pop(self.pick(data, len(self.in_flight)))
        self.router.failed(replica, num_requests)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def end_session(self, data: st.DataObject) -> None:
        session = self.sessions.pop(self.pick(data, len(self.sessions)))
        self.router.end_session(session)
        self.router.end_session(session)

    @invariant()
    def counts_match_the_sessions_and_groups_in_flight(self) -> None:
        for replica in self.replicas:
            assert replica.num_sessions == sum(session.replica is replica for session in self.sessions)
            assert replica.num_running == sum(num for _, at, num in self.in_flight if at is replica)
        assert self.router.usable()


Sessions.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
test_counts_hold_for_any_order_of_events = Sessions.TestCase
