"""Commands and groups between decoding steps, with a fake engine."""

import asyncio
import gc
import inspect
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from titanrl.base.errors import StoppedError
from titanrl.carriers.types import Completion, EngineLoad, GenerationRequest, SamplingParams
from titanrl.generator import actor as generator_actor
from titanrl.generator.actor import EngineLoop, EngineStoppedError, Generator


class Finished:
    """A ticket and its completion."""

    def __init__(self, ticket: int, num_tokens: int, version: int) -> None:
        self.ticket = ticket
        self.completion = Completion(
            token_ids=np.zeros(num_tokens, np.int64),
            logprobs=np.zeros(num_tokens, np.float32),
            versions=np.full(num_tokens, version, np.int64),
            finish_reason="length",
        )


class CountingEngine:
    """Fake engine whose requests finish after `max_new_tokens` steps with the current version."""

    def __init__(self) -> None:
        self.version: int | None = 1
        self.running: dict[int, list[int]] = {}
        self.aborted: list[int] = []
        self.num_steps = 0

    @property
    def can_step(self) -> bool:
        return bool(self.running) and self.version is not None

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(num_requests=len(self.running), num_queued=0)

    def add(self, request: GenerationRequest) -> int:
        ticket = request.token_ids[0]
        if ticket < 0:
            raise ValueError("refused")
        self.running[ticket] = [0, request.sampling.max_new_tokens]
        return ticket

    def abort(self, tickets: Iterable[int]) -> None:
        for ticket in set(tickets) & self.running.keys():
            del self.running[ticket]
            self.aborted.append(ticket)

    def invalidate(self, reason: str) -> None:
        self.version = None

    def step(self) -> list[Finished]:
        assert self.version is not None
        self.num_steps += 1
        for tokens in self.running.values():
            tokens[0] += 1
        ended = [ticket for ticket, (done, limit) in self.running.items() if done >= limit]
        return [Finished(ticket, self.running.pop(ticket)[1], self.version) for ticket in ended]


class ClockedEngine(CountingEngine):
    """Fake engine whose steps take a millisecond, and the clock of its loop."""

    def __init__(self) -> None:
        super().__init__()
        self.delivered = list[int]()
        """Steps before each delivery of tokens that are being sampled."""

    def perf_counter(self) -> float:
        return self.num_steps / 1000

    def sampled(self, starts: Mapping[int, int]) -> dict[int, tuple[list[int], list[float]]]:
        self.delivered.append(self.num_steps)
        return {ticket: ([0] * (self.running[ticket][0] - start), []) for ticket, start in starts.items()}


def requests(*lengths: int, first: int = 0) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            token_ids=(first + index,), sampling=SamplingParams(max_new_tokens=length, temperature=1.0, seed=None)
        )
        for index, length in enumerate(lengths)
    ]


async def completed(loop: EngineLoop, groups: list[list[GenerationRequest]], num_kept: list[int]) -> list[list[Completion]]:
    results = await loop.submit(groups, num_kept)
    return [await asyncio.wrap_future(result) for result in results]


def set_version(version: int | None) -> Any:
    def run(engine: CountingEngine) -> int:
        engine.version = version
        return len(engine.running)

    return run


async def test_draining_update_runs_between_earlier_and_later_requests() -> None:
    engine = CountingEngine()
    loop = EngineLoop(lambda: engine)  # type: ignore[arg-type,return-value]
    before = asyncio.create_task(completed(loop, [requests(2000)], [1]))
    await asyncio.sleep(0)
    update = asyncio.create_task(loop.call(set_version(2), when_drained=True))
    await asyncio.sleep(0)
    after = asyncio.create_task(completed(loop, [requests(3, first=10)], [1]))
    assert await update == 0
    assert {completion.versions[-1] for (completion,) in await before} == {1}
    assert {completion.versions[-1] for (completion,) in await after} == {2}
    await loop.close()


