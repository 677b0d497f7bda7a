"""Collate planned sequences into the tensors of packed rows.

The model's output at position t predicts the token at t + 1, so all values of a token are stored at the position before it.

Shape suffixes: B rows, L tokens of a row, N = B * L, S tokens of a sequence, T recorded tokens, Y layers, K experts of a token.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from titanrl.algorithms.logprobs import TeacherTokens, TokenSupports, token_supports
from titanrl.carriers.record import Columns
from titanrl.carriers.supports import ExpertIds, Supports
from titanrl.carriers.tables import MicroBatch, Row
from titanrl.carriers.types import GroupHandle, Segment
from titanrl.models.decoder import sequence_starts


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """Tensors of the packed rows of one micro-batch on one rank. The padding at the end of a row is one more sequence."""

    tokens_BL: torch.Tensor
    """Input token ids, 0 in the padding."""
    positions_BL: torch.Tensor
    """Position of each token in its sequence. A sequence starts at position 0, or after the tokens that it shares with
    earlier sequences of the row (`SequencePlan.num_shared`)."""
    targets_BL: torch.Tensor
    """Token id that each position predicts."""
    mask_BL: torch.Tensor
    """True where the target is a loss token: it was sampled by the policy, with a finite log-probability."""
    logprobs_BL: torch.Tensor
    """Log-probability of the target under the generator; 0 outside the mask."""
    versions_BL: torch.Tensor
    """Policy version that sampled the target; 0 outside the mask."""
    advantages_BL: torch.Tensor
    """Advantage of the target."""
    weights_BL: torch.Tensor
    """Loss weight of the target; 0 outside the mask."""
    predicts_BL: torch.Tensor
    """True at the tokens of sequences, except the last of each, whose prediction is not used."""
    proximal_BL: torch.Tensor | None = None
    """Log-probability of the target under the proximal policy, if the loss needs it."""
    reference_BL: torch.Tensor | None = None
    """Log-probability of the target under the reference policy, if the loss needs it."""
    values_BL: torch.Tensor | None = None
    """Value of the target before the update; None without a critic."""
    returns_BL: torch.Tensor | None = None
    """Return that the critic learns for the target; None without a critic."""
    supports: TokenSupports | None = None
    """Supports of the targets' distributions, `[N]`; None without truncated sampling."""
    experts_BLYK: torch.Tensor | None = None
    """Experts that the generator chose for each input token, as `ExpertIds` defines; None if no sequence has them."""
    teacher: TeacherTokens | None = None
    """Distributions of a teacher at the targets, if the loss is a divergence from it."""
    shares_prompts: bool = False
    """True if any sequence shares tokens with earlier sequences of its row."""

    @property
    def length(self) -> int:
        """Number of tokens of a row, L."""
        return self.tokens_BL.shape[1]

    @property
    def sequence_N(self) -> torch.Tensor:
        """Sequence id of each position, from 0."""
        return sequence_starts(self.positions_BL).flatten().cumsum(0) - 1

    def columns(self, *parts: slice) -> Self:
        """Return the rows with only some columns, as input of a model. Sequences are cut, so `sequence_N` is not defined."""
        changed: dict[str, Any] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, torch.Tensor):
                changed[name] = torch.cat([value[:, part] for part in parts], dim=1)
            elif isinstance(value, TokenSupports | TeacherTokens):
                changed[name] = value.columns(len(self.tokens_BL), *parts)
        return replace(self, **changed)

    def to(self, device: torch.device) -> Self:
        """Copy all tensors to a device; return `self` if they are already on it."""
        if self.tokens_BL.device == device:
            return self
        values: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        for name, value in values.items():
            if isinstance(value, torch.Tensor | TokenSupports | TeacherTokens):
                values[name] = value.to(device, non_blocking=True)
        return replace(self, **values)


