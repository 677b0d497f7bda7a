"""A caller's own data through the trainer: laid out in packed rows, run, and answered in the caller's order.

Every rank is given all data and plans alike, so nothing needs to be agreed on. Shapes: L tokens of a row, S tokens of a
sequence, N tokens of a micro-batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from titanrl.algorithms.losses import LossMetrics
from titanrl.algorithms.packing import balance, pack, row_costs
from titanrl.loading import import_object
from titanrl.trainer.collate import PackedRows, empty_rows, row_length
from titanrl.trainer.learner import Learner, Objective, named_objective
from titanrl.types import Datum, FloatArray, LossSums

CustomLoss = Callable[[list[Datum], list[Tensor]], tuple[Tensor, Mapping[str, float]]]
"""From data and the log-probabilities of their targets, `[S]` each, to a loss that is a sum over the data, and metrics."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a datum lies in a micro-batch."""

    index: int
    """Which of the caller's data."""
    row: int
    """Row of the micro-batch."""
    tokens: slice
    """Its tokens in the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataAnswer:
    """What one rank answers: the data it ran; nothing from the other ranks of its tensor-parallel group."""

    logprobs: Mapping[int, FloatArray]
    """Log-probabilities of the targets by index of the datum, `[S]`."""
    sums: tuple[LossSums, ...]
    """Metrics of each micro-batch."""
    version: int
    """Policy version that computed them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSizes:
    """How data are cut into micro-batches."""

    row_tokens: int
    """Length of a row."""
    rows_per_microbatch: int
    """Rows that run at once."""
    multiple: int
    """What the length of rows is a multiple of, where they are not full."""


def run_data(
    learner: Learner, data: Sequence[Datum], sizes: RowSizes, loss: str | None, config: Mapping[str, float], *, backward: bool
) -> DataAnswer:
    """Run this rank's share of the data under a loss, or without one only for the log-probabilities.

    Args:
        loss: name of a loss, or `package.module:function` of a `CustomLoss`.
        config: the loss's options, see `named_objective`.
        backward: also add the gradient.

    Raises:
        ValueError: a datum is longer than a row or lacks what the loss needs; the loss or an option of it is not known.
    """
    check_data(data, sizes, loss)
    named = named_objective(loss, config) if loss is not None and ":" not in loss else None
    custom: CustomLoss | None = import_object(loss, key="loss_fn") if loss is not None and ":" in loss else None
    logprobs: dict[int, FloatArray] = {}
    sums = []
    for places in plan_data([len(datum.model_input) for datum in data], sizes, learner.model.dp_size, learner.model.dp_rank):
        rows = lay_out(data, places, sizes)
        objective = named if custom is None else _custom_objective(custom, data, places)
        if objective is None:
            logprobs_BL = learner.logprobs(rows)
        else:
            result = learner.run(rows, objective, backward=backward)
            logprobs_BL = result.logprobs_BL
            sums.append(result.sums)
        values_BL = logprobs_BL.float().cpu().numpy()
        logprobs |= {place.index: values_BL[place.row, place.tokens] for place in places}
    if learner.model.tp_rank != 0:
        logprobs = {}
    return DataAnswer(logprobs=logprobs, sums=tuple(sums), version=learner.version_in_use)


def plan_data(lengths: Sequence[int], sizes: RowSizes, dp_size: int, dp_rank: int) -> Iterator[list[Place]]:
    """The micro-batches of one rank, as many as on every other; those without data run one empty row."""
    rows = pack(lengths, sizes.row_tokens)
    shares = balance(row_costs(np.asarray(lengths), np.zeros(len(lengths), np.int64), rows), dp_size)
    per_microbatch = sizes.rows_per_microbatch
    own = [rows[i] for i in shares[dp_rank]]
    for start in range(0, max(map(len, shares)), per_microbatch):
        places = []
        for row, indices in enumerate(own[start : start + per_microbatch]):
            end = 0
            for index in indices:
                begin, end = end, end + lengths[index]
                places.append(Place(index, row, slice(begin, end)))
        yield places