async def test_draining_command_holds_back_the_commands_behind_it() -> None:
    engine = CountingEngine()
    loop = EngineLoop(lambda: engine)  # type: ignore[arg-type,return-value]
    running = asyncio.create_task(completed(loop, [requests(2000)], [1]))
    await asyncio.sleep(0)
    ran: list[str] = []
    drained = asyncio.create_task(loop.call(lambda _: ran.append("drained"), when_drained=True))
    await asyncio.sleep(0)
    behind = asyncio.create_task(loop.call(lambda _: ran.append("behind")))
    await asyncio.sleep(0)
    second = asyncio.create_task(loop.call(lambda _: ran.append("second"), when_drained=True))
    stats = loop.take_stats()  # waits for no command
    assert (ran, running.done(), stats.num_tokens) == ([], False, 0)
    await asyncio.gather(running, drained, behind, second)
    assert ran == ["drained", "behind", "second"]
    await loop.close()


async def test_cancellation_does_not_wait_for_a_drain() -> None:
    engine = CountingEngine()
    loop = EngineLoop(lambda: engine)  # type: ignore[arg-type,return-value]
    (endless,) = await loop.submit([requests(10**9)], [1])
    drained = asyncio.create_task(loop.call(set_version(2), when_drained=True))
    await asyncio.sleep(0)
    await asyncio.wait_for(loop.cancel(endless), 60)
    assert await asyncio.wait_for(drained, 60) == 0
    assert endless.result() == []
    await loop.close()


async def test_draining_command_runs_immediately_without_valid_weights() -> None:
    engine = CountingEngine()
    loop = EngineLoop(lambda: engine)  # type: ignore[arg-type,return-value]
    running = asyncio.create_task(completed(loop, [requests(1000)], [1]))
    await asyncio.sleep(0)
    await loop.call(set_version(None))
    assert await loop.call(set_version(2), when_drained=True) == 1
    ((completion,),) = await running
    assert completion.versions[-1] == 2
    await loop.close()


async def test_command_after_the_thread_has_stopped_fails() -> None:
    loop = EngineLoop(CountingEngine)  # type: ignore[arg-type]
    await loop.close()
    with pytest.raises(EngineStoppedError, match="the engine was closed"):
        await loop.call(lambda engine: None)


async def test_closed_loop_keeps_its_engine_whose_end_takes_seconds() -> None:
    loop = EngineLoop(CountingEngine)  # type: ignore[arg-type]
    ended = await loop.call(lambda engine: weakref.finalize(engine, lambda: None))
    await loop.close()
    assert ended.alive


async def test_groups_that_fail_together_raise_one_error_and_report_no_other(caplog: pytest.LogCaptureFixture) -> None:
    generator = object.__new__(Generator)
    generator._loop = EngineLoop(CountingEngine)  # type: ignore[arg-type]
    generator._setup = cast("Any", SimpleNamespace(config=SimpleNamespace(on_update="drain")))
    generator._calls, generator._up_to_date = {}, asyncio.Event()
    generator._up_to_date.set()
    generate = inspect.unwrap(Generator.__dict__["generate"]._method)
    groups = [requests(10**9, first=number) for number in range(3)]
    call = asyncio.create_task(generate(generator, groups, [1, 1, 1], None))
    await asyncio.sleep(0.01)
    await generator._loop.start_over("the run restarts")
    with pytest.raises(StoppedError, match="the run restarts"):
        await call
    del call
    gc.collect()
    await generator._loop.close()
    assert "never retrieved" not in caplog.text


async def test_complete_group_aborts_its_spares_only() -> None:
    engine = CountingEngine()
    loop = EngineLoop(lambda: engine)  # type: ignore[arg-type,return-value]
    groups = [requests(9, 2, 5000, 4), requests(6, 7, first=10)]
    first, second = await completed(loop, groups, [3, 2])
    assert [len(completion.token_ids) for completion in first] == [9, 2, 4]
    assert [len(completion.token_ids) for completion in second] == [6, 7]
    await loop.close()  # a group has its result before its spares are aborted
    assert engine.aborted == [2]
    assert engine.num_steps == 9


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("is_cancelled", [False, True], ids=["complete", "cancelled"])
async def test_group_has_its_result_even_if_the_engine_fails_to_abort_its_spares(is_cancelled: bool) -> None:
    class Failing(CountingEngine):
        def abort(self, tickets: Iterable[int]) -> None:
            raise OSError("the connection to rank 1 is broken")

    loop = EngineLoop(Failing)  # type: ignore[arg-type]
    (result,) = await loop.submit([requests(2, 1_000_000_000)], [2 if is_cancelled else 1])
    if is_cancelled:
        with pytest.raises(OSError, match="broken"):
            await loop.cancel(result)
    assert len(await asyncio.wait_for(asyncio.wrap_future(result), 5)) == (0 if is_cancelled else 1)
    await loop.close()


