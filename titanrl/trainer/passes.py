"""Forward and backward passes over user-provided data: pack it into rows, run them, and return results by datum.

Each rank receives all data and computes the same plan, so planning needs no communication.

Shape suffixes: B rows, L tokens of a row, S tokens of a sequence, T loss tokens of a sequence, N tokens of a micro-batch,
M rows of `TeacherTokens`, V vocabulary entries on this rank, K known entries or experts of a token, Y layers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from titanrl.algorithms.contracts import bound_loss, checked_custom_loss, custom_algorithm, declared_traits, tinker_algorithm
from titanrl.algorithms.logprobs import DivergenceName, TeacherTokens, token_supports
from titanrl.algorithms.losses import LossMetrics
from titanrl.algorithms.packing import balance, pack, row_costs
from titanrl.base.plugins import Plugin, check_call, plugin_of
from titanrl.carriers.supports import ExpertIds, Supports, has_ids_S
from titanrl.carriers.types import DataResult, Datum, FloatArray
from titanrl.models.decoder import routers_of
from titanrl.trainer.agreement import Facts
from titanrl.trainer.collate import PackedRows, empty_rows, placed_experts, row_length
from titanrl.trainer.learner import Learner, Objective, distillation_objective, policy_objective, supervised_objective
from titanrl.trainer.model import PolicyModel

T = TypeVar("T")


class CustomLoss(Protocol):
    """User-defined loss, summed over the data."""

    def __call__(self, data: list[Datum], logprobs: list[Tensor], /) -> tuple[Tensor, Mapping[str, float]]:
        """Return the loss and a dict of metrics, given data and the log-probabilities of their targets, `[S]` each."""
        ...


@dataclass(frozen=True, slots=True)
class Location:
    """Location of a datum in a micro-batch."""

    index: int
    """Index in the data."""
    row: int
    """Index of the row in the micro-batch."""
    tokens: slice
    """Tokens of the row that hold the datum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSizes:
    """Maximum sizes of rows and of a rank's micro-batch."""

    row_tokens: int
    rows_per_microbatch: int
    multiple: int
    """Multiple to which the length of shorter rows is rounded up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """Divergence that a loss computes, and the weights that compute the teacher's distributions."""

    name: DivergenceName
    beta: float
    """Weight of the teacher in the mixture of `jsd`."""
    at_version: int | None
    """Version of the weights; None uses those being trained."""


INPUTS = frozenset({"target_tokens", "weights", "logprobs", "advantages"})
"""Keys of `loss_fn_inputs` that losses use, except undecorated functions."""


@dataclass(frozen=True, slots=True)
class ChosenLoss:
    """Loss of a pass over data."""

    name: str
    inputs: tuple[str, ...]
    """Required keys of `loss_fn_inputs`."""
    objective: Callable[[Sequence[Datum], Sequence[Location]], Objective]
    """Function that builds the objective of a micro-batch from all data and the locations of its data."""
    teacher: Teacher | None = None
    """Teacher, if the loss is a divergence."""
    takes_all: bool = False
    """True if a function receives the data, and may use any input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPass:
    """Validated plan of one rank's pass over its share of the data."""

    data: Sequence[Datum]
    """All data, the same on every rank."""
    sizes: RowSizes
    loss: ChosenLoss | None
    microbatches: Sequence[Sequence[Location]]
    """This rank's micro-batches. All ranks have the same number of them."""

    def facts(self) -> Facts:
        """Return the values that must be equal on all ranks before the first micro-batch."""
        return {
            "data": len(self.data),
            "tokens": sum(len(datum.model_input) for datum in self.data),
            "micro-batches": len(self.microbatches),
        }


