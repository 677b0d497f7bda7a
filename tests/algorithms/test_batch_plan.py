import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.records import make_record as make_group
from tests.records import plan_rewards
from titanrl.algorithms.contracts import Advantage, GroupRewards
from titanrl.carriers.tables import BatchPlan, RecordTable, Row, SequencePlan
from titanrl.carriers.types import GroupRecord
from titanrl.config.algorithm import ADVANTAGES, AlgorithmConfig

RecordMaker = Callable[..., GroupRecord]


def plan(
    records: list[GroupRecord],
    *,
    row_tokens: int = 1000,
    rows_per_microbatch: int = 1,
    dp_size: int = 1,
    share_prompts: bool = False,
    custom_advantage: Advantage | None = None,
    weight_of: Callable[[str, int], float] = lambda part, task: 1.0,
    **algorithm,
) -> BatchPlan:
    return plan_rewards(
        RecordTable.of(records),
        algorithm=AlgorithmConfig(**algorithm),
        constant_length=26,
        row_tokens=row_tokens,
        rows_per_microbatch=rows_per_microbatch,
        dp_size=dp_size,
        share_prompts=share_prompts,
        own=custom_advantage,
        weight_of=weight_of,
    )


def rows(plan: BatchPlan) -> list[list[list[Row]]]:
    return [[list(rank) for rank in microbatch.rows] for microbatch in plan.microbatches]


def sequences(plan: BatchPlan) -> list[SequencePlan]:
    return [sequence for microbatch in plan.microbatches for rank in microbatch.rows for row in rank for sequence in row]


def test_plan_of_small_batch_by_hand(make_record: RecordMaker) -> None:
    record = make_record(7, rewards=[1.0, 0.0, 0.5], num_sampled=[3, 5, 4], prompt_len=2)
    batch = plan([record], row_tokens=8)
    # The third rollout has reward = mean; of the others, 7 and 5 tokens do not share a row of 8. Weight 1 / (3 + 5 + 4).
    good = SequencePlan(handle=record.handle, segment=0, length=5, advantage=0.5, weight=1 / 12)
    bad = SequencePlan(handle=record.handle, segment=1, length=7, advantage=-0.5, weight=1 / 12)
    assert rows(batch) == [[[(bad,)]], [[(good,)]]]
    assert batch.num_placed == 12
    assert batch.packing_efficiency == 12 / 16


def test_groups_without_payload_affect_weights_but_do_not_run(make_record: RecordMaker) -> None:
    mute = make_record(1, rewards=[1.0, 1.0], num_sampled=[10, 20], has_payload=False)
    batch = plan([make_record(0, rewards=[1.0, 0.0], num_sampled=[4, 6]), mute])
    assert {sequence.handle.location for sequence in sequences(batch)} == {0}
    assert {sequence.weight for sequence in sequences(batch)} == {1 / 40}


def test_arrival_order_does_not_change_plan(make_record: RecordMaker) -> None:
    rng = random.Random(3)
    records = [make_record(i, [rng.random() for _ in range(8)], [rng.randint(1, 60) for _ in range(8)]) for i in range(12)]
    expected = plan(records, row_tokens=100, rows_per_microbatch=3, dp_size=2)
    for _ in range(5):
        rng.shuffle(records)
        assert plan(records, row_tokens=100, rows_per_microbatch=3, dp_size=2) == expected


@given(st.data())
def test_every_sequence_with_advantage_runs_once(make_record: RecordMaker, data: st.DataObject) -> None:
    rewards = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=4, max_size=4).filter(lambda r: len(set(r)) > 1)
    lengths = st.lists(st.integers(1, 30), min_size=4, max_size=4)
    records = [make_record(i, data.draw(rewards), data.draw(lengths)) for i in range(data.draw(st.integers(1, 8)))]
    rows_per_microbatch, dp_size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    batch = plan(records, row_tokens=40, rows_per_microbatch=rows_per_microbatch, dp_size=dp_size)
    ran = sorted((sequence.handle.location, sequence.segment) for sequence in sequences(batch))
    assert ran == [(r.index, i) for r in records for i in range(4) if r.rewards[i] != sum(r.rewards) / 4]
    for microbatch in batch.microbatches:
        assert len(microbatch.rows) == dp_size
        assert any(microbatch.rows)
        assert all(len(rank) <= rows_per_microbatch for rank in microbatch.rows)
        assert all(sum(sequence.length for sequence in row) <= 40 for rank in microbatch.rows for row in rank)


