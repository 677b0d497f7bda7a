"""Forward, backward and optimizer step on one rank. Gradients add up until `optim_step`; nothing here rescales a loss.

Shapes: B rows, L tokens of a row, N = B * L, V vocabulary entries on this rank.
"""

import math
from dataclasses import replace
from typing import Literal

import torch
from torchtitan.components.optimizer import OptimizersContainer, default_adamw
from torchtitan.distributed import utils as dist_utils

from titanrl.algorithms.logprobs import logprobs_and_entropy
from titanrl.algorithms.losses import LossMetrics, cross_entropy, weighted_sum
from titanrl.algorithms.objective import LossInputs, measure_correction, policy_loss
from titanrl.config.sections import AlgorithmConfig
from titanrl.models.attention import PackedAttention, packed_mask
from titanrl.trainer.collate import PackedRows
from titanrl.trainer.model import PolicyModel, local_logits
from titanrl.types import AdamParams, CorrectionTotals, LossSums, OptimUpdate

LossName = Literal["policy", "cross_entropy"]


class Learner:
    """A model, its optimizer, and the number of steps taken (the policy's version)."""

    def __init__(self, model: PolicyModel, algorithm: AlgorithmConfig, temperature: float) -> None:
        """Start at version 0 with empty optimizer state.

        Args:
            model: the policy of this rank.
            algorithm: what the `policy` loss is.
            temperature: what the sampler divides logits by, and so this does too.
        """
        self.model = model
        self.optimizers = new_optimizer(model)
        self.version = 0
        self._algorithm = algorithm
        self._temperature = temperature

    def forward_backward(self, rows: PackedRows, loss: LossName, correction: CorrectionTotals) -> LossSums:
        """Add the gradient of sum(w * l) over these rows; returns the metrics' sums over them.

        Ranks of one tensor-parallel group compute the same, so only its first reports sums.
        """
        rows = rows.to(self.model.device)
        return self._reported(self._policy(rows, correction) if loss == "policy" else self._cross_entropy(rows))

    @torch.no_grad()
    def measure_correction(self, rows: PackedRows) -> LossSums:
        """What the off-policy correction does over these rows, from a forward pass alone."""
        sums = measure_correction(self._inputs(rows.to(self.model.device)), self._algorithm)
        self.model.reshard()
        return self._reported(sums)

    def _reported(self, metrics: LossMetrics) -> LossSums:
        if self.model.tp_rank != 0:
            return LossSums(sums={}, maxima={})
        return LossSums(
            sums={name: value.item() for name, value in metrics.sums.items()},
            maxima={name: value.item() for name, value in metrics.maxima.items()},
        )

    def optim_step(self, params: AdamParams) -> OptimUpdate:
        """Clip, step and clear the gradients; on a non-finite gradient only clear them.

        The norm is global, so every rank decides the same.
        """
        self.model.reshard()
        parameters = list(self.model.module.parameters())
        max_norm = params.max_grad_norm or math.inf
        grad_norm = float(dist_utils.clip_grad_norm_(parameters, max_norm, foreach=True))
        finite = math.isfinite(grad_norm)
        if finite:
            self._set_params(params)
            self.optimizers.step()
            self.version += 1
        self.optimizers.zero_grad()
        return OptimUpdate(version=self.version, grad_norm=grad_norm, skipped=not finite)

    def start_over(self) -> None:
        """Back to version 0 with fresh optimizer state, weights kept: what warm start leaves to RL."""
        self.optimizers = new_optimizer(self.model)
        self.version = 0

    @property
    def buffer_names(self) -> frozenset[str]:
        """Names of what `weights` holds besides parameters."""
        return frozenset(name for name, _ in self.model.module.named_buffers())

    def weights(self) -> dict[str, torch.Tensor]:
        """The parameters and persistent buffers by name, sharded, as they are now; to be read only.

        They are the model's own tensors: `state_dict()` otherwise detaches each, which for DTensors takes longer than
        to copy a small model, and torch.distributed's `get_model_state_dict` takes longer still for the same.
        """
        self.model.reshard()
        state = self.model.module.state_dict(keep_vars=True)
        return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}

    def _policy(self, rows: PackedRows, correction: CorrectionTotals) -> LossMetrics:
        loss, metrics = policy_loss(replace(self._inputs(rows), correction=correction), self._algorithm)
        loss.backward()
        return metrics

    def _inputs(self, rows: PackedRows) -> LossInputs:
        logprobs_N, entropy_N = self._logprobs(rows)
        return LossInputs(
            logprobs_N=logprobs_N,
            generator_logprobs_N=rows.logprobs_BL.flatten(),
            proximal_logprobs_N=None,
            reference_logprobs_N=None,
            entropy_N=entropy_N,
            advantages_N=rows.advantages_BL.flatten(),
            weights_N=rows.weights_BL.flatten(),
            mask_N=rows.mask_BL.flatten(),
            sequence_N=rows.sequence_N,
        )

    def _cross_entropy(self, rows: PackedRows) -> LossMetrics:
        logprobs_N, _ = self._logprobs(rows)
        mask_N = rows.mask_BL.flatten()
        loss = weighted_sum(cross_entropy(logprobs_N, mask=mask_N), rows.weights_BL.flatten(), mask=mask_N)
        loss.backward()
        return LossMetrics(sums={"loss/policy": loss.detach(), "num_tokens": mask_N.sum()}, maxima={})

    def _logprobs(self, rows: PackedRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of each target and entropy of each prediction, `[N]` each."""
        module = self.model.module
        logits_BLV = module(rows.tokens_BL, positions=rows.positions_BL, attention_masks=self._mask(rows.positions_BL))
        logits_BLV, vocab_start, group = local_logits(logits_BLV, module.config.vocab_size)
        return logprobs_and_entropy(
            logits_BLV.flatten(0, 1),
            rows.targets_BL.flatten(),
            group=group,
            vocab_start=vocab_start,
            temperature=self._temperature,
        )

    def _mask(self, positions_BL: torch.Tensor) -> object:
        module = self.model.module
        if isinstance(module.config.layers[0].attention.inner_attention, PackedAttention.Config):
            return packed_mask(positions_BL)
        return module.get_attention_masks(positions_BL)

    def _set_params(self, params: AdamParams) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"], group["eps"], group["weight_decay"] = params.learning_rate, params.eps, params.weight_decay
                group["betas"] = (params.beta1, params.beta2)


def new_optimizer(model: PolicyModel) -> OptimizersContainer:
    """torchtitan's AdamW over the model's parameters; the real hyper-parameters come with each step."""
    return default_adamw().build(model_parts=[model.module])
