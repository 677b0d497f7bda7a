"""Checkpoints to go on from, by torchtitan's own manager (DCP): model, optimizer and version."""

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.checkpoint import CheckpointManager

from titanrl.trainer.learner import Learner


class _Version(Stateful):
    """The learner's version as checkpoint state."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    def state_dict(self) -> dict[str, Any]:
        """The version."""
        return {"version": self._learner.version}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a version."""
        self._learner.version = state_dict["version"]


class Checkpoints:
    """Writes `step-<n>` folders and keeps the last few. Every rank calls it alike."""

    def __init__(self, learner: Learner, folder: Path, keep_last: int) -> None:
        """Save into and load from `folder`, an absolute path."""
        self._learner, self._folder, self._keep_last = learner, folder, keep_last
        self._manager: CheckpointManager | None = None

    def save(self, step: int) -> None:
        """Write the state of this step; returns when it is on disk."""
        self._learner.model.reshard()
        self._get().save(step)

    def load(self, step: int) -> None:
        """Restore the state of a step.

        Raises:
            ValueError: there is no such checkpoint.
        """
        self._learner.model.reshard()
        if not self._get().load(step):
            raise ValueError(f"no checkpoint of step {step} in {self._folder}")

    def _get(self) -> CheckpointManager:
        """The manager, bound to the optimizer as it is at the first use: warm start replaces it before."""
        if self._manager is None:
            config = CheckpointManager.Config(
                enable=True, folder=self._folder.name, interval=1, keep_latest_k=self._keep_last, async_mode="disabled"
            )
            self._manager = config.build(
                dataloader=None,
                model_parts=[self._learner.model.module],
                optimizers=self._learner.optimizers,
                lr_schedulers=None,
                states={"train_state": _Version(self._learner)},
                sd_adapter=self._learner.model.adapter,
                base_folder=str(self._folder.parent),
            )
        return self._manager
