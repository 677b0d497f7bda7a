"""Stubs of `benchmarks.controller`: a trainer and a generator that only reply, and a reward.

Like the real actors, they are in a module with few imports, because rollout workers and scoring processes import it, too.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from titanrl.carriers.tables import MicroBatch
from titanrl.carriers.types import (
    AdamParams,
    Admission,
    Completion,
    EngineLoad,
    GenerationRequest,
    GenerationStats,
    LossSums,
    OptimUpdate,
)
from titanrl.processes.actors import Actor, concurrent_endpoint, endpoint
from titanrl.weights.records import Commit, WeightManifest

if TYPE_CHECKING:
    from monarch.actor import Port

GROUPS_PER_MESSAGE = 16
"""Groups per message of the generator, as if they had finished at the same decoding step."""


class StubTrainer(Actor):
    """Trainer rank that computes nothing and replies immediately."""

    def __init__(self, setup: Any) -> None:
        self._version = 0

    @endpoint
    async def start(self) -> None:
        """Do nothing; there is no model."""

    @endpoint
    async def load_model(self, model_dir: Path) -> None:
        """Do nothing; there is no model."""

    @endpoint
    async def forward_backward(
        self, microbatch: MicroBatch, proximal_version: int | None, reference_version: int | None
    ) -> LossSums:
        """Count the sequences of a micro-batch."""
        num_sequences = sum(len(rank.sequences) for rank in microbatch.rows)
        return LossSums(
            sums={"num_tokens": float(num_sequences), "loss/policy": 0.0, "lag/0": 0.0, "lag/0/logprob_abs": 0.0}, maxima={}
        )

    @endpoint
    async def optim_step(self, params: AdamParams, completes: bool) -> OptimUpdate:
        """Increase the version."""
        self._version += 1
        return OptimUpdate(version=self._version, grad_norm=1.0, skipped=False)

    @endpoint
    async def push_weights(self, version: int) -> WeightManifest:
        """Return an empty manifest."""
        return WeightManifest(version, 0, "", 0, None, 0, ())

    @endpoint
    async def close(self) -> None:
        """Do nothing; there is nothing to close."""


class StubGenerator(Actor):
    """Generator that replies immediately with slices of prepared random text."""

    def __init__(self, setup: Any) -> None:
        self._num_tokens, self._since = 0, time.perf_counter()
        self._text = np.random.default_rng(0).integers(2, 95, 1 << 16)
        self._logprobs = np.full(1 << 16, -0.5, np.float32)
        self._versions = np.zeros(1 << 16, np.int64)

    @endpoint
    async def start(self) -> None:
        """Do nothing; there is no engine."""

    @concurrent_endpoint
    async def generate(
        self,
        groups: Sequence[Sequence[GenerationRequest]],
        num_kept: Sequence[int],
        answers: "Port[Any]",
        admission: Admission,
    ) -> None:
        """Send completions for every group, `GROUPS_PER_MESSAGE` groups at a time."""
        load = EngineLoad(num_requests=0, num_queued=0)
        for start in range(0, len(groups), GROUPS_PER_MESSAGE):
            places = range(start, min(start + GROUPS_PER_MESSAGE, len(groups)))
            answers.send(([(place, [self._completion(request) for request in groups[place]]) for place in places], load, []))

    @endpoint
    async def pull_weights(self, commit: Commit) -> int:
        """Set the version of later completions."""
        self._versions = np.full(1 << 16, commit.version)
        return 0

    @concurrent_endpoint
    async def expect_weights(self, version: int) -> None:
        """Do nothing; there are no weights."""

    @concurrent_endpoint
    async def stats(self) -> GenerationStats:
        """Return the tokens generated since the last call."""
        now = time.perf_counter()
        stats = GenerationStats(num_tokens=self._num_tokens, busy_s=0.0, wall_s=now - self._since, num_replicas=1)
        self._num_tokens, self._since = 0, now
        return stats

    @endpoint
    async def close(self) -> None:
        """Do nothing; there is nothing to close."""

    def _completion(self, request: GenerationRequest) -> Completion:
        num_tokens = request.sampling.max_new_tokens
        self._num_tokens += num_tokens
        start = self._num_tokens % (len(self._text) - num_tokens)
        tokens = slice(start, start + num_tokens)
        return Completion(
            token_ids=self._text[tokens],
            logprobs=self._logprobs[tokens],
            versions=self._versions[tokens],
            finish_reason="length",
        )


def reward(text: str, entry: Mapping[str, Any]) -> float:
    """Return 1 for about half of all completions, and 0 for the others."""
    return float(ord(text[0]) % 2)
