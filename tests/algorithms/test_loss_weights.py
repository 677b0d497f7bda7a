import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanrl.algorithms.batch_plan import sequence_weights, without_rejected
from titanrl.carriers.tables import SEQUENCE, MicroBatch, RowTable
from titanrl.carriers.types import MeasuredCorrection
from titanrl.config.algorithm import Reduction

REDUCTIONS: tuple[Reduction, ...] = ("sum", "token_mean", "sequence_mean", "sequence_mean_token_sum", "prompt_mean", "constant")


def objective(
    reduction: Reduction, losses: list[list[float]], prompt_of: list[int] | None = None, constant_length: int = 1
) -> float:
    """Compute sum_it w_i * l_it over the token losses of each sequence."""
    weights = sequence_weights(
        reduction,
        num_sampled=[len(tokens) for tokens in losses],
        prompt_of=prompt_of or list(range(len(losses))),
        constant_length=constant_length,
    )
    return sum(weight * sum(tokens) for weight, tokens in zip(weights, losses, strict=True))


FIVE = [[1.0, 2.0], [4.0, 5.0, 6.0]]


@pytest.mark.parametrize(
    ("reduction", "losses", "prompt_of", "expected"),
    [  # those of the means and of the constant are the figures that SkyRL tests its loss reductions with
        ("token_mean", FIVE, None, 3.6),
        ("sequence_mean", [[1.0, 2.0], [3.0]], None, 2.25),
        ("constant", [[2.0, 3.0], [9.0]], None, 0.7),
        ("prompt_mean", [[1.0, 2.0], [3.0], [5.0, 6.0], [7.0, 8.0]], [0, 0, 1, 1], 4.25),
        ("sum", FIVE, None, 18.0),
        ("sequence_mean_token_sum", FIVE, None, 9.0),
    ],
)
def test_reductions_by_hand(
    reduction: Reduction, losses: list[list[float]], prompt_of: list[int] | None, expected: float
) -> None:
    assert objective(reduction, losses, prompt_of, constant_length=10) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_step_without_tokens_has_zero_weights(reduction: Reduction) -> None:
    assert sequence_weights(reduction, num_sampled=[0, 0], prompt_of=[0, 1], constant_length=5).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_sequence_without_tokens_is_not_counted(reduction: Reduction) -> None:
    losses, prompt_of = [[1.0, 2.0], [4.0, 5.0, 6.0]], [0, 1]
    alone = objective(reduction, losses, prompt_of, constant_length=4)
    assert objective(reduction, [*losses, []], [*prompt_of, 2], constant_length=4) == alone


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), min_size=1, max_size=30).filter(lambda s: any(n for n, _ in s))
)
def test_weights_of_means_sum_to_one(sequences: list[tuple[int, int]]) -> None:
    counts, prompts = [count for count, _ in sequences], [prompt for _, prompt in sequences]
    for reduction in ("token_mean", "sequence_mean", "prompt_mean"):
        weights = sequence_weights(reduction, num_sampled=counts, prompt_of=prompts, constant_length=1)
        assert sum(weight * count for weight, count in zip(weights, counts, strict=True)) == pytest.approx(1.0, rel=1e-12)


@given(st.integers(0, 2**32), st.sampled_from(REDUCTIONS))
def test_order_of_sequences_does_not_change_weights(seed: int, reduction: Reduction) -> None:
    rng = random.Random(seed)
    sequences = [(rng.randrange(5), rng.randrange(3)) for _ in range(8)]
    shuffled = rng.sample(range(8), k=8)
    weights = sequence_weights(
        reduction, num_sampled=[n for n, _ in sequences], prompt_of=[p for _, p in sequences], constant_length=3
    )
    moved = [sequences[i] for i in shuffled]
    after = sequence_weights(reduction, num_sampled=[n for n, _ in moved], prompt_of=[p for _, p in moved], constant_length=3)
    assert after.tolist() == [weights[i] for i in shuffled]


# Weights of a step without the rejected tokens. The first group has two rollouts: one has a segment of 2 tokens, all rejected,
# and one of 4 tokens, 3 of them kept; the other has 2 tokens, both kept. The second group has one rollout of 4 tokens, all
# rejected.

KEPT = [(0, 0, 2, 0), (0, 0, 4, 3), (0, 1, 2, 2), (1, 0, 4, 0)]
"""Group, rollout, and tokens before and after rejection of each segment."""


def split(places: list[list[list[int]]], weights: list[float]) -> tuple[list[MicroBatch], list[list[MeasuredCorrection]]]:
    """Return micro-batches and counts, with the segments of each micro-batch and rank in `places`."""
    microbatches, effects = [], []
    for ranks in places:
        tables, counts = [], []
        for rank, segments in enumerate(ranks):
            table = np.zeros(len(segments), SEQUENCE)
            table["handle"]["location"] = [KEPT[i][0] for i in segments]
            table["rollout"] = [KEPT[i][1] for i in segments]
            table["weight"] = [weights[i] for i in segments]
            tables.append(RowTable(table, np.arange(1, len(table) + 1)))
            both = np.array([KEPT[i][2:] for i in segments], np.int64).reshape(-1, 2)
            counts.append(MeasuredCorrection(dp_rank=rank, weight=0.0, num_weights=0, counts=both))
        microbatches.append(MicroBatch(rows=tuple(tables)))
        effects.append(counts[::-1])
    return microbatches, effects


@pytest.mark.parametrize("places", [[[[0, 1, 2, 3]]], [[[0], [1]], [[2], [3]]], [[[3, 1], []], [[0], [2]]]])
@pytest.mark.parametrize("importance", [1.0, 0.5])
@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("sum", [1.0, 1.0]),
        ("token_mean", [1 / 5, 1 / 5]),
        ("sequence_mean", [1 / (2 * 3), 1 / (2 * 2)]),
        ("sequence_mean_token_sum", [1 / 2, 1 / 2]),
        ("prompt_mean", [1 / 5, 1 / 5]),
        ("constant", [1 / (2 * 7), 1 / (2 * 7)]),
    ],
)
def test_rejected_segments_do_not_count_as_rollouts(
    reduction: Reduction, expected: list[float], importance: float, places: list[list[list[int]]]
) -> None:
    of_rollouts = sequence_weights(reduction, num_sampled=[6, 2, 4], prompt_of=[0, 0, 1], constant_length=7)
    microbatches, effects = split(places, [float(of_rollouts[i]) * importance for i in (0, 0, 1, 2)])
    found = without_rejected(microbatches, effects, reduction)
    weights = {}
    for microbatch, ranks in zip(found, places, strict=True):
        for table, segments in zip(microbatch.rows, ranks, strict=True):
            weights |= dict(zip(segments, table.sequences["weight"].tolist(), strict=True))
    first, second = (value * importance for value in expected)
    assert [weights[i] for i in range(4)] == pytest.approx([first, first, second, 0.0], rel=1e-15)