def check_data(data: Sequence[Datum], sizes: RowSizes, loss: str | None) -> None:
    """Look at all data before anything runs: were one rank alone to find a mistake, the others would wait for it.

    Raises:
        ValueError: a datum is empty or longer than a row, lacks what the loss needs, or an array has another length.
    """
    ratio = loss not in (None, "cross_entropy") and ":" not in str(loss)
    needed = ("target_tokens", "logprobs", "advantages") if ratio else ("target_tokens",)
    for index, datum in enumerate(data):
        length = len(datum.model_input)
        if not 0 < length <= sizes.row_tokens:
            rule = f"must be 1 to trainer.row_tokens={sizes.row_tokens}"
            raise ValueError(f"data[{index}].model_input has {length} tokens: {rule}")
        for name in needed:
            if name not in datum.loss_fn_inputs:
                raise ValueError(f"data[{index}].loss_fn_inputs has no {name!r}, which the loss needs")
        for name, values in datum.loss_fn_inputs.items():
            if np.shape(values) != (length,):
                raise ValueError(f"data[{index}].loss_fn_inputs[{name!r}] has shape {np.shape(values)}, its input ({length},)")


def lay_out(data: Sequence[Datum], places: Sequence[Place], sizes: RowSizes) -> PackedRows:
    """The data of one micro-batch as packed rows."""
    length = row_length((place.tokens.stop for place in places), sizes.row_tokens, sizes.multiple)
    rows = empty_rows(1 + max((place.row for place in places), default=0), length)
    for place in places:
        datum, row = data[place.index], place.row
        rows.tokens_BL[row, place.tokens] = torch.from_numpy(np.asarray(datum.model_input))
        rows.positions_BL[row, place.tokens] = torch.arange(len(datum.model_input))
        rows.positions_BL[row, place.tokens.stop :] = torch.arange(length - place.tokens.stop)
        rows.targets_BL[row, place.tokens] = _input(datum, "target_tokens", 0.0).long()
        weights, logprobs = _input(datum, "weights", 1.0), _input(datum, "logprobs", 0.0)
        rows.mask_BL[row, place.tokens] = (weights != 0) & logprobs.isfinite()
        rows.weights_BL[row, place.tokens] = weights
        rows.logprobs_BL[row, place.tokens] = logprobs.nan_to_num()
        rows.advantages_BL[row, place.tokens] = _input(datum, "advantages", 0.0)
    return rows


def _input(datum: Datum, name: str, default: float) -> Tensor:
    """One array of a datum as a tensor of its input's length."""
    if name not in datum.loss_fn_inputs:
        return torch.full((len(datum.model_input),), default)
    return torch.from_numpy(np.asarray(datum.loss_fn_inputs[name]))


def _custom_objective(function: CustomLoss, data: Sequence[Datum], places: Sequence[Place]) -> Objective:
    """A caller's loss over the data of a micro-batch."""

    def objective(rows: PackedRows, logprobs_N: Tensor, entropy_N: Tensor) -> tuple[Tensor, LossMetrics]:
        logprobs_BL = logprobs_N.view(rows.tokens_BL.shape)
        loss = logprobs_N.sum() * 0.0
        metrics: Mapping[str, float] = {}
        failure: Exception | None = None
        if places:
            try:
                loss, metrics = function(
                    [data[place.index] for place in places], [logprobs_BL[place.row, place.tokens] for place in places]
                )
            except Exception as error:  # the caller's code may raise anything, and other ranks wait in backward for this one
                failure = error
        _fail_together(failure)
        sums = {name: torch.tensor(float(value)) for name, value in metrics.items()}
        return loss, LossMetrics(sums={"loss/policy": loss.detach().cpu(), **sums}, maxima={})

    return objective


def _fail_together(failure: Exception | None) -> None:
    """Raise on all ranks if there is a failure on any, each its own; a collective."""
    failures: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(failures, None if failure is None else repr(failure))
    if failure is not None:
        raise failure
    for rank, text in enumerate(failures):
        if text is not None:
            raise RuntimeError(f"the loss failed on trainer rank {rank}: {text}")
