"""Forward passes, backward passes and optimizer steps on one rank.

Gradients accumulate until `optim_step`. Losses are never rescaled here, because the loss weights contain all normalization.
`Learner` comes first, then the objectives that it computes, its optimizer, the load of the experts, and the critic.

Shape suffixes: B rows, L tokens of a row, N = B * L, M selected tokens, V vocabulary entries of this rank, K experts of a
token, Y layers, E experts.
"""

import copy
import ctypes
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.checkpoint import ModelWrapper
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig, default_adamw
from torchtitan.components.optimizer.utils import init_optim_state
from torchtitan.distributed import utils as dist_utils

from titanrl.algorithms.contracts import LossInputs, PolicyLoss, bound_loss
from titanrl.algorithms.losses import LossMetrics, cross_entropy, importance_sampling, value_loss, weighted_sum
from titanrl.algorithms.objective import ObjectiveInputs, lag_metrics, measure_correction, policy_loss
from titanrl.base.errors import PhaseError
from titanrl.carriers.supports import id_dtype
from titanrl.carriers.tables import Row
from titanrl.carriers.types import AdamParams, FloatArray, LossSums, MeasuredCorrection, OptimUpdate, RankValues
from titanrl.config.algorithm import AVERAGE, AlgorithmConfig
from titanrl.models.decoder import PackedAttention, biased_layers, packed_block_mask, packed_mask, routers_of
from titanrl.trainer.collate import PackedRows, empty_rows, places
from titanrl.trainer.model import HEAD, PolicyModel, ScoringHead, ValueHead, adapters_of, without_adapters
from titanrl.trainer.snapshots import MovingAverage, Snapshots, check_recoverable, trainable_tensors
from titanrl.weights.layout import LiveState, local_part

Objective = Callable[..., tuple[Tensor, LossMetrics]]
"""Function of rows, log-probabilities `[N]`, entropies `[N]` and, if the rows have a teacher, the divergences from it, `[N]`.
That of a critic gets values `[N]` instead of log-probabilities, and ignores the entropies. It returns the rows' share of the
objective, 0-dim, and its metrics."""
NUM_COUNTS = 3
"""Number of the counts of `ExpertLoad` besides those of experts."""


@dataclass(frozen=True, slots=True)
class RowsResult:
    """Log-probabilities and metrics of a pass over some rows."""

    logprobs_BL: Tensor
    """Log-probability of each position's target, or its value by a critic, without gradient."""
    sums: LossSums


