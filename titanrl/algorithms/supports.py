"""Supports of truncated sampling (top-p, top-k, min-p) as logit masks for the tokens of a micro-batch.

The support of a token is the set of vocabulary entries that truncation kept when the token was sampled.

Shape suffixes: N tokens, C tokens of a chunk, V vocabulary entries on this rank, I listed ids, M bitmaps, W words of a bitmap.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from titanrl.carriers.supports import WORD_BITS, Supports, bitmap_words, join, whole_vocabulary

Starts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSupports:
    """Supports of tokens: the full vocabulary, a list of ids, or a bitmap.

    Offsets are stored on the host, so slicing the supports of some tokens needs no device synchronization.
    """

    sizes_N: Tensor
    """Number of entries in each token's support."""
    is_whole_N: Tensor
    """True where the support is the full vocabulary."""
    ids_I: Tensor
    """Vocabulary ids of the small supports, concatenated over tokens, int32."""
    id_tokens_I: Tensor
    """Index of the token that each id belongs to, int32."""
    id_starts: Starts
    """Offsets of the tokens in `ids_I`, `[N + 1]`, on the host."""
    bitmaps_MW: Tensor
    """Bitmaps of the other supports, int32."""
    bitmap_tokens_M: Tensor
    """Index of the token that each bitmap belongs to, int32."""
    bitmap_starts: Starts
    """Offsets of the tokens in `bitmaps_MW`, `[N + 1]`, on the host."""

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Self:
        """Copy the tensors to a device."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        return type(self)(**values | {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in tensors.items()})

    def limits_any(self, tokens: slice) -> bool:
        """Return True if any of these tokens has a support smaller than the vocabulary."""
        first, last, _ = tokens.indices(len(self.is_whole_N))
        has_ids = self.id_starts[first] < self.id_starts[last]
        return bool(has_ids or self.bitmap_starts[first] < self.bitmap_starts[last])

    def outside(self, tokens: slice, vocab_start: int, num_entries: int) -> Tensor:
        """Return a mask that is True at vocabulary entries outside the support, bool `[C, V]`.

        Args:
            tokens: Slice of C tokens.
            vocab_start: Id of this rank's first vocabulary entry.
            num_entries: Number of vocabulary entries on this rank, V.
        """
        first, last, _ = tokens.indices(len(self.is_whole_N))
        size = (last - first) * num_entries
        # The extra last element is a dummy target for ids that belong to other ranks.
        flat = torch.empty(size + 1, dtype=torch.bool, device=self.is_whole_N.device)
        outside = flat[:size].view(last - first, num_entries)
        torch.logical_not(self.is_whole_N[first:last, None].expand_as(outside), out=outside)
        listed = slice(self.id_starts[first], self.id_starts[last])
        columns_I = self.ids_I[listed].long() - vocab_start
        flat_indices_I = (self.id_tokens_I[listed].long() - first) * num_entries + columns_I
        flat.index_fill_(0, torch.where((columns_I >= 0) & (columns_I < num_entries), flat_indices_I, size), 0)
        mapped = slice(self.bitmap_starts[first], self.bitmap_starts[last])
        if mapped.start < mapped.stop:
            bits = torch.arange(WORD_BITS, dtype=torch.int32, device=outside.device)
            words = slice(vocab_start // WORD_BITS, bitmap_words(vocab_start + num_entries))
            unpacked = ((self.bitmaps_MW[mapped, words, None] >> bits) & 1).flatten(1)
            inside = unpacked[:, vocab_start % WORD_BITS :][:, :num_entries]
            outside[self.bitmap_tokens_M[mapped].long() - first, : inside.shape[1]] = inside == 0
        return outside

    def columns(self, num_rows: int, start: int, stop: int) -> Self:
        """Return the supports of columns `start` to `stop`, where the tokens are the flattened `num_rows` rows of a matrix."""
        length = len(self.is_whole_N) // num_rows
        slices = [slice(row * length + start, row * length + stop) for row in range(num_rows)]
        listed = [slice(self.id_starts[tokens.start], self.id_starts[tokens.stop]) for tokens in slices]
        mapped = [slice(self.bitmap_starts[tokens.start], self.bitmap_starts[tokens.stop]) for tokens in slices]
        shifts = [tokens.start - row * (stop - start) for row, tokens in enumerate(slices)]
        return replace(
            self,
            sizes_N=torch.cat([self.sizes_N[tokens] for tokens in slices]),
            is_whole_N=torch.cat([self.is_whole_N[tokens] for tokens in slices]),
            ids_I=torch.cat([self.ids_I[ids] for ids in listed]),
            id_tokens_I=torch.cat([self.id_tokens_I[ids] - shift for ids, shift in zip(listed, shifts, strict=True)]),
            id_starts=_joined_starts(self.id_starts, slices),
            bitmaps_MW=torch.cat([self.bitmaps_MW[bitmaps] for bitmaps in mapped]),
            bitmap_tokens_M=torch.cat([self.bitmap_tokens_M[rows] - shift for rows, shift in zip(mapped, shifts, strict=True)]),
            bitmap_starts=_joined_starts(self.bitmap_starts, slices),
        )


class CollatedSupports:
    """Builder of the supports of packed rows. Sequences must be added in order of position."""

    def __init__(self, num_tokens: int) -> None:
        """Start with full supports for all `num_tokens` tokens."""
        self._num_tokens = num_tokens
        self._parts: list[Supports] = []
        self._end = 0

    def add(self, start: int, supports: Supports) -> None:
        """Add the supports of consecutive tokens from position `start` on, which must not precede the end of the last ones."""
        self._parts += whole_vocabulary(start - self._end, supports.vocab_size), supports
        self._end = start + len(supports)

    def collated(self) -> TokenSupports | None:
        """Return the supports of all tokens; None if none were added."""
        if not self._parts:
            return None
        rest = whole_vocabulary(self._num_tokens - self._end, self._parts[0].vocab_size)
        return token_supports(join([*self._parts, rest]))


def token_supports(supports: Supports) -> TokenSupports:
    """Convert supports to tensors on the host."""
    counts = supports.counts_S.astype(np.int64)
    is_bitmap = supports.is_bitmap_S
    words_are_bitmaps = np.repeat(is_bitmap, counts)
    id_counts = np.where(is_bitmap, 0, counts)
    tokens = np.arange(len(counts), dtype=np.int32)
    return TokenSupports(
        sizes_N=torch.from_numpy(supports.sizes_S()),
        is_whole_N=torch.from_numpy(counts == 0),
        ids_I=torch.from_numpy(supports.words_K[~words_are_bitmaps]),
        id_tokens_I=torch.from_numpy(np.repeat(tokens, id_counts)),
        id_starts=_starts(id_counts),
        bitmaps_MW=torch.from_numpy(supports.words_K[words_are_bitmaps].reshape(-1, bitmap_words(supports.vocab_size))),
        bitmap_tokens_M=torch.from_numpy(tokens[is_bitmap]),
        bitmap_starts=_starts(is_bitmap.astype(np.int64)),
    )


def _starts(counts: npt.NDArray[np.int64]) -> Starts:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def _joined_starts(starts: Starts, slices: Sequence[slice]) -> Starts:
    return _starts(np.concatenate([np.diff(starts[tokens.start : tokens.stop + 1]) for tokens in slices]))