def test_advantage_and_reduction_follow_config(make_record: RecordMaker) -> None:
    batch = plan([make_record(0, rewards=[0.0, 3.0], num_sampled=[1, 1])], advantage="rloo", reduction="constant")
    assert {sequence.segment: sequence.advantage for sequence in sequences(batch)} == {0: -3.0, 1: 3.0}
    assert {sequence.weight for sequence in sequences(batch)} == {1 / 52}


def test_shared_prompt_excludes_its_last_token(make_record: RecordMaker) -> None:
    records = [make_record(i, rewards=[1.0, 0.0, 0.0], num_sampled=[3, 2, 1], prompt_len=5) for i in range(2)]
    apart, together = (plan(records, row_tokens=24, share_prompts=share) for share in (False, True))
    assert [[s.num_shared for s in row] for microbatch in apart.microbatches for row in microbatch.rows[0]] == [[0] * 3] * 2
    # 8 tokens of the first, 3 and 2 of the others, and as much again for the second group, are 26; only 24 fit.
    assert [[(s.handle.location, s.num_shared) for s in row] for m in together.microbatches for row in m.rows[0]] == [
        [(0, 0), (0, 4), (0, 4), (1, 0), (1, 4)],
        [(1, 0)],
    ]
    assert together.packing_efficiency == (24 + 6) / 48
    without = [(s.handle.location, s.segment, s.advantage, s.weight) for s in sequences(together)]
    assert sorted(without) == sorted((s.handle.location, s.segment, s.advantage, s.weight) for s in sequences(apart))


def test_group_without_prompt_shares_nothing(make_record: RecordMaker) -> None:
    record = make_record(0, rewards=[1.0, 0.0], num_sampled=[6, 5], prompt_len=0)
    assert {sequence.num_shared for sequence in sequences(plan([record], share_prompts=True))} == {0}


def test_prompts_are_not_shared_if_that_takes_more_rows(make_record: RecordMaker) -> None:
    # Apart 7 + 3 and 6 + 4 fill two rows of 10; a group's own order would leave the 7 alone, and the 6 with the 3.
    records = [
        make_record(0, rewards=[1.0, 0.0], num_sampled=[6, 5], prompt_len=1),
        make_record(1, rewards=[1.0, 0.0], num_sampled=[3, 2], prompt_len=1),
    ]
    batch = plan(records, row_tokens=10, share_prompts=True)
    assert len(batch.microbatches) == 2
    assert {sequence.num_shared for sequence in sequences(batch)} == {0}


def test_packing_efficiency_counts_empty_rows_of_idle_ranks(make_record: RecordMaker) -> None:
    batch = plan([make_record(0, rewards=[0.0, 1.0], num_sampled=[8, 8], prompt_len=2)], row_tokens=20, dp_size=2)
    assert [len(rank) for rank in batch.microbatches[0].rows] == [1, 0]
    assert batch.packing_efficiency == 20 / 40


@pytest.mark.parametrize("share_prompts", [False, True])
def test_batch_without_gradient_gives_ranks_one_empty_micro_batch(make_record: RecordMaker, share_prompts: bool) -> None:
    batch = plan(
        [make_record(0, rewards=[1.0, 1.0], num_sampled=[3, 3], has_payload=False)], share_prompts=share_prompts, dp_size=2
    )
    assert rows(batch) == [[[], []]]
    assert batch.packing_efficiency == 0.0
    # Of four answers with three right ones the best of two is always right.
    record = make_record(0, rewards=[1.0, 1.0, 1.0, 0.0], num_sampled=[3, 3, 3, 3])
    assert sequences(plan([record], advantage="pass_at_k", pass_k=2)) == []