class Learner:
    """Model, optimizer and policy version of one rank.

    The version is the number of steps, without the skipped ones. A step is one or more optimizer steps on one batch.

    Methods raise `PhaseError` if they would mix weights or gradients of different versions. Passes with gradient and optimizer
    steps need the live weights, not a snapshot. Reading or keeping weights also needs a version, which they do not have between
    the optimizer steps of one batch. Changing them in another way also needs that no gradients are pending.
    """

    def __init__(
        self,
        model: PolicyModel,
        algorithm: AlgorithmConfig,
        temperature: float,
        *,
        custom_loss: Callable[..., Any] | None = None,
        snapshots_on_device: bool = False,
        publishes_adapters: bool = False,
        head: ScoringHead | ValueHead | None = None,
    ) -> None:
        """Start at version 0 with empty optimizer state.

        The logits are divided by `temperature`, the sampling temperature of the generator. Without `custom_loss`, the loss is
        the built-in one that `algorithm` names. Snapshots are on the device, or else in pinned host memory. With
        `publishes_adapters`, adapters are published by themselves instead of merged. The `head` replaces the model's output; it
        scores tokens by default.
        """
        self.model, self.temperature = model, temperature
        self._algorithm, self._loss = algorithm, bound_loss(algorithm, custom_loss)
        self._snapshots_on_device = snapshots_on_device
        self._head = head or ScoringHead(model.module.lm_head, model.module.config.vocab_size)
        self._load = ExpertLoad(model.module, model.tp_rank)
        self._context = model.context
        self._state = LiveState(model.module)
        self._publishes_adapters = publishes_adapters
        self.base_version = 0
        """Number of times that loaded weights changed the base of the adapters, which must then be published again."""
        # Published weights by name, which `weights_changed` updates; None if those of the model are published.
        self._merged: dict[str, Tensor] | None = None if model.lora is None or publishes_adapters else {}
        self._base_sums = self._sums_of_base() if model.lora is not None else []
        self._begin()
        self.weights_changed()

    def _begin(self) -> None:
        """Start at version 0 with the live weights."""
        self.optimizers = new_optimizer(self.model, self._algorithm)
        self.version = 0
        self.num_ahead = 0
        """Number of optimizer steps since the version was last incremented. The weights have a version only while it is 0."""
        self.snapshots = Snapshots(self.model.module, on_device=self._snapshots_on_device)
        self.average: MovingAverage | None = None
        """Moving average of the weights; None unless `algorithm.ema_decay` is set."""
        if self._algorithm.ema_decay is not None:
            self.model.reshard()
            self.average = MovingAverage(trainable_tensors(self.model.module), self._algorithm.ema_decay)
        self.num_pending = 0
        """Number of backward passes since the last optimizer step."""
        self._failed_pass = False
        self._loss_is_finite = torch.ones((), dtype=torch.bool, device=self.model.device)

    def for_adapter(self) -> "Learner":
        """Return a learner at version 0 for another adapter of the same model. It keeps no merged weights.

        The learners of a model take turns: only that of the live adapter may be used; see `Adapters`.
        """
        other = copy.copy(self)
        other._merged = None
        other._load = ExpertLoad(self.model.module, self.model.tp_rank)
        other._begin()
        return other

    @property
    def version_in_use(self) -> int:
        """Version of the weights that a forward pass currently uses."""
        return self.version if self.snapshots.current is None else self.snapshots.current

    def without_gradient(self) -> list[str]:
        """Return the names of the trainable parameters that have no gradient."""
        self.model.reshard()
        parameters = self.model.module.named_parameters()
        return [canonical_fqn(name) for name, value in parameters if value.requires_grad and value.grad is None]

    def forward_backward(
        self, rows: PackedRows, mean_weight: float = 1.0, *, entropy_coef: float | None = None, backward: bool = True
    ) -> RowsResult:
        """Add the gradient of the policy objective over some rows; without `backward`, only compute the objective.

        The objective is divided by `mean_weight`, the mean weight of the off-policy correction over the whole batch. If
        `entropy_coef` is given, it replaces `algorithm.entropy_coef`.
        """
        algorithm = self._algorithm
        if entropy_coef is not None:
            algorithm = algorithm.model_copy(update={"entropy_coef": entropy_coef})
        version = self.version + min(self.num_ahead, 1)  # between two versions, no token was sampled by the current weights
        policy = partial(policy_objective, algorithm=algorithm, loss=self._loss, mean_weight=mean_weight, version=version)
        return self.run(rows, policy, backward=backward)

    def measure_correction(self, rows: PackedRows, plan: Sequence[Row]) -> MeasuredCorrection:
        """Run a forward pass over some rows, and return the effect of the off-policy correction on their sequences.

        The results are in the order of `plan`, the sequences of each row.
        """
        rows = rows.to(self.model.device)
        with self._forward_only():
            logprobs_BL, entropy_BL, *_ = self._score(rows)
            inputs = _inputs(rows, logprobs_BL.flatten(), entropy_BL.flatten())
            weight, num_weights, before_N, after_N = measure_correction(inputs, self._algorithm)
        before_BL, after_BL = (tokens_N.view(rows.mask_BL.shape).cpu().numpy() for tokens_N in (before_N, after_N))
        counts = [(before_BL[b, place].sum(), after_BL[b, place].sum()) for b, row in enumerate(plan) for place in places(row)]
        return MeasuredCorrection(
            dp_rank=self.model.dp_rank,
            weight=float(weight),
            num_weights=int(num_weights),
            counts=np.array(counts, np.int64).reshape(-1, 2),
        )

    def run(self, rows: PackedRows, objective: Objective, *, backward: bool = True) -> RowsResult:
        """Compute an objective over some rows; with `backward`, accumulate its gradient.

        All ranks of a tensor- or context-parallel group compute the same values, so only the first rank reports metrics.
        """
        if backward:
            self._require_live_weights("forward_backward")
        rows = rows.to(self.model.device)
        with self.model.computing() if backward else self._forward_only():
            scores = self._score(rows)
            loss, metrics = objective(rows, *(values_BL.flatten() for values_BL in scores))
            if backward:
                loss.backward()
        if backward:
            self.num_pending += 1
            self._loss_is_finite &= loss.detach().isfinite()
        return RowsResult(scores[0].detach(), self._reported(metrics))

    def logprobs(self, rows: PackedRows) -> Tensor:
        """Compute the log-probability of each position's target under the weights in use, `[B, L]`, without gradient."""
        with self._forward_only():
            return self._score(rows.to(self.model.device))[0]

    def logits(self, rows: PackedRows, tokens_M: Tensor) -> Tensor:
        """Compute the logits of this rank's vocabulary entries at some of the flattened tokens, `[M, V]`, without gradient.

        Their dtype is that of the passes, so M V of them take 2 or 4 M V bytes.
        """
        assert isinstance(self._head, ScoringHead), "a critic has no logits"
        rows = rows.to(self.model.device)
        selecting = self._head.selecting(tokens_M.to(self.model.device), self._context)
        with self._forward_only(), selecting:
            logits_MV: Tensor = self._forward(rows, self._part(rows))
        return logits_MV

    def optim_step(self, params: AdamParams, *, completes: bool = True) -> OptimUpdate:
        """Clip the gradients, take an optimizer step and clear the gradients. This is a collective.

        If the gradient is 0, the weights and the optimizer state stay as they are: momentum and weight decay alone would move
        the weights. The step still counts.

        The step is skipped if a loss or the gradient norm is not finite on any rank. All ranks make the same decision, because
        the gradient norm is global and the ranks all-reduce a flag for finite losses.

        `completes` is False if more optimizer steps on the same batch follow. Otherwise the version is incremented, unless all
        steps since the last increment were skipped. If a pass since the last step failed, all gradients are discarded before
        `PhaseError` is raised.
        """
        self._require_live_weights("optim_step")
        if self._failed_pass:
            self.zero_grad()
            raise PhaseError("optim_step: a backward pass since the last step failed; step skipped, all gradients discarded")
        self.model.reshard()
        parameters = [parameter for parameter in self.model.module.parameters() if parameter.requires_grad]
        if self.num_pending:  # without a pass, such as of the policy while a critic warms up, the gradient is 0
            for parameter in parameters:
                if parameter.grad is None:  # unused in this step: FSDP sets zeros, and all layouts must give the same result
                    parameter.grad = torch.zeros_like(parameter)
        max_norm = params.max_grad_norm or math.inf
        has_ep = self.model.parallel_dims.ep_enabled  # the experts' gradients are then on a mesh of their own
        grad_norm = float(dist_utils.clip_grad_norm_(parameters, max_norm, foreach=True, ep_enabled=has_ep))
        losses_are_finite = self._loss_is_finite.to(torch.int32)
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            torch.distributed.all_reduce(losses_are_finite, torch.distributed.ReduceOp.MIN)
        finite = bool(losses_are_finite) and math.isfinite(grad_norm)
        if finite and grad_norm:
            for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
                group["lr"], group["weight_decay"] = params.learning_rate, params.weight_decay
                if "betas" in group:  # AdamW
                    group["betas"], group["eps"] = (params.beta1, params.beta2), params.eps
                else:  # a loaded checkpoint has the momentum that it was saved with
                    group["momentum"] = self._algorithm.muon_momentum
            self.optimizers.step()
            self.weights_changed(trained_only=True)
            if self.average is not None:
                self.average.update()
        self.num_ahead += finite
        load = self._load.take(balance=finite and grad_norm > 0)
        if completes and self.num_ahead:
            self.version, self.num_ahead = self.version + 1, 0
        self.zero_grad()
        return OptimUpdate(version=self.version, grad_norm=grad_norm, skipped=not finite, is_empty=not grad_norm, experts=load)

    def zero_grad(self) -> None:
        """Discard the gradients accumulated since the last optimizer step."""
        self.optimizers.zero_grad()
        self._load.reset()
        self.num_pending = 0
        self._failed_pass = False
        self._loss_is_finite.fill_(True)

    @contextmanager
    def required_pass(self) -> Iterator[None]:
        """Make the next `optim_step`, which may already be queued, raise if the body raises and leaves gradients incomplete.

        No other rank then waits for this one in `optim_step`, if the body is in a phase of `Agreement`: it fails on all ranks,
        or no later phase starts.
        """
        try:
            yield
        except BaseException:  # also after cancellation the gradient is incomplete
            self._failed_pass = True
            raise

    def start_over(self) -> None:
        """Reset version, optimizer state, moving average and snapshots between warm start and RL, but keep the weights.

        The bias of experts becomes 0, as in a run that starts from the stored model of the warm start, which has none.
        """
        self.require_settled("start_over")
        for layer in biased_layers(self.model.module):
            local_part(layer.expert_bias_E).zero_()
        self.reset_optimizer()
        self.version = 0
        self.drop_snapshots()

    def reset_optimizer(self) -> None:
        """Clear the optimizer state in place, because checkpoints hold a reference to it, and reset the moving average."""
        for optimizer in self.optimizers:
            optimizer.state.clear()
        if self.average is not None:
            self.average.restart()

    def prepare_state(self, what: str) -> None:
        """Check that the weights have a version, and create optimizer state at step 0 if there is none.

        Saving and loading need the tensors of the optimizer state. `what` names the request in the message of the error.
        """
        self.require_settled(what)
        self.model.reshard()
        return_freed_memory()
        for optimizer in self.optimizers:
            if not optimizer.state:
                init_optim_state(optimizer)
                for state in optimizer.state.values():
                    if "step" in state:  # of AdamW; Muon counts none
                        state["step"].zero_()

    @property
    def buffer_names(self) -> frozenset[str]:
        """Names of all buffers, also of those that are not persistent and so not in `weights`."""
        return frozenset(name for name, _ in self.model.module.named_buffers())

    def drop_snapshots(self, *, keep: Collection[int] = ()) -> None:
        """Drop all snapshots except those of the versions in `keep`."""
        for version in self.snapshots.held:
            if version not in keep:
                self.snapshots.drop(version)

    def weights(self) -> Mapping[str, Tensor]:
        """Return the sharded tensors to publish, by name: those of `base` with adapters merged, or only the adapters.

        Without merging, these are the model's own tensors, so the caller must not modify them. Merged weights are updated in
        place after each step, so this is not a collective.
        """
        self._require_version("reading the weights")
        if self._merged is not None:
            return self._merged
        self.model.reshard()
        tensors = self._state.tensors()
        return adapters_of(tensors) if self._publishes_adapters else tensors

    def base(self) -> Mapping[str, Tensor]:
        """Return the model's own parameters and persistent buffers by name, without adapters.

        If there are adapters, only loading changes these tensors.
        """
        self.model.reshard()
        return without_adapters(self._state.tensors())

    def weights_loaded(self) -> None:
        """Update what is computed from the weights, and count a change of the base. Call this after loading. A collective."""
        if self.model.lora is not None:
            before, self._base_sums = self._base_sums, self._sums_of_base()
            has_changed = torch.tensor(before != self._base_sums, dtype=torch.int32, device=self.model.device)
            if torch.distributed.is_initialized():
                torch.distributed.all_reduce(has_changed, torch.distributed.ReduceOp.MAX)
            self.base_version += int(has_changed)
        self.weights_changed()

    def _sums_of_base(self) -> list[int]:
        """Return the sum of the bit patterns of this rank's shard of each tensor of the base."""
        kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        shards = [local_part(value) for value in self.base().values()]
        return [int(shard.contiguous().view(kinds[shard.element_size()]).sum()) for shard in shards]

    def weights_changed(self, *, trained_only: bool = False) -> None:
        """Update what is computed from the parameters. Call this after any change of them. This is a collective.

        `trained_only` states that frozen parameters have not changed. Changes of buffers (the bias of experts) need no call.
        """
        self.model.weights_changed(trained_only=trained_only)
        if self._merged is None:
            return
        for name, value in self.model.weights().items():
            merged = self._merged.setdefault(name, value)
            # The tensors without an adapter are the model's own.
            if local_part(merged).data_ptr() != local_part(value).data_ptr():
                local_part(merged).copy_(local_part(value))

    def keep_weights(self) -> int:
        """Take a snapshot of the live weights and return their version."""
        self._require_version("keep_weights")
        self.snapshots.take(self.version)
        return self.version

    @contextmanager
    def weights_at(self, version: int, *, within_batch: bool = False) -> Iterator[None]:
        """Use the weights of a version inside the context, and restore the live weights bit for bit on exit.

        The live version needs no snapshot; if it has one, the snapshot counts, as user code may have changed the weights since.
        The version `AVERAGE` selects the moving average. `within_batch` admits gradients of earlier micro-batches, which
        stay as they are.

        Raises:
            ValueError: The learner has no moving average, or the version has no snapshot.
            SnapshotMismatchError: The snapshot does not match the live parameters.
        """
        if not within_batch:
            self.require_settled(f"weights_at({version})")
        self._require_version(f"weights_at({version})")
        if version == AVERAGE and self.average is None:
            raise ValueError("at_version: the trainer has no moving average (got ema). Set algorithm.ema_decay.")
        average = self.average.entries() if version == AVERAGE and self.average is not None else None
        if version == self.version and version not in self.snapshots.held:
            yield
            return
        try:
            with self.snapshots.using(version, average):
                self.model.weights_changed()
                yield
        finally:
            self.model.weights_changed()

    def check_snapshots(self, row_tokens: int) -> None:
        """Check that snapshots work after a forward pass of one empty row; see `check_recoverable`."""
        check_recoverable(self.model.module, lambda: self.logprobs(empty_rows(1, row_tokens)))

    def require_settled(self, what: str) -> None:
        """Raise `PhaseError` unless the live weights are in use and have a version, and no gradients are pending."""
        self._require_version(what)
        if self.num_pending:
            raise PhaseError(f"{what}: gradients of {self.num_pending} backward passes are pending; call optim_step first")

    def _require_live_weights(self, what: str) -> None:
        if self.snapshots.current is not None:
            raise PhaseError(f"{what}: version {self.snapshots.current} replaces the live weights; leave weights_at first")

    def _require_version(self, what: str) -> None:
        self._require_live_weights(what)
        if self.num_ahead:
            raise PhaseError(f"{what}: the weights are between two versions; more optimizer steps on this batch must follow")

    @contextmanager
    def _forward_only(self) -> Iterator[None]:
        """Return the context for passes without gradient, which leave all parameters sharded, as passes with gradient do.

        FSDP2 would leave some gathered, and the next pass would not gather them again. A push, which reshards them, may run
        before this pass on one rank and after it on another: then only some ranks would gather in the next pass, which would
        fail.
        """
        with torch.no_grad(), self.model.computing():
            yield
        self.model.reshard()

    def _score(self, rows: PackedRows) -> tuple[Tensor, ...]:
        """Compute the log-probability of each target, the entropy of each prediction, and with a teacher the divergence from
        it, `[B, L]` each. Those of a critic are the value of each token, and zeros."""
        part = self._part(rows)
        with self._head.scoring(part.targets_BL, self.temperature, part.supports, part.teacher):
            scores: tuple[Tensor, ...] = self._forward(rows, part)
        if torch.is_grad_enabled():  # before the backward pass, in which routers may choose again
            self._load.add(part)
        return scores if self._context is None else self._context.whole(scores)

    def _part(self, rows: PackedRows) -> PackedRows:
        """Return the columns of the rows that this rank computes."""
        return rows if self._context is None else self._context.cut(rows)

    def _forward(self, rows: PackedRows, part: PackedRows) -> Any:
        """Run the model on this rank's columns of the rows."""
        self._load.record(part)
        module, positions_BL = self.model.module, rows.positions_BL
        attention = module.config.layers[0].attention.inner_attention
        order = None if self._context is None else self._context.order(rows.length, positions_BL.device)
        mask: object
        if isinstance(attention, PackedAttention.Config):
            mask = packed_mask(positions_BL, order)
        elif rows.shares_prompts or order is not None:
            mask = packed_block_mask(positions_BL, attention.block_size, order)
        else:
            mask = module.get_attention_masks(positions_BL)  # faster to build than `packed_block_mask`
        return module(part.tokens_BL, positions=part.positions_BL, attention_masks=mask)

    def _reported(self, metrics: LossMetrics) -> LossSums:
        """Copy the metrics to the host in one transfer; return no metrics on ranks that do not report."""
        if not self.model.reports:
            return LossSums(sums={}, maxima={})
        values = [*metrics.sums.values(), *metrics.maxima.values()]
        numbers = torch.stack([value.detach().to(torch.float32) for value in values]).tolist() if values else []
        return LossSums(
            sums=dict(zip(metrics.sums, numbers, strict=False)),
            maxima=dict(zip(metrics.maxima, numbers[len(metrics.sums) :], strict=True)),
        )