def plan_pass(
    model: PolicyModel, data: Sequence[Datum], sizes: RowSizes, loss: str | Plugin | None, config: Mapping[str, Any]
) -> DataPass:
    """Validate all data and plan this rank's micro-batches. Without a loss, the pass only computes log-probabilities.

    Raises:
        ValueError: A datum is too long or lacks an input of the loss, or the loss or one of its options is unknown.
    """
    chosen = None if loss is None else chosen_loss(loss, config)
    check_data(data, sizes, chosen)
    check_supports(data, model.module.config.vocab_size)
    routers = routers_of(model.module)
    check_experts(data, len(routers), routers[0].top_k if routers else 0, routers[0].num_experts if routers else 0)
    microbatches = plan_data([len(datum.model_input) for datum in data], sizes, model.dp_size, model.dp_rank)
    return DataPass(data=data, sizes=sizes, loss=chosen, microbatches=list(microbatches))


def run_data(learner: Learner, planned: DataPass, *, backward: bool) -> DataResult:
    """Run a pass; with `backward`, accumulate the gradient of its loss. This is a collective."""
    logprobs: dict[int, FloatArray] = {}
    sums = []
    for locations in planned.microbatches:
        rows = build_rows(planned.data, locations, planned.sizes)
        if planned.loss is not None and planned.loss.teacher is not None:
            num_top = _num_top(planned.data)
            if num_top:
                tokens = top_tokens(planned.data, locations, rows, num_top, learner.model.module.config.vocab_size)
            else:
                tokens = teacher_tokens(learner, planned.loss.teacher, planned.data, locations, planned.sizes, rows)
            rows = replace(rows, teacher=tokens)
        if planned.loss is None:
            logprobs_BL = learner.logprobs(rows)
        else:
            result = learner.run(rows, planned.loss.objective(planned.data, locations), backward=backward)
            logprobs_BL = result.logprobs_BL
            sums.append(result.sums)
        values_BL = logprobs_BL.float().cpu().numpy()
        logprobs |= {location.index: values_BL[location.row, location.tokens] for location in locations}
    if not learner.model.reports:  # another rank with the same share returns them
        logprobs = {}
    return DataResult(logprobs=logprobs, sums=tuple(sums), version=learner.version_in_use)


def teacher_tokens(
    learner: Learner,
    teacher: Teacher,
    data: Sequence[Datum],
    locations: Sequence[Location],
    sizes: RowSizes,
    rows: PackedRows,
) -> TeacherTokens:
    """Compute the teacher's logits at the loss tokens of a micro-batch. This is a collective.

    The teacher reads its own inputs, which are packed separately, in one forward pass. All logits of the micro-batch's loss
    tokens are kept until its backward pass.
    """
    pairs = ((datum.model_input, datum.teacher_input) for datum in (data[location.index] for location in locations))
    inputs = [np.asarray(own if other is None else other) for own, other in pairs]
    unlabeled = [Datum(model_input=tokens, loss_fn_inputs={"target_tokens": np.zeros_like(tokens)}) for tokens in inputs]
    starts: dict[int, tuple[int, int]] = {}
    placed = []
    for row, indices in enumerate(pack([len(tokens) for tokens in inputs], sizes.row_tokens)):
        end = 0
        for index in indices:
            starts[index] = row, end
            placed.append(Location(index, row, slice(end, end + len(inputs[index]))))
            end += len(inputs[index])
    packed = build_rows(unlabeled, placed, sizes)
    index_BL = torch.full(rows.tokens_BL.shape, -1, dtype=torch.int64)
    selected = [torch.zeros(0, dtype=torch.int64)]
    num_selected = 0
    for index, location in enumerate(locations):
        (tokens_T,) = rows.mask_BL[location.row, location.tokens].nonzero(as_tuple=True)
        row, start = starts[index]
        # Both inputs end with the same completion.
        end = row * packed.length + start + len(inputs[index])
        selected.append(tokens_T - (location.tokens.stop - location.tokens.start) + end)
        index_BL[location.row, location.tokens.start + tokens_T] = torch.arange(num_selected, num_selected + len(tokens_T))
        num_selected += len(tokens_T)
    tokens_M = torch.cat(selected) if num_selected else torch.zeros(1, dtype=torch.int64)  # `TeacherTokens` needs a row
    version = teacher.at_version
    with nullcontext() if version is None else learner.weights_at(version, within_batch=True):  # keeps gradients
        logits_MV = learner.logits(packed, tokens_M)
    return TeacherTokens(name=teacher.name, beta=teacher.beta, index_N=index_BL.flatten(), logits_MV=logits_MV)