@pytest.mark.parametrize(
    "algorithm",
    [
        {"entropy_coef": 0.1},
        {"entropy_target": 0.1},
        {"kl": {"coef": 0.1}},
        {"loss": "dro"},
        {"correction": {"preset": "geometric_rejection", "denominator": "post"}},
    ],
)
def test_sequences_without_advantage_run_if_other_terms_need_them(make_record: RecordMaker, algorithm) -> None:
    records = [make_record(0, [1.0, 0.5, 0.0], [4, 6, 5]), make_record(1, [1.0, 1.0], [2, 3])]
    assert len(sequences(plan(records))) == 2
    assert sorted((s.handle.location, s.segment) for s in sequences(plan(records, **algorithm))) == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
    ]


def test_reinforce_pp_trains_on_groups_of_equal_rewards(make_record: RecordMaker) -> None:
    records = [make_record(0, [1.0, 1.0], [4, 4]), make_record(1, [0.0, 0.0], [4, 4])]
    batch = plan(records, advantage="reinforce_pp")
    # Mean 0.5, standard deviation 0.5.
    assert {s.handle.location: s.advantage for s in sequences(batch)} == pytest.approx({0: 1.0, 1: -1.0}, rel=1e-5)


def test_equal_rewards_have_no_advantage_with_a_batch_baseline(make_record: RecordMaker) -> None:
    # Group 0 has the values 0.75 and -0.25 (3 times), group 1 only 0. Over the tokens: mean (3 * 0.75 - 3 * 0.25) / 10 = 0.15.
    records = [
        make_record(0, [1.0, 0.0, 0.0, 0.0], [3, 1, 1, 1]),
        make_record(1, [1.0, 1.0], [2, 2], has_payload=False),
    ]
    batch = plan(records, advantage="reinforce_pp_baseline")
    std = ((3 * 0.6**2 + 3 * 0.4**2 + 4 * 0.15**2) / 10) ** 0.5
    assert batch.advantages_N.tolist() == pytest.approx([0.6 / std, *3 * [-0.4 / std], 0.0, 0.0], rel=1e-5)
    assert batch.advantages_N.tolist()[4:] == [0.0, 0.0]
    assert {s.handle.location for s in sequences(batch)} == {0}


REWARDS = st.sampled_from([0.0, 0.1, 0.25, 1.0])


BY_REWARD = [name for name, each in ADVANTAGES.items() if not (each.traits.compares_parts or each.traits.has_critic)]


@pytest.mark.parametrize("advantage", [*BY_REWARD, "custom"])
@given(
    groups=st.lists(st.lists(st.tuples(REWARDS, st.integers(0, 4)), min_size=1, max_size=4), min_size=1, max_size=4),
    credit=st.sampled_from(["rollout", "turn", "state", "token"]),
    std_ddof=st.sampled_from([0, 1]),
)
def test_no_estimator_needs_the_tokens_of_equal_rewards(advantage: str, groups: Any, credit: str, std_ddof: int) -> None:
    """A worker stores no tokens of a group of equal rewards, unless the estimator declares that it needs them."""
    options: dict[str, Any] = {"advantage": advantage}
    if advantage == "custom":
        options = {"advantage": "mine.py:centred"}
    if advantage == "pass_at_k":
        options["pass_k"] = 2
    elif advantage != "custom" and credit != "rollout" and (advantage, credit) != ("reinforce_pp", "state"):
        options["credit"] = credit
    if advantage == "grpo":
        options["std_ddof"] = std_ddof
    algorithm = AlgorithmConfig(**options)
    records = []
    for index, group in enumerate(groups):
        rewards, counts = [reward for reward, _ in group], [count for _, count in group]
        differs = len(set(rewards)) > 1 or algorithm.trains_on_equal_rewards
        records.append(make_group(index, rewards, counts, has_payload=differs and any(counts)))
    batch = plan(records, custom_advantage=centred if advantage == "custom" else None, **options)
    assert all(map(math.isfinite, batch.advantages_N))
    if not algorithm.trains_on_equal_rewards:
        for record, values in zip(
            records, np.split(batch.advantages_N, np.cumsum([len(group) for group in groups])), strict=False
        ):
            assert len(set(record.rewards)) > 1 or not values.any()


def test_group_with_signal_must_have_payload(make_record: RecordMaker) -> None:
    with pytest.raises(AssertionError, match=r"groups \[4\] have a gradient but no payload"):
        plan([make_record(4, rewards=[1.0, 0.0], num_sampled=[3, 3], has_payload=False)])


