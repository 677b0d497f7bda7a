"""Checkpoints of model, optimizer, moving average, policy version and random-number state.

They are written with `torch.distributed.checkpoint` (DCP): each rank writes its own shards, and a run with any other parallel
layout can load them.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.checkpoint import CheckpointManager, ModelWrapper

from titanrl.base.files import Digests, digests_of, uncommit_folder
from titanrl.trainer.learner import Learner
from titanrl.trainer.storage import storage_errors

AVERAGE_KEY = "average"
"""Prefix of the names of the moving averages in a checkpoint."""


class _Progress(Stateful):
    """Version and random-number state of a learner."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    def state_dict(self) -> dict[str, Any]:
        """Return the version and the state of the random-number generators."""
        random = {"cpu": torch.get_rng_state()}
        kind = self._learner.model.device.type
        if kind != "cpu":
            random[kind] = torch.get_device_module(kind).get_rng_state()
        return {"version": self._learner.version, "random": random}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the version and the state of the random-number generators."""
        self._learner.version = state_dict["version"]
        for kind, state in state_dict["random"].items():
            (torch if kind == "cpu" else torch.get_device_module(kind)).set_rng_state(state)


class Checkpoints:
    """Checkpoints of a run: `step-<n>` folders, of which only the latest are kept, and states in folders of any name.

    All methods except `finish` must be called on all ranks.
    """

    def __init__(self, learner: Learner, folder: Path, keep_last: int, *, in_background: bool = False) -> None:
        """Build torchtitan's checkpoint manager.

        Args:
            learner: Learner to save and restore.
            folder: Absolute path of the parent of the `step-<n>` folders.
            keep_last: Number of `step-<n>` folders to keep.
            in_background: Return from `save` after the state is copied, and write it to disk while training continues.
        """
        self._learner, self._folder = learner, folder
        self._kept: tuple[int, ...] = (0,)  # versions whose snapshots stay valid when a checkpoint is loaded
        config = CheckpointManager.Config(
            enable=True,
            folder=folder.name,
            interval=1,
            keep_latest_k=keep_last,
            async_mode="async" if in_background else "disabled",
        )
        self._progress = _Progress(learner)
        self._manager = config.build(
            dataloader=None,
            model_parts=[learner.model.module],
            optimizers=learner.optimizers,
            lr_schedulers=None,
            states={"train_state": self._progress, **self._average},
            sd_adapter=learner.model.adapter,
            base_folder=str(folder.parent),
        )

    def save(self, step: int, published: int | None = None) -> None:
        """Save the state of a step. `.metadata` appears in its folder when the checkpoint is complete.

        Args:
            step: Step, which is part of the name of the folder.
            published: Version of a snapshot whose weights are also written, always before this method returns.

        Raises:
            PhaseError: Gradients are pending, or a snapshot replaces the live weights.
        """
        self._prepare("save_checkpoint")
        with storage_errors("save a checkpoint", self._folder):
            if published is not None:
                with self._learner.weights_at(published):
                    dcp.save(self._weights(), checkpoint_id=str(self._published(step)))
            self._manager.save(step)

    def finish(self, step: int) -> Digests:
        """Wait until the files of a step are on disk; return the digests of this rank's files. Any thread may call this.

        Computing the digests takes 0.7 s per gigabyte on each rank if the files are in the page cache.
        """
        saving = self._manager.save_future
        with storage_errors("save a checkpoint", self._folder):
            if saving is not None:
                saving.result()
            return _own_digests(self._folder / f"step-{step}")

    def load_published(self, step: int, version: int) -> None:
        """Load the weights of the snapshot that `save` wrote, and keep them as a snapshot that `load` does not drop.

        Raises:
            PhaseError: Gradients are pending, or a snapshot replaces the live weights.
        """
        self._prepare("load_published")
        with storage_errors("load a checkpoint", self._folder):
            dcp.load(self._weights(), checkpoint_id=str(self._published(step)))
        self._learner.version = version
        self._learner.weights_changed()
        self._learner.keep_weights()
        self._kept = (*self._kept, version)

    def load(self, step: int) -> None:
        """Restore the state of a step.

        Raises:
            ValueError: The checkpoint does not exist, or it has no moving average although one is configured.
            PhaseError: Gradients are pending, or a snapshot replaces the live weights.
        """
        self._prepare("load_checkpoint")
        with storage_errors("load a checkpoint", self._folder):
            self._manager.maybe_wait_for_saving()
            self._require_average(self._folder / f"step-{step}")
            is_loaded = self._manager.load(step)
        if not is_loaded:
            raise ValueError(f"step: no such checkpoint in {self._folder} (got {step}). Choose the step of an existing folder.")
        self._learner.drop_snapshots(keep=self._kept)
        self._learner.weights_changed()

    def save_state(self, folder: Path) -> Digests:
        """Save the state to a folder; return the digests of this rank's files.

        Raises:
            PhaseError: Gradients are pending, or a snapshot replaces the live weights.
        """
        self._prepare("save_state")
        with storage_errors("save a state", folder):
            if dist.get_rank() == 0:
                uncommit_folder(folder)
            dcp.save(self._components(with_optimizer=True), checkpoint_id=str(folder))
            return _own_digests(folder)

    def load_state(self, folder: Path, *, with_optimizer: bool) -> None:
        """Restore a state that `save_state` wrote. If `with_optimizer` is False, reset the optimizer and the moving average.

        Raises:
            ValueError: The folder has no complete state, or the state has no moving average although one is configured.
            PhaseError: Gradients are pending, or a snapshot replaces the live weights.
        """
        if not (folder / ".metadata").is_file():
            raise ValueError(f"load_state: no complete state in this folder (got {folder}). Give the path from save_state.")
        self._prepare("load_state")
        with storage_errors("load a state", folder):
            if with_optimizer:
                self._require_average(folder)
            dcp.load(self._components(with_optimizer=with_optimizer), checkpoint_id=str(folder))
        self._learner.drop_snapshots(keep=self._kept)
        if not with_optimizer:
            self._learner.reset_optimizer()
        self._learner.weights_changed()

    def close(self) -> None:
        """Wait until all checkpoints are on disk."""
        with storage_errors("save a checkpoint", self._folder):
            self._manager.maybe_wait_for_saving()
        self._manager.close()

    def _prepare(self, what: str) -> None:
        self._learner.require_settled(what)
        self._learner.model.reshard()
        self._learner.materialize_optimizer()

    @property
    def _average(self) -> dict[str, Stateful]:
        return {} if self._learner.average is None else {AVERAGE_KEY: self._learner.average}

    def _require_average(self, folder: Path) -> None:
        """Check that a checkpoint has a moving average of the weights if the learner keeps one."""
        if not self._average or not (folder / ".metadata").is_file():  # loading reports an incomplete checkpoint
            return
        names = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        if not any(name.startswith(f"{AVERAGE_KEY}.") for name in names):
            raise ValueError(
                f"algorithm.ema_decay: {folder.name} was saved without a moving average of the weights (got {folder}). Set "
                "algorithm.ema_decay to null, or start a new run from an exported model."
            )

    def _published(self, step: int) -> Path:
        return self._folder / f"step-{step}" / "published"

    def _weights(self) -> dict[str, Any]:
        return {"model": ModelWrapper(self._learner.model.module)}

    def _components(self, *, with_optimizer: bool) -> dict[str, Any]:
        learner = self._learner
        optimizer = {"optimizer": learner.optimizers, **self._average} if with_optimizer else {}
        return {**self._weights(), "train_state": self._progress, **optimizer}


def _own_digests(folder: Path) -> dict[str, str]:
    """Return the digests of the checkpoint files that this rank wrote. Rank 0 also writes `.metadata`."""
    rank = dist.get_rank()
    return digests_of(folder, [*folder.glob(f"__{rank}_*"), *([folder / ".metadata"] if rank == 0 else [])])
