"""The generator pool with fake replicas."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.endpoints import FakeEndpoint
from titanrl.carriers.types import Admission, EngineLoad, GenerationRequest, SamplingParams
from titanrl.processes.actors import ActorError, ReplyPort, cause_of
from titanrl.rollout.pool import GeneratorPool, InRound, ReplicaState, Router, SessionKey


class Replica:
    """Fake generator actor: it replies with its name and records the size of each message."""

    def __init__(self, name: str, error: Exception | None = None, *, num_queued: int = 0) -> None:
        self.name, self.error = name, error
        self.held_message: int | None = None
        self.release = asyncio.Event()
        self.load = EngineLoad(num_requests=8, num_queued=num_queued)
        self.messages: list[int] = []
        self.admissions: list[Admission] = []
        self.generate, self.cancel = FakeEndpoint(self.reply), FakeEndpoint(self.cancel_call)
        self.cancelled = list[tuple[str, int]]()

    async def reply(
        self,
        groups: Sequence[Sequence[GenerationRequest]],
        num_kept: Sequence[int],
        replies: ReplyPort,
        admission: Admission,
    ) -> None:
        self.admissions.append(admission)
        self.messages.append(sum(map(len, groups)))
        if len(self.messages) == self.held_message:
            await self.release.wait()
        await asyncio.sleep(0.01)
        finished = []
        for place in reversed(range(len(groups))):
            if self.error is not None and place == 0:
                raise self.error
            kept = groups[place][: num_kept[place]]
            finished.append((place, [(self.name, request.token_ids) for request in kept]))
            if place % 2 == 0:  # two groups per message
                replies.send((finished, self.load, []))
                finished = []

    async def cancel_call(self, name: str, index: int) -> None:
        self.cancelled.append((name, index))


def requests(*prompts: int) -> list[GenerationRequest]:
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0, seed=None)
    return [GenerationRequest(token_ids=(prompt,), sampling=sampling) for prompt in prompts]


async def test_replica_gets_requests_as_soon_as_it_is_available() -> None:
    pool = GeneratorPool([None, None], max_num_seqs=64)
    calls = [asyncio.create_task(pool.generate(requests(prompt))) for prompt in (1, 2)]
    await asyncio.sleep(0.05)
    assert not any(call.done() for call in calls)
    pool.use(1, Replica("b"))
    assert await asyncio.gather(*calls) == [[("b", (1,))], [("b", (2,))]]


async def test_calls_of_one_tick_share_a_message() -> None:
    replica = Replica("a")
    pool = GeneratorPool([replica], max_num_seqs=64)
    first, second = await asyncio.gather(pool.generate(requests(1, 2)), pool.generate(requests(3)))
    assert replica.messages == [3]
    assert first == [("a", (1,)), ("a", (2,))]
    assert second == [("a", (3,))]


async def test_cancelled_call_is_cancelled_at_its_replica_and_others_are_not() -> None:
    replica = Replica("a")
    replica.held_message = 1
    pool = GeneratorPool([replica], max_num_seqs=64)
    kept, cancelled, queued = (asyncio.create_task(pool.generate(requests(prompt))) for prompt in (1, 2, 3))
    await asyncio.sleep(0)
    queued.cancel()  # before the message is sent
    await asyncio.sleep(0.005)
    cancelled.cancel()
    await asyncio.sleep(0.005)
    replica.release.set()
    assert await kept == [("a", (1,))]
    (name,) = {admission.name for admission in replica.admissions}
    assert sorted(replica.cancelled) == [(name, 1), (name, 2)]
    assert await pool.generate(requests(4)) == [("a", (4,))]
    assert [state.num_running for state in pool._router] == [0]


async def test_groups_go_to_the_least_loaded_replica() -> None:
    replicas = [Replica("a"), Replica("b")]
    pool = GeneratorPool(replicas, max_num_seqs=64)
    await asyncio.gather(*(pool.generate(requests(group, group)) for group in range(4)))
    assert [sum(replica.messages) for replica in replicas] == [4, 4]


async def test_groups_of_a_round_are_placed_by_index_with_the_round_size() -> None:
    replicas = [Replica("a"), Replica("b")]
    pool = GeneratorPool(replicas, max_num_seqs=64)
    with pool.session() as session, pool.session() as other, pool.session() as third:
        turns = [(session, 5), (other, 6), (third, 7)]  # of the indices 4 to 8, the others are those of another worker
        calls = [one.generate(requests(index), place=InRound(index, range(4, 9))) for one, index in turns]
        assert [answer[0][0] for answer in await asyncio.gather(*calls)] == ["b", "a", "b"]
    assert replicas[0].admissions == [Admission(indices=(6,), round_size=3)]
    assert replicas[1].admissions == [Admission(indices=(5, 7), round_size=2)]
    await pool.generate(requests(1), when_drained=True)
    assert [replace(each, name="") for each in replicas[0].admissions[1:]] == [Admission(when_drained=True)]


async def test_replica_error_reaches_every_pending_call() -> None:
    pool = GeneratorPool([Replica("a", error=RuntimeError("engine gone"))], max_num_seqs=64)
    first, second = await asyncio.gather(pool.generate(requests(1)), pool.generate(requests(2)), return_exceptions=True)
    assert str(cause_of(first)) == "engine gone"
    assert second == [("a", (2,))] or str(cause_of(second)) == "engine gone"
    with pytest.raises(ActorError, match="engine gone"):
        await pool.generate(requests(3))


async def test_turns_of_a_session_go_to_one_replica() -> None:
    replicas = [Replica("a"), Replica("b")]
    pool = GeneratorPool(replicas, max_num_seqs=64)

    async def converse(first: int) -> None:
        with pool.session() as session:
            turns = [await session.generate(requests(first + turn)) for turn in range(3)]
        assert len({name for ((name, _),) in turns}) == 1  # type: ignore[misc]

    await asyncio.gather(*(converse(10 * lane) for lane in range(4)))
    assert [sum(replica.messages) for replica in replicas] == [6, 6]


async def test_session_moves_when_its_replica_failed() -> None:
    pool = GeneratorPool([Replica("a", error=RuntimeError("engine gone")), Replica("b")], max_num_seqs=64)
    with pool.session() as session:
        with pytest.raises(ActorError, match="engine gone"):
            await session.generate(requests(1))
        assert await session.generate(requests(2)) == [("b", (2,))]
    assert await pool.generate(requests(3)) == [("b", (3,))]


async def test_replica_waiting_for_weights_gets_no_requests() -> None:
    held, free = Replica("held"), Replica("free")
    held.load = EngineLoad(num_requests=2, num_queued=0, admits=False)
    held.held_message = 2
    pool = GeneratorPool([held, free], max_num_seqs=64)
    first = asyncio.create_task(pool.generate(requests(1)))
    other = asyncio.create_task(pool.generate(requests(2)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    second = asyncio.create_task(pool.generate(requests(3)))  # keeps the first replica busy
    await asyncio.gather(first, other)
    assert [answer[0] for answer in await pool.generate(requests(4, 5))] == ["free", "free"]
    held.release.set()
    await second
    assert await pool.generate(requests(6)) == [("held", (6,))]


async def test_room_waits_at_the_limit_until_a_group_finishes() -> None:
    pool = GeneratorPool([Replica("a")], max_num_seqs=4)
    assert await pool.room(group_size=2) == 2
    running = [asyncio.create_task(pool.generate(requests(1, 2))) for _ in range(2)]
    await asyncio.sleep(0)
    waiting = asyncio.create_task(pool.room(group_size=2))
    await asyncio.sleep(0)
    assert not waiting.done()
    await asyncio.gather(*running)
    assert await waiting >= 1


async def test_replica_with_a_queue_gets_no_more_than_it_decodes() -> None:
    replica = Replica("a", num_queued=4)
    replica.held_message = 2
    pool = GeneratorPool([replica], max_num_seqs=64)
    first = asyncio.create_task(pool.generate(requests(*range(2))))
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # the first group is sent in a message of its own
    second = asyncio.create_task(pool.generate(requests(*range(12))))
    await first
    # Half of the replica's requests queue, so it decodes 6 of this worker's 12. No group has room until they finish.
    waiting = asyncio.create_task(pool.room(group_size=1))
    await asyncio.sleep(0)
    assert not waiting.done()
    replica.release.set()
    await second
    assert await waiting == 1


async def test_spare_requests_are_sent_but_not_returned() -> None:
    replica = Replica("a")
    kept = await GeneratorPool([replica], max_num_seqs=64).generate(requests(1, 2, 3), num_kept=2)
    assert (replica.messages, len(kept)) == ([3], 2)


async def test_queued_call_of_a_dead_replica_goes_to_the_replacement() -> None:
    first, second = Replica("first"), Replica("second")
    pool = GeneratorPool([first], max_num_seqs=64)
    generating = asyncio.create_task(pool.generate(requests(1)))
    await asyncio.sleep(0)  # the call is queued, but its message is not being sent
    pool.use(0, None)
    pool.use(0, second)
    assert await asyncio.wait_for(generating, 10) == [("second", (1,))]
    assert await asyncio.wait_for(pool.generate(requests(2)), 10) == [("second", (2,))]
    assert first.messages == []


async def test_running_calls_of_a_dead_replica_go_to_other_replicas() -> None:
    first, second = Replica("first"), Replica("second")
    first.held_message = 1
    pool = GeneratorPool([first, second], max_num_seqs=64)
    generating = asyncio.create_task(pool.generate(requests(1)))
    await asyncio.sleep(0.02)
    pool.use(0, None)
    assert await asyncio.wait_for(generating, 10) == [("second", (1,))]
    in_round = asyncio.create_task(placed(pool, requests(2), index=0, indices=[0, 1]))
    await asyncio.sleep(0.05)
    assert not in_round.done(), "groups of a round wait for their own replica"
    pool.use(0, Replica("third"))
    assert await asyncio.wait_for(in_round, 10) == [("third", (2,))]


async def placed(pool: GeneratorPool, group: list[GenerationRequest], *, index: int, indices: list[int]) -> list[Any]:
    with pool.session() as session:
        return await session.generate(group, place=InRound(index, indices))


def test_least_loaded_replica_is_chosen_and_paused_sessions_break_ties() -> None:
    router, keys = Router(2), [SessionKey() for _ in range(4)]
    first, second = (router.assign(num, key) for num, key in zip((8, 2), keys, strict=False))
    assert (first.index, second.index) == (0, 1)
    assert router.assign(2, keys[2]).index == 1
    for replica, num_requests in ((first, 8), (second, 2), (second, 2)):
        router.finished(replica, num_requests, admits=True)
    assert router.assign(1, keys[3]).index == 0  # it has one session, the other replica has two


def test_workers_prefer_different_replicas() -> None:
    """Workers do not know of each other's requests: with one preference, 4 workers would send 8 groups to 2 of 8 replicas."""
    routers = [Router(8, first=number * 8 // 4) for number in range(4)]
    chosen = [router.assign(1, SessionKey()).index for router in routers for _ in range(2)]
    assert sorted(chosen) == list(range(8))


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