def test_duplicate_group_is_refused(make_record: RecordMaker) -> None:
    record = make_record(4, rewards=[1.0, 0.0], num_sampled=[3, 3])
    with pytest.raises(AssertionError, match="twice"):
        plan([record, record])


def centred(group: GroupRewards) -> list[float]:
    mean = sum(group.rewards) / len(group.rewards)
    return [reward - mean for reward in group.rewards]


def test_custom_advantage_receives_parts_lengths_and_options(make_record: RecordMaker) -> None:
    seen: list[GroupRewards] = []

    def record_group(group: GroupRewards, *, std_ddof: int) -> list[int]:
        seen.append(group)
        return [std_ddof] * len(group.rewards)

    second = make_record(4, rewards=[0.0, 1.0], reward_parts={"right": (0.0, 0.5), "short": (0.0, 0.5)}, num_sampled=[7, 8])
    first = make_record(2, rewards=[1.0, 0.0, 2.0], reward_parts={"right": (1.0, 0.0, 2.0)}, num_sampled=[3, 1, 2])
    weights = {"right": 1.0, "short": 0.5}
    batch = plan([second, first], custom_advantage=record_group, std_ddof=1, weight_of=lambda part, task: weights[part])
    right = {"right": [1.0, 0.0, 2.0]}
    both = {"right": [0.0, 0.5], "short": [0.0, 0.5]}
    assert seen == [
        GroupRewards(
            rewards=[1.0, 0.0, 2.0],
            parts=right,
            weights={"right": 1.0},
            num_tokens=[3, 1, 2],
            index=2,
            turn_rewards=[[1.0], [0.0], [2.0]],
            turn_tokens=[[3], [1], [2]],
            turn_states=[[0], [0], [0]],
        ),
        GroupRewards(
            rewards=[0.0, 1.0],
            parts=both,
            weights=weights,
            num_tokens=[7, 8],
            index=4,
            turn_rewards=[[0.0], [1.0]],
            turn_tokens=[[7], [8]],
            turn_states=[[0], [0]],
        ),
    ]
    assert batch.advantages_N.tolist() == [1.0] * 5


def test_custom_advantage_of_equal_rewards_is_trained_on(make_record: RecordMaker) -> None:
    batch = plan([make_record(0, rewards=[1.0, 1.0], num_sampled=[3, 5])], custom_advantage=lambda group: group.num_tokens)
    assert sorted(sequence.advantage for sequence in sequences(batch)) == [3.0, 5.0]


@pytest.mark.parametrize(
    ("advantage", "problem"),
    [
        (
            lambda group: [0.0],
            r"mine:f must return one finite number per completion \(got \[0\.0\] for the rewards \[1\.0, 0\.0\]",
        ),
        (lambda group: [0.0, float("nan")], r"mine:f must return one finite number .* \(got \[0\.0, nan\]"),
        (lambda group: [0.0, 1e39], r"mine:f must return one finite number .* \(got \[0\.0, 1e\+39\]"),
        (lambda group: None, r"mine:f raised TypeError: 'NoneType' object is not iterable \(got the rewards \[1\.0, 0\.0\]\)"),
        (lambda group: [1 / reward for reward in group.rewards], r"mine:f raised ZeroDivisionError"),
        (
            lambda group: dict(enumerate(group.rewards)),
            r"mine:f must return .* \(got \{0: 1\.0, 1: 0\.0\} for",
        ),
        (lambda group: {0.5, -0.5}, r"mine:f must return one finite number .* \(got \{-?0\.5, -?0\.5\} for"),
        (lambda group: "10", r"mine:f must return one finite number .* \(got 10 for"),
    ],
    ids=["too-few", "nan", "too-large", "none", "raises", "mapping", "set", "text"],
)
def test_error_names_custom_advantage_with_wrong_result(make_record: RecordMaker, advantage: Advantage, problem: str) -> None:
    with pytest.raises(ValueError, match=rf"^algorithm\.advantage: {problem}"):
        plan([make_record(0, rewards=[1.0, 0.0])], custom_advantage=advantage, advantage="mine:f")
