"""Forward, backward and optimizer step on one rank. Gradients accumulate until `optim_step`; nothing here rescales a loss.

Shapes: B rows, L tokens of a row, N = B * L.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torchtitan.components.optimizer import OptimizersContainer, default_adamw
from torchtitan.components.optimizer.utils import init_optim_state
from torchtitan.distributed import utils as dist_utils

from titanrl.algorithms.lag_metrics import lag_metrics
from titanrl.algorithms.losses import LossMetrics, cross_entropy, weighted_sum
from titanrl.algorithms.objective import LossInputs, measure_correction, policy_loss
from titanrl.algorithms.tinker import tinker_algorithm
from titanrl.config.sections import AlgorithmConfig
from titanrl.models.attention import PackedAttention, packed_block_mask, packed_mask
from titanrl.trainer.collate import PackedRows, empty_rows
from titanrl.trainer.head import ScoringHead
from titanrl.trainer.model import PolicyModel
from titanrl.trainer.snapshots import Snapshots, check_recoverable
from titanrl.types import NOT_MEASURED, AdamParams, CorrectionTotals, LossSums, OptimUpdate
from titanrl.weights.layout import local_part
from titanrl.weights.state import LiveState

LossName = Literal["policy", "cross_entropy"]
Objective = Callable[[PackedRows, Tensor, Tensor], tuple[Tensor, LossMetrics]]
"""A function of rows, log-probabilities `[N]` and entropies `[N]`. It returns a share of the objective, 0-dim, and its
metrics."""


class PhaseError(Exception):
    """A call that would mix weights or gradients of different versions. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class RowsResult:
    """Result of running some rows."""

    logprobs_BL: Tensor
    """Log-probability of each position's target, without gradient."""
    sums: LossSums
    """Metrics of these rows."""