async def test_spare_that_finishes_at_the_step_of_the_last_kept_completion_is_discarded() -> None:
    engine = CountingEngine()
    loop = EngineLoop(lambda: engine)  # type: ignore[arg-type,return-value]
    ((*completions,),) = await completed(loop, [requests(4, 4, 4)], [2])
    assert len(completions) == 2
    assert (engine.running, engine.aborted) == ({}, [])
    await loop.close()


async def test_decoding_pauses_without_valid_weights_and_resumes_with_the_next_ones() -> None:
    engine = CountingEngine()
    loop = EngineLoop(lambda: engine)  # type: ignore[arg-type,return-value]
    running = asyncio.create_task(completed(loop, [requests(100_000)], [1]))
    await asyncio.sleep(0.01)
    await loop.call(set_version(None))
    num_steps = engine.num_steps
    await asyncio.sleep(0.01)
    assert engine.num_steps == num_steps
    await loop.call(set_version(7))
    ((completion,),) = await running
    assert completion.versions[-1] == 7
    await loop.close()


async def test_refused_request_removes_only_the_requests_of_its_call() -> None:
    engine = CountingEngine()
    loop = EngineLoop(lambda: engine)  # type: ignore[arg-type,return-value]
    other = asyncio.create_task(completed(loop, [requests(2000, first=20)], [1]))
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="refused"):
        await loop.submit([requests(5000, 5000), [*requests(5000, first=10), *requests(1, first=-1)]], [2, 2])
    assert sorted(engine.aborted) == [0, 1, 10]
    ((completion,),) = await other
    assert len(completion.token_ids) == 2000
    assert engine.running == {}
    await loop.close()


async def test_close_fails_a_command_that_waits_for_a_drain() -> None:
    engine = CountingEngine()
    loop = EngineLoop(lambda: engine)  # type: ignore[arg-type,return-value]
    running = asyncio.create_task(completed(loop, [requests(10**9)], [1]))
    await asyncio.sleep(0)
    update = asyncio.create_task(loop.call(set_version(2), when_drained=True))
    await asyncio.sleep(0.01)
    await loop.close()
    for waiting in (running, update):
        with pytest.raises(EngineStoppedError, match="closed"):
            await waiting


async def cancel(*waiting: "asyncio.Task[Any]") -> None:
    """Cancel tasks that have sent commands."""
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)


async def test_cancelled_commands_are_not_run_and_do_not_stop_the_thread() -> None:
    engine, released, began = CountingEngine(), threading.Event(), asyncio.Event()
    loop = EngineLoop(lambda: engine)  # type: ignore[arg-type,return-value]
    running = asyncio.create_task(completed(loop, [requests(10**9)], [1]))
    hanging = asyncio.create_task(loop.call(hang(began, asyncio.get_running_loop(), released)))
    await asyncio.wait_for(began.wait(), 5)
    await cancel(
        asyncio.create_task(loop.submit([requests(3, first=1)], [1])),
        asyncio.create_task(loop.submit([requests(3, first=2)], [1], when_drained=True)),
        asyncio.create_task(loop.turn()),
    )
    released.set()
    await hanging
    assert await asyncio.wait_for(loop.call(lambda _: set(engine.running)), 5) == {0}
    await loop.close()
    with pytest.raises(EngineStoppedError, match="closed"):
        await running


async def test_close_fails_the_commands_behind_a_cancelled_one() -> None:
    engine = CountingEngine()
    loop = EngineLoop(lambda: engine)  # type: ignore[arg-type,return-value]
    running = asyncio.create_task(completed(loop, [requests(10**9)], [1]))
    update = asyncio.create_task(loop.call(set_version(2), when_drained=True))
    await cancel(asyncio.create_task(loop.call(set_version(3))))
    behind = asyncio.create_task(loop.call(set_version(4)))
    await asyncio.sleep(0.01)
    await loop.close()
    for waiting in (running, update, behind):
        with pytest.raises(EngineStoppedError, match="closed"):
            await asyncio.wait_for(waiting, 5)


