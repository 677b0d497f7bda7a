"""Supports of the tokens of a micro-batch as masks of their logits.

Shape suffixes: N tokens, C tokens of a chunk, V vocabulary entries on this rank, I listed ids, M bitmaps, W words of a bitmap.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from titanrl.supports import WORD_BITS, Supports, bitmap_words, join, whole_vocabulary

Starts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSupports:
    """Supports of tokens, as ids or as bitmaps. The host knows which belong to a token, so no mask waits for the device."""

    sizes_N: Tensor
    """Entries in the support of each token."""
    is_whole_N: Tensor
    """True where the support is the whole vocabulary."""
    ids_I: Tensor
    """Ids of the small supports, one token after another, int32."""
    id_tokens_I: Tensor
    """Token of each id, int32."""
    id_starts: Starts
    """First id of each token, and the end of the last one's, `[N + 1]`, on the host."""
    bitmaps_MW: Tensor
    """Bitmaps of the other supports, int32."""
    bitmap_tokens_M: Tensor
    """Token of each bitmap, int32."""
    bitmap_starts: Starts
    """First bitmap of each token, and the end of the last one's, `[N + 1]`, on the host."""

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Self:
        """Copy the tensors to a device."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        return type(self)(**values | {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in tensors.items()})

    def limits_any(self, tokens: slice) -> bool:
        """Return True if the support of one of these tokens is a part of the vocabulary."""
        first, last, _ = tokens.indices(len(self.is_whole_N))
        has_ids = self.id_starts[first] < self.id_starts[last]
        return bool(has_ids or self.bitmap_starts[first] < self.bitmap_starts[last])

    def outside(self, tokens: slice, vocab_start: int, num_entries: int) -> Tensor:
        """Mark the vocabulary entries that are not in the support of some tokens, `[C, V]`.

        Args:
            tokens: The tokens.
            vocab_start: First vocabulary entry of this rank.
            num_entries: Entries of this rank, V.
        """
        first, last, _ = tokens.indices(len(self.is_whole_N))
        size = (last - first) * num_entries
        flat = torch.empty(size + 1, dtype=torch.bool, device=self.is_whole_N.device)  # the last element takes other ranks' ids
        outside = flat[:size].view(last - first, num_entries)
        torch.logical_not(self.is_whole_N[first:last, None].expand_as(outside), out=outside)
        listed = slice(self.id_starts[first], self.id_starts[last])
        columns_I = self.ids_I[listed].long() - vocab_start
        places_I = (self.id_tokens_I[listed].long() - first) * num_entries + columns_I
        flat.index_fill_(0, torch.where((columns_I >= 0) & (columns_I < num_entries), places_I, size), 0)
        mapped = slice(self.bitmap_starts[first], self.bitmap_starts[last])
        if mapped.start < mapped.stop:
            bits = torch.arange(WORD_BITS, dtype=torch.int32, device=outside.device)
            words = slice(vocab_start // WORD_BITS, bitmap_words(vocab_start + num_entries))
            unpacked = ((self.bitmaps_MW[mapped, words, None] >> bits) & 1).flatten(1)
            inside = unpacked[:, vocab_start % WORD_BITS :][:, :num_entries]
            outside[self.bitmap_tokens_M[mapped].long() - first, : inside.shape[1]] = inside == 0
        return outside

    def columns(self, num_rows: int, start: int, stop: int) -> Self:
        """Return the supports of some columns, if the tokens are those of `num_rows` rows of equal length."""
        if num_rows == 1:
            return self._parts([slice(start, stop)])
        length = len(self.is_whole_N) // num_rows
        return self._parts([slice(row * length + start, row * length + stop) for row in range(num_rows)])

    def _parts(self, parts: Sequence[slice]) -> Self:
        """Return the supports of several ranges of tokens, one after another."""
        width = parts[0].stop - parts[0].start
        listed = [slice(self.id_starts[part.start], self.id_starts[part.stop]) for part in parts]
        mapped = [slice(self.bitmap_starts[part.start], self.bitmap_starts[part.stop]) for part in parts]
        moved = [part.start - index * width for index, part in enumerate(parts)]
        return replace(
            self,
            sizes_N=torch.cat([self.sizes_N[part] for part in parts]),
            is_whole_N=torch.cat([self.is_whole_N[part] for part in parts]),
            ids_I=torch.cat([self.ids_I[part] for part in listed]),
            id_tokens_I=torch.cat([self.id_tokens_I[part] - by for part, by in zip(listed, moved, strict=True)]),
            id_starts=_joined_starts(self.id_starts, parts),
            bitmaps_MW=torch.cat([self.bitmaps_MW[part] for part in mapped]),
            bitmap_tokens_M=torch.cat([self.bitmap_tokens_M[part] - by for part, by in zip(mapped, moved, strict=True)]),
            bitmap_starts=_joined_starts(self.bitmap_starts, parts),
        )


class CollatedSupports:
    """Supports of the sequences in packed rows, added in the order of their positions."""

    def __init__(self, num_tokens: int) -> None:
        """Start with no limited token among `num_tokens`."""
        self._num_tokens = num_tokens
        self._parts: list[Supports] = []
        self._end = 0

    def add(self, start: int, supports: Supports) -> None:
        """Add the supports of consecutive tokens, at or after the end of those before."""
        self._parts += whole_vocabulary(start - self._end, supports.vocab_size), supports
        self._end = start + len(supports)

    def collated(self) -> TokenSupports | None:
        """Return the supports of all tokens; None if nothing was added."""
        if not self._parts:
            return None
        rest = whole_vocabulary(self._num_tokens - self._end, self._parts[0].vocab_size)
        return token_supports(join([*self._parts, rest]))


def token_supports(supports: Supports) -> TokenSupports:
    """Return supports as tensors on the host."""
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


def _joined_starts(starts: Starts, parts: Sequence[slice]) -> Starts:
    return _starts(np.concatenate([np.diff(starts[part.start : part.stop + 1]) for part in parts]))