class Learner:
    """A model, its optimizer, and the number of steps taken (the policy's version)."""

    def __init__(
        self, model: PolicyModel, algorithm: AlgorithmConfig, temperature: float, *, snapshots_on_device: bool = False
    ) -> None:
        """Start at version 0 with empty optimizer state.

        Args:
            model: Policy on this rank.
            algorithm: Definition of the `policy` loss.
            temperature: Divisor of the logits, the same as the sampler's.
            snapshots_on_device: Keep snapshots of the weights on the device instead of in host memory.
        """
        self.model = model
        self.optimizers = new_optimizer(model)
        self.version = 0
        self.snapshots = Snapshots(model.module, on_device=snapshots_on_device)
        self.temperature = temperature
        self._algorithm = algorithm
        self._head = ScoringHead(model.module.lm_head, model.module.config.vocab_size)
        self._state = LiveState(model.module)
        self._merged: dict[str, Tensor] = {}
        self._num_pending = 0
        self._failed_pass = False
        self._loss_is_finite = torch.ones((), dtype=torch.bool, device=model.device)
        self.refresh_merged_weights()

    @property
    def version_in_use(self) -> int:
        """Version of the weights that a forward pass uses at the moment."""
        return self.version if self.snapshots.current is None else self.snapshots.current

    def forward_backward(self, rows: PackedRows, loss: LossName, correction: CorrectionTotals = NOT_MEASURED) -> LossSums:
        """Add the gradient of sum(w * l) over these rows; return the sums of its metrics."""
        policy = partial(_policy, algorithm=self._algorithm, correction=correction, version=self.version)
        return self.run(rows, policy if loss == "policy" else _cross_entropy).sums

    def measure_correction(self, rows: PackedRows) -> LossSums:
        """Run a forward pass and return the sums of the off-policy correction over these rows."""
        rows = rows.to(self.model.device)
        with torch.no_grad():
            logprobs_BL, entropy_BL = self._score(rows)
            return self._reported(
                measure_correction(_inputs(rows, logprobs_BL.flatten(), entropy_BL.flatten()), self._algorithm)
            )

    def run(self, rows: PackedRows, objective: Objective, *, backward: bool = True) -> RowsResult:
        """Compute an objective over some rows; with `backward`, add its gradient.

        Ranks of one tensor-parallel group compute the same values, so only the first one reports metrics.

        Raises:
            PhaseError: Gradients of a snapshot would be added to those of the live weights.
        """
        if backward:
            self._require_live_weights("forward_backward")
        rows = rows.to(self.model.device)
        with torch.set_grad_enabled(backward):
            logprobs_BL, entropy_BL = self._score(rows)
            loss, metrics = objective(rows, logprobs_BL.flatten(), entropy_BL.flatten())
        if backward:
            loss.backward()
            self._num_pending += 1
            self._loss_is_finite &= loss.detach().isfinite()
        return RowsResult(logprobs_BL.detach(), self._reported(metrics))

    def logprobs(self, rows: PackedRows) -> Tensor:
        """Compute the log-probability of each position's target under the weights in use, `[B, L]`, without gradient."""
        with torch.no_grad():
            return self._score(rows.to(self.model.device))[0]

    def optim_step(self, params: AdamParams) -> OptimUpdate:
        """Clip the gradients, take a step and clear the gradients; skip the step if a loss or the gradient is not finite.

        Every rank decides alike: the gradient norm is global, and ranks exchange whether their losses were finite.

        Raises:
            PhaseError: A snapshot replaces the live weights, or a pass since the last step failed. In the second case all
                gradients are discarded.
        """
        self._require_live_weights("optim_step")
        if self._failed_pass:
            self.zero_grad()
            raise PhaseError("optim_step: a backward pass since the last step failed; no step taken, all gradients discarded")
        self.model.reshard()
        parameters = [parameter for parameter in self.model.module.parameters() if parameter.requires_grad]
        max_norm = params.max_grad_norm or math.inf
        grad_norm = float(dist_utils.clip_grad_norm_(parameters, max_norm, foreach=True))
        finite = self._every_loss_is_finite() and math.isfinite(grad_norm)
        if finite:
            self._set_params(params)
            self.optimizers.step()
            self.version += 1
            self.refresh_merged_weights()
        self.zero_grad()
        return OptimUpdate(version=self.version, grad_norm=grad_norm, skipped=not finite)

    def zero_grad(self) -> None:
        """Discard the gradients added since the last optimizer step."""
        self.optimizers.zero_grad()
        self._num_pending = 0
        self._failed_pass = False
        self._loss_is_finite.fill_(True)

    @contextmanager
    def whole_pass(self) -> Iterator[None]:
        """Refuse the next `optim_step`, which may already be queued, if the body does not add its gradient completely."""
        try:
            yield
        except BaseException:  # a cancelled pass is as incomplete as a failed one; the caller receives the exception
            self._failed_pass = True
            raise

    def start_over(self) -> None:
        """Reset version, optimizer state and snapshots, and keep the weights, as between warm start and RL.

        Raises:
            PhaseError: A snapshot replaces the live weights, or gradients are pending.
        """
        self.require_settled("start_over")
        self.reset_optimizer()
        self.version = 0
        self.drop_snapshots()

    def reset_optimizer(self) -> None:
        """Clear all moments in place, because checkpoints hold a reference to the optimizer."""
        for optimizer in self.optimizers:
            optimizer.state.clear()

    @property
    def buffer_names(self) -> frozenset[str]:
        """Names of the buffers in `weights`."""
        return frozenset(name for name, _ in self.model.module.named_buffers())

    def drop_snapshots(self, *, keep_first: bool = False) -> None:
        """Drop the snapshots of all versions, or of all but version 0."""
        for version in self.snapshots.held:
            if version != 0 or not keep_first:
                self.snapshots.drop(version)

    def weights(self) -> Mapping[str, Tensor]:
        """Return the current sharded parameters and persistent buffers by name, with adapters merged; do not modify them.

        These are the model's own tensors. Merged weights are updated in place after each step, so this is not a collective.

        Raises:
            PhaseError: A snapshot replaces the live weights.
        """
        self._require_live_weights("reading the weights")
        if self.model.lora is not None:
            return self._merged
        self.model.reshard()
        return self._state.tensors()

    def refresh_merged_weights(self) -> None:
        """Merge the current adapters into the published weights. This is a collective; call it after any change of weights."""
        if self.model.lora is None:
            return
        for name, value in self.model.weights().items():
            kept = self._merged.setdefault(name, value)
            if local_part(kept).data_ptr() != local_part(value).data_ptr():
                local_part(kept).copy_(local_part(value))

    def keep_weights(self) -> int:
        """Keep a snapshot of the live weights and return their version.

        Raises:
            PhaseError: A snapshot replaces the live weights.
        """
        self._require_live_weights("keep_weights")
        self.snapshots.take(self.version)
        return self.version

    @contextmanager
    def weights_at(self, version: int) -> Iterator[None]:
        """Compute with the weights of a version inside the context; restore the live weights bit for bit at its end.

        The live version needs neither snapshot nor copy.

        Raises:
            KeyError: There is no snapshot of the version.
            SnapshotMismatchError: The snapshot does not fit the live parameters.
            PhaseError: Gradients are pending, or another version is already in use.
        """
        self.require_settled(f"weights_at({version})")
        if version == self.version and version not in self.snapshots.held:
            yield
            return
        with self.snapshots.using(version):
            yield

    def check_snapshots(self, row_tokens: int) -> None:
        """Check with one empty row that snapshots work after a forward pass; see `check_recoverable`."""
        check_recoverable(self.model.module, lambda: self.logprobs(empty_rows(1, row_tokens)))

    def require_settled(self, what: str) -> None:
        """Check that the live weights are in use and no gradients are pending.

        Raises:
            PhaseError: A snapshot replaces the live weights, or gradients are pending.
        """
        self._require_live_weights(what)
        if self._num_pending:
            raise PhaseError(f"{what}: gradients of {self._num_pending} backward passes are pending; call optim_step first")

    def materialize_optimizer(self) -> None:
        """Create the optimizer's state without counting a step, so that it can be saved or loaded."""
        for optimizer in self.optimizers:
            if not optimizer.state:
                init_optim_state(optimizer)
                for state in optimizer.state.values():
                    state["step"].zero_()

    def _require_live_weights(self, what: str) -> None:
        if self.snapshots.current is not None:
            raise PhaseError(f"{what}: version {self.snapshots.current} replaces the live weights; leave weights_at first")

    def _every_loss_is_finite(self) -> bool:
        """Return True if all losses since the last step were finite, on all ranks. This is a collective."""
        finite = self._loss_is_finite.to(torch.int32)
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            torch.distributed.all_reduce(finite, torch.distributed.ReduceOp.MIN)
        return bool(finite)

    def _score(self, rows: PackedRows) -> tuple[Tensor, Tensor]:
        """Compute the log-probability of each target and the entropy of each prediction, `[B, L]` each."""
        module, positions_BL = self.model.module, rows.positions_BL
        with self._head.scoring(rows.targets_BL, self.temperature):
            scores: tuple[Tensor, Tensor] = module(rows.tokens_BL, positions=positions_BL, attention_masks=self._mask(rows))
        return scores

    def _mask(self, rows: PackedRows) -> object:
        module = self.model.module
        attention = module.config.layers[0].attention.inner_attention
        if isinstance(attention, PackedAttention.Config):
            return packed_mask(rows.positions_BL)
        if rows.shares_prompts:
            return packed_block_mask(rows.positions_BL, attention.block_size)
        return module.get_attention_masks(rows.positions_BL)  # torchtitan's block mask is faster to build

    def _reported(self, metrics: LossMetrics) -> LossSums:
        """Copy the metrics of this rank to the host in one transfer."""
        if self.model.tp_rank != 0:
            return LossSums(sums={}, maxima={})
        values = [*metrics.sums.values(), *metrics.maxima.values()]
        numbers = torch.stack([value.detach().to(torch.float32) for value in values]).tolist() if values else []
        return LossSums(
            sums=dict(zip(metrics.sums, numbers, strict=False)),
            maxima=dict(zip(metrics.maxima, numbers[len(metrics.sums) :], strict=True)),
        )

    def _set_params(self, params: AdamParams) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"], group["eps"], group["weight_decay"] = params.learning_rate, params.eps, params.weight_decay
                group["betas"] = (params.beta1, params.beta2)


