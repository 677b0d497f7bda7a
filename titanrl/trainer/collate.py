"""Packed rows as tensors.

Shapes: B rows, L tokens of a row, N = B * L, S tokens of a sequence. The model's output at place t predicts the token at
t + 1, so everything about a token stands at the place that predicts it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch

from titanrl.types import Handle, Rollout, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """The rows one rank runs at once."""

    tokens_BL: torch.Tensor
    """Input tokens, 0 where a row is empty."""
    positions_BL: torch.Tensor
    """Place of the token in its sequence; 0 starts a sequence. The empty end of a row counts as one more."""
    targets_BL: torch.Tensor
    """The token each place predicts."""
    mask_BL: torch.Tensor
    """True where that token was sampled by the policy, with a finite log-probability."""
    logprobs_BL: torch.Tensor
    """The generator's log-probability of the target."""
    versions_BL: torch.Tensor
    """Policy version that sampled the target; 0 outside the mask."""
    advantages_BL: torch.Tensor
    """Advantage of the target."""
    weights_BL: torch.Tensor
    """Loss weight of the target, 0 outside the mask."""
    proximal_BL: torch.Tensor | None = None
    """The target's log-probability under the proximal policy, where a loss was given one."""
    reference_BL: torch.Tensor | None = None
    """The target's log-probability under the reference policy, where a loss was given one."""

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return self.tokens_BL.shape[1]

    @property
    def sequence_N(self) -> torch.Tensor:
        """Number of each place's sequence among those of these rows, from 0; the empty end of a row counts as one more."""
        return (self.positions_BL == 0).flatten().cumsum(0) - 1

    def to(self, device: torch.device) -> Self:
        """The same rows on a device; themselves if they are there already."""
        if self.tokens_BL.device == device:
            return self
        given = {field.name: getattr(self, field.name) for field in fields(self) if getattr(self, field.name) is not None}
        return type(self)(**{name: value.to(device, non_blocking=True) for name, value in given.items()})


def row_length(used: Iterable[int], row_tokens: int, multiple: int) -> int:
    """How long rows need to be that use so many tokens each: the longest, rounded up to a multiple, at most `row_tokens`.

    Nothing is computed for the end that no row of a micro-batch uses. Ranks may run rows of different length.
    """
    return min(row_tokens, -(-max(used, default=1) // multiple) * multiple)


def empty_rows(num_rows: int, row_tokens: int) -> PackedRows:
    """Rows without a sequence: token 0 everywhere, and nothing that counts."""
    return collate([()] * num_rows, {}, row_tokens)


def collate(rows: Sequence[Row], payload: Mapping[Handle, Mapping[int, Rollout]], row_tokens: int) -> PackedRows:
    """Lay sequences one after another into rows of `row_tokens`; no rows give one empty row, so that every rank has work."""
    num_rows = max(1, len(rows))
    tokens = np.zeros((num_rows, row_tokens), np.int64)
    positions = np.zeros((num_rows, row_tokens), np.int64)
    targets = np.zeros((num_rows, row_tokens), np.int64)
    versions = np.zeros((num_rows, row_tokens), np.int64)
    mask = np.zeros((num_rows, row_tokens), np.bool_)
    logprobs, advantages, weights = (np.zeros((num_rows, row_tokens), np.float32) for _ in range(3))
    for b in range(num_rows):
        start = 0
        for sequence in rows[b] if rows else ():
            rollout = payload[sequence.handle][sequence.rollout]
            end = start + len(rollout.token_ids)
            assert (len(rollout.token_ids), end <= row_tokens) == (sequence.length, True), "the plan does not fit its payload"
            tokens[b, start:end] = rollout.token_ids
            positions[b, start:end] = np.arange(sequence.length)
            predicting = slice(start, end - 1)
            targets[b, predicting] = rollout.token_ids[1:]
            trained = rollout.mask[1:] & np.isfinite(rollout.logprobs[1:])
            mask[b, predicting] = trained
            logprobs[b, predicting] = np.where(trained, rollout.logprobs[1:], 0.0)
            versions[b, predicting] = np.where(trained, rollout.versions[1:], 0)
            advantages[b, predicting] = sequence.advantage
            weights[b, predicting] = np.where(trained, sequence.weight, 0.0)
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
    )
