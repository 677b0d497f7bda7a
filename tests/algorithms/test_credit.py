"""Turn and token advantages; expected numbers are worked out by hand.

The group of turns has three rollouts. A has two segments, with turns of 2 and 3 tokens in the first and of 1 in the second, and
rewards of 0, 1 and 2. B has one segment, with turns of 4 and 1 tokens and rewards of 1 and 0. C has one turn of 2 tokens and
reward 4.
With a discount of 1/2 the returns are A: 1, 2, 2; B: 1, 0; C: 4.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.records import make_record, plan_rewards
from titanrl.algorithms.advantages import (
    discounted_returns,
    returns_differ,
    token_advantages,
    token_returns_differ,
    turn_advantages,
)
from titanrl.algorithms.contracts import GroupRewards
from titanrl.carriers.tables import BatchPlan, PackedColumns, RecordTable, SequencePlan, TurnTable
from titanrl.carriers.types import GroupRecord, GroupTokens, GroupTurns
from titanrl.config.algorithm import AlgorithmConfig, Reduction
from titanrl.metrics.steps import state_metrics

TURNS = GroupTurns(
    num_turns=(2, 1, 2, 1), rewards=(0.0, 1.0, 2.0, 1.0, 0.0, 4.0), num_sampled=(2, 3, 1, 4, 1, 2), states=(5, 6, 5, 5, 7, 5)
)


def group(index: int = 0) -> GroupRecord:
    record = make_record(index, rewards=[3.0, 1.0, 4.0], num_sampled=[5, 1, 5, 2], prompt_len=2)
    return replace(record, num_segments=(2, 1, 1), turns=TURNS)


def plan(records: Sequence[GroupRecord] | RecordTable, own: Any = None, **options: object) -> BatchPlan:
    algorithm = AlgorithmConfig(**options)  # type: ignore[arg-type]
    return plan_rewards(
        records if isinstance(records, RecordTable) else RecordTable.of(records),
        algorithm=algorithm,
        constant_length=10,
        row_tokens=100,
        rows_per_microbatch=1,
        dp_size=1,
        own=own,
    )


def sequences(batch: BatchPlan) -> dict[tuple[int, int], SequencePlan]:
    found = [s for microbatch in batch.microbatches for rank in microbatch.rows for row in rank for s in row]
    return {(sequence.handle.location, sequence.segment): sequence for sequence in found}


def test_turn_return_discounts_later_turns() -> None:
    assert discounted_returns([0.0, 1.0, 2.0], 0.5) == (1.0, 2.0, 2.0)
    assert discounted_returns([0.0, 1.0, 2.0], 1.0) == (3.0, 3.0, 2.0)
    assert discounted_returns([5.0], 0.0) == (5.0,)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("dr_grpo", [[-1.0, 1.0, 0.0], [-1.0, -1.0], [2.0]]),  # means of 2, 1 and 2
        ("rloo", [[-1.5, 2.0, 0.0], [-1.5, -2.0], [3.0]]),
        ("grpo", [[-1 / 2**0.5, 1.0, 0.0], [-1 / 2**0.5, -1.0], [2**0.5]]),
        ("maxrl", [[-0.5, 1.0, 0.0], [-0.5, -1.0], [1.0]]),
        ("reinforce_pp", [[1.0, 2.0, 2.0], [1.0, 0.0], [4.0]]),
        ("reinforce_pp_baseline", [[-1.0, 1.0, 0.0], [-1.0, -1.0], [2.0]]),
    ],
)
def test_turn_advantages_by_hand(method: str, expected: list[list[float]]) -> None:
    rewards, tokens = [[0.0, 1.0, 2.0], [1.0, 0.0], [4.0]], [[2, 3, 1], [4, 1], [2]]
    made = GroupRewards(rewards=[3.0, 1.0, 4.0], turn_rewards=rewards, turn_tokens=tokens)
    (advantages,) = turn_advantages([made], method, discount=0.5)
    if method.startswith("reinforce_pp"):  # the z-score over the 13 tokens
        values = np.repeat(np.concatenate([np.array(own) for own in expected]), [2, 3, 1, 4, 1, 2])
        expected = [[(value - values.mean()) / values.std() for value in own] for own in expected]
    assert [pytest.approx(own, abs=1e-5) for own in expected] == advantages


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        # In state 5 the returns are 1, 2, 1 and 4 with mean 2; in states 6 and 7 there is one turn each. Rewards: 3, 1, 4.
        ("dr_grpo", [[1 / 3 - 0.5, 1 / 3, 1 / 3], [-5 / 3 - 0.5, -5 / 3], [4 / 3 + 1.0]]),
        # The mean of the other returns in state 5 is 7/3, 2, 7/3 and 4/3.
        ("rloo", [[0.5 - 2 / 3, 0.5, 0.5], [-2.5 - 2 / 3, -2.5], [2.0 + 4 / 3]]),
        # The standard deviation of the rewards is sqrt(14)/3, that of the returns in state 5 sqrt(3/2).
        ("grpo", [[0.26726 - 0.40825, 0.26726, 0.26726], [-1.33631 - 0.40825, -1.33631], [1.06904 + 0.81650]]),
        ("maxrl", [[1 / 8 - 0.25, 1 / 8, 1 / 8], [-5 / 8 - 0.25, -5 / 8], [1 / 2 + 0.5]]),
    ],
)
def test_turns_in_the_same_state_are_compared_by_hand(method: str, expected: list[list[float]]) -> None:
    made = GroupRewards(
        rewards=[3.0, 1.0, 4.0],
        turn_rewards=[[0.0, 1.0, 2.0], [1.0, 0.0], [4.0]],
        turn_tokens=[[2, 3, 1], [4, 1], [2]],
        turn_states=[[5, 6, 5], [5, 7], [5]],
    )
    (found,) = turn_advantages([made], method, discount=0.5, state_weight=0.5)
    assert [pytest.approx(own, abs=1e-5) for own in expected] == found


def test_example_of_the_documentation_and_unknown_states() -> None:
    rewards, tokens = [[0.0, 0.0, 1.0], [0.0, 0.0]], [[1, 1, 1], [1, 1]]
    made = GroupRewards(rewards=[1.0, 0.0], turn_rewards=rewards, turn_tokens=tokens, turn_states=[[1, 2, 1], [1, 2]])
    (found,) = turn_advantages([made], "dr_grpo", discount=0.5, state_weight=1.0)
    expected = [[0.5 - 1 / 6, 0.5 + 1 / 4, 0.5 + 7 / 12], [-0.5 - 5 / 12, -0.5 - 1 / 4]]
    assert [pytest.approx(own, rel=1e-12) for own in expected] == found
    unknown = replace(made, turn_states=[[0, 0, 0], [0, 0]])
    assert turn_advantages([unknown], "dr_grpo", discount=0.5, state_weight=1.0) == [[[0.5] * 3, [-0.5] * 2]]


def test_state_returns_differ_where_rewards_do_not() -> None:
    rewards = [[0.0, 1.0], [1.0]]
    assert returns_differ(rewards, 0.5, [[7, 8], [7]])
    assert not returns_differ(rewards, 0.5, [[7, 8], [8]]), "both end from state 8"
    assert not returns_differ(rewards, 1.0, [[7, 8], [7]])
    assert not returns_differ(rewards, 0.5, [[0, 0], [0]])


def test_tokens_have_advantages_of_their_states() -> None:
    batch = plan([group()], credit="state", turn_discount=0.5, state_weight=0.5)
    found = {segment: (sequence.advantage, sequence.spans) for (_, segment), sequence in sequences(batch).items()}
    third = pytest.approx(1 / 3)
    assert found[0][1] == ((pytest.approx(-1 / 6), 2), (third, 3))
    assert found[1] == (third, ())
    assert found[2][1] == ((pytest.approx(-13 / 6), 4), (pytest.approx(-5 / 3), 1))
    assert found[3] == (pytest.approx(7 / 3), ())


def test_states_survive_packing_and_are_unknown_in_earlier_checkpoints() -> None:
    table = RecordTable.of([group(), group(1)]).turns
    assert TurnTable.unpacked([table.packed]).states.tolist() == [5, 6, 5, 5, 7, 5] * 2
    earlier = PackedColumns(*table.packed[:3])
    assert TurnTable.unpacked([table.packed, earlier]).states.tolist() == [5, 6, 5, 5, 7, 5] * 2 + [0] * 12
    # In each group, four of six turns are in state 5.
    assert state_metrics(RecordTable.of([group(), group(1)])) == {"episode/shared_state_frac": pytest.approx(4 / 6)}


def test_token_has_advantage_of_its_turn() -> None:
    batch = plan([group()], credit="turn", turn_discount=0.5)
    found = {segment: (sequence.advantage, sequence.spans) for (_, segment), sequence in sequences(batch).items()}
    # The second segment of A is compared with nothing; the turns of B have the same advantage.
    assert found == {0: (pytest.approx(1 / 6), ((-1.0, 2), (1.0, 3))), 2: (-1.0, ()), 3: (2.0, ())}
    assert batch.advantages_N.tolist() == pytest.approx([1 / 6, -1.0, 2.0])


@pytest.mark.parametrize(
    ("reduction", "weights"),
    [
        ("sum", (1, 1, 1)),
        ("token_mean", (1 / 13, 1 / 13, 1 / 13)),
        ("sequence_mean", (1 / 18, 1 / 15, 1 / 6)),
        ("sequence_mean_token_sum", (1 / 3, 1 / 3, 1 / 3)),
        ("prompt_mean", (1 / 13, 1 / 13, 1 / 13)),
        ("constant", (1 / 30, 1 / 30, 1 / 30)),
    ],
)
def test_turn_credit_keeps_loss_weights_of_rollouts(reduction: Reduction, weights: tuple[float, float, float]) -> None:
    planned = sequences(plan([group()], credit="turn", turn_discount=0.5, reduction=reduction))
    assert [planned[0, segment].weight for segment in (0, 2, 3)] == pytest.approx(weights, rel=1e-15)
    tokens = {0: ((-1.0, 2), (1.0, 3)), 2: ((-1.0, 5),), 3: ((2.0, 2),)}
    total = sum(planned[0, segment].weight * value * num for segment, runs in tokens.items() for value, num in runs)
    assert total == pytest.approx(weights[0] * 1 + weights[1] * -5 + weights[2] * 4, abs=1e-15)


def test_single_turn_has_advantage_of_rollout() -> None:
    record = make_record(0, rewards=[1.0, 0.0, 0.5], num_sampled=[3, 5, 4])
    assert plan([record], credit="turn") == plan([record])


def test_custom_advantage_may_return_one_number_per_turn() -> None:
    def mine(group: GroupRewards, *, turn_discount: float) -> list[list[float]]:
        assert group.turn_rewards == [[0.0, 1.0, 2.0], [1.0, 0.0], [4.0]]
        assert group.turn_tokens == [[2, 3, 1], [4, 1], [2]]
        return [[turn_discount * reward for reward in rewards] for rewards in group.turn_rewards]

    planned = sequences(plan([group()], mine, advantage="mine:f", turn_discount=0.25))
    assert {segment: s.spans or s.advantage for (_, segment), s in planned.items()} == {
        0: ((0.0, 2), (0.25, 3)),
        1: 0.5,
        2: ((0.25, 4), (0.0, 1)),
        3: 1.0,
    }


def test_custom_token_advantages_cross_segments() -> None:
    values = [[0.5, 0.5, 1.0, 1.0, 1.0, 2.0], [0.0] * 5, [-1.0, 3.0]]
    planned = sequences(plan([group()], lambda group: values, advantage="mine:f"))
    assert {segment: s.spans or s.advantage for (_, segment), s in planned.items()} == {
        0: ((0.5, 2), (1.0, 3)),
        1: 2.0,
        3: ((-1.0, 1), (3.0, 1)),
    }


def test_groups_may_mix_rollout_turn_and_token_advantages() -> None:
    def mine(group: GroupRewards) -> object:
        return [1.0, 2.0, 3.0] if group.index == 0 else [[1.0, 1.0, 0.5], [0.0, 0.0], [0.0]]

    planned = sequences(plan([group(0), group(1)], mine, advantage="mine:f"))
    assert {place: s.spans or s.advantage for place, s in planned.items()} == {
        **{(0, 0): 1.0, (0, 1): 1.0, (0, 2): 2.0, (0, 3): 3.0},
        **{(1, 0): 1.0, (1, 1): 0.5},
    }


@pytest.mark.parametrize("values", [[[1.0], [1.0, 2.0], [1.0]], [[1.0] * 3, [float("nan")] * 2, [1.0]], [[1.0], 2.0, 3.0]])
def test_error_names_advantage_with_wrong_number_of_values(values: object) -> None:
    with pytest.raises(ValueError, match=r"^algorithm\.advantage: mine:f "):
        plan([group()], lambda group: values, advantage="mine:f")


def test_table_keeps_turns_in_any_order_and_with_groups_without_turns() -> None:
    plain = make_record(1, rewards=[1.0, 0.0], num_sampled=[3, 4])
    for table in (RecordTable.of([plain, group()]), RecordTable.of([plain]) + RecordTable.of([group()])):
        ordered = table.by_index()
        assert ordered.turns.rewards.tolist() == [*TURNS.rewards, 1.0, 0.0]
        assert ordered.turns.num_sampled.tolist() == [*TURNS.num_sampled, 3, 4]
        assert ordered.num_turns_by_rollout.tolist() == [3, 2, 1, 1, 1]
    assert RecordTable.of([plain]).known_turns is None


# Tokens. Rollout A has two segments of 3 and 1 tokens, and rewards of 1/2 for its first token and 1 for its last. B has two
# tokens, and 1 for the last. Without a discount, the returns are A: 1.5, 1, 1, 1; B: 1, 1. With a discount of 1/2 they are
# A: 0.625, 0.25, 0.5, 1; B: 0.5, 1. After its end, B counts with 1.

TOKENS = GroupTokens(num_rewards=(2, 1), positions=(0, 3, 1), rewards=(0.5, 1.0, 1.0))


def credited(index: int = 0, tokens: GroupTokens | None = TOKENS) -> GroupRecord:
    record = make_record(index, rewards=[1.5, 1.0], num_sampled=[3, 1, 2], prompt_len=2)
    return replace(record, num_segments=(2, 1), tokens=tokens)


@pytest.mark.parametrize(
    ("method", "discount", "expected"),
    [
        ("dr_grpo", 1.0, [0.25, 0.0, 0.0, 0.0, -0.25, 0.0]),
        ("dr_grpo", 0.5, [0.0625, -0.375, -0.25, 0.0, -0.0625, 0.375]),
        ("rloo", 0.5, [0.125, -0.75, -0.5, 0.0, -0.125, 0.75]),
        ("grpo", 0.5, [1.0, -1.0, -1.0, 0.0, -1.0, 1.0]),
        ("maxrl", 0.5, [1 / 9, -0.6, -1 / 3, 0.0, -1 / 9, 0.6]),
        ("reinforce_pp", 0.5, [0.625, 0.25, 0.5, 1.0, 0.5, 1.0]),
        ("reinforce_pp_baseline", 1.0, [0.25, 0.0, 0.0, 0.0, -0.25, 0.0]),
    ],
)
def test_token_advantages_by_hand(method: str, discount: float, expected: list[float]) -> None:
    found = token_advantages(RecordTable.of([credited()]), method, discount=discount)
    if method.startswith("reinforce_pp"):  # the z-score over the 6 tokens
        expected = ((np.array(expected) - np.mean(expected)) / np.std(expected)).tolist()
    assert found.tolist() == pytest.approx(expected, abs=1e-4)


def test_token_advantages_are_split_by_segment() -> None:
    batch = plan([credited()], credit="token", token_discount=0.5)
    assert {segment: s.spans or s.advantage for (_, segment), s in sequences(batch).items()} == {
        0: ((0.0625, 1), (-0.375, 1), (-0.25, 1)),
        2: ((-0.0625, 1), (0.375, 1)),
    }  # the last token of A, a segment of its own, has no advantage
    assert batch.advantages_N.tolist() == [-0.5625 / 4, 0.3125 / 2]


def test_outcome_rewards_give_each_token_advantage_of_rollout() -> None:
    for record in (
        credited(tokens=None),
        credited(tokens=GroupTokens(num_rewards=(1, 1), positions=(3, 1), rewards=(1.5, 1.0))),
    ):
        assert sequences(plan([record], credit="token")) == sequences(plan([record]))


def test_turn_reward_is_added_to_last_token_of_turn() -> None:
    # The returns are A: 3, 3, 3, 3, 3, 2; B: 1, 1, 1, 1, 0; C: 4, 4.
    table = RecordTable.of([group()])
    assert table.tokens.by_token(table.num_sampled_by_rollout).tolist() == [0, 0, 0, 0, 1, 2, 0, 0, 0, 1, 0, 0, 4]
    expected = [1 / 3] * 4 + [2 / 3, 0.0] + [-5 / 3] * 4 + [-7 / 3] + [4 / 3] * 2
    assert token_advantages(table, "dr_grpo").tolist() == pytest.approx(expected)


def test_token_advantages_compare_returns_of_same_token() -> None:
    def differ(tokens: GroupTokens | None, rewards: list[float], discount: float) -> bool:
        record = replace(make_record(0, rewards=rewards, num_sampled=[2, 3]), tokens=tokens)
        return token_returns_differ(RecordTable.of([record]), discount)

    assert differ(GroupTokens(num_rewards=(1, 1), positions=(0, 2), rewards=(1.0, 1.0)), [1.0, 1.0], 1.0)
    assert not differ(GroupTokens(num_rewards=(1, 1), positions=(1, 2), rewards=(1.0, 1.0)), [1.0, 1.0], 1.0)
    assert differ(GroupTokens(num_rewards=(1, 1), positions=(1, 2), rewards=(1.0, 1.0)), [1.0, 1.0], 0.5)
    assert not differ(None, [1.0, 1.0], 1.0)
    assert differ(None, [1.0, 0.5], 1.0)


def test_rollout_without_loss_tokens_is_compared_by_its_reward() -> None:
    record = replace(
        make_record(0, rewards=[1.0, 0.0], num_sampled=[0, 2]), tokens=GroupTokens(num_rewards=(0, 0), positions=(), rewards=())
    )
    assert token_advantages(RecordTable.of([record]), "dr_grpo").tolist() == [-0.5, -0.5]


def test_custom_advantage_receives_token_rewards() -> None:
    def mine(group: GroupRewards, *, token_discount: float) -> list[list[float]]:
        assert group.token_rewards == [[0.5, 0.0, 0.0, 1.0], [0.0, 1.0]]
        return [[token_discount * reward for reward in rewards] for rewards in group.token_rewards]

    planned = sequences(plan([credited()], mine, advantage="mine:f", token_discount=0.5))
    assert {segment: s.spans or s.advantage for (_, segment), s in planned.items()} == {
        0: ((0.25, 1), (0.0, 2)),
        1: 0.5,
        2: ((0.0, 1), (0.5, 1)),
    }


def test_table_keeps_token_rewards_in_any_order_and_with_groups_without_them() -> None:
    plain = make_record(1, rewards=[1.0, 0.0], num_sampled=[3, 4])
    for table in (RecordTable.of([plain, credited()]), RecordTable.of([plain]) + RecordTable.of([credited()])):
        ordered = table.by_index()
        expected = [0.5, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
        assert ordered.tokens.by_token(ordered.num_sampled_by_rollout).tolist() == expected
    assert RecordTable.of([plain]).known_tokens is None
