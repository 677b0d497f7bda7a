"""The policy trainer's actor: one rank of the mesh. It fetches what the plan names, calls the learner, answers with numbers."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanrl.actors import Actor, concurrent_endpoint, current_rank, endpoint
from titanrl.config.sections import AlgorithmConfig, TrainerConfig
from titanrl.device import Device, num_threads
from titanrl.types import AdamParams, Handle, LossSums, MicroBatch, OptimUpdate, Rollout, Row
from titanrl.weights.manifest import WeightManifest
from titanrl.weights.store import WeightStore

if TYPE_CHECKING:
    from titanrl.trainer.collate import PackedRows
    from titanrl.trainer.learner import LossName
    from titanrl.weights.digest import Verify
    from titanrl.weights.transport import TransportName


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSetup:
    """What a trainer rank needs to start."""

    run: str
    """Name of the run, the prefix of its weight keys."""
    config: TrainerConfig
    """Parallel plan, dtypes, row size."""
    algorithm: AlgorithmConfig
    """What the loss is."""
    temperature: float
    """The sampler's temperature."""
    generator_dtype: str
    """Type that weights are published in."""
    transports: "Sequence[TransportName]"
    """Ways by which their bytes may reach the generators, the best first."""
    verify: "Verify"
    """What the digest of their bytes covers."""
    device: Device
    """Where it runs."""
    checkpoint_dir: Path
    """Folder of checkpoints."""
    keep_checkpoints: int
    """Checkpoints kept."""
    store: WeightStore
    """Where weights go."""
    shards: Any
    """Storage shards, an actor mesh."""


class PolicyTrainer(Actor):
    """One rank of the trainer. The controller calls every endpoint on all ranks, in one order."""

    def __init__(self, setup: TrainerSetup) -> None:
        """Keep the set-up; `start` loads."""
        self._setup = setup

    @endpoint
    async def start(self) -> None:
        """Import torchtitan and join the process group."""
        from titanrl.models.titan import prepare_torchtitan

        prepare_torchtitan(self._setup.device)
        import torch
        from torchtitan.config import CommConfig
        from torchtitan.distributed.utils import init_distributed

        if self._setup.device.kind == "cpu":
            torch.set_num_threads(num_threads(self._setup.config.parallelism.world_size))
        init_distributed(CommConfig(), base_folder=str(self._setup.checkpoint_dir.parent / "logs"))

    @endpoint
    async def load_model(self, model_dir: Path) -> None:
        """Build the policy from a Hugging Face directory, at version 0."""
        import torch

        from titanrl.models.qwen3 import qwen3_spec, torch_dtype
        from titanrl.trainer.checkpoint import Checkpoints
        from titanrl.trainer.learner import Learner
        from titanrl.trainer.model import build_model
        from titanrl.weights.publish import WeightPublisher

        setup, rank = self._setup, current_rank().rank
        torch.manual_seed(0)
        model = build_model(qwen3_spec(model_dir, setup.device), model_dir, setup.config, setup.device)
        self._model_dir = model_dir
        self._learner = Learner(model, setup.algorithm, setup.temperature)
        self._checkpoints = Checkpoints(self._learner, setup.checkpoint_dir, setup.keep_checkpoints)
        self._publisher = WeightPublisher(
            setup.run, rank, setup.store, torch_dtype(setup.generator_dtype), setup.transports, setup.verify
        )
        # All memory for publishing now: page faults would make the first pushes ten times slower.
        await self._publisher.prepare(self._learner.weights(), self._learner.buffer_names)

    @endpoint
    async def forward_backward(self, microbatch: MicroBatch, loss: "LossName" = "policy") -> LossSums:
        """Add the gradient of this rank's rows of a micro-batch; returns the sums of its metrics."""
        return self._learner.forward_backward(await self._packed(microbatch), loss, microbatch.correction)

    @endpoint
    async def measure_correction(self, microbatch: MicroBatch) -> LossSums:
        """What the off-policy correction does over this rank's rows of a micro-batch; changes nothing."""
        return self._learner.measure_correction(await self._packed(microbatch))

    @endpoint
    async def optim_step(self, params: AdamParams) -> OptimUpdate:
        """Take one optimizer step with the gradient gathered so far."""
        return self._learner.optim_step(params)

    @concurrent_endpoint
    async def push_weights(self, version: int) -> WeightManifest:
        """Publish this rank's share of the weights as a version; they may change as soon as this returns.

        Forward and backward passes may run meanwhile: they change no weight, and `optim_step` is called after this returned.
        """
        assert version == self._learner.version, f"asked to push v{version}, weights are v{self._learner.version}"
        return await self._publisher.publish(version, self._learner.weights(), self._learner.buffer_names)

    @endpoint
    async def start_over(self) -> None:
        """Keep the weights, forget optimizer state and version."""
        self._learner.start_over()

    @endpoint
    async def save_checkpoint(self, step: int) -> None:
        """Write model, optimizer and version so that a later run can go on from here."""
        self._checkpoints.save(step)

    @endpoint
    async def load_checkpoint(self, step: int) -> int:
        """Go back to a checkpoint; returns its version."""
        self._checkpoints.load(step)
        return self._learner.version

    @endpoint
    async def export_model(self, target: Path) -> None:
        """Write the policy as a Hugging Face directory."""
        from titanrl.trainer.model import export_hf

        export_hf(self._learner.model, self._model_dir, target)

    @endpoint
    async def close(self) -> None:
        """Leave the process group."""
        import torch

        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    async def _packed(self, microbatch: MicroBatch) -> "PackedRows":
        """This rank's rows of a micro-batch as tensors."""
        from titanrl.trainer.collate import collate

        rows = microbatch.rows[self._learner.model.dp_rank]
        return collate(rows, await self._fetch(rows), self._setup.config.row_tokens)

    async def _fetch(self, rows: Sequence[Row]) -> Mapping[Handle, Mapping[int, Rollout]]:
        """The rollouts of some rows, straight from their shards."""
        wanted: dict[int, list[tuple[Handle, int]]] = defaultdict(list)
        for sequence in (sequence for row in rows for sequence in row):
            wanted[sequence.handle.shard].append((sequence.handle, sequence.rollout))
        answers = await asyncio.gather(
            *(self._setup.shards.slice(procs=shard).get.call_one(keys) for shard, keys in wanted.items())
        )
        payload: dict[Handle, dict[int, Rollout]] = defaultdict(dict)
        for keys, rollouts in zip(wanted.values(), answers, strict=True):
            for (handle, place), rollout in zip(keys, rollouts, strict=True):
                payload[handle][place] = rollout
        return payload
