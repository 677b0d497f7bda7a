"""Advantages and returns from the values of a critic, and the critic's loss; expected numbers by hand in float64.

The rollouts are those of `test_credit`: A has segments of 5 tokens (turns of 2 and 3) and of 1 token, B turns of 4 and 1
tokens, C one turn of 2 tokens. Rewards are at the last token of each turn: A 0, 1, 2; B 1, 0; C 4.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from tests.algorithms.test_credit import group, sequences
from titanrl.algorithms.batch_plan import plan_batch, plan_step
from titanrl.algorithms.gae import TokenValues, collect_values, critic_advantages, gae, value_metrics
from titanrl.algorithms.losses import value_loss, weighted_sum
from titanrl.carriers.tables import BatchPlan, RecordTable
from titanrl.carriers.types import RankValues
from titanrl.config.algorithm import AlgorithmConfig

VALUES = [0.5, 1.0, 0.0, 0.5, 1.0, 2.0, 0.5, 0.5, 0.5, 0.5, 1.0, 3.0, 2.0]
OPTIONS = {"rows_per_microbatch": 2, "constant_length": 10, "row_tokens": 8}


def algorithm(**critic: object) -> AlgorithmConfig:
    options = {"token_lambda": 0.5, "turn_lambda": 0.25, "standardize": False, **critic}
    return AlgorithmConfig.model_validate(
        {"advantage": "gae", "token_discount": 0.9, "turn_discount": 0.8, "critic": options}, strict=False
    )


def values(last: tuple[float, float, float] = (7.0, 8.0, 9.0), groups: int = 1) -> TokenValues:
    return TokenValues(values_T=np.array(VALUES * groups, np.float32), last_N=np.array(last * groups, np.float32))


def by_hand(after_c: float = 0.0) -> np.ndarray:
    """Return the advantages of the 13 tokens; each line is A_t = r_t + g V_(t+1) - V_t + g l A_(t+1)."""
    g, h, gl, hl = 0.9, 0.8, 0.9 * 0.5, 0.8 * 0.25  # discounts of tokens and turns, and their products with lambda
    a6 = 2.0 - 2.0
    a5 = 1.0 + h * 2.0 - 1.0 + hl * a6  # the last token of A's second turn
    a4 = g * 1.0 - 0.5 + gl * a5
    a3 = g * 0.5 - 0.0 + gl * a4
    a2 = h * 0.0 - 1.0 + hl * a3  # the last token of A's first turn
    a1 = g * 1.0 - 0.5 + gl * a2
    b5 = 0.0 - 1.0
    b4 = 1.0 + h * 1.0 - 0.5 + hl * b5
    b3 = g * 0.5 - 0.5 + gl * b4
    b2 = g * 0.5 - 0.5 + gl * b3
    b1 = g * 0.5 - 0.5 + gl * b2
    c2 = 4.0 + h * after_c - 2.0
    c1 = g * 2.0 - 3.0 + gl * c2
    return np.array([a1, a2, a3, a4, a5, a6, b1, b2, b3, b4, b5, c1, c2])


def test_advantages_and_returns_by_hand() -> None:
    means_N, spans = critic_advantages(RecordTable.of([group()]), values(), algorithm())
    expected = by_hand()
    np.testing.assert_allclose(spans.table["advantage"], expected, rtol=0, atol=1e-15)
    np.testing.assert_allclose(spans.table["target"], expected + VALUES, rtol=1e-7)
    np.testing.assert_allclose(means_N, [expected[:6].mean(), expected[6:11].mean(), expected[11:].mean()], rtol=1e-15)
    assert spans.num_spans.tolist() == [5, 1, 5, 2]
    assert spans.table["value"].tolist() == VALUES


def test_truncated_rollout_is_bootstrapped_with_the_value_after_it() -> None:
    records = RecordTable.of([replace(group(), truncated=(2,))])
    _, spans = critic_advantages(records, values(), algorithm())
    np.testing.assert_allclose(spans.table["advantage"], by_hand(after_c=9.0), rtol=0, atol=1e-14)
    _, spans = critic_advantages(records, values(), algorithm(bootstrap_truncated=False))
    np.testing.assert_allclose(spans.table["advantage"], by_hand(), rtol=0, atol=1e-15)


def test_lambda_of_one_gives_discounted_return_minus_value() -> None:
    rewards, own = np.array([0.0, 1.0, 0.0, 2.0]), np.array([3.0, -1.0, 0.5, 4.0])
    ends = np.array([False, True, False, True])
    advantages = gae(rewards, own, np.array([4]), np.zeros(1), ends, discounts=(0.9, 0.5), lambdas=(1.0, 1.0))
    returns = [0.9 * (1.0 + 0.5 * 0.9 * 2.0), 1.0 + 0.5 * 0.9 * 2.0, 0.9 * 2.0, 2.0]
    np.testing.assert_allclose(advantages, np.array(returns) - own, rtol=0, atol=1e-15)
    one_step = gae(rewards, own, np.array([4]), np.zeros(1), ends, discounts=(0.9, 0.5), lambdas=(0.0, 0.0))
    np.testing.assert_allclose(one_step, [-0.9 - 3.0, 1.0 + 0.25 + 1.0, 3.6 - 0.5, 2.0 - 4.0], rtol=0, atol=1e-15)


def test_standardized_advantages_have_mean_0_and_deviation_1_but_targets_keep_their_scale() -> None:
    _, spans = critic_advantages(RecordTable.of([group()]), values(), algorithm(standardize=True))
    expected = by_hand()
    z_scores = (expected - expected.mean()) / (expected.std() + 1e-6)
    np.testing.assert_allclose(spans.table["advantage"], z_scores, rtol=0, atol=1e-14)
    np.testing.assert_allclose(spans.table["target"], expected + VALUES, rtol=1e-7)


def test_values_that_are_not_finite_are_refused() -> None:
    diverged = replace(values(), values_T=np.full(13, np.nan, np.float32))
    with pytest.raises(ValueError, match="values of the critic are not finite"):
        critic_advantages(RecordTable.of([group()]), diverged, algorithm())


def test_explained_variance_by_hand() -> None:
    _, spans = critic_advantages(RecordTable.of([group()]), values(), algorithm())
    errors, targets = by_hand(), by_hand() + VALUES
    found = value_metrics(spans)
    assert found["critic/explained_variance"] == pytest.approx(1.0 - errors.var() / targets.var(), rel=1e-6)
    assert found["critic/value_mean"] == pytest.approx(np.mean(VALUES))
    assert found["critic/return_mean"] == pytest.approx(targets.mean(), rel=1e-6)


def plan_of(records: RecordTable, dp_size: int, **known: object) -> BatchPlan:
    return plan_batch(records, algorithm=algorithm(), dp_size=dp_size, **OPTIONS, **known)  # type: ignore[arg-type]


@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_values_return_to_the_order_of_the_records(dp_size: int) -> None:
    records = RecordTable.of([group(3), group(5)])
    planned = plan_of(records, dp_size, advantages_N=np.zeros(6))
    counts, starts = records.num_sampled, np.cumsum(records.num_sampled) - records.num_sampled
    replies = []
    for microbatch in planned.microbatches:
        ranks = []
        for rank, table in enumerate(microbatch.rows):
            segments = [4 * (handle[1] == 5) + segment for handle, segment in table.sequences[["handle", "segment"]].tolist()]
            own = [np.arange(starts[m], starts[m] + counts[m], dtype=np.float32) for m in segments]
            last = np.array([100 + m for m in segments], np.float32)
            ranks.append(RankValues(dp_rank=rank, values=np.concatenate([np.zeros(0, np.float32), *own]), last=last))
        replies.append(ranks)
    found = collect_values(records, planned.microbatches, replies)
    assert found.values_T.tolist() == list(range(26))
    assert found.last_N.tolist() == [101, 102, 103, 105, 106, 107], "of a rollout with two segments, that of the second"


def test_spans_carry_value_and_return_of_each_token_into_rows_and_minibatches() -> None:
    records = RecordTable.of([group(3), group(5)])
    advantages_N, spans = critic_advantages(records, values(groups=2), algorithm())
    plan = partial(plan_of, dp_size=2, advantages_N=advantages_N, spans=spans)
    expected, targets = by_hand(), by_hand() + VALUES
    for num_minibatches in (1, 2):
        step = plan_step(records, plan, epochs=1, num_minibatches=num_minibatches, seed=(0,))
        found = {place: s.spans for update in step.updates for place, s in sequences(update).items()}
        assert found.keys() == {(location, segment) for location in (3, 5) for segment in range(4)}
        for location in (3, 5):
            tokens = np.array([span for segment in range(4) for span in found[location, segment]])
            np.testing.assert_allclose(tokens.T, [expected, np.ones(13), VALUES, targets], rtol=1e-6, atol=1e-7)


def test_clipped_value_loss_by_hand() -> None:
    values_N = torch.tensor([1.0, 2.0, 0.0, 1.1], dtype=torch.float64, requires_grad=True)
    old_N = torch.tensor([1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    returns_N = torch.tensor([3.0, 3.0, 3.0, 0.0], dtype=torch.float64)
    loss_N, clipped_N = value_loss(values_N, old_N, returns_N, clip=0.2)
    # Values 2 -> 1.2 (toward the return, so clipped) and 0 -> 0.8 (away from it, so the larger loss of 0 counts).
    assert loss_N.tolist() == pytest.approx([2.0, 0.5 * 1.8**2, 4.5, 0.5 * 1.1**2], rel=1e-15)
    assert clipped_N.tolist() == [False, True, False, False]
    weighted_sum(loss_N, torch.tensor([0.1, 0.2, 0.3, 0.4]), mask=torch.tensor([True, True, True, False])).backward()
    assert values_N.grad.tolist() == pytest.approx([0.1 * -2.0, 0.0, 0.3 * -3.0, 0.0], rel=1e-6)
    plain_N, unclipped_N = value_loss(values_N, old_N, returns_N, clip=None)
    assert plain_N.tolist() == pytest.approx([2.0, 0.5, 4.5, 0.5 * 1.1**2], rel=1e-15)
    assert not unclipped_N.any()
