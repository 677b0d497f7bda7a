"""The critic of one rank: a second model with its own optimizer, in the processes of the policy's trainer.

It is a `Learner` whose model returns values instead of log-probabilities, so passes, optimizer steps and their checks are those
of the policy. Its version is the number of steps in which it was trained.

Shape suffixes: B rows, L tokens of a row, N = B * L.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.checkpoint import ModelWrapper

from titanrl.algorithms.losses import LossMetrics, value_loss, weighted_sum
from titanrl.carriers.tables import Row
from titanrl.carriers.types import AdamParams, FloatArray, LossSums, RankValues
from titanrl.config.algorithm import AlgorithmConfig
from titanrl.config.device import Device
from titanrl.config.sections import TrainerConfig
from titanrl.models.directory import ModelDirectory
from titanrl.trainer.checkpoint import load_model, prepare
from titanrl.trainer.collate import PackedRows, places
from titanrl.trainer.learner import Learner
from titanrl.trainer.model import HEAD, ValueHead
from titanrl.weights.layout import local_part


class Critic(Stateful):
    """Critic of a rank. Its methods are collectives, except those of the state."""

    def __init__(self, source: ModelDirectory, trainer: TrainerConfig, algorithm: AlgorithmConfig, device: Device) -> None:
        """Load the policy's initial weights from a directory, with a zero head. All parameters are trained, also with LoRA."""
        self._config = algorithm.critic
        model = load_model(source, trainer.model_copy(update={"lora": None}), device, is_critic=True)
        # The loss and the average belong to the policy.
        own = algorithm.model_copy(update={"ema_decay": None})
        self.learner = Learner(model, own, 1.0, head=ValueHead(model.module.lm_head))

    @property
    def is_warming_up(self) -> bool:
        """True during the first `warmup_steps` steps, in which the policy is not trained."""
        return self.learner.version < self._config.warmup_steps

    def values(self, rows: PackedRows, plan: Sequence[Row]) -> RankValues:
        """Compute the values of the loss tokens of some rows. `plan` has the sequences of each row."""
        values_BL: FloatArray = self.learner.logprobs(rows).cpu().numpy()
        mask_BL = rows.mask_BL.numpy()
        located = [(b, place) for b, row in enumerate(plan) for place in places(row)]
        return RankValues(
            dp_rank=self.learner.model.dp_rank,
            values=np.concatenate([np.zeros(0, np.float32), *(values_BL[at][mask_BL[at]] for at in located)]),
            last=np.array([values_BL[b, place.stop - 1] for b, place in located], np.float32),
        )

    def forward_backward(self, rows: PackedRows) -> LossSums:
        """Add the gradient of the critic's loss over some rows; return its metrics."""
        objective = partial(value_objective, clip=self._config.value_clip)
        return self.learner.run(rows, objective).sums

    def optim_step(self, params: AdamParams, *, completes: bool) -> dict[str, float]:
        """Take a step as `Learner.optim_step` does, but with the critic's learning rate and clipping; return its metrics."""
        rate, norm = self._config.learning_rate, self._config.max_grad_norm
        update = self.learner.optim_step(replace(params, learning_rate=rate, max_grad_norm=norm), completes=completes)
        return {"critic/grad_norm": update.grad_norm, "critic/skipped": float(update.skipped)}

    def start_over(self, policy: Learner) -> None:
        """Copy the policy's weights except the head, which becomes zero; reset the optimizer and the version."""
        weights = policy.model.weights()
        self.learner.start_over()
        with torch.no_grad():
            for name, value in self.learner.model.weights().items():
                own = local_part(value)
                own.zero_() if name == HEAD else own.copy_(local_part(weights[name]))
        self.learner.weights_changed()

    def state_dict(self) -> dict[str, Any]:
        """Return weights, optimizer state and version. Loading a checkpoint fills these tensors."""
        prepare(self.learner, "state of the critic")
        module, optimizers = self.learner.model.module, self.learner.optimizers
        return {
            "model": ModelWrapper(module).state_dict(),
            "optimizer": optimizers.state_dict(),
            "version": self.learner.version,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore weights, optimizer state and version."""
        ModelWrapper(self.learner.model.module).load_state_dict(state_dict["model"])
        self.learner.optimizers.load_state_dict(state_dict["optimizer"])
        self.learner.version = state_dict["version"]
        self.learner.weights_loaded()


def value_objective(rows: PackedRows, values_N: Tensor, unused_N: Tensor, *, clip: float | None) -> tuple[Tensor, LossMetrics]:
    """Compute the critic's share of its objective, with the loss weights of the policy, and its metrics."""
    mask_N = rows.mask_BL.flatten()
    # Rows without sequences have no values.
    old_N, returns_N = (torch.zeros_like(values_N) if v is None else v.flatten() for v in (rows.values_BL, rows.returns_BL))
    loss_N, clipped_N = value_loss(values_N, old_N, returns_N, clip=clip)
    loss = weighted_sum(loss_N, rows.weights_BL.flatten(), mask=mask_N)
    return loss, LossMetrics(sums={"loss/critic": loss.detach(), "critic/clip_frac": (clipped_N & mask_N).sum()}, maxima={})