def top_tokens(
    data: Sequence[Datum], locations: Sequence[Location], rows: PackedRows, num_top: int, vocab_size: int
) -> TeacherTokens:
    """Return the most likely tokens of another model at the targets of a micro-batch.

    Tokens that the policy does not have, such as those in the padding of another vocabulary, are not known entries.
    """
    index_BL = torch.full(rows.tokens_BL.shape, -1, dtype=torch.int64)
    ids = [np.full((1, num_top), -1)]  # for a micro-batch without data
    logprobs = [np.full((1, num_top), -np.inf, np.float32)]
    num_rows = 1
    for location in locations:
        if (top := data[location.index].teacher_top) is not None:
            num = len(top.token_ids)
            ids.append(np.where(top.token_ids < vocab_size, top.token_ids, -1))
            logprobs.append(np.where(top.token_ids < vocab_size, top.logprobs, -np.inf).astype(np.float32))
            places = slice(location.tokens.stop - num, location.tokens.stop)
            index_BL[location.row, places] = torch.arange(num_rows, num_rows + num)
            num_rows += num
    return TeacherTokens(
        name="forward_kl",
        beta=0.5,  # not used by `forward_kl`
        index_N=index_BL.flatten(),
        logits_MV=torch.from_numpy(np.concatenate(logprobs)),
        ids_MK=torch.from_numpy(np.concatenate(ids)),
    )


def _num_top(data: Sequence[Datum]) -> int:
    """Return the number of most likely tokens that data have, which `check_data` requires to be equal; 0 without any."""
    return next((datum.teacher_top.token_ids.shape[1] for datum in data if datum.teacher_top is not None), 0)


def plan_data(lengths: Sequence[int], sizes: RowSizes, dp_size: int, dp_rank: int) -> Iterator[list[Location]]:
    """Yield the micro-batches of one rank. All ranks get the same number; a micro-batch without data runs one empty row."""
    rows = pack(lengths, sizes.row_tokens)
    shares = balance(row_costs(np.asarray(lengths), np.zeros(len(lengths), np.int64), rows), dp_size)  # no token is shared
    per_microbatch = sizes.rows_per_microbatch
    rank_rows = [rows[i] for i in shares[dp_rank]]
    for start in range(0, max(map(len, shares)), per_microbatch):
        locations = []
        for row, indices in enumerate(rank_rows[start : start + per_microbatch]):
            end = 0
            for index in indices:
                begin, end = end, end + lengths[index]
                locations.append(Location(index, row, slice(begin, end)))
        yield locations


def chosen_loss(loss: str | Plugin, config: Mapping[str, Any]) -> ChosenLoss:
    """Resolve the loss of a pass.

    A user-defined object that is decorated with `titanrl.policy_loss` is a `PolicyLoss`, like those that `algorithm.loss` can
    name. An undecorated object is a `CustomLoss`.

    Raises:
        ValueError: The loss or one of its options is unknown.
    """
    if loss == "cross_entropy":
        for name, value in config.items():
            raise ValueError(f"loss_fn_config.{name}: cross_entropy has no options (got {value}). Remove it.")
        return ChosenLoss("cross_entropy", ("target_tokens",), lambda data, locations: supervised_objective)
    if loss in get_args(DivergenceName):
        teacher = _chosen_teacher(loss, config)  # type: ignore[arg-type]
        return ChosenLoss(str(loss), ("target_tokens", "logprobs"), lambda data, locations: distillation_objective, teacher)
    plugin = plugin_of("loss_fn", loss) if isinstance(loss, str) else loss
    function: Any = None if plugin is None else plugin.load()
    traits = declared_traits(function)
    if plugin is not None and traits is None:
        key, expected = "loss_fn, without titanrl.policy_loss", "def loss(data, logprobs) -> tuple[Tensor, Mapping[str, float]]"
        check_call(function, CustomLoss.__call__, key=key, name=plugin.name, expected=expected)
        return ChosenLoss(plugin.name, ("target_tokens",), partial(_custom_objective, function), takes_all=True)
    if plugin is None or traits is None:
        algorithm = tinker_algorithm(str(loss), config)
    else:
        algorithm = custom_algorithm(function, traits, plugin.path, config)
    objective: Objective = partial(policy_objective, algorithm=algorithm, loss=bound_loss(algorithm, function))
    if plugin is not None:
        objective = partial(_on_all_ranks, objective)
    return ChosenLoss(algorithm.loss, ("target_tokens", "logprobs", "advantages"), lambda data, locations: objective)


