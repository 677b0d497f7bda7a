"""Supports of truncated sampling: the vocabulary entries that top-k, top-p and min-p kept for each token.

Shape suffixes: S tokens, K words of all tokens, W words of a vocabulary bitmap, V vocabulary entries.
"""

import copyreg
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]

WORD_BITS = 32


def bitmap_words(vocab_size: int) -> int:
    """Return the number of 32-bit words in a bitmap of the vocabulary."""
    return -(-vocab_size // WORD_BITS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Supports:
    """The supports of consecutive tokens, stored as ragged lists of 32-bit words, in the smaller of two encodings.

    Fewer than W words are the ids of the entries, in increasing order. W words are a bitmap: entry v is bit v % 32 of word
    v // 32. No words mean the whole vocabulary. A token thus takes 4 bytes per entry of its support, at most V / 8 bytes.

    Example: the supports `{4, 9}`, `{0, 1, 2, 69}` and all of 70 entries, with bitmaps of 3 words: `counts_S=[2, 3, 0]`,
    `words_K=[4, 9, 7, 0, 32]`.
    """

    counts_S: Int32Array
    """Number of words of each token."""
    words_K: Int32Array
    """Words of all tokens, concatenated."""
    vocab_size: int
    """Number of vocabulary entries."""

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.counts_S)

    def __getitem__(self, tokens: slice) -> "Supports":
        """Return the supports of a slice of the tokens (step 1)."""
        first, last, _ = tokens.indices(len(self))
        ends_S = self.ends_S
        words = slice(0 if first == 0 else ends_S[first - 1], 0 if last == 0 else ends_S[last - 1])
        return Supports(counts_S=self.counts_S[tokens], words_K=self.words_K[words], vocab_size=self.vocab_size)

    @property
    def ends_S(self) -> npt.NDArray[np.int64]:
        """Index after each token's last word."""
        return np.cumsum(self.counts_S, dtype=np.int64)

    @property
    def is_bitmap_S(self) -> npt.NDArray[np.bool_]:
        """True for tokens whose words are a bitmap."""
        return np.equal(self.counts_S, bitmap_words(self.vocab_size))

    def where(self, kept_S: npt.NDArray[np.bool_]) -> "Supports":
        """Return the supports with the whole vocabulary for all tokens where `kept_S` is False."""
        return Supports(
            counts_S=np.where(kept_S, self.counts_S, 0).astype(np.int32),
            words_K=self.words_K[np.repeat(kept_S, self.counts_S)],
            vocab_size=self.vocab_size,
        )

    def sizes_S(self) -> npt.NDArray[np.int64]:
        """Return the number of entries in each support."""
        is_bitmap_S = self.is_bitmap_S
        sizes_S = np.where(self.counts_S == 0, self.vocab_size, self.counts_S).astype(np.int64)
        bitmaps = self.words_K[np.repeat(is_bitmap_S, self.counts_S)].reshape(-1, bitmap_words(self.vocab_size))
        sizes_S[is_bitmap_S] = np.bitwise_count(bitmaps.view(np.uint32)).sum(-1)
        return sizes_S

    def contains_S(self, entries_S: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return, for each token, True if its support contains the corresponding entry of `entries_S`."""
        is_bitmap_S, tokens = self.is_bitmap_S, np.arange(len(self))
        found_S: npt.NDArray[np.bool_] = np.equal(self.counts_S, 0)
        token_K = np.repeat(tokens, self.counts_S)
        is_listed_K = ~is_bitmap_S[token_K] & (self.words_K == entries_S[token_K])
        found_S[token_K[is_listed_K]] = True
        mapped = tokens[is_bitmap_S & (entries_S >= 0) & (entries_S < self.vocab_size)]
        words = self.words_K[(self.ends_S - self.counts_S)[mapped] + entries_S[mapped] // WORD_BITS]
        found_S[mapped] = (words >> (entries_S[mapped] % WORD_BITS)) & 1 == 1
        return found_S

    def ids(self, index: int) -> npt.NDArray[np.int64]:
        """Return the support of the token at `index`: token ids in increasing order."""
        one = self[index : index + 1]
        if len(one.words_K) == 0:
            return np.arange(self.vocab_size)
        if one.is_bitmap_S[0]:
            bits = np.unpackbits(np.ascontiguousarray(one.words_K, "<i4").view(np.uint8), bitorder="little")
            return np.flatnonzero(bits)
        return one.words_K.astype(np.int64)


def supports_of(words: Sequence[Int32Array], vocab_size: int) -> Supports:
    """Build supports from the words of each token."""
    counts_S = np.fromiter(map(len, words), np.int32, len(words))
    words_K = np.concatenate([np.zeros(0, np.int32), *words])
    return Supports(counts_S=counts_S, words_K=words_K, vocab_size=vocab_size)


def words_of(ids: Int32Array, vocab_size: int) -> Int32Array:
    """Encode one support, given as ids in increasing order, as words."""
    if len(ids) >= vocab_size:
        return ids[:0]
    if len(ids) < bitmap_words(vocab_size):
        return ids
    bits = np.zeros(bitmap_words(vocab_size) * WORD_BITS, np.uint8)
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").view("<i4")


def placed(parts: Sequence[tuple[int, Supports]], num_tokens: int) -> Supports:
    """Place supports, each from the token at the given index, among tokens that support the whole vocabulary.

    There must be at least one part, and parts must be in order and must not overlap.
    """
    counts_S = np.zeros(num_tokens, np.int32)
    for start, supports in parts:
        counts_S[start : start + len(supports)] = supports.counts_S
    return replace(join(supports for _, supports in parts), counts_S=counts_S)


def join(parts: Iterable[Supports]) -> Supports:
    """Join supports, at least one, into one object. All must have the same vocabulary size."""
    parts = list(parts)
    assert len({part.vocab_size for part in parts}) == 1, "supports of different vocabularies"
    return Supports(
        counts_S=np.concatenate([part.counts_S for part in parts]),
        words_K=np.concatenate([part.words_K for part in parts]),
        vocab_size=parts[0].vocab_size,
    )


def _from_bytes(counts: bytes, words: bytes, vocab_size: int) -> Supports:
    return Supports(counts_S=np.frombuffer(counts, "<i4"), words_K=np.frombuffer(words, "<i4"), vocab_size=vocab_size)


def _reduce(value: Supports) -> tuple[Any, ...]:
    return _from_bytes, (value.counts_S.astype("<i4").tobytes(), value.words_K.astype("<i4").tobytes(), value.vocab_size)


copyreg.pickle(Supports, _reduce)
