"""The generator actor: an engine of its own, its weights pulled from the store."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from titanrl.actors import Actor, concurrent_endpoint, endpoint
from titanrl.config.sections import GeneratorConfig
from titanrl.device import Device
from titanrl.generator.loop import EngineLoop, GeneratorStats
from titanrl.types import Completion, EngineLoad, GenerationRequest
from titanrl.weights.manifest import Commit
from titanrl.weights.pull import WeightReader

if TYPE_CHECKING:
    import torch
    from monarch.actor import Port

    from titanrl.generator.engine import Engine

Answer = tuple[int, list[Completion], EngineLoad]
"""Place of a group in a call, its completions, and what the engine has left to do."""


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
    """One vLLM engine that many callers share. It serves only with weights it has pulled whole."""

    def __init__(self, setup: GeneratorSetup) -> None:
        """Keep the set-up; `start` loads."""
        self._setup = setup
        self._targets: dict[str, torch.Tensor] = {}
        self._expected = self._pulled = -1
        self._settled = asyncio.Event()
        self._settled.set()

    @endpoint
    async def start(self) -> None:
        """Import vLLM and build the engine; returns when it can pull."""
        from titanrl.models.titan import prepare_torchtitan

        prepare_torchtitan(self._setup.device)
        from titanrl.generator.engine import Engine

        setup = self._setup
        self._loop = EngineLoop(
            lambda: Engine(setup.model_dir, setup.config, setup.device, max_len=setup.max_len, stop_ids=setup.stop_ids)
        )
        await self._loop.call(lambda engine: None)

    @concurrent_endpoint
    async def generate(
        self, groups: Sequence[Sequence[GenerationRequest]], num_kept: Sequence[int], answers: "Port[Answer]"
    ) -> None:
        """Sample completions; many calls are served at once.

        All requests of a call join the batch at the same decoding step. Each group is sent to `answers` as soon as
        `num_kept` of its requests have ended, the rest of which are aborted; the call returns when all are sent.
        """

        async def answer(place: int, result: Future[list[Completion]]) -> None:
            answers.send((place, await asyncio.wrap_future(result), self._loop.load))

        await self._settled.wait()
        results = await self._loop.submit(groups, num_kept)
        await asyncio.gather(*(answer(place, result) for place, result in enumerate(results)))

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

        def update(engine: "Engine") -> None:
            engine.update_weights(commit.version, lambda model: fetched.copy_into(self._weight_targets(model)))
            if on_update == "restart":
                engine.restart()

        try:
            fetched = await self._setup.reader.fetch(commit)
            await self._loop.call(update, when_drained=on_update == "drain")
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
        """End the engine's thread."""
        await self._loop.close()

    def _weight_targets(self, model: "torch.nn.Module") -> "dict[str, torch.Tensor]":
        """The same mapping at every pull, so that the reader's plan for it is kept."""
        from titanrl.generator import native, titan
        from titanrl.models.qwen3 import read_hf_config

        if not self._targets:
            if self._setup.config.model_impl == "titan":
                self._targets = titan.weight_targets(model)
            else:
                self._targets = native.weight_targets(model, read_hf_config(self._setup.model_dir))
        return self._targets
