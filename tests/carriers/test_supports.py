"""Supports of truncated sampling as ragged words."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanrl.carriers.supports import Supports, bitmap_words, join, placed, supports_of, words_of


def supports(ids: list[list[int]], vocab_size: int) -> Supports:
    return supports_of([words_of(np.array(sorted(some), np.int32), vocab_size) for some in ids], vocab_size)


def lists(made: Supports) -> list[list[int]]:
    return [made.ids(token).tolist() for token in range(len(made))]


def test_small_supports_are_ids_and_large_ones_bitmaps() -> None:
    made = supports([[4, 9], [0, 1, 2, 69], list(range(70))], 70)
    assert made.counts_S.tolist() == [2, 3, 0]
    assert made.words_K.tolist() == [4, 9, 7, 0, 32]
    assert made.is_bitmap_S.tolist() == [False, True, False]
    assert made.sizes_S().tolist() == [2, 4, 70]
    assert lists(made) == [[4, 9], [0, 1, 2, 69], list(range(70))]


def test_last_bit_of_a_word_is_kept() -> None:
    assert lists(supports([[0, 31], [31, 32, 63]], 64)) == [[0, 31], [31, 32, 63]]


def test_tiny_vocabulary_is_always_a_bitmap() -> None:
    made = supports([[3], [0, 2]], 5)
    assert made.counts_S.tolist() == [1, 1]
    assert lists(made) == [[3], [0, 2]]


@pytest.mark.parametrize(("size", "num_bytes"), [(20, 80), (4747, 18_988), (4748, 18_992), (100_000, 18_992), (151_936, 0)])
def test_bytes_per_token(size: int, num_bytes: int) -> None:
    assert words_of(np.arange(size, dtype=np.int32), 151_936).nbytes == num_bytes
    assert bitmap_words(151_936) == 4748


@st.composite
def drawn(draw: st.DrawFn) -> tuple[list[list[int]], int]:
    vocab_size = draw(st.integers(1, 200))
    one = st.lists(st.integers(0, vocab_size - 1), min_size=1, unique=True).map(sorted)
    return draw(st.lists(one, max_size=6)), vocab_size


@given(drawn(), st.integers(0, 6), st.integers(0, 6))
def test_slices_and_copies_have_the_same_ids(example: tuple[list[list[int]], int], first: int, last: int) -> None:
    ids, vocab_size = example
    made = supports(ids, vocab_size)
    assert lists(made) == ids
    assert made.sizes_S().tolist() == [len(some) for some in ids]
    part = made[first:last]
    assert lists(part) == ids[first:last]
    joined = placed([(2, join([part, made]))], 2 + len(part) + len(made))
    assert lists(joined) == [list(range(vocab_size))] * 2 + ids[first:last] + ids
    assert lists(pickle.loads(pickle.dumps(joined))) == lists(joined)
    for entry in (0, vocab_size - 1, vocab_size, -1):
        assert made.contains_S(np.full(len(made), entry)).tolist() == [entry in some or len(some) == vocab_size for some in ids]
    kept = np.arange(len(made)) % 2 == 0
    masked = made.where(kept)
    assert lists(masked) == [some if keep else list(range(vocab_size)) for some, keep in zip(ids, kept, strict=True)]
