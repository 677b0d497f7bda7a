"""Replay of rank 0's changes on another rank, with fake engines that log their calls."""

from collections.abc import Iterable
from multiprocessing import Pipe
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanrl.base.errors import DivergedError
from titanrl.carriers.types import GenerationRequest, SamplingParams
from titanrl.generator.lockstep import Abort, Follower, Leader, Turn, apply_changes
from titanrl.weights.records import WeightMismatchError

REQUEST = GenerationRequest(token_ids=(1,), sampling=SamplingParams(max_new_tokens=4, temperature=1.0, seed=None))


class LoggingEngine:
    """Fake engine that logs its calls; a request runs until it is aborted."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.running: list[int] = []
        self.next_ticket = 0

    @property
    def num_running(self) -> int:
        return len(self.running)

    def add(self, request: GenerationRequest) -> int:
        self.log.append("add")
        self.running.append(self.next_ticket)
        self.next_ticket += 1
        return self.running[-1]

    def abort(self, tickets: Iterable[int]) -> None:
        self.log.append(("abort", tuple(tickets)))
        for ticket in self.log[-1][1]:
            self.running.remove(ticket)

    def restart(self) -> None:
        self.log.append("restart")

    def step(self) -> list[Any]:
        self.log.append("step")
        return []


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(["add", "abort", "restart", "step"]), max_size=30))
def test_follower_replays_rank_0_changes_between_the_same_steps(actions: list[str]) -> None:
    mine, theirs, (here, there) = LoggingEngine(), LoggingEngine(), Pipe()
    leader: Any = Leader(mine, [here])  # type: ignore[arg-type]
    follower = Follower(lambda: (theirs, there))  # type: ignore[arg-type,return-value]
    for action in [*actions, "step"]:
        if action == "add":
            leader.add(REQUEST)
        elif action != "abort":
            getattr(leader, action)()
        elif mine.running:
            leader.abort(iter(mine.running[:2]))
    leader.close()
    follower.stopped.result(timeout=10)
    assert theirs.log == mine.log


def test_rank_with_a_different_number_of_requests_stops() -> None:
    engine, (here, there) = LoggingEngine(), Pipe()
    follower = Follower(lambda: (engine, there))  # type: ignore[arg-type,return-value]
    here.send(Turn((REQUEST, REQUEST), num_running=1, swap=None))
    with pytest.raises(DivergedError, match="2 requests are running on this rank, 1 on rank 0"):
        follower.stopped.result(timeout=10)
    assert "step" not in engine.log
    apply_changes(engine, Turn((Abort((0,)),), num_running=1, swap=None))  # type: ignore[arg-type]


def test_rank_that_cannot_start_fails_all_waiters() -> None:
    def build() -> Any:
        raise RuntimeError("no such device")

    follower = Follower(build)
    for waiting in (follower.started, follower.stopped):
        with pytest.raises(RuntimeError, match="no such device"):
            waiting.result(timeout=10)


def test_swap_fails_when_rank_0_closes_before_it() -> None:
    here, there = Pipe()
    follower = Follower(lambda: (LoggingEngine(), there))  # type: ignore[arg-type,return-value]
    swap = follower.swap(lambda engine: None)
    here.close()
    follower.stopped.result(timeout=10)
    for refused in (swap, follower.swap(lambda engine: None)):
        with pytest.raises(WeightMismatchError, match="the engine of this rank has stopped"):
            refused.result(timeout=10)
