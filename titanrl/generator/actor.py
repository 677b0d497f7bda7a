"""The `Generator` actor: one rank of a vLLM engine that pulls its weights from the trainer.

Its engine runs on a thread of its own, `EngineLoop`, the second half of the module.

Importing this module does not import torch. Processes that only call generators, such as rollout workers, do not need it.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from titanrl.base.errors import StoppedError
from titanrl.base.plugins import loading
from titanrl.carriers.record import span
from titanrl.carriers.types import Admission, Completion, EngineLoad, GenerationRequest, GenerationStats
from titanrl.config.device import Device
from titanrl.config.sections import GeneratorConfig, LoraConfig
from titanrl.models.directory import open_model
from titanrl.processes.actors import Actor, Gathering, ReplyPort, concurrent_endpoint, current_rank, endpoint
from titanrl.weights.records import Commit, HeldAdapter

if TYPE_CHECKING:
    from titanrl.generator.engine import Engine, Fill, Finished, HeldPuller, Puller, Sampled
    from titanrl.generator.lockstep import Follower, Leader
    from titanrl.weights.store import WeightSource


T = TypeVar("T")

OnSampled = Callable[[int, "Sampled"], None]
"""Function that gets the index of a group, and the next tokens of its only request, on the engine's thread."""
SAMPLED_S = 0.02
"""Shortest time between two deliveries of tokens that are being sampled, in seconds. A tiny model would spend more time on them
than on its steps."""
SAMPLED_EACH_S = 0.001
"""The same for each request whose tokens are delivered, because their messages and events cost time."""
Reply = tuple[list[tuple[int, list[Completion]]], EngineLoad, list[tuple[int, "Sampled"]]]
"""Finished groups of a `generate` call as (index in the call, completions) pairs, the engine's load, and the next tokens of
groups that are being sampled."""
GroupRequest = tuple[Sequence[GenerationRequest], int]
"""Requests of a group, and the number of completions to keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSetup:
    """Everything a generator needs to start."""

    model_dir: Path
    """Hugging Face directory. The generator reads its config, its tokenizer for stop texts, and its weights if
    `source` is None."""
    config: GeneratorConfig
    device: Device
    max_len: int
    """Longest prompt plus completion, in tokens."""
    stop_ids: tuple[int, ...]
    """Tokens that end a completion."""
    source: "WeightSource | None"
    """Source of the weights. If None, vLLM loads the weights of `model_dir`, and they never change."""
    family: str | None = None
    """`model.family` of the configuration."""
    lora: LoraConfig | None = None
    """Adapters of the trainer, if they are published by themselves."""
    num_held: int = 0
    """Number of other adapters that the generator can hold."""
    has_expert_bias: bool = False
    """True if the trainer publishes a bias of the experts."""


class Generator(Actor):
    """One vLLM engine shared by many callers. While a pull is announced, new requests wait; without complete weights, they are
    refused.

    With `generator.tp` > 1, a replica is a mesh of this actor, one per tensor-parallel rank. Call `start`, `pull_weights`,
    `hold_adapter`, `start_over`, `probe` and `close` on all ranks, `follow` on all ranks except 0, and the others on rank 0.

    All endpoints used during a run are concurrent. Monarch starts no concurrent endpoint while a plain one runs, and a pull
    may wait for running requests to finish (`on_update: drain`).
    """

    def __init__(self, setup: GeneratorSetup) -> None:
        self._setup = setup
        self._rank = current_rank().rank  # read here: on the engine's thread Monarch has no context, and it would be 0
        self._puller: Puller | None = None
        self._held_puller: HeldPuller | None = None
        self._leader: Leader | None = None
        self._follower: Follower | None = None
        self._rounds = Gathering(self._submit_round)
        self._calls: dict[str, asyncio.Task[Sequence[Future[list[Completion]]]]] = {}
        self._pulling = asyncio.Lock()  # held from a fetch to its swap: one version or adapter at a time
        self._restarting = asyncio.Event()
        self._expected = self._attempted = -1  # versions: of `expect_weights`, and of the last pull, even a failed one
        self._up_to_date = asyncio.Event()
        self._up_to_date.set()

    @endpoint
    async def start(self) -> None:
        """Import vLLM and build the engine; return when it is ready to pull weights."""
        from titanrl.models.preparation import prepare_torchtitan

        prepare_torchtitan(self._setup.device)
        if self._rank == 0:
            self._loop = EngineLoop(self._build_engine if self._setup.config.tp == 1 else self._build_leader)
            await self._loop.call(lambda engine: None)  # returns once the engine is built
        else:
            from titanrl.generator.lockstep import Follower, connect

            self._follower = Follower(lambda: (self._build_engine(), connect(self._rank, self._setup.config.tp)[0]))
            await asyncio.wrap_future(self._follower.started)

    @concurrent_endpoint
    async def follow(self) -> None:
        """Wait until rank 0 closes; raise if this rank can no longer follow it."""
        assert self._follower is not None, "rank 0 follows no other rank"
        await asyncio.wrap_future(self._follower.stopped)

    @concurrent_endpoint
    async def generate(
        self,
        groups: Sequence[Sequence[GenerationRequest]],
        num_kept: Sequence[int],
        replies: ReplyPort,
        admission: Admission | None = None,
    ) -> None:
        """Sample completions and send each group to `replies` as soon as `num_kept` of its requests have finished.

        All requests of a call join the batch at the same decoding step, as soon as `admission` allows it. In synchronous
        training, workers send the groups of *rounds*: the requests of all workers join together, so that results are
        reproducible. Once a group is complete, the engine aborts its remaining requests. The call returns when every group has
        been sent. A cancelled group has no completions.

        Tokens are not sent while they are sampled in a round, whose callers wait for all of it. Neither are they if `on_update`
        is `restart`, because an update drops them.
        """
        admission = admission or Admission()
        news: asyncio.Queue[tuple[int, asyncio.Future[list[Completion]] | Sampled]] = asyncio.Queue()
        streams = admission.streams and self._setup.config.on_update != "restart"
        assert not (streams and admission.round_size), "a round streams no tokens"
        tell = asyncio.get_running_loop().call_soon_threadsafe

        def on_sampled(index: int, sampled: "Sampled") -> None:
            tell(news.put_nowait, (index, sampled))

        admitted = asyncio.create_task(self._admit(groups, num_kept, admission, on_sampled if streams else None))
        if admission.name:
            self._calls[admission.name] = admitted
        try:
            for index, result in enumerate(map(asyncio.wrap_future, await admitted)):
                result.add_done_callback(lambda result: result.cancelled() or result.exception())  # only the first is raised
                result.add_done_callback(lambda result, index=index: news.put_nowait((index, result)))  # type: ignore[misc]
            num_sent = 0
            while num_sent < len(groups):
                ready = [await news.get(), *(news.get_nowait() for _ in range(news.qsize()))]
                load = replace(self._loop.load, admits=self._loop.load.admits and self._up_to_date.is_set())
                finished = [(index, new.result()) for index, new in ready if isinstance(new, asyncio.Future)]
                sampled = [(index, new) for index, new in ready if not isinstance(new, asyncio.Future)]
                replies.send_soon((finished, load, sampled))
                num_sent += len(finished)
        finally:
            self._calls.pop(admission.name, None)

    @concurrent_endpoint
    async def cancel(self, name: str, index: int) -> None:
        """Cancel the group at an index of a call, named by its `Admission`, when it is in the batch and not done."""
        admitted = self._calls.get(name)
        if admitted is None:
            return
        await asyncio.wait({admitted})
        if not admitted.cancelled() and admitted.exception() is None:  # after a failure, nothing is in the batch
            await self._loop.cancel(admitted.result()[index])

    async def _admit(
        self,
        groups: Sequence[Sequence[GenerationRequest]],
        num_kept: Sequence[int],
        admission: Admission,
        on_sampled: OnSampled | None,
    ) -> "Sequence[Future[list[Completion]]]":
        """Add requests to the batch as soon as their admission allows it; return one future per group."""
        await self._up_to_date.wait()
        if admission.round_size:
            parts = dict(zip(admission.indices, zip(groups, num_kept, strict=True), strict=True))
            of_round = await self._rounds.add(parts, admission.round_size)
            return [of_round[index] for index in admission.indices]
        return await self._loop.submit(groups, num_kept, when_drained=admission.when_drained, on_sampled=on_sampled)

    async def _submit_round(self, parts: Mapping[int, GroupRequest]) -> "dict[int, Future[list[Completion]]]":
        groups, num_kept = zip(*parts.values(), strict=True)
        # Requests left over from an abandoned round would change this round's batches. Otherwise the engine is already idle.
        results = await self._loop.submit(groups, num_kept, when_drained=True)
        return dict(zip(parts, results, strict=True))

    @concurrent_endpoint
    async def abandon_round(self) -> None:
        """Drop the requests of an incomplete round, because a worker or another generator died."""
        self._rounds.reset(StoppedError("a worker or generator died"))

    @concurrent_endpoint
    async def probe(self) -> None:
        """Return once the engine has finished its current step, which shows that neither it nor the event loop hangs.

        Other ranks than 0 show it of their event loop alone: their engines block until rank 0 takes a step.
        """
        if self._rank == 0:
            await self._loop.turn()

    @concurrent_endpoint
    async def expect_weights(self, version: int) -> None:
        """Hold back new requests until the pull of `version` has finished; running requests continue."""
        self._expected = max(self._expected, version)
        if self._expected > self._attempted:  # the pull may have finished before this call arrived
            self._up_to_date.clear()

    @concurrent_endpoint
    async def pull_weights(self, commit: Commit) -> int:
        """Load a committed version between two decoding steps; `on_update` decides what happens to running requests.

        Pulls run one at a time, in the order of the calls. After a failed pull, the generator refuses requests until a later
        pull succeeds.

        Returns:
            Bytes that this rank has received since the last pull, not counting shared memory.

        Raises:
            WeightMismatchError: The version no longer exists, or does not match this model.
            StoppedError: The run restarts.
        """
        on_update = self._setup.config.on_update

        def update(engine: "Engine | Leader") -> None:
            try:
                engine.update_weights(commit.version, fill)
                if on_update == "restart":
                    engine.restart()
            except Exception as error:  # the engine may hold a mixture of versions; the caller gets the error
                engine.invalidate(f"the pull of version {commit.version} failed: {error}")
                raise

        async def fetch() -> "Fill":
            if self._puller is None:
                from titanrl.generator.engine import Puller

                setup, model = self._setup, open_model(self._setup.model_dir, self._setup.family)
                assert setup.source is not None, "a frozen model pulls no weights"
                self._puller = Puller(setup.source, model, setup.config, self._rank, has_adapters=setup.lora is not None)
            return await self._puller.fetch(commit)

        async with self._pulling:
            with span("pull", version=commit.version):
                fill, fetched = await self._fetched(fetch())
                try:
                    if self._follower is not None:
                        await asyncio.wrap_future(self._follower.swap(fill))
                    else:
                        await self._loop.call(update, when_drained=fetched and on_update == "drain")
                    assert self._puller is not None, "the swap fails if the fetch did"
                    return self._puller.take_received()
                finally:
                    self._attempted = max(self._attempted, commit.version)
                    if self._attempted >= self._expected:  # also after a failure: the requests must then be refused, not wait
                        self._up_to_date.set()

    @concurrent_endpoint
    async def hold_adapter(self, held: HeldAdapter) -> None:
        """Add an adapter beside the policy's between two decoding steps; running requests continue.

        Requests name it by its number: those of a session's client that keeps a version, or of another of its models.

        Raises:
            WeightMismatchError: Its bytes do not match this model.
            StoppedError: The run restarts.
        """

        async def fetch() -> "Fill":
            if self._held_puller is None:
                from titanrl.generator.engine import HeldPuller

                assert self._setup.source is not None, "a frozen model holds no adapters"
                self._held_puller = HeldPuller(self._setup.source)
            return await self._held_puller.fetch(held)

        async with self._pulling:
            fill, _ = await self._fetched(fetch())
            if self._follower is not None:
                await asyncio.wrap_future(self._follower.swap(fill))
            else:
                await self._loop.call(lambda engine: engine.hold_adapter(held.number, held.version, fill))

    @concurrent_endpoint
    async def drop_adapter(self, number: int) -> None:
        """Forget an adapter, whose requests have finished; rank 0 tells the other ranks."""
        async with self._pulling:  # after `hold_adapter`, if its caller was cancelled
            await self._loop.call(lambda engine: engine.drop_adapters([number]))

    @concurrent_endpoint
    async def start_over(self, source: "WeightSource | None") -> None:
        """Drop all requests and weights because the run restarts; later pulls read from `source`."""
        reason = "the run restarts, and the weights are not published yet"
        self._rounds.reset(StoppedError(reason))
        self._restarting.set()  # ends the fetches of earlier pulls, because the processes they wait for may be dead
        if self._follower is None:
            await self._loop.start_over(reason)  # fails the requests that a draining pull waits for
        async with self._pulling:  # earlier pulls have finished
            self._restarting.clear()
            if self._follower is None:  # an earlier pull may have let held requests continue
                await self._loop.start_over(reason)
            if self._puller is not None:
                self._puller.close()
            self._puller, self._setup = None, replace(self._setup, source=source)
            if self._held_puller is not None:
                self._held_puller.close()
                self._held_puller = None
                if self._follower is None:
                    await self._loop.call(lambda engine: engine.drop_adapters(engine.held_adapters))
            self._expected = self._attempted = -1
            self._up_to_date.set()

    @concurrent_endpoint
    async def stats(self) -> GenerationStats:
        """Return the work done since the previous call."""
        return self._loop.take_stats()

    @endpoint
    async def close(self) -> None:
        """Stop the engine's thread. The threads of the other ranks exit when rank 0 closes."""
        if self._follower is not None:
            self._follower.close()
            await asyncio.wait({asyncio.wrap_future(self._follower.stopped)})
        else:
            await self._loop.close()
        if self._leader is not None:
            self._leader.close()
        if self._setup.config.tp > 1:
            from titanrl.generator.compat import leave_ranks

            leave_ranks()

    def _build_engine(self) -> "Engine":
        with loading():
            from titanrl.generator.engine import Engine

        setup = self._setup
        source = open_model(setup.model_dir, setup.family)
        engine = Engine(
            source,
            setup.config,
            setup.device,
            max_len=setup.max_len,
            stop_ids=setup.stop_ids,
            lora=setup.lora,
            num_held=setup.num_held,
            has_expert_bias=setup.has_expert_bias,
        )
        if setup.source is None:
            engine.version = 0  # vLLM has loaded the weights
        return engine

    def _build_leader(self) -> "Leader":
        from titanrl.generator.lockstep import Leader, connect

        engine = self._build_engine()
        self._leader = Leader(engine, connect(0, self._setup.config.tp))
        return self._leader

    async def _fetched(self, fetch: "Coroutine[None, None, Fill]") -> "tuple[Fill, bool]":
        """Return the function that `fetch` returns, which writes weights into the model, and whether the fetch succeeded.

        A fetch fails if the run restarts. After a failed fetch, the returned function raises the error: in the swap and not
        here, because all ranks must take part in every swap, and then fail at the same step.
        """
        fetching = asyncio.create_task(fetch)
        restarting = asyncio.create_task(self._restarting.wait())
        try:
            await asyncio.wait({fetching, restarting}, return_when=asyncio.FIRST_COMPLETED)
            if not fetching.done():
                raise StoppedError("the run restarts")
            return fetching.result(), True
        except Exception as error:  # whatever the error: the engine must stop serving older weights, or not hold the adapter
            failure = error

            def fail(engine: "Engine") -> bool:
                raise failure

            return fail, False
        finally:
            fetching.cancel()
            restarting.cancel()