def _chosen_teacher(loss: DivergenceName, config: Mapping[str, Any]) -> Teacher:
    """Return the teacher of a divergence; raise `ValueError` if it has no such option, or a value is invalid."""
    options = {"at_version": None, **({"beta": 0.5} if loss == "jsd" else {})}
    for name, value in config.items():
        if name not in options:
            fix = f"Its options: {', '.join(options)}."
            raise ValueError(f"loss_fn_config.{name}: {loss} has no such option (got {value}). {fix}")
    values: dict[str, Any] = {**options, **config}
    beta = values.get("beta", 0.5)
    if not 0.0 < beta < 1.0:
        fix = "Use forward_kl or reverse_kl for the limits."
        raise ValueError(f"loss_fn_config.beta: must be above 0 and below 1 (got {beta}). {fix}")
    return Teacher(name=loss, beta=float(beta), at_version=values["at_version"])


def check_data(data: Sequence[Datum], sizes: RowSizes, loss: ChosenLoss | None) -> None:
    """Check all data on every rank: if only one detected an error, the others would wait for it in a collective.

    The client has checked what does not depend on the model and the loss.

    Raises:
        ValueError: A datum is empty, longer than a row, lacks an input of the loss or has one of an unknown name, or the
            teacher's tokens do not fit.
    """
    needed = ("target_tokens",) if loss is None else loss.inputs
    for index, datum in enumerate(data):
        length = len(datum.model_input)
        if not 0 < length <= sizes.row_tokens:
            fix = f"Cut it to 1 to {sizes.row_tokens} tokens, or change trainer.row_tokens."
            raise ValueError(f"data[{index}].model_input: does not fit a row (got {length} tokens). {fix}")
        inputs = f"data[{index}].loss_fn_inputs"
        if loss is not None and not loss.takes_all and (unknown := sorted(datum.loss_fn_inputs.keys() - INPUTS)):
            fix = f"Give those that the loss uses, among {', '.join(sorted(INPUTS))}."
            raise ValueError(f"{inputs}: loss {loss.name!r} has no such input (got {unknown[0]!r}). {fix}")
        for name in needed:
            if name not in datum.loss_fn_inputs:
                names = sorted(datum.loss_fn_inputs)
                loss_name = None if loss is None else loss.name
                raise ValueError(f"{inputs}: {name!r} is missing (got {names}). Add it: loss {loss_name!r} needs it.")
        if loss is not None and loss.teacher is not None and datum.teacher_input is not None:
            _check_teacher_input(f"data[{index}].teacher_input", datum, sizes)
        if datum.teacher_top is not None:
            _check_top(f"data[{index}].teacher_top", datum, _num_top(data), loss)


