"""The `Generator` actor: one rank of a vLLM engine that pulls its weights from the trainer.

Importing this module does not import torch. Processes that only call generators, such as rollout workers, do not need it.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from titanrl.base.errors import StoppedError
from titanrl.base.plugins import loading
from titanrl.carriers.record import span
from titanrl.carriers.types import Admission, Completion, EngineLoad, GenerationRequest, GenerationStats
from titanrl.config.device import Device
from titanrl.config.sections import GeneratorConfig, LoraConfig
from titanrl.generator.loop import EngineLoop, OnSampled
from titanrl.models.directory import open_model
from titanrl.processes.actors import Actor, Gathering, ReplyPort, concurrent_endpoint, current_rank, endpoint
from titanrl.weights.records import Commit, HeldAdapter

if TYPE_CHECKING:
    from concurrent.futures import Future
    from multiprocessing.connection import Connection

    from titanrl.generator.engine import Engine, Fill, Sampled
    from titanrl.generator.lockstep import Follower, Leader
    from titanrl.generator.pulling import HeldPuller, Puller
    from titanrl.weights.store import WeightSource

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
    `start_over`, `probe` and `close` on all ranks, `follow` on all ranks except 0, and the others on rank 0.

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
        self._pulling, self._restarting = asyncio.Lock(), asyncio.Event()
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
            from titanrl.generator.lockstep import Follower

            self._follower = Follower(self._build_follower)
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

        Tokens are not sent while they are sampled if `on_update` is `restart`, because an update drops them.
        """
        admission = admission or Admission()
        news: asyncio.Queue[tuple[int, asyncio.Future[list[Completion]] | Sampled]] = asyncio.Queue()
        streams = admission.streams and self._setup.config.on_update != "restart"
        tell = asyncio.get_running_loop().call_soon_threadsafe

        def on_sampled(index: int, sampled: "Sampled") -> None:
            tell(news.put_nowait, (index, sampled))

        admitted = asyncio.create_task(self._admit(groups, num_kept, admission, on_sampled if streams else None))
        if admission.name:
            self._calls[admission.name] = admitted
        try:
            for index, result in enumerate(map(asyncio.wrap_future, await admitted)):
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
        """Cancel a group of a call when it is in the batch, unless it is done; `name` is that of its `Admission`."""
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
        """Return once the engine has finished its current step, which shows that neither it nor the event loop hangs."""
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

        async with self._pulling:
            with span("pull", version=commit.version):
                if self._puller is None:
                    from titanrl.generator.pulling import Puller

                    setup, model = self._setup, open_model(self._setup.model_dir, self._setup.family)
                    assert setup.source is not None, "a frozen model pulls no weights"
                    has_adapters = setup.lora is not None
                    self._puller = Puller(setup.source, model, setup.config, self._rank, has_adapters=has_adapters)
                puller = self._puller
                fill, fetched = await self._fetch(commit, puller)
                if self._follower is not None:
                    await asyncio.wrap_future(self._follower.swap(fill))
                    return puller.take_received()
                try:
                    await self._loop.call(update, when_drained=fetched and on_update == "drain")
                    return puller.take_received()
                finally:
                    self._attempted = max(self._attempted, commit.version)
                    if self._attempted >= self._expected:  # also after a failure: the requests must then be refused, not wait
                        self._up_to_date.set()

    @concurrent_endpoint
    async def hold_adapter(self, held: HeldAdapter) -> None:
        """Add an adapter beside the policy's between two decoding steps; running requests continue.

        Raises:
            WeightMismatchError: Its bytes do not match this model.
        """
        async with self._pulling:
            if self._held_puller is None:
                from titanrl.generator.pulling import HeldPuller

                assert self._setup.source is not None, "a frozen model holds no adapters"
                self._held_puller = HeldPuller(self._setup.source)
            fill = await self._held_puller.fetch(held)
            if self._follower is not None:
                await asyncio.wrap_future(self._follower.swap(fill))
            else:
                await self._loop.call(lambda engine: engine.hold_adapter(held.number, held.version, fill))

    @concurrent_endpoint
    async def drop_adapter(self, number: int) -> None:
        """Forget an adapter, whose requests have finished; rank 0 tells the other ranks."""
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

    def _build_follower(self) -> "tuple[Engine, Connection]":
        from titanrl.generator.lockstep import connect

        engine = self._build_engine()
        (leader,) = connect(self._rank, self._setup.config.tp)
        return engine, leader

    async def _fetch(self, commit: Commit, puller: "Puller") -> "tuple[Fill, bool]":
        """Fetch a version; return a function that writes it into the model, and whether the fetch succeeded.

        A fetch fails if the run restarts. After a failed fetch, the returned function raises the error: in the swap and not
        here, because all ranks must take part in every swap, and then fail at the same step.
        """
        fetching = asyncio.create_task(puller.fetch(commit))
        restarting = asyncio.create_task(self._restarting.wait())
        try:
            await asyncio.wait({fetching, restarting}, return_when=asyncio.FIRST_COMPLETED)
            if not fetching.done():
                raise StoppedError("the run restarts")
            return fetching.result(), True
        except Exception as error:  # whatever the error, the engine must stop serving older weights
            failure = error

            def fail(engine: "Engine") -> bool:
                raise failure

            return fail, False
        finally:
            fetching.cancel()
            restarting.cancel()