class EngineStoppedError(StoppedError):
    """The engine's thread has stopped; the message gives the reason."""


@dataclass(slots=True)
class _Group:
    """Requests whose completions are returned as one result."""

    result: Future[list[Completion]]
    completions: list[Completion | None]
    num_missing: int
    """Completions still needed; at 0 the remaining requests are spares."""
    on_sampled: Callable[["Sampled"], None] | None = None
    """Gets the tokens of the only request while they are sampled."""
    num_delivered: int = 0
    """Tokens that it has got."""


@dataclass(frozen=True, slots=True)
class _Command:
    """A function to run on the engine's thread, and its result."""

    run: Callable[["Engine | Leader"], Any]
    result: Future[Any]
    when_drained: bool
    """True if the command waits until no request is running."""

    def answer(self, engine: "Engine | Leader") -> None:
        """Run the function, unless its caller has cancelled the call, and set its result."""
        if not self.result.set_running_or_notify_cancel():  # else it cannot be cancelled any more
            return
        try:
            self.result.set_result(self.run(engine))
        except Exception as error:  # belongs to the caller; the engine continues
            self.result.set_exception(error)


class EngineLoop:
    """Owner of an engine and of the only thread that uses it. Call the methods from an event loop.

    Commands run in the order in which they were sent. A command that waits for a drain blocks all later commands, including
    new requests, but not `cancel` and `turn`: what it waits for may be what they cancel.
    """

    def __init__(self, build: Callable[[], "Engine | Leader"]) -> None:
        """Start the thread, which builds the engine before it runs the first command."""
        self._inbox: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._urgent: queue.SimpleQueue[_Command] = queue.SimpleQueue()  # these run also while a command waits for a drain
        self._draining: _Command | None = None  # waits until no request is running
        self._dropping: str | None = None  # reason of `start_over`, until its command runs
        self._closing = False
        self._engine: Engine | Leader | None = None
        """Kept until the process ends: when it is collected, vLLM visits all objects of the process, which takes seconds."""
        self._waiting: dict[int, tuple[_Group, int]] = {}  # by the engine's number of a request (ticket): its group and place
        self._streams: dict[int, _Group] = {}  # groups with `on_sampled`, by ticket
        self._next_delivery = 0.0
        self.load = EngineLoad(num_requests=0, num_queued=0)
        self._stopped: str | None = None
        self._num_tokens, self._busy_s = 0, 0.0  # since the start; only the thread changes them
        self._counted = self._num_tokens, self._busy_s, time.perf_counter()  # at the last `take_stats`
        self._thread = threading.Thread(target=self._run, args=(build,), name="engine", daemon=True)
        self._thread.start()

    async def submit(
        self,
        groups: Sequence[Sequence[GenerationRequest]],
        num_kept: Sequence[int],
        *,
        when_drained: bool = False,
        on_sampled: OnSampled | None = None,
    ) -> list[Future[list[Completion]]]:
        """Add all requests to the batch at the same step; return one future per group.

        With `when_drained`, the requests first wait until all earlier requests have finished.

        When `num_kept` requests of a group have finished, the engine aborts the rest. The future then returns the completions
        in request order. If the engine refuses any request, none of this call's requests are added.

        `on_sampled` gets the tokens of groups with one request while they are sampled, except the last ones.
        """

        def add(engine: "Engine | Leader") -> list[Future[list[Completion]]]:
            before = set(self._waiting)
            results = list[Future[list[Completion]]]()
            try:
                for requests, num_missing in zip(groups, num_kept, strict=True):
                    group = _Group(Future(), [None] * len(requests), num_missing)
                    if not requests:  # a group that needs no more turns in this round
                        group.result.set_result([])
                    for index, request in enumerate(requests):
                        ticket = engine.add(request)
                        self._waiting[ticket] = (group, index)
                        if on_sampled is not None and len(requests) == 1:
                            group.on_sampled = partial(on_sampled, len(results))
                            self._streams[ticket] = group
                    results.append(group.result)
            except Exception:  # raised to the caller, after removing the requests that were already added
                self._abort(engine, self._waiting.keys() - before)
                raise
            return results

        return await self.call(add, when_drained=when_drained)

    async def cancel(self, result: Future[list[Completion]]) -> None:
        """Cancel the requests of a group, whose future then returns no completions, unless it is done."""

        def cancel(engine: "Engine | Leader") -> None:
            tickets = {ticket for ticket, (group, _) in self._waiting.items() if group.result is result}
            if tickets:
                result.set_result([])
                self._abort(engine, tickets)

        await self._interject(cancel)

    async def call(self, run: Callable[["Engine | Leader"], T], *, when_drained: bool = False) -> T:
        """Run a function on the engine between two steps; `when_drained` first waits until all earlier requests have finished.

        Raises:
            EngineStoppedError: The engine could not be built, failed, or was closed.
        """
        command = _Command(run, Future(), when_drained)
        self._inbox.put(command)
        if self._stopped is not None:  # checked after the put: a thread that stops later fails the command itself
            raise EngineStoppedError(self._stopped)
        return await asyncio.wrap_future(command.result)

    async def turn(self) -> None:
        """Wait until the thread has finished its current step or command, without waiting for a drain.

        Raises:
            EngineStoppedError: The thread has stopped.
        """
        await self._interject(lambda engine: None)

    async def _interject(self, run: Callable[["Engine | Leader"], None]) -> None:
        """Run a function after the current step or command, before other commands."""
        command = _Command(run, Future(), when_drained=False)
        self._urgent.put(command)
        if self._stopped is not None:
            raise EngineStoppedError(self._stopped)
        self._inbox.put(_Command(lambda engine: None, Future(), when_drained=False))  # wakes the thread
        await asyncio.wrap_future(command.result)

    async def start_over(self, reason: str) -> None:
        """Drop all requests and the weights. Commands sent earlier run first, but no longer wait for requests to drain.

        Raises:
            EngineStoppedError: The thread has stopped.
        """

        def begin(engine: "Engine | Leader") -> None:
            self._drop(engine, reason)
            engine.invalidate(reason)
            self._dropping = None

        self._dropping = reason
        await self.call(begin)
        self.take_stats()

    def take_stats(self) -> GenerationStats:
        """Return the work done since the previous call."""
        num_tokens, busy_s, since = self._counted
        self._counted = self._num_tokens, self._busy_s, time.perf_counter()
        now_tokens, now_busy_s, now = self._counted
        return GenerationStats(
            num_tokens=now_tokens - num_tokens, busy_s=now_busy_s - busy_s, wall_s=now - since, num_replicas=1
        )

    async def close(self) -> None:
        """Stop after the current step; fail unfinished requests and commands with `EngineStoppedError`."""
        self._closing = True
        self._inbox.put(None)  # wakes the thread
        await asyncio.to_thread(self._thread.join)

    def _run(self, build: Callable[[], "Engine | Leader"]) -> None:
        """Run the thread. When it exits for any reason, every pending future fails with that reason."""
        reason = "the engine was closed"
        try:
            engine = self._engine = build()
            while self._run_commands(engine):
                self._step(engine)
                self._run_urgent(engine)
        except Exception as error:  # thread boundary: every pending future gets the cause
            reason = f"the engine failed: {error!r}"
            raise
        finally:
            self._stop(reason)

    def _run_commands(self, engine: "Engine | Leader") -> bool:
        """Run the queued commands; block if there is nothing to decode. Return False once the loop is closing."""
        while not engine.can_step or not self._inbox.empty() or self._draining is not None:
            command, self._draining = self._draining or self._inbox.get(), None
            if command is None:
                break
            if self._dropping is not None:
                self._drop(engine, self._dropping)
            if command.when_drained and engine.can_step and not command.result.cancelled():
                self._draining = command
                break
            command.answer(engine)
            self._run_urgent(engine)
        return not self._closing

    def _run_urgent(self, engine: "Engine | Leader") -> None:
        while not self._urgent.empty():
            self._urgent.get().answer(engine)

    def _step(self, engine: "Engine | Leader") -> None:
        started = time.perf_counter()
        with span("decode"):
            for finished in engine.step():
                self._num_tokens += len(finished.completion.token_ids)
                self._deliver(engine, finished)
            if self._streams and time.perf_counter() >= self._next_delivery:
                sampled = engine.sampled({ticket: group.num_delivered for ticket, group in self._streams.items()})
                for ticket, (token_ids, logprobs) in sampled.items():
                    group = self._streams[ticket]
                    assert group.on_sampled is not None
                    group.num_delivered += len(token_ids)
                    group.on_sampled((token_ids, logprobs))
                self._next_delivery = time.perf_counter() + max(SAMPLED_S, SAMPLED_EACH_S * len(self._streams))
        self.load = replace(engine.load, admits=self._draining is None)
        self._busy_s += time.perf_counter() - started

    def _deliver(self, engine: "Engine | Leader", finished: "Finished") -> None:
        """Store a completion in its group; the last one needed resolves the group's future and aborts the spare requests."""
        if finished.ticket not in self._waiting:
            return  # a spare that finished at the same step as the last completion that its group needed
        group, index = self._waiting.pop(finished.ticket)
        self._streams.pop(finished.ticket, None)
        group.completions[index] = finished.completion
        group.num_missing -= 1
        if group.num_missing == 0:
            group.result.set_result([completion for completion in group.completions if completion is not None])
            if None in group.completions:  # last: no group may lose its result if the engine fails here
                self._abort(engine, {ticket for ticket, (other, _) in self._waiting.items() if other is group})

    def _abort(self, engine: "Engine | Leader", tickets: Set[int]) -> None:
        for ticket in tickets:
            del self._waiting[ticket]
            self._streams.pop(ticket, None)
        engine.abort(tickets)

    def _drop(self, engine: "Engine | Leader", reason: str) -> None:
        if self._waiting:
            self._fail_groups(StoppedError(reason))
            self._abort(engine, set(self._waiting))

    def _fail_groups(self, error: StoppedError) -> None:
        for result in {id(group): group.result for group, _ in self._waiting.values()}.values():
            result.set_exception(error)

    def _stop(self, reason: str) -> None:
        self._stopped = reason
        self._fail_groups(EngineStoppedError(reason))
        commands = [self._draining]
        for waiting in (self._inbox, self._urgent):
            while not waiting.empty():
                commands.append(waiting.get())
        for command in commands:
            if command is not None and command.result.set_running_or_notify_cancel():
                command.result.set_exception(EngineStoppedError(reason))