def _check_teacher_input(name: str, datum: Datum, sizes: RowSizes) -> None:
    """Raise `ValueError` unless the teacher's input fits a row and ends with the tokens that precede the loss tokens.

    The input token before the first loss token belongs to the prompt, and may differ.
    """
    tokens = np.asarray(datum.teacher_input)
    if not 0 < len(tokens) <= sizes.row_tokens:
        fix = f"Cut it to 1 to {sizes.row_tokens} tokens, or change trainer.row_tokens."
        raise ValueError(f"{name}: does not fit a row (got {len(tokens)} tokens). {fix}")
    weights = np.asarray(datum.loss_fn_inputs.get("weights", np.ones(len(datum.model_input))))
    num_completion = len(weights) - (int(np.flatnonzero(weights)[0]) if weights.any() else len(weights))
    ends_alike = num_completion <= 1 or np.array_equal(tokens[1 - num_completion :], datum.model_input[1 - num_completion :])
    if len(tokens) < num_completion or not ends_alike:
        fix = "Append the completion, without its last token, to the teacher's prompt."
        raise ValueError(f"{name}: must end with the completion (got {len(tokens)} tokens). {fix}")


def _check_top(name: str, datum: Datum, num_top: int, loss: ChosenLoss | None) -> None:
    """Raise `ValueError` unless a loss uses the teacher's most likely tokens, and they cover the loss tokens."""
    assert datum.teacher_top is not None
    if loss is None or loss.name != "forward_kl":
        got = "no loss" if loss is None else loss.name
        raise ValueError(f"{name}: only the loss forward_kl uses it (got {got}). Remove it.")
    ids, logprobs = datum.teacher_top.token_ids, datum.teacher_top.logprobs
    weights = np.asarray(datum.loss_fn_inputs.get("weights", np.ones(len(datum.model_input))))
    first = int(np.flatnonzero(weights)[0]) if weights.any() else len(weights)
    if np.shape(ids) != np.shape(logprobs) or np.ndim(ids) != 2 or ids.shape[1] != num_top or len(ids) > len(weights):
        fix = f"Give {num_top} tokens with log-probabilities at each of the last targets."
        raise ValueError(f"{name}: wrong shape (got {np.shape(ids)} and {np.shape(logprobs)}). {fix}")
    if len(ids) < len(weights) - first:
        fix = "Give the most likely tokens at every loss token."
        raise ValueError(f"{name}: must cover the {len(weights) - first} last targets (got {len(ids)}). {fix}")


def check_supports(data: Sequence[Datum], vocab_size: int) -> None:
    """Check that the supports of all data match their targets and the model.

    Raises:
        ValueError: Supports have the wrong length or vocabulary size, or a target is not in its support.
    """
    for index, datum in enumerate(data):
        if datum.supports is None:
            continue
        name, targets_S = f"data[{index}].supports", np.asarray(datum.loss_fn_inputs["target_tokens"], np.int64)
        if len(datum.supports) != len(targets_S):
            fix = f"Give one per input token: {len(targets_S)}."
            raise ValueError(f"{name}: wrong length (got {len(datum.supports)}). {fix}")
        if datum.supports.vocab_size != vocab_size:
            fix = "Use samples from a model with the same vocabulary."
            raise ValueError(f"{name}: the model's vocabulary size is {vocab_size} (got {datum.supports.vocab_size}). {fix}")
        outside = np.flatnonzero(~datum.supports.contains_S(targets_S))
        if len(outside):
            fix = "Give the supports that the targets were sampled from."
            raise ValueError(f"{name}: target {outside[0]} is not in its support (got token {targets_S[outside[0]]}). {fix}")


def check_experts(data: Sequence[Datum], num_layers: int, per_token: int, num_experts: int) -> None:
    """Check that the experts of all data are those of the model.

    Raises:
        ValueError: Ids have the wrong shape, or the model has no such expert.
    """
    for index, datum in enumerate(data):
        if datum.experts is None:
            continue
        shape = (len(datum.model_input), num_layers, per_token)
        if datum.experts.shape != shape:
            fix = "Use the experts of samples of this model."
            raise ValueError(f"data[{index}].experts: must have shape {shape} (got {datum.experts.shape}). {fix}")
        largest = datum.experts[has_ids_S(datum.experts)].max(initial=0)
        if largest >= num_experts:
            fix = "Use samples of this model."
            raise ValueError(f"data[{index}].experts: the model has {num_experts} experts (got id {largest}). {fix}")


