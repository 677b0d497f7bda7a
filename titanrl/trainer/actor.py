"""The policy trainer's actor, one rank of the mesh: it fetches the planned rollouts, runs the learner and returns metrics."""

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanrl.actors import Actor, concurrent_endpoint, current_rank, endpoint
from titanrl.config.sections import AlgorithmConfig, TrainerConfig
from titanrl.device import Device
from titanrl.loading import loading
from titanrl.replay.actors import Shards, fetch
from titanrl.tables import MicroBatch
from titanrl.types import AdamParams, Datum, GroupHandle, LossSums, OptimUpdate, Rollout, Row
from titanrl.weights.manifest import WeightManifest
from titanrl.weights.store import WeightStore

if TYPE_CHECKING:
    from titanrl.config.choices import TransportName, Verify
    from titanrl.trainer.collate import PackedRows
    from titanrl.trainer.datums import DataResult
    from titanrl.trainer.learner import LossName

ROW_MULTIPLE = 8
"""Divisor of the length of rows on each tensor-parallel rank, if rows may have any length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSetup:
    """Settings of a trainer rank."""

    run: str
    """Name of the run and prefix of its weight keys."""
    seed: int
    """Seed of every random number the trainer draws."""
    config: TrainerConfig
    """Parallel plan, dtypes and row size."""
    algorithm: AlgorithmConfig
    """Definition of the loss."""
    temperature: float
    """Sampling temperature."""
    generator_dtype: str
    """Dtype of published weights."""
    transports: "Sequence[TransportName]"
    """Allowed transports of published weights, in order of preference."""
    verify: "Verify"
    """Coverage of the digest of published weights."""
    device: Device
    """Device of the trainer."""
    checkpoint_dir: Path
    """Folder of checkpoints."""
    keep_checkpoints: int
    """Number of checkpoints to keep."""
    store: WeightStore
    """Store of published weights."""
    shards: Any
    """Actor mesh of the storage shards."""


class PolicyTrainer(Actor):
    """One rank of the trainer. The controller calls every endpoint on all ranks, in the same order."""

    def __init__(self, setup: TrainerSetup) -> None:
        """Store the settings; `start` and `load_model` do the work."""
        self._setup = setup
        self._shards = Shards(setup.shards)
        self._closing: list[Callable[[], None]] = []
        self._busy_s = 0.0
        # A push copies the weights while other endpoints run. Endpoints that replace the live weights acquire this lock.
        self._weights_lock = asyncio.Lock()

    @endpoint
    async def start(self) -> None:
        """Import torchtitan and join the process group."""
        with loading():
            from titanrl.models.titan import prepare_torchtitan

            prepare_torchtitan(self._setup.device)
            import torch
            from torchtitan.config import CommConfig
            from torchtitan.distributed.utils import init_distributed

        if self._setup.device.kind == "cpu":
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        else:
            torch.get_device_module(self._setup.device.kind).set_device(int(os.environ["LOCAL_RANK"]))
        init_distributed(CommConfig(), base_folder=str(self._setup.checkpoint_dir.parent / "logs"))

    @endpoint
    async def load_model(self, model_dir: Path) -> None:
        """Build the policy from a Hugging Face directory, at version 0."""
        import torch

        from titanrl.models.qwen3 import qwen3_spec, torch_dtype
        from titanrl.trainer.checkpoint import Checkpoints
        from titanrl.trainer.hf import load_hf
        from titanrl.trainer.kept import KeptLogprobs
        from titanrl.trainer.learner import Learner
        from titanrl.trainer.model import build_model
        from titanrl.weights.publish import WeightPublisher

        setup, rank = self._setup, current_rank().rank
        torch.manual_seed(setup.seed)
        model = build_model(qwen3_spec(model_dir, setup.device), model_dir, setup.config, setup.device, seed=setup.seed)
        load_hf(model, model_dir)
        self._model_dir = model_dir
        self._learner = Learner(model, setup.algorithm, setup.temperature, snapshots_on_device=setup.config.snapshots_on_device)
        self._learner.check_snapshots(setup.config.row_tokens)
        self._kept = KeptLogprobs()
        # Compiled code, including FlexAttention, would be recompiled for every new length.
        fixed = setup.config.compile or setup.device.attention == "flex"
        self._row_multiple = setup.config.row_tokens if fixed else ROW_MULTIPLE * setup.config.parallelism.tp
        self._checkpoints = Checkpoints(
            self._learner, setup.checkpoint_dir, setup.keep_checkpoints, in_background=setup.device.kind != "cpu"
        )
        self._closing.append(self._checkpoints.close)
        self._publisher = WeightPublisher(
            setup.run, rank, setup.store, torch_dtype(setup.generator_dtype), setup.transports, setup.verify
        )
        # Allocate all memory for publishing now: page faults would make the first pushes ten times slower.
        await self._publisher.prepare(self._learner.weights(), self._learner.buffer_names)

    # Rows of the plan, which refer to rollouts in the storage shards

    @endpoint
    async def forward_backward(
        self,
        microbatch: MicroBatch,
        loss: "LossName" = "policy",
        proximal_version: int | None = None,
        reference_version: int | None = None,
    ) -> LossSums:
        """Add the gradient of this rank's rows of a micro-batch; return the sums of its metrics.

        With versions, the loss also gets the log-probabilities that `compute_logprobs` kept for them.
        """
        with self._learner.whole_pass():
            rows, packed = await self._rows(microbatch)
            if proximal_version is not None:
                packed = replace(packed, proximal_BL=self._kept.get(proximal_version, rows, packed.length))
            if reference_version is not None:
                packed = replace(packed, reference_BL=self._kept.get(reference_version, rows, packed.length))
            with self._computing():
                return self._learner.forward_backward(packed, loss, microbatch.correction)

    @endpoint
    async def measure_correction(self, microbatch: MicroBatch, proximal_version: int | None = None) -> LossSums:
        """Run a forward pass and return the sums of the off-policy correction over this rank's rows of a micro-batch."""
        rows, packed = await self._rows(microbatch)
        if proximal_version is not None:
            packed = replace(packed, proximal_BL=self._kept.get(proximal_version, rows, packed.length))
        with self._computing():
            return self._learner.measure_correction(packed)

    @endpoint
    async def compute_logprobs(self, microbatch: MicroBatch, at_version: int) -> None:
        """Compute log-probabilities with the weights of a version and keep them on this rank for a later loss."""
        rows, packed = await self._rows(microbatch)
        async with self._weights_lock:
            with self._computing(), self._learner.weights_at(at_version):
                logprobs_BL = self._learner.logprobs(packed).cpu()
        self._kept.put(at_version, rows, logprobs_BL)

    # The user's data, in Tinker's format

    @endpoint
    async def run_data(
        self, data: Sequence[Datum], loss_fn: str | None, loss_fn_config: Mapping[str, float], *, backward: bool
    ) -> "DataResult":
        """Run this rank's share of the data with a loss; without a loss, only compute log-probabilities."""
        return self._run_data(data, loss_fn, loss_fn_config, backward=backward)

    @endpoint
    async def compute_data_logprobs(self, data: Sequence[Datum], at_version: int) -> "DataResult":
        """Compute log-probabilities of this rank's share of the data with the weights of a version."""
        async with self._weights_lock:
            with self._learner.weights_at(at_version):
                return self._run_data(data, None, {}, backward=False)

    # Optimizer, versions and checkpoints

    @endpoint
    async def optim_step(self, params: AdamParams) -> OptimUpdate:
        """Take one optimizer step with the accumulated gradient."""
        with self._computing():
            update = self._learner.optim_step(params)
        busy_s, self._busy_s = self._busy_s, 0.0
        return replace(update, busy_s=busy_s)

    @endpoint
    async def zero_grad(self) -> None:
        """Discard the accumulated gradient."""
        self._learner.zero_grad()

    @endpoint
    async def keep_weights(self) -> int:
        """Keep a copy of the current weights and return their version, for `compute_logprobs`."""
        return self._learner.keep_weights()

    @endpoint
    async def drop_weights(self, version: int) -> None:
        """Drop the copy of a version and the log-probabilities computed with it."""
        self._learner.snapshots.drop(version)
        self._kept.drop(version)

    @concurrent_endpoint
    async def push_weights(self, version: int) -> WeightManifest:
        """Publish this rank's shards of the weights as a version; weights may change after this returns.

        Forward and backward passes may run at the same time, because they do not change weights. The controller calls
        `optim_step` only after this has returned.
        """
        assert version == self._learner.version, f"asked to push v{version}, weights are v{self._learner.version}"
        async with self._weights_lock:
            return await self._publisher.publish(version, self._learner.weights(), self._learner.buffer_names)

    @endpoint
    async def start_over(self) -> None:
        """Keep the weights; reset optimizer state and version."""
        self._learner.start_over()

    @endpoint
    async def save_checkpoint(self, step: int) -> None:
        """Write model, optimizer and version, for a later run to resume from."""
        self._checkpoints.save(step)

    @endpoint
    async def load_checkpoint(self, step: int) -> int:
        """Restore a checkpoint and return its version."""
        self._checkpoints.load(step)
        return self._learner.version

    @endpoint
    async def save_state(self, folder: Path) -> None:
        """Write model, optimizer and version into a separate folder."""
        self._checkpoints.save_state(folder)

    @endpoint
    async def load_state(self, folder: Path, *, with_optimizer: bool) -> int:
        """Restore a state that `save_state` wrote and return its version."""
        self._checkpoints.load_state(folder, with_optimizer=with_optimizer)
        return self._learner.version

    @endpoint
    async def export_model(self, target: Path) -> None:
        """Write the policy as a Hugging Face directory."""
        from titanrl.trainer.hf import export_hf

        self._learner.require_settled("export_model")
        export_hf(self._learner.model, self._model_dir, target)

    @endpoint
    async def close(self) -> None:
        """Finish pending writes and leave the process group."""
        import torch

        for finish in self._closing:
            finish()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Add the time of the body to `OptimUpdate.busy_s`. The body must not await, or it would count waiting as work."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._busy_s += time.perf_counter() - started

    async def _rows(self, microbatch: MicroBatch) -> "tuple[tuple[Row, ...], PackedRows]":
        """Return this rank's rows of a micro-batch, as planned and as tensors."""
        from titanrl.trainer.collate import collate, row_length

        rows = tuple(microbatch.rows[self._learner.model.dp_rank])
        used = [sum(sequence.num_placed for sequence in row) for row in rows]
        length = row_length(used, self._setup.config.row_tokens, self._row_multiple)
        return rows, collate(rows, await self._fetch(rows), length)

    def _run_data(
        self, data: Sequence[Datum], loss_fn: str | None, loss_fn_config: Mapping[str, float], *, backward: bool
    ) -> "DataResult":
        from titanrl.trainer.datums import RowSizes, run_data

        config = self._setup.config
        sizes = RowSizes(
            row_tokens=config.row_tokens, rows_per_microbatch=config.rows_per_microbatch, multiple=self._row_multiple
        )
        with self._computing():
            return run_data(self._learner, data, sizes, loss_fn, loss_fn_config, backward=backward)

    async def _fetch(self, rows: Sequence[Row]) -> Mapping[GroupHandle, Mapping[int, Rollout]]:
        """Fetch the rollouts of some rows from their storage shards."""
        wanted: dict[int, list[tuple[GroupHandle, int]]] = defaultdict(list)
        for sequence in (sequence for row in rows for sequence in row):
            wanted[sequence.handle.shard].append((sequence.handle, sequence.rollout))
        replies = await asyncio.gather(*(fetch(self._shards[shard], keys) for shard, keys in wanted.items()))
        payload: dict[GroupHandle, dict[int, Rollout]] = defaultdict(dict)
        for keys, rollouts in zip(wanted.values(), replies, strict=True):
            for (handle, index), rollout in zip(keys, rollouts, strict=True):
                payload[handle][index] = rollout
        return payload
