"""Explain the loss of recorded tokens: how each one entered the objective of its step, and how much it moved the policy.

The trainer records the inputs of the objective (`record/`, kind `trained`). The function that it calls (`token_terms` of
`titanrl.algorithms.objective`) computes the objective from them once more, in double precision. Only the share of the gradient
is computed here.

Shape suffix: N loss tokens of a sequence.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from titanrl.algorithms.contracts import bound_loss, declared_traits
from titanrl.algorithms.losses import weighted_sum
from titanrl.algorithms.objective import ObjectiveInputs, TokenTerms, token_terms
from titanrl.base.errors import TitanRLError
from titanrl.base.files import DamagedError
from titanrl.base.plugins import import_object
from titanrl.config.algorithm import LOSSES, AlgorithmConfig, LossTraits
from titanrl.config.errors import ConfigError
from titanrl.config.load import load_config
from titanrl.metrics.reading import RecordedGroup, RunRecord, TrainedSegment

Column = npt.NDArray[Any]


class NotExplainedError(TitanRLError):
    """The tokens of a step or a group were not recorded, or their loss cannot be computed; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedSegment:
    """Effect of the loss tokens of a sequence on the objective of an optimizer step.

    `columns` have one value per loss token:

    - `position` (in the segment), `token_id` (-1 if the group's tokens are not recorded), `version` (of the generator)
    - `generator_logprob`, `proximal_logprob`, `logprob` (current policy), and with a KL penalty `reference_logprob`
    - `ratio`: importance ratio of the loss, as its clipping compares it
    - `clip`: empty, `low`, `high`, `dual`, or `yes` for a loss whose bounds are not known
    - `correction`: weight of the off-policy correction, 1 without one, 0 for a rejected token; divided by the mean weight of
      the step with `batch_normalize`
    - `advantage`, `weight` (loss weight)
    - `loss`: share of the objective, that is the weight times the sum of all terms
    - `gradient`: derivative of the objective with respect to the log-probability
    - `share`: share of the token in the squared norm of the sequence's gradient with respect to the logits; see `share_of`
    """

    step: int
    update: int
    """Optimizer step on the batch, from 0."""
    index: int
    """Prompt of the group."""
    segment: int
    """Index of the sequence among those of the group."""
    completion: int | None
    """Index of the completion; None if the group is not recorded."""
    version: int
    """Policy version that was trained."""
    columns: Mapping[str, Column]
    left_out: tuple[str, ...]
    """Terms of the objective that the record cannot explain."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON; a number that is not finite becomes None."""
        names = ("step", "update", "index", "segment", "completion", "version", "left_out")
        values: dict[str, Any] = {name: getattr(self, name) for name in names}
        return values | {"columns": {name: list(map(_finite, column.tolist())) for name, column in self.columns.items()}}


def explain(run: RunRecord, step: int, index: int, *, loads_loss: bool = False) -> list[ExplainedSegment]:
    """Explain the tokens of a recorded group in a step, one entry for each sequence and optimizer step.

    The objective is that of `config.yaml`, with which the run was started or resumed last.

    Args:
        run: Run directory, from `titanrl.open_run`.
        step: Step, from 1.
        index: Prompt of the group.
        loads_loss: True to import a custom loss that `config.yaml` names, which executes its code.

    Raises:
        NotExplainedError: The step has no recorded loss of this group, or the loss is a custom one that cannot be imported.
        DamagedError: The columns are damaged.
    """
    trained = [segment for segment in run.trained(index) if segment.step == step]
    if not trained:
        raise NotExplainedError(_why_missing(run, step, index))
    algorithm, custom = _objective_of(run, loads_loss)
    group = next(iter(run.groups(index)), None)
    return [explain_segment(segment, algorithm, custom=custom, group=group) for segment in trained]