def build_rows(data: Sequence[Datum], locations: Sequence[Location], sizes: RowSizes) -> PackedRows:
    """Build the packed rows of one micro-batch. A target with weight 0 or without a finite `logprobs` is masked."""
    length = row_length((location.tokens.stop for location in locations), sizes.row_tokens, sizes.multiple)
    rows = empty_rows(1 + max((location.row for location in locations), default=0), length)
    supports: list[tuple[int, Supports]] = []
    experts: list[tuple[int, slice, ExpertIds]] = []
    for location in locations:
        datum, row = data[location.index], location.row
        rows.tokens_BL[row, location.tokens] = torch.from_numpy(np.asarray(datum.model_input))
        rows.positions_BL[row, location.tokens] = torch.arange(len(datum.model_input))
        rows.positions_BL[row, location.tokens.stop :] = torch.arange(length - location.tokens.stop)  # for padding
        rows.targets_BL[row, location.tokens] = _input(datum, "target_tokens", 0.0).long()
        weights, logprobs = _input(datum, "weights", 1.0), _input(datum, "logprobs", 0.0)
        rows.mask_BL[row, location.tokens] = (weights != 0) & logprobs.isfinite()
        rows.weights_BL[row, location.tokens] = weights
        rows.logprobs_BL[row, location.tokens] = logprobs.nan_to_num()
        rows.advantages_BL[row, location.tokens] = _input(datum, "advantages", 0.0)
        rows.predicts_BL[row, location.tokens] = True
        if datum.supports is not None:
            supports.append((row * length + location.tokens.start, datum.supports))
        if datum.experts is not None:
            experts.append((row, location.tokens, datum.experts))
    return replace(
        rows,
        supports=token_supports(supports, rows.tokens_BL.numel()),
        experts_BLYK=placed_experts(experts, len(rows.tokens_BL), length),
    )


def _input(datum: Datum, name: str, default: float) -> Tensor:
    """Return an array of a datum as a tensor; if it is missing, return a tensor filled with the default."""
    if name not in datum.loss_fn_inputs:
        return torch.full((len(datum.model_input),), default)
    return torch.from_numpy(np.asarray(datum.loss_fn_inputs[name]))


def _custom_objective(function: CustomLoss, data: Sequence[Datum], locations: Sequence[Location]) -> Objective:
    def objective(rows: PackedRows, logprobs_N: Tensor, entropy_N: Tensor) -> tuple[Tensor, LossMetrics]:
        def compute() -> tuple[Tensor, Mapping[str, float]]:
            logprobs_BL = logprobs_N.view(rows.tokens_BL.shape)
            selected = [data[location.index] for location in locations]
            logprobs = [logprobs_BL[location.row, location.tokens] for location in locations]
            return checked_custom_loss(function(selected, logprobs))

        loss, metrics = _on_all_ranks(compute if locations else lambda: (logprobs_N.sum() * 0.0, {}))  # all ranks run backward
        sums = {name: torch.tensor(float(value)) for name, value in metrics.items()}
        return loss, LossMetrics(sums={"loss/policy": loss.detach().cpu(), **sums}, maxima={})

    return objective


def _on_all_ranks(compute: Callable[..., T], *args: Any) -> T:
    """Call user-defined code; if it raises on one rank, raise on all ranks before backward. This is a collective.

    A rank that failed raises its own exception.
    """
    failure: Exception | None = None
    try:
        result = compute(*args)
    except Exception as error:  # user-defined code may raise anything, and the other ranks would wait in backward
        failure = error
    failures: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(failures, None if failure is None else repr(failure))
    if failure is not None:
        raise failure
    for rank, text in enumerate(failures):
        if text is not None:
            raise RuntimeError(f"loss_fn: the loss raised on trainer rank {rank} (got {text}). Correct the loss.")
    return result