def hang(began: asyncio.Event, loop: asyncio.AbstractEventLoop, released: threading.Event) -> Any:
    def run(_: CountingEngine) -> None:
        loop.call_soon_threadsafe(began.set)
        released.wait()

    return run


async def test_turn_returns_during_a_drain_but_not_while_a_step_hangs() -> None:
    engine, released = CountingEngine(), threading.Event()
    loop = EngineLoop(lambda: engine)  # type: ignore[arg-type,return-value]
    await asyncio.wait_for(loop.turn(), 5)  # idle
    running = asyncio.create_task(completed(loop, [requests(2000)], [1]))
    await asyncio.sleep(0)
    drained = asyncio.create_task(loop.call(lambda _: None, when_drained=True))
    await asyncio.sleep(0)
    await asyncio.wait_for(loop.turn(), 5)
    await asyncio.gather(running, drained)
    began = asyncio.Event()
    hanging = asyncio.create_task(loop.call(hang(began, asyncio.get_running_loop(), released)))
    await asyncio.wait_for(began.wait(), 5)
    turn = asyncio.create_task(loop.turn())
    assert await asyncio.wait({turn}, timeout=0.2) == (set(), {turn})
    released.set()
    await asyncio.wait_for(asyncio.gather(hanging, turn), 5)
    await loop.close()
    with pytest.raises(EngineStoppedError):
        await loop.turn()


def test_stats_taken_while_the_engine_counts_repeat_no_tokens() -> None:
    taken = list[int]()

    class Tokens:
        """Tokens of which the number is asked for between the reading and the writing of the count."""

        def __len__(self) -> int:
            taken.append(loop.take_stats().num_tokens)
            return 3

    class AskingEngine(CountingEngine):
        def step(self) -> list[Finished]:
            ended = super().step()
            for finished in ended:
                object.__setattr__(finished.completion, "token_ids", Tokens())
            return ended

    async def scenario() -> None:
        for first in range(4):
            await completed(loop, [requests(1, first=first)], [1])
        await loop.close()

    loop = EngineLoop(AskingEngine)  # type: ignore[arg-type]
    asyncio.run(scenario())
    assert sum(taken) + loop.take_stats().num_tokens == 12


def test_start_over_does_not_wait_for_draining_requests() -> None:
    async def scenario() -> None:
        engine = CountingEngine()
        loop = EngineLoop(lambda: engine)  # type: ignore[arg-type, return-value]
        endless = [asyncio.wrap_future(result) for result in await loop.submit([requests(10**9)], [1])]
        drain = asyncio.create_task(loop.call(set_version(2), when_drained=True))
        await asyncio.sleep(0)  # sends the command
        behind = asyncio.create_task(loop.submit([requests(10**9, first=1)], [1]))  # held back by the drain
        await asyncio.sleep(0)
        await asyncio.wait_for(loop.start_over("the run restarts"), 10)
        assert drain.done()
        for result in (*endless, *map(asyncio.wrap_future, await behind)):
            with pytest.raises(StoppedError, match="the run restarts"):
                await result
        assert engine.aborted == [0, 1]
        assert engine.version is None
        assert loop.take_stats().num_tokens == 0
        await loop.call(set_version(0))
        assert [len(group) for group in await completed(loop, [requests(3)], [1])] == [1]
        await loop.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))


@pytest.mark.parametrize(("num_streams", "interval"), [(2, 20), (50, 50)])
async def test_more_streams_get_their_tokens_less_often(
    num_streams: int, interval: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, got = ClockedEngine(), Counter[int]()
    monkeypatch.setattr(generator_actor, "time", engine)
    loop = EngineLoop(lambda: engine)  # type: ignore[arg-type,return-value]
    groups = [[request] for request in requests(*[120] * num_streams)]
    results = await loop.submit(
        groups, [1] * num_streams, on_sampled=lambda index, sampled: got.update({index: len(sampled[0])})
    )
    await asyncio.gather(*map(asyncio.wrap_future, results))
    await loop.close()
    assert set(np.diff(engine.delivered)) <= {interval, interval + 1}  # of rounding
    assert got == dict.fromkeys(range(num_streams), engine.delivered[-1])  # the completion has the later ones