def return_freed_memory() -> None:
    """Return what glibc keeps for the tensors of the next step, up to all activations, before copies of the state are made."""
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def policy_objective(
    rows: PackedRows,
    logprobs_N: Tensor,
    entropy_N: Tensor,
    *,
    algorithm: AlgorithmConfig,
    loss: PolicyLoss,
    mean_weight: float = 1.0,
    version: int | None = None,
) -> tuple[Tensor, LossMetrics]:
    """Compute the policy objective. If `version`, the version being trained, is given, add metrics by lag of each token."""
    inputs = replace(_inputs(rows, logprobs_N, entropy_N), mean_weight=mean_weight)
    total, metrics = policy_loss(inputs, algorithm, loss)
    if version is None:
        return total, metrics
    lags_N = version - rows.versions_BL.flatten()
    sums, maxima = lag_metrics(logprobs_N, inputs.generator_logprobs_N, lags_N, inputs.mask_N)
    return total, LossMetrics(sums={**metrics.sums, **sums}, maxima={**metrics.maxima, **maxima})


def supervised_objective(rows: PackedRows, logprobs_N: Tensor, entropy_N: Tensor) -> tuple[Tensor, LossMetrics]:
    """Compute the sum of the weighted cross-entropy over all targets."""
    mask_N = rows.mask_BL.flatten()
    loss = weighted_sum(cross_entropy(logprobs_N, mask=mask_N), rows.weights_BL.flatten(), mask=mask_N)
    return loss, LossMetrics(sums={"loss/policy": loss.detach(), "num_tokens": mask_N.sum()}, maxima={})


