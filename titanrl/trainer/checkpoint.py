"""Checkpoints of model, optimizer, version and random state, written by torch's distributed checkpointing (DCP).

Each rank writes its own shards. A checkpoint can be loaded into any other layout.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.checkpoint import CheckpointManager, ModelWrapper

from titanrl.trainer.learner import Learner


class _Progress(Stateful):
    """The state of a learner besides model and optimizer."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    def state_dict(self) -> dict[str, Any]:
        """Return the version and the state of the random generators."""
        random = {"cpu": torch.get_rng_state()}
        kind = self._learner.model.device.type
        if kind != "cpu":
            random[kind] = torch.get_device_module(kind).get_rng_state()
        return {"version": self._learner.version, "random": random}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore them, and drop the snapshots of all versions but 0, the only one that is the same in every run."""
        self._learner.version = state_dict["version"]
        self._learner.drop_snapshots(keep_first=True)
        for kind, state in state_dict["random"].items():
            (torch if kind == "cpu" else torch.get_device_module(kind)).set_rng_state(state)


class Checkpoints:
    """The checkpoints of a run: `step-<n>` folders, of which the last few are kept, and named states.

    Every method is a collective.
    """

    def __init__(self, learner: Learner, folder: Path, keep_last: int, *, in_background: bool = False) -> None:
        """Set up checkpoints below a folder.

        Args:
            learner: Learner to save and restore.
            folder: Absolute path of the parent of the `step-<n>` folders.
            keep_last: Number of `step-<n>` folders to keep.
            in_background: Return from `save` after copying the state, and write to disk while training continues.
        """
        self._learner, self._folder = learner, folder
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
            states={"train_state": self._progress},
            sd_adapter=learner.model.adapter,
            base_folder=str(folder.parent),
        )

    def save(self, step: int) -> None:
        """Write the state of this step. `.metadata` appears in its folder when the checkpoint is complete.

        Raises:
            PhaseError: Gradients are pending, or a snapshot replaces the live weights.
        """
        self._prepare("save_checkpoint")
        self._manager.save(step)

    def load(self, step: int) -> None:
        """Restore the state of a step.

        Raises:
            ValueError: There is no such checkpoint.
            PhaseError: Gradients are pending, or a snapshot replaces the live weights.
        """
        self._prepare("load_checkpoint")
        self._manager.maybe_wait_for_saving()
        if not self._manager.load(step):
            raise ValueError(f"step: there is no such checkpoint in {self._folder} (got {step}). Choose one of its folders.")
        self._learner.refresh_merged_weights()

    def save_state(self, folder: Path) -> None:
        """Write the state into a separate folder.

        Raises:
            PhaseError: Gradients are pending, or a snapshot replaces the live weights.
        """
        self._prepare("save_state")
        dcp.save(self._components(with_optimizer=True), checkpoint_id=str(folder))

    def load_state(self, folder: Path, *, with_optimizer: bool) -> None:
        """Restore a state that `save_state` wrote. Without the optimizer's state, the optimizer is reset.

        Raises:
            ValueError: The folder has no complete state.
            PhaseError: Gradients are pending, or a snapshot replaces the live weights.
        """
        if not (folder / ".metadata").is_file():
            raise ValueError(f"load_state: no complete state in this folder (got {folder}). Give the path from save_state.")
        self._prepare("load_state")
        dcp.load(self._components(with_optimizer=with_optimizer), checkpoint_id=str(folder))
        if not with_optimizer:
            self._learner.reset_optimizer()
        self._learner.refresh_merged_weights()

    def close(self) -> None:
        """Wait until all checkpoints are on disk."""
        self._manager.maybe_wait_for_saving()
        self._manager.close()

    def _prepare(self, what: str) -> None:
        self._learner.require_settled(what)
        self._learner.model.reshard()
        self._learner.materialize_optimizer()

    def _components(self, *, with_optimizer: bool) -> dict[str, Any]:
        learner = self._learner
        optimizer = {"optimizer": learner.optimizers} if with_optimizer else {}
        return {"model": ModelWrapper(learner.model.module), "train_state": self._progress, **optimizer}
