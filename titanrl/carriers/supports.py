"""Records of the sampler for each token: the support of truncated sampling, and the experts of a mixture of experts.

A support is the vocabulary entries that top-k, top-p and min-p kept. Experts are one small integer by token, layer and choice.

Shape suffixes: S tokens, K words of all tokens or experts of a token, W words of a vocabulary bitmap, V vocabulary entries,
Y layers.
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


ExpertIds = npt.NDArray[Any]
"""Ids, `[S, Y, K]`, uint8 or uint16. The largest value of the type at all ids of a token states that none were recorded.

Example: two layers with two of 8 experts, of three tokens, the last of which has none:
`[[[0, 5], [7, 1]], [[5, 2], [1, 3]], [[255, 255], [255, 255]]]`, 4 bytes per token.
"""


def id_dtype(num_experts: int) -> Any:
    """Return the smallest type that holds the ids of `num_experts` experts and the value for none."""
    return np.dtype(np.uint8 if num_experts <= np.iinfo(np.uint8).max else np.uint16)


def has_ids_S(experts: ExpertIds) -> npt.NDArray[np.bool_]:
    """Return True for the tokens whose ids were recorded."""
    found: npt.NDArray[np.bool_] = (experts != np.iinfo(experts.dtype).max).any((1, 2))
    return found


def first_recorded(parts: Iterable[ExpertIds], num_tokens: int) -> ExpertIds | None:
    """Combine ids, all from token 0 on, into those of `num_tokens` tokens; return None without parts.

    Each token has the ids of the first part that has them.
    """
    merged: ExpertIds | None = None
    for part in parts:
        if merged is None:
            merged = np.full((num_tokens, *part.shape[1:]), np.iinfo(part.dtype).max, part.dtype)
        missing = np.flatnonzero(~has_ids_S(merged[: len(part)]))
        merged[missing] = part[missing]
    return merged


def joined_experts(parts: Sequence[tuple[ExpertIds | None, int]]) -> ExpertIds | None:
    """Join the expert ids of parts of a sequence, each with its number of tokens; parts without ids get the mark for none.

    Return None if no part has ids.
    """
    known = next((ids for ids, _ in parts if ids is not None), None)
    if known is None:
        return None
    none = np.iinfo(known.dtype).max
    return np.concatenate([np.full((num, *known.shape[1:]), none, known.dtype) if ids is None else ids for ids, num in parts])


def experts_bytes(experts: ExpertIds | None) -> tuple[Any, ...] | None:
    """Return the arguments of `experts_from`, which pickle faster than an array."""
    return None if experts is None else (experts.tobytes(), experts.dtype.str, *experts.shape[1:])


def experts_from(data: bytes, dtype: str, num_layers: int, per_token: int) -> ExpertIds:
    """Rebuild ids, `[S, num_layers, per_token]`, from the result of `experts_bytes`."""
    return np.frombuffer(data, dtype).reshape(-1, num_layers, per_token)