def row_length(used: Iterable[int], row_tokens: int, multiple: int) -> int:
    """Return the largest number of used tokens, rounded up to a multiple, but at most `row_tokens`.

    Rows of this length avoid computing padding that all rows of a micro-batch have in common. The length may differ between
    ranks.
    """
    return min(row_tokens, -(-max(used, default=1) // multiple) * multiple)


def places(row: Row) -> Iterator[slice]:
    """Yield the positions of each sequence in its row."""
    end = 0
    for sequence in row:
        start, end = end, end + sequence.num_placed
        yield slice(start, end)


def empty_rows(num_rows: int, row_tokens: int) -> PackedRows:
    """Return rows of padding only, with an all-False mask."""
    return collate([()] * num_rows, {}, row_tokens)


def recorded_segments(
    microbatch: MicroBatch, rows: Sequence[Row], packed: PackedRows, logprobs_BL: torch.Tensor
) -> Iterator[tuple[dict[str, Any], Columns]]:
    """Yield the records of the sequences whose losses are recorded: values, and columns with one value per loss token.

    docs/record.md describes them. `rows` is the plan of the packed rows, and `logprobs_BL` has the log-probabilities of their
    targets under the policy being trained.
    """
    recorded = microbatch.recorded
    assert recorded is not None, "nothing is recorded"
    chosen = [
        (index, sequence, (b, place))
        for b, row in enumerate(rows)
        for sequence, place in zip(row, places(row), strict=True)
        if (index := recorded.indices.get(sequence.handle)) is not None
    ]
    if not chosen:
        return
    tensors_BL = {
        "logprobs": logprobs_BL,
        "generator_logprobs": packed.logprobs_BL,
        "versions": packed.versions_BL,
        "proximal_logprobs": packed.proximal_BL,
        "reference_logprobs": packed.reference_BL,
        "advantages": packed.advantages_BL,
        "weights": packed.weights_BL,
    }
    # Arrays, because an operation on a tensor takes several times as long, and on a GPU each would be a copy of its own. The
    # values of all sequences are selected at once.
    mask_BL = packed.mask_BL.cpu().numpy()
    found = [np.flatnonzero(mask_BL[place]) for _, _, place in chosen]
    places_T = np.concatenate(
        [row * packed.length + place.start + found_S for (_, _, (row, place)), found_S in zip(chosen, found, strict=True)]
    )
    columns_T = {
        name: values_BL.detach().cpu().numpy().ravel()[places_T]
        for name, values_BL in tensors_BL.items()
        if values_BL is not None
    }
    columns_T["versions"] = columns_T["versions"].astype(np.int32)
    now, end = time.time(), 0
    for (index, sequence, _), found_S in zip(chosen, found, strict=True):
        start, end = end, end + len(found_S)
        values = {
            "time": now,
            "step": recorded.step,
            "update": recorded.update,
            "index": index,
            "segment": sequence.segment,
            "mean_weight": microbatch.mean_weight,
        }
        # Each value is stored at the position before its token.
        positions = (found_S + sequence.num_shared + 1).astype(np.int32)
        yield values, {"positions": positions, **{name: column_T[start:end] for name, column_T in columns_T.items()}}


def placed_experts(parts: Sequence[tuple[int, slice, ExpertIds]], num_rows: int, row_tokens: int) -> torch.Tensor | None:
    """Place the experts of sequences, each with its row and positions, among tokens without; return None without parts.

    Raises:
        ValueError: The parts are of different models.
    """
    if not parts:
        return None
    kinds = {(experts.shape[1:], experts.dtype) for _, _, experts in parts}
    if len(kinds) > 1:
        raise ValueError(f"experts: recorded with different models (got {sorted(map(str, kinds))}). Use data of one model.")
    first = parts[0][2]
    experts_BLYK = np.full((num_rows, row_tokens, *first.shape[1:]), np.iinfo(first.dtype).max, first.dtype)
    for row, place, experts in parts:
        experts_BLYK[row, place] = experts
    return torch.from_numpy(experts_BLYK)


def collate(rows: Sequence[Row], payload: Mapping[GroupHandle, Mapping[int, Segment]], row_tokens: int) -> PackedRows:
    """Collate planned rows and their segments into tensors.

    Without rows, return one empty row, because all ranks must run the model in each micro-batch. `payload` has the segments of
    the rollouts by group and index of the segment.
    """
    num_rows = max(1, len(rows))
    tokens = np.zeros((num_rows, row_tokens), np.int64)
    positions = np.zeros((num_rows, row_tokens), np.int64)
    targets = np.zeros((num_rows, row_tokens), np.int64)
    versions = np.zeros((num_rows, row_tokens), np.int64)
    mask = np.zeros((num_rows, row_tokens), np.bool_)
    logprobs, advantages, weights = (np.zeros((num_rows, row_tokens), np.float32) for _ in range(3))
    predicts = np.zeros((num_rows, row_tokens), np.bool_)
    of_critic: list[npt.NDArray[np.float32]] = []  # values and returns
    supports: list[tuple[int, Supports]] = []
    experts: list[tuple[int, slice, ExpertIds]] = []
    for b in range(num_rows):
        end = 0
        for sequence, place in zip(rows[b], places(rows[b]), strict=True) if rows else ():
            segment = payload[sequence.handle][sequence.segment]
            first, start, end = sequence.num_shared, place.start, place.stop
            assert (len(segment.token_ids), end <= row_tokens) == (sequence.length, True), "the plan does not fit its payload"
            assert not segment.mask[: first + 1].any(), "a sampled token cannot be shared"
            tokens[b, start:end] = segment.token_ids[first:]
            positions[b, start:end] = np.arange(first, sequence.length)
            predicting, predicted = slice(start, end - 1), slice(first + 1, None)
            predicts[b, predicting] = True
            if segment.experts is not None:
                experts.append((b, place, segment.experts[first:]))
            targets[b, predicting] = segment.token_ids[predicted]
            trained = segment.mask[predicted] & np.isfinite(segment.logprobs[predicted])
            mask[b, predicting] = trained
            logprobs[b, predicting] = np.where(trained, segment.logprobs[predicted], 0.0)
            versions[b, predicting] = np.where(trained, segment.versions[predicted], 0)
            if sequence.spans:
                values, counts, *critic_columns = zip(*sequence.spans, strict=True)
                advantages[b, predicting][trained] = np.repeat(np.array(values, np.float32), counts)
                if critic_columns and not of_critic:
                    of_critic = [np.zeros_like(advantages) for _ in critic_columns]
                for column, numbers in zip(of_critic, critic_columns, strict=True):
                    column[b, predicting][trained] = numbers
            else:
                advantages[b, predicting] = sequence.advantage
            weights[b, predicting] = np.where(trained, sequence.weight, 0.0)
            if segment.supports is not None:
                limited = segment.supports[predicted].where(trained)
                assert limited.contains_S(segment.token_ids[predicted]).all(), "a sampled token is not in its support"
                supports.append((b * row_tokens + start, limited))
        positions[b, end:] = np.arange(row_tokens - end)
    return PackedRows(
        tokens_BL=torch.from_numpy(tokens),
        positions_BL=torch.from_numpy(positions),
        targets_BL=torch.from_numpy(targets),
        mask_BL=torch.from_numpy(mask),
        logprobs_BL=torch.from_numpy(logprobs),
        versions_BL=torch.from_numpy(versions),
        advantages_BL=torch.from_numpy(advantages),
        weights_BL=torch.from_numpy(weights),
        values_BL=torch.from_numpy(of_critic[0]) if of_critic else None,
        returns_BL=torch.from_numpy(of_critic[1]) if of_critic else None,
        supports=token_supports(supports, num_rows * row_tokens),
        experts_BLYK=placed_experts(experts, num_rows, row_tokens),
        predicts_BL=torch.from_numpy(predicts),
        shares_prompts=any(sequence.num_shared for row in rows for sequence in row),
    )