def distillation_objective(
    rows: PackedRows, logprobs_N: Tensor, entropy_N: Tensor, divergence_N: Tensor
) -> tuple[Tensor, LossMetrics]:
    """Compute the weighted sum over all targets of the divergence from the teacher and of the policy loss -r A.

    r is the importance ratio to the sampler. Without advantages, the second term is 0.
    """
    mask_N = rows.mask_BL.flatten()
    inputs = LossInputs.of(logprobs_N, rows.logprobs_BL.flatten(), rows.advantages_BL.flatten(), mask_N=mask_N)
    loss_N = torch.where(mask_N, divergence_N, 0.0) + importance_sampling(inputs)
    loss = weighted_sum(loss_N, rows.weights_BL.flatten(), mask=mask_N)
    difference_N = torch.where(mask_N, (logprobs_N.detach() - inputs.old_logprobs_N).abs(), 0.0)
    sums = {
        "policy/kl_teacher": torch.where(mask_N, divergence_N.detach(), 0.0).sum(),
        "policy/entropy": torch.where(mask_N, entropy_N.detach(), 0.0).sum(),
        "mismatch/logprob_abs_mean": difference_N.sum(),
        "loss/policy": loss.detach(),
        "num_tokens": mask_N.sum(),
    }
    return loss, LossMetrics(sums=sums, maxima={"mismatch/logprob_abs_max": difference_N.max()})


