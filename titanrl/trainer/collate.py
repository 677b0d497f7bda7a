"""Packed rows as tensors.

Shapes: B rows, L tokens of a row, N = B * L, S tokens of a sequence. The model's output at position t predicts the token at
t + 1, so the values of a token are stored at the position before it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import torch

from titanrl.algorithms.supports import CollatedSupports, TokenSupports
from titanrl.models.attention import sequence_starts
from titanrl.tables import Row
from titanrl.types import GroupHandle, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """Rows that one rank runs at once."""

    tokens_BL: torch.Tensor
    """Input tokens, 0 in the empty end of a row."""
    positions_BL: torch.Tensor
    """Position of the token in its sequence. A sequence starts at 0, or after the tokens that it shares with an earlier one of
    the row (`SequencePlan.num_shared`). The empty end of a row counts as one more sequence."""
    targets_BL: torch.Tensor
    """Token that each position predicts."""
    mask_BL: torch.Tensor
    """True where the policy sampled that token, with a finite log-probability."""
    logprobs_BL: torch.Tensor
    """Log-probability of the target, from the generator."""
    versions_BL: torch.Tensor
    """Policy version that sampled the target; 0 outside the mask."""
    advantages_BL: torch.Tensor
    """Advantage of the target."""
    weights_BL: torch.Tensor
    """Loss weight of the target, 0 outside the mask."""
    proximal_BL: torch.Tensor | None = None
    """Log-probability of the target under the proximal policy, if the loss needs it."""
    reference_BL: torch.Tensor | None = None
    """Log-probability of the target under the reference policy, if the loss needs it."""
    supports: TokenSupports | None = None
    """Support of the target's distribution at each position, rows one after another; None without truncated sampling."""
    shares_prompts: bool = False
    """True if a sequence shares its start with another one."""

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return self.tokens_BL.shape[1]

    @property
    def sequence_N(self) -> torch.Tensor:
        """Id of each position's sequence, from 0; the empty end of a row counts as one more sequence."""
        return sequence_starts(self.positions_BL).flatten().cumsum(0) - 1

    def to(self, device: torch.device) -> Self:
        """Copy the rows to a device; return `self` if they are already there."""
        if self.tokens_BL.device == device:
            return self
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        on_device = {
            name: value.to(device, non_blocking=True)
            for name, value in values.items()
            if isinstance(value, torch.Tensor | TokenSupports)
        }
        return type(self)(**values | on_device)


def row_length(used: Iterable[int], row_tokens: int, multiple: int) -> int:
    """Return the length of rows that use so many tokens each: the maximum, rounded up to a multiple, at most `row_tokens`.

    Shorter rows avoid computing the end that no row of a micro-batch uses. Ranks may run rows of different length.
    """
    return min(row_tokens, -(-max(used, default=1) // multiple) * multiple)


def empty_rows(num_rows: int, row_tokens: int) -> PackedRows:
    """Return rows without a sequence: token 0 everywhere, and an empty mask."""
    return collate([()] * num_rows, {}, row_tokens)


def collate(rows: Sequence[Row], payload: Mapping[GroupHandle, Mapping[int, Segment]], row_tokens: int) -> PackedRows:
    """Build rows of `row_tokens` from their sequences. Without rows, return one empty row: every rank must run the model."""
    num_rows = max(1, len(rows))
    tokens = np.zeros((num_rows, row_tokens), np.int64)
    positions = np.zeros((num_rows, row_tokens), np.int64)
    targets = np.zeros((num_rows, row_tokens), np.int64)
    versions = np.zeros((num_rows, row_tokens), np.int64)
    mask = np.zeros((num_rows, row_tokens), np.bool_)
    logprobs, advantages, weights = (np.zeros((num_rows, row_tokens), np.float32) for _ in range(3))
    supports = CollatedSupports(num_rows * row_tokens)
    for b in range(num_rows):
        start = 0
        for sequence in rows[b] if rows else ():
            segment = payload[sequence.handle][sequence.segment]
            first, end = sequence.num_shared, start + sequence.num_placed
            assert (len(segment.token_ids), end <= row_tokens) == (sequence.length, True), "the plan does not fit its payload"
            assert not segment.mask[: first + 1].any(), "a sampled token cannot be shared"
            tokens[b, start:end] = segment.token_ids[first:]
            positions[b, start:end] = np.arange(first, sequence.length)
            predicting, predicted = slice(start, end - 1), slice(first + 1, None)
            targets[b, predicting] = segment.token_ids[predicted]
            trained = segment.mask[predicted] & np.isfinite(segment.logprobs[predicted])
            mask[b, predicting] = trained
            logprobs[b, predicting] = np.where(trained, segment.logprobs[predicted], 0.0)
            versions[b, predicting] = np.where(trained, segment.versions[predicted], 0)
            if sequence.spans:
                values, counts = zip(*sequence.spans, strict=True)
                advantages[b, predicting][trained] = np.repeat(np.array(values, np.float32), counts)
            else:
                advantages[b, predicting] = sequence.advantage
            weights[b, predicting] = np.where(trained, sequence.weight, 0.0)
            if segment.supports is not None:
                limited = segment.supports[predicted].where(trained)
                assert limited.contains_S(segment.token_ids[predicted]).all(), "a sampled token is not in its support"
                supports.add(b * row_tokens + start, limited)
            start = end
        positions[b, start:] = np.arange(row_tokens - start)
    return PackedRows(
        tokens_BL=torch.from_numpy(tokens),
        positions_BL=torch.from_numpy(positions),
        targets_BL=torch.from_numpy(targets),
        mask_BL=torch.from_numpy(mask),
        logprobs_BL=torch.from_numpy(logprobs),
        versions_BL=torch.from_numpy(versions),
        advantages_BL=torch.from_numpy(advantages),
        weights_BL=torch.from_numpy(weights),
        supports=supports.collated(),
        shares_prompts=any(sequence.num_shared for row in rows for sequence in row),
    )