def explain_segment(
    segment: TrainedSegment,
    algorithm: AlgorithmConfig,
    *,
    custom: Callable[..., Any] | None = None,
    group: RecordedGroup | None = None,
) -> ExplainedSegment:
    """Explain a recorded sequence; `group`, if it is recorded, has its token ids."""
    columns = segment.columns()
    try:
        inputs = _inputs(columns, segment.mean_weight, algorithm)
        place = None if group is None else group.place_of(segment.segment)
        tokens = None if group is None or place is None else group.tokens()[place[0]][place[1]]["token_ids"]
        token_ids = np.full(len(inputs.logprobs_N), -1) if tokens is None else tokens[columns["positions"]]
    except (KeyError, IndexError) as error:
        raise DamagedError(f"the record of step {segment.step} and group {segment.index} lacks {error}") from error
    with torch.enable_grad():
        inputs.logprobs_N.requires_grad_()
        terms = token_terms(inputs, algorithm, bound_loss(algorithm, custom))
        kept_N = terms.correction.kept_N
        loss_N = torch.where(kept_N, torch.stack(list(terms.terms_N.values())).sum(0) * inputs.weights_N, 0.0)
        objective = torch.stack(
            [weighted_sum(term_N, inputs.weights_N, mask=kept_N) for term_N in terms.terms_N.values()]
        ).sum()
        (gradient_N,) = torch.autograd.grad(objective, inputs.logprobs_N)
    correction_N = torch.ones_like(loss_N) if terms.correction.weights_N is None else terms.correction.weights_N
    if algorithm.correction.batch_normalize:
        correction_N = correction_N / inputs.mean_weight
    values = {
        "position": columns["positions"],
        "token_id": token_ids,
        "version": columns["versions"],
        "generator_logprob": inputs.generator_logprobs_N,
        "proximal_logprob": terms.proximal_N,
        "logprob": inputs.logprobs_N,
        **({} if inputs.reference_logprobs_N is None else {"reference_logprob": inputs.reference_logprobs_N}),
        "ratio": terms.values["ratio"],
        "clip": np.array(_clips(terms, algorithm)),
        "correction": torch.where(kept_N, correction_N, 0.0),
        "advantage": terms.advantages_N,
        "weight": inputs.weights_N,
        "loss": loss_N,
        "gradient": gradient_N,
        "share": share_of(gradient_N, inputs.logprobs_N),
    }
    return ExplainedSegment(
        step=segment.step,
        update=segment.update,
        index=segment.index,
        segment=segment.segment,
        completion=None if place is None else place[0],
        version=segment.version,
        columns={name: value.detach().numpy() if isinstance(value, Tensor) else value for name, value in values.items()},
        left_out=("entropy bonus",) if algorithm.has_entropy_bonus else (),
    )


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def share_of(gradient_N: Tensor, logprobs_N: Tensor) -> Tensor:
    """Return the share of each token in the squared norm of the sequence's gradient with respect to the logits.

    With probabilities p of the policy, a sampled token a and the derivative g with respect to its log-probability, the gradient
    with respect to the token's logits is g (onehot(a) - p), up to the temperature. Its squared norm is
    g^2 ((1 - p_a)^2 + sum over the other tokens of p^2). Logits of different tokens are different coordinates, so the squared
    norms of a sequence add up. Only p_a is recorded. The sum over the others is between 0 and (1 - p_a)^2, so the squared norm
    is g^2 (1 - p_a)^2 times a factor from 1 to 2, and a share is correct up to a factor from 1/2 to 2.
    """
    squares_N = (gradient_N * torch.expm1(logprobs_N.detach())).square()
    total = squares_N.sum()
    return squares_N / total if total > 0 else torch.zeros_like(squares_N)


def _inputs(columns: Mapping[str, Column], mean_weight: float, algorithm: AlgorithmConfig) -> ObjectiveInputs:
    """Return the recorded inputs of the objective, as one sequence in double precision."""

    def column(name: str) -> Tensor:
        return torch.from_numpy(columns[name].astype(np.float64))

    logprobs_N = column("logprobs")
    return ObjectiveInputs(
        logprobs_N=logprobs_N,
        generator_logprobs_N=column("generator_logprobs"),
        proximal_logprobs_N=column("proximal_logprobs") if "proximal_logprobs" in columns else None,
        reference_logprobs_N=column("reference_logprobs") if algorithm.kl.coef else None,
        entropy_N=torch.zeros_like(logprobs_N),
        advantages_N=column("advantages"),
        weights_N=column("weights"),
        mask_N=torch.ones_like(logprobs_N, dtype=torch.bool),
        sequence_N=torch.zeros(len(logprobs_N), dtype=torch.int64),
        mean_weight=mean_weight,
    )


def _clips(terms: TokenTerms, algorithm: AlgorithmConfig) -> list[str]:
    """Return at which bound each token is clipped; empty for a token that is not."""
    low, high = 1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high
    names = []
    for clip, ratio in zip(terms.values["clip"].tolist(), terms.values["ratio"].tolist(), strict=True):
        if not clip:
            names.append("")
        elif algorithm.loss not in LOSSES:
            names.append("yes")
        else:
            names.append("low" if ratio < low else "high" if ratio > high else "")
    dual = algorithm.dual_clip
    if algorithm.loss in LOSSES and dual is not None:
        is_dual = ((terms.advantages_N < 0) & (terms.values["ratio"] > dual)).tolist()
        names = ["dual" if name and beyond else name for name, beyond in zip(names, is_dual, strict=True)]
    return names


def _objective_of(run: RunRecord, loads_loss: bool) -> tuple[AlgorithmConfig, Callable[..., Any] | None]:
    """Return the objective of a run, and its custom loss."""
    try:
        algorithm = load_config(run.path / "config.yaml").algorithm
    except ConfigError as error:
        raise NotExplainedError(f"{run.path}: the configuration of the run cannot be read: {error}") from error
    if algorithm.loss in LOSSES:
        return algorithm, None
    name = algorithm.loss
    if not loads_loss:
        raise NotExplainedError(
            f"algorithm.loss: a custom loss is executed to explain it, so it must be allowed (got {name}). "
            "Pass --load-loss, or loads_loss=True, if you trust its code."
        )
    try:
        loss = import_object(name, key="algorithm.loss")
    except ValueError as error:
        raise NotExplainedError(str(error)) from error
    return algorithm.with_loss_traits(declared_traits(loss) or LossTraits()), loss


def _why_missing(run: RunRecord, step: int, index: int) -> str:
    """Explain why a group has no recorded loss in a step."""
    of_step = sorted({segment.index for segment in run.trained() if segment.step == step})
    if of_step:
        shown: Sequence[int] = of_step[:20]
        more = f" and {len(of_step) - 20} others" if len(of_step) > 20 else ""
        found = f"The step has those of {', '.join(map(str, shown))}{more}"
    else:
        steps = sorted({segment.step for segment in run.trained()})
        found = f"The record has steps {steps[0]} to {steps[-1]}" if steps else "The record has no losses"
    return (
        f"step {step}: no loss of group {index} is recorded. {found}. logging.rollouts_per_step groups of a step are recorded, "
        "and a group whose advantages are all 0 has no loss."
    )
