"""States to go on from, by torch's distributed checkpoints (DCP): model, optimizer, version and random numbers.

They are sharded as the trainer is, and can be loaded into any other layout.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.checkpoint import CheckpointManager, ModelWrapper

from titanrl.trainer.learner import Learner


class _Progress(Stateful):
    """Everything of the learner that is neither model nor optimizer."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    def state_dict(self) -> dict[str, Any]:
        """Version and state of the random generators."""
        random = {"cpu": torch.get_rng_state()}
        kind = self._learner.model.device.type
        if kind != "cpu":
            random[kind] = torch.get_device_module(kind).get_rng_state()
        return {"version": self._learner.version, "random": random}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take them up. Held versions belong to another past, all but version 0: what a run begins with is the same in both."""
        self._learner.version = state_dict["version"]
        self._learner.drop_snapshots(keep_first=True)
        for kind, state in state_dict["random"].items():
            (torch if kind == "cpu" else torch.get_device_module(kind)).set_rng_state(state)


class Checkpoints:
    """A run's `step-<n>` folders, of which the last few are kept, and states under names. Every rank calls it alike."""

    def __init__(self, learner: Learner, folder: Path, keep_last: int, *, in_background: bool = False) -> None:
        """Save into and load from `folder`, an absolute path.

        Args:
            learner: what is saved.
            folder: where the `step-<n>` folders are.
            keep_last: how many of them stay.
            in_background: `save` returns when the state is copied, and the disk is written while training goes on.
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
        """Write the state of this step; `.metadata` appears in its folder when it is whole.

        Raises:
            PhaseError: gradients are pending, or a snapshot stands in for the live weights.
        """
        self._prepare("save_checkpoint")
        self._manager.save(step)

    def load(self, step: int) -> None:
        """Restore the state of a step.

        Raises:
            ValueError: there is no such checkpoint.
            PhaseError: gradients are pending, or a snapshot stands in for the live weights.
        """
        self._prepare("load_checkpoint")
        self._manager.maybe_wait_for_saving()
        if not self._manager.load(step):
            raise ValueError(f"no checkpoint of step {step} in {self._folder}")
        self._learner.weights_changed()

    def save_state(self, folder: Path) -> None:
        """Write the state into a folder of its own.

        Raises:
            PhaseError: gradients are pending, or a snapshot stands in for the live weights.
        """
        self._prepare("save_state")
        dcp.save(self._parts(with_optimizer=True), checkpoint_id=str(folder))

    def load_state(self, folder: Path, *, with_optimizer: bool) -> None:
        """Restore what `save_state` wrote; without the optimizer's state that one starts afresh.

        Raises:
            ValueError: there is no whole state in the folder.
            PhaseError: gradients are pending, or a snapshot stands in for the live weights.
        """
        if not (folder / ".metadata").is_file():
            raise ValueError(f"load_state: there is no whole state in {folder}; give the path that save_state returned")
        self._prepare("load_state")
        dcp.load(self._parts(with_optimizer=with_optimizer), checkpoint_id=str(folder))
        if not with_optimizer:
            self._learner.reset_optimizer()
        self._learner.weights_changed()

    def close(self) -> None:
        """Wait until everything is on disk."""
        self._manager.maybe_wait_for_saving()
        self._manager.close()

    def _prepare(self, what: str) -> None:
        self._learner.require_settled(what)
        self._learner.model.reshard()
        self._learner.materialize_optimizer()

    def _parts(self, *, with_optimizer: bool) -> dict[str, Any]:
        learner = self._learner
        optimizer = {"optimizer": learner.optimizers} if with_optimizer else {}
        return {"model": ModelWrapper(learner.model.module), "train_state": self._progress, **optimizer}