def named_objective(loss_fn: str, options: Mapping[str, float]) -> Objective:
    """Return the objective of one of Tinker's losses.

    Raises:
        ValueError: There is no such loss, or it has no such option.
    """
    if loss_fn == "cross_entropy":
        for name, value in options.items():
            raise ValueError(f"loss_fn_config.{name}: cross_entropy has no options (got {value}). Remove it.")
        return _cross_entropy
    return partial(_policy, algorithm=tinker_algorithm(loss_fn, options))


def _policy(
    rows: PackedRows,
    logprobs_N: Tensor,
    entropy_N: Tensor,
    *,
    algorithm: AlgorithmConfig,
    correction: CorrectionTotals = NOT_MEASURED,
    version: int | None = None,
) -> tuple[Tensor, LossMetrics]:
    """Compute the policy loss; if `version`, the one being trained, is given, add metrics by the age of each token."""
    inputs = replace(_inputs(rows, logprobs_N, entropy_N), correction=correction)
    loss, metrics = policy_loss(inputs, algorithm)
    if version is None:
        return loss, metrics
    lags_N = version - rows.versions_BL.flatten()
    sums, maxima = lag_metrics(logprobs_N, inputs.generator_logprobs_N, lags_N, inputs.mask_N)
    return loss, LossMetrics(sums={**metrics.sums, **sums}, maxima={**metrics.maxima, **maxima})


def _cross_entropy(rows: PackedRows, logprobs_N: Tensor, entropy_N: Tensor) -> tuple[Tensor, LossMetrics]:
    mask_N = rows.mask_BL.flatten()
    loss = weighted_sum(cross_entropy(logprobs_N, mask=mask_N), rows.weights_BL.flatten(), mask=mask_N)
    return loss, LossMetrics(sums={"loss/policy": loss.detach(), "num_tokens": mask_N.sum()}, maxima={})


def _inputs(rows: PackedRows, logprobs_N: Tensor, entropy_N: Tensor) -> LossInputs:
    return LossInputs(
        logprobs_N=logprobs_N,
        generator_logprobs_N=rows.logprobs_BL.flatten(),
        proximal_logprobs_N=None if rows.proximal_BL is None else rows.proximal_BL.flatten(),
        reference_logprobs_N=None if rows.reference_BL is None else rows.reference_BL.flatten(),
        entropy_N=entropy_N,
        advantages_N=rows.advantages_BL.flatten(),
        weights_N=rows.weights_BL.flatten(),
        mask_N=rows.mask_BL.flatten(),
        sequence_N=rows.sequence_N,
    )


def new_optimizer(model: PolicyModel) -> OptimizersContainer:
    """Build torchtitan's AdamW over the trainable parameters. Each step sets its own hyper-parameters."""
    fused = model.device.type in ("cpu", "cuda")  # torch-npu has no fused AdamW for sharded parameters
    return replace(default_adamw(), implementation="fused" if fused else "foreach").build(model_parts=[model.module])
