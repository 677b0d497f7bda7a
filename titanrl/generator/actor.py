"""The generator actor: an engine of its own, its weights pulled from the store."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from titanrl.actors import Actor, concurrent_endpoint, current_rank, endpoint
from titanrl.config.sections import GeneratorConfig
from titanrl.device import Device
from titanrl.generator import native
from titanrl.generator.loop import EngineLoop, GeneratorStats
from titanrl.loading import loading
from titanrl.models.hf_config import read_hf_config
from titanrl.types import Completion, EngineLoad, GenerationRequest
from titanrl.weights.manifest import Commit
from titanrl.weights.pull import Targets, WeightReader

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import torch
    from monarch.actor import Port

    from titanrl.generator.engine import Engine
    from titanrl.generator.lockstep import Follower, Leader

Answer = tuple[list[tuple[int, list[Completion]]], EngineLoad]
"""Places in a call of groups that have ended, with their completions, and what the engine has left to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSetup:
    """What a generator needs to start."""

    model_dir: Path
    """Hugging Face directory; only its config is read here."""
    config: GeneratorConfig
    """Engine options."""
    device: Device
    """Where it runs."""
    max_len: int
    """Longest prompt plus completion, in tokens."""
    stop_ids: tuple[int, ...]
    """Tokens that end a completion."""
    reader: WeightReader
    """Where weights come from."""


class Generator(Actor):
    """One vLLM engine that many callers share. It serves only with weights it has pulled whole.

    With `generator.tp` a replica is a mesh of this actor, one for each tensor-parallel rank: `start`, `pull_weights` and
    `close` are called on all ranks, `follow` on all but rank 0, everything else on rank 0.
    """

    def __init__(self, setup: GeneratorSetup) -> None:
        """Keep the set-up; `start` loads."""
        self._setup = setup
        self._rank = current_rank().rank  # is 0 on any other thread
        self._targets: Targets = {}
        self._leader: Leader | None = None
        self._follower: Follower | None = None
        self._expected = self._pulled = -1
        self._settled = asyncio.Event()
        self._settled.set()

    @endpoint
    async def start(self) -> None:
        """Import vLLM and build the engine; returns when it can pull."""
        from titanrl.models.titan import prepare_torchtitan

        prepare_torchtitan(self._setup.device)
        if self._rank == 0:
            self._loop = EngineLoop(self._build_engine if self._setup.config.tp == 1 else self._build_leader)
            await self._loop.call(lambda engine: None)
        else:
            from titanrl.generator.lockstep import Follower

            self._follower = Follower(self._build_follower)
            await asyncio.wrap_future(self._follower.started)

    @concurrent_endpoint
    async def follow(self) -> None:
        """Return when rank 0 has closed, and raise whatever else keeps this rank from doing what rank 0 does."""
        assert self._follower is not None, "rank 0 follows nobody"
        await asyncio.wrap_future(self._follower.ended)

    @concurrent_endpoint
    async def generate(
        self, groups: Sequence[Sequence[GenerationRequest]], num_kept: Sequence[int], answers: "Port[Answer]"
    ) -> None:
        """Sample completions; many calls are served at once.

        All requests of a call join the batch at the same decoding step. Each group is sent to `answers` as soon as
        `num_kept` of its requests have ended, the rest of which are aborted, together with those that ended at the same step;
        the call returns when all are sent.
        """
        ended: asyncio.Queue[tuple[int, asyncio.Future[list[Completion]]]] = asyncio.Queue()

        def note(place: int, result: asyncio.Future[list[Completion]]) -> None:
            ended.put_nowait((place, result))

        await self._settled.wait()
        results = [asyncio.wrap_future(result) for result in await self._loop.submit(groups, num_kept)]
        for place, result in enumerate(results):
            result.add_done_callback(partial(note, place))
        num_sent = 0
        while num_sent < len(groups):
            together = [await ended.get(), *(ended.get_nowait() for _ in range(ended.qsize()))]
            load = replace(self._loop.load, admits=self._loop.load.admits and self._settled.is_set())
            answers.send(([(place, result.result()) for place, result in together], load))
            num_sent += len(together)

    @concurrent_endpoint
    async def expect_weights(self, version: int) -> None:
        """Let requests that come from now on wait until the pull of a version has ended; running ones go on."""
        self._expected = max(self._expected, version)
        if self._expected > self._pulled:  # the pull may have overtaken this
            self._settled.clear()

    @endpoint
    async def pull_weights(self, commit: Commit) -> None:
        """Take over a committed version between two decoding steps; `on_update` says what becomes of running requests.

        However the pull fails, the generator serves nothing until a later one succeeds. Pulls run one after another, and
        each answers its own caller.

        Raises:
            WeightMismatchError: the version is not there, or not what this model needs.
        """
        on_update = self._setup.config.on_update

        def update(engine: "Engine | Leader") -> None:
            engine.update_weights(commit.version, fill)
            if on_update == "restart":
                engine.restart()

        fill, is_there = await self._fetch(commit)
        if self._follower is not None:
            await asyncio.wrap_future(self._follower.swap(fill))
            return
        try:
            await self._loop.call(update, when_drained=is_there and on_update == "drain")
        except Exception as error:  # whatever it is, the engine may hold a mixture; the caller gets it too
            reason = f"the pull of version {commit.version} failed: {error}"
            await self._loop.call(lambda engine: engine.invalidate(reason))
            raise
        finally:
            self._pulled = max(self._pulled, commit.version)
            if self._pulled >= self._expected:
                self._settled.set()

    @concurrent_endpoint
    async def stats(self) -> GeneratorStats:
        """Work done since the last call."""
        return self._loop.take_stats()

    @endpoint
    async def close(self) -> None:
        """End the engine's thread; the other ranks' threads end with that of rank 0."""
        if self._follower is not None:
            self._follower.close()
            await asyncio.wait({asyncio.wrap_future(self._follower.ended)})
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
        return Engine(setup.model_dir, setup.config, setup.device, max_len=setup.max_len, stop_ids=setup.stop_ids)

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

    async def _fetch(self, commit: Commit) -> "tuple[Callable[[torch.nn.Module], None], bool]":
        """What fills the model with a version, and whether it can; if not, it raises why not.

        The error waits until then, so that every pull is one swap on every rank, and the ranks fail together.
        """
        try:
            fetched = await self._setup.reader.fetch(commit)
        except Exception as error:  # whatever it is, the engine is not to serve older weights
            return partial(_raise, error), False
        return lambda model: fetched.copy_into(self._weight_targets(model)), True

    def _weight_targets(self, model: "torch.nn.Module") -> Targets:
        """The same mapping at every pull, so that the reader's plan for it is kept."""
        if not self._targets:
            if self._setup.config.model_impl == "titan":
                from titanrl.generator import titan  # torchtitan takes long to import, and vLLM's own model does without

                self._targets = titan.weight_targets(model)
            else:
                config = read_hf_config(self._setup.model_dir)
                self._targets = native.weight_targets(model, config, self._rank, self._setup.config.tp)
        return self._targets


def _raise(error: Exception, model: "torch.nn.Module") -> None:
    raise error