def _inputs(rows: PackedRows, logprobs_N: Tensor, entropy_N: Tensor) -> ObjectiveInputs:
    return ObjectiveInputs(
        logprobs_N=logprobs_N,
        generator_logprobs_N=rows.logprobs_BL.flatten(),
        proximal_logprobs_N=None if rows.proximal_BL is None else rows.proximal_BL.flatten(),
        reference_logprobs_N=None if rows.reference_BL is None else rows.reference_BL.flatten(),
        entropy_N=entropy_N,
        advantages_N=rows.advantages_BL.flatten(),
        weights_N=rows.weights_BL.flatten(),
        mask_N=rows.mask_BL.flatten(),
        sequence_N=rows.sequence_N,
        support_sizes_N=None if rows.supports is None else rows.supports.sizes_N,
    )


class _Optimizers(OptimizersContainer):
    """Optimizers of torchtitan, and torch's Muon."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        return torch.optim.Muon if name == "Muon" else OptimizersContainer._resolve_optimizer_factory(name)


def new_optimizer(model: PolicyModel, algorithm: AlgorithmConfig) -> OptimizersContainer:
    """Build the optimizers of the trainable parameters. `Learner.optim_step` sets the hyperparameters of each step.

    With `muon`, the two-dimensional weights of the layers have Muon (https://kellerjordan.github.io/posts/muon/). Its learning
    rate is multiplied by 0.2 sqrt(max(rows, columns)), which gives updates of AdamW's size (arXiv:2502.16982).
    """
    fused = model.device.type in ("cpu", "cuda")  # torch-npu has no fused AdamW for sharded parameters
    config = replace(default_adamw(), implementation="fused" if fused else "foreach")
    trained = {name: value for name, value in model.module.named_parameters() if value.requires_grad}
    hidden = [name for name, value in trained.items() if value.ndim == 2 and "layers." in name]
    if algorithm.optimizer == "muon" and hidden:
        options = {"momentum": algorithm.muon_momentum, "adjust_lr_fn": "match_rms_adamw"}
        pattern = f"^({'|'.join(map(re.escape, hidden))})$"
        muon = ParamGroupConfig(pattern=pattern, optimizer_name="Muon", optimizer_kwargs=options)
        config = replace(config, param_groups=[muon, *(config.param_groups if len(hidden) < len(trained) else ())])
    return _Optimizers(config, model_parts=[model.module])


class ExpertLoad:
    """Counts of the loss tokens of each expert, and of tokens by recorded experts, since the last optimizer step.

    It also gives the routers the experts that a generator recorded, and changes the bias against loaded experts.
    Nothing is counted for a dense model. The order of calls is `record` before a forward pass, `add` before its backward pass,
    and `take` after the optimizer step.
    """

    def __init__(self, module: nn.Module, tp_rank: int) -> None:
        """Find the routers. `tp_rank` is this rank's index among those that share its rows."""
        self._routers, self._tp_rank = routers_of(module), tp_rank
        self._biased = biased_layers(module)
        self._counts_YE: Tensor | None = None
        self._tokens: Tensor | None = None
        self._is_recorded = any(router.mode != "own" for router in self._routers)

    def record(self, rows: PackedRows) -> None:
        """Give the routers the recorded experts of the rows of the next forward pass, or none if they do not use them.

        Raises:
            ValueError: They are those of another model.
        """
        ids_BLYK = rows.experts_BLYK if self._is_recorded else None
        if ids_BLYK is not None:
            expected = [len(self._routers), self._routers[0].top_k]
            if list(ids_BLYK.shape[2:]) != expected:
                raise ValueError(
                    f"experts: the model has {expected[0]} layers with {expected[1]} experts for each token (got ids of "
                    f"{ids_BLYK.shape[2]} and {ids_BLYK.shape[3]}). Use data of this model, or set trainer.routing to own."
                )
        for number, router in enumerate(self._routers):
            router.recorded_BLK = None if ids_BLYK is None else ids_BLYK[:, :, number]
            router.tp_rank = self._tp_rank

    def add(self, rows: PackedRows) -> None:
        """Count the experts of the last forward pass on this rank, at its loss tokens.

        Call it before the backward pass, which may compute them again.
        """
        if not self._routers:
            return
        counts = []
        for router in self._routers:
            assert router.chosen_BLK is not None, "a router took no part in the pass"
            part = self._part(rows, router.chosen_BLK.shape[1])
            chosen = router.chosen_BLK[rows.mask_BL[:, part]]
            counts.append(chosen.flatten().bincount(minlength=router.num_experts))
        counts_YE = torch.stack(counts)
        self._counts_YE = counts_YE if self._counts_YE is None else self._counts_YE + counts_YE
        tokens = self._compared_tokens(rows, part)
        self._tokens = tokens if self._tokens is None else self._tokens + tokens

    def reset(self) -> None:
        """Forget the counts since the last step."""
        self._counts_YE = self._tokens = None

    def take(self, *, balance: bool) -> Mapping[str, float]:
        """Return the metrics of all ranks' counts, and start again; none without routers. This is a collective with routers.

        With `balance`, the bias of the experts changes first, if they have one.
        """
        if not self._routers:
            return {}
        counts_YE, tokens = self._counts_YE, self._tokens
        self.reset()
        num_layers, num_experts = len(self._routers), self._routers[0].num_experts
        device = next(self._routers[0].parameters()).device
        totals = torch.zeros(num_layers * num_experts + NUM_COUNTS, dtype=torch.int64, device=device)
        if counts_YE is not None and tokens is not None:
            totals += torch.cat([counts_YE.flatten(), tokens])
        if dist.is_initialized():
            dist.all_reduce(totals)
        all_YE = totals[:-NUM_COUNTS].view(num_layers, num_experts)
        counted = load_metrics(all_YE)
        if self._biased:
            bias_YE = torch.stack([local_part(layer.expert_bias_E) for layer in self._biased])
            if balance:
                bias_YE += bias_change(all_YE, self._biased[0].load_balance_coeff)
                for layer, bias_E in zip(self._biased, bias_YE, strict=True):
                    local_part(layer.expert_bias_E).copy_(bias_E)
            counted["experts/max_bias"] = float(bias_YE.abs().max())
        if not counted or not self._is_recorded:
            return counted
        num_tokens, num_recorded, num_different = totals[-NUM_COUNTS:].tolist()
        return counted | {
            "experts/differ_frac": num_different / max(num_recorded, 1),
            "experts/no_ids_frac": 1 - num_recorded / max(num_tokens, 1),
            "experts/id_bytes": float(num_layers * self._routers[0].top_k * id_dtype(num_experts).itemsize),
        }

    def _part(self, rows: PackedRows, length: int) -> slice:
        """Return the part of L that the routers of this rank saw, of this length, from its place in the group."""
        start = 0 if length == rows.length else self._tp_rank * length
        return slice(start, start + length)

    def _compared_tokens(self, rows: PackedRows, part: slice) -> Tensor:
        """Return the numbers of tokens in all, with recorded experts, and with others than the routers would choose."""
        predicts_BL, ids_BLYK = rows.predicts_BL[:, part], rows.experts_BLYK
        if ids_BLYK is None or not self._is_recorded:
            return torch.stack([predicts_BL.sum(), *[predicts_BL.new_zeros((), dtype=torch.int64)] * 2])
        first_BLK = ids_BLYK[:, part, 0].to(torch.int64)
        has_ids_BL = predicts_BL & (first_BLK != torch.iinfo(ids_BLYK.dtype).max).any(-1)
        differs = [router.differs_BL for router in self._routers if router.differs_BL is not None]
        differs_BL = predicts_BL & torch.stack(differs).any(0)
        return torch.stack([predicts_BL.sum(), has_ids_BL.sum(), differs_BL.sum()])


def bias_change(counts_YE: Tensor, rate: float) -> Tensor:
    """Return the change of the bias of each expert after a step, in float64: `rate` times the sign of mean - count, centered.

    The sum of the changes of a layer is 0, as in torchtitan, so that the biases stay small. A constant changes no choice.
    Source: arXiv:2408.15664, algorithm 1.
    """
    signs_YE = (counts_YE.sum(-1, keepdim=True) - counts_YE.shape[-1] * counts_YE).sign().double()
    return rate * (signs_YE - signs_YE.mean(-1, keepdim=True))


def load_metrics(counts_YE: Tensor) -> dict[str, float]:
    """Return how evenly the tokens of each layer are distributed over its experts; none if there are no tokens.

    `experts/max_load` is the largest number of tokens of an expert divided by the mean, averaged over layers, and
    `experts/worst_load` that of the worst layer. `experts/entropy` is the entropy of the distribution, divided by that of an
    even one, averaged over layers.
    """
    if not counts_YE.any():
        return {}
    shares_YE = counts_YE.double() / counts_YE.sum(-1, keepdim=True)
    num_experts = counts_YE.shape[-1]
    largest_Y = shares_YE.max(-1).values * num_experts
    entropy_Y = torch.special.entr(shares_YE).sum(-1) / math.log(max(num_experts, 2))
    return {
        "experts/max_load": float(largest_Y.mean()),
        "experts/worst_load": float(largest_Y.max()),
        "experts/entropy": float(entropy_Y.mean()),
    }


class Critic(Stateful):
    """The critic of a rank: a second model with its own optimizer, in the processes of the policy's trainer.

    Its `learner` has a model that returns values instead of log-probabilities, so passes, optimizer steps and their checks are
    those of the policy. Its version is the number of steps in which it was trained. The methods are collectives, except
    `state_dict`.
    """

    def __init__(self, model: PolicyModel, algorithm: AlgorithmConfig) -> None:
        """Start at version 0 with a model of `load_model`, which has the policy's initial weights and a zero head."""
        self._config = algorithm.critic
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
        self.learner.prepare_state("state of the critic")
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
