import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanrl.algorithms.batch_plan import sequence_weights, without_rejected
from titanrl.base.choices import Reduction
from titanrl.carriers.tables import SEQUENCE, MicroBatch, RowTable
from titanrl.carriers.types import MeasuredCorrection

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


# The next five are the figures that SkyRL tests its loss reductions with.


def test_token_mean_is_mean_over_all_tokens() -> None:
    assert objective("token_mean", [[1.0, 2.0], [4.0, 5.0, 6.0]]) == pytest.approx(3.6, rel=1e-15)


def test_sequence_mean_is_mean_of_sequence_means() -> None:
    assert objective("sequence_mean", [[1.0, 2.0], [3.0]]) == pytest.approx(2.25, rel=1e-15)


def test_constant_divides_each_sequence_by_fixed_length() -> None:
    assert objective("constant", [[2.0, 3.0], [9.0]], constant_length=10) == pytest.approx(0.7, rel=1e-15)


def test_prompt_mean_is_mean_of_prompt_means() -> None:
    losses = [[1.0, 2.0], [3.0], [5.0, 6.0], [7.0, 8.0]]
    assert objective("prompt_mean", losses, prompt_of=[0, 0, 1, 1]) == pytest.approx(4.25, rel=1e-15)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_step_without_tokens_has_zero_weights(reduction: Reduction) -> None:
    assert sequence_weights(reduction, num_sampled=[0, 0], prompt_of=[0, 1], constant_length=5).tolist() == [0.0, 0.0]


def test_sum_and_token_sum_add_token_losses() -> None:
    losses = [[1.0, 2.0], [4.0, 5.0, 6.0]]
    assert objective("sum", losses) == 18.0
    assert objective("sequence_mean_token_sum", losses) == 9.0


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_sequence_without_tokens_is_not_counted(reduction: Reduction) -> None:
    losses, prompt_of = [[1.0, 2.0], [4.0, 5.0, 6.0]], [0, 1]
    alone = objective(reduction, losses, prompt_of, constant_length=4)
    assert objective(reduction, [*losses, []], [*prompt_of, 2], constant_length=4) == alone


@pytest.mark.parametrize(
    ("reduction", "factor"), [("token_mean", 1), ("sequence_mean", 1), ("prompt_mean", 1), ("constant", 1), ("sum", 2)]
)
def test_doubling_every_sequence_changes_only_sum(reduction: Reduction, factor: int) -> None:
    losses = [[1.0, 2.0], [4.0, 5.0, 6.0], [0.5]]
    once = objective(reduction, losses, [0, 0, 1], constant_length=4)
    twice = objective(reduction, losses + losses, [0, 0, 1, 2, 2, 3], constant_length=4)
    assert twice == pytest.approx(factor * once, rel=1e-14)


def test_unequal_micro_batches_give_exact_token_mean() -> None:
    # 100 tokens of loss 0.5 and 900 of 0.3: (50 + 270) / 1000 = 0.32, where the mean of the two means would be 0.4.
    weights = sequence_weights("token_mean", num_sampled=[100, 900], prompt_of=[0, 1], constant_length=1)
    first, second = weights[0] * 100 * 0.5, weights[1] * 900 * 0.3
    assert first + second == pytest.approx(0.32, rel=1e-15)
    assert second + first == pytest.approx(0.32, rel=1e-15)


def test_ragged_sequences_give_exact_token_mean() -> None:
    lengths = [7, 93, 1, 300, 99, 200, 50, 150, 60, 40]  # the first two hold the 100 tokens of loss 0.5
    losses = [[0.5 if i < 2 else 0.3] * length for i, length in enumerate(lengths)]
    assert objective("token_mean", losses) == pytest.approx(0.32, rel=1e-14)


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
