"""Rollouts of several segments: reductions and advantages work on rollouts, packing works on segments.

Group 0 has rollouts of 2 + 3 and of 4 sampled tokens, group 1 has rollouts of 1 + 2 + 3 and of 6.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.records import make_record, plan_rewards
from titanrl.carriers.tables import BatchPlan, RecordTable, SequencePlan
from titanrl.carriers.types import GroupRecord
from titanrl.config.algorithm import AlgorithmConfig, Reduction

PROMPT = 4


def group(index: int, segments: list[list[int]], rewards: list[float]) -> GroupRecord:
    """Return the record of a group, given the number of sampled tokens of each segment of each rollout."""
    sampled = [num for rollout in segments for num in rollout]
    record = make_record(index, rewards=rewards, num_sampled=[1] * len(rewards), prompt_len=PROMPT)
    return replace(
        record,
        num_segments=tuple(map(len, segments)),
        num_sampled=tuple(sampled),
        lengths=tuple(PROMPT + num for num in sampled),
    )


GROUPS = [group(0, [[2, 3], [4]], [1.0, 0.0]), group(1, [[1, 2, 3], [6]], [3.0, 1.0])]


def plan(records: list[GroupRecord], **options: object) -> BatchPlan:
    keys = {"row_tokens": 100, "rows_per_microbatch": 1, "dp_size": 1, "share_prompts": False, **options}
    reduction = keys.pop("reduction", "token_mean")
    algorithm = AlgorithmConfig(advantage="dr_grpo", reduction=reduction)  # type: ignore[arg-type]
    return plan_rewards(RecordTable.of(records), algorithm=algorithm, constant_length=10, **keys)  # type: ignore[arg-type]


def sequences(batch: BatchPlan) -> dict[tuple[int, int], SequencePlan]:
    found = [s for microbatch in batch.microbatches for rank in microbatch.rows for row in rank for s in row]
    return {(sequence.handle.location, sequence.segment): sequence for sequence in found}


@pytest.mark.parametrize(
    ("reduction", "weights"),
    [
        ("sum", [[1, 1, 1], [1, 1, 1, 1]]),
        ("token_mean", [[1 / 21] * 3, [1 / 21] * 4]),
        ("sequence_mean", [[1 / 20, 1 / 20, 1 / 16], [1 / 24] * 4]),
        ("sequence_mean_token_sum", [[1 / 4] * 3, [1 / 4] * 4]),
        ("prompt_mean", [[1 / 18] * 3, [1 / 24] * 4]),
        ("constant", [[1 / 40] * 3, [1 / 40] * 4]),
    ],
)
def test_weights_by_hand(reduction: Reduction, weights: list[list[float]]) -> None:
    planned = sequences(plan(GROUPS, reduction=reduction))
    for record, expected in zip(GROUPS, weights, strict=True):
        got = [planned[record.handle.location, segment].weight for segment in range(len(expected))]
        assert got == pytest.approx(expected, rel=1e-15)


def test_all_segments_of_a_rollout_have_its_advantage() -> None:
    planned = sequences(plan(GROUPS))
    locations = [record.handle.location for record in GROUPS]
    assert [planned[locations[0], segment].advantage for segment in range(3)] == [0.5, 0.5, -0.5]
    assert [planned[locations[1], segment].advantage for segment in range(4)] == [1.0, 1.0, 1.0, -1.0]


def test_only_first_segments_share_the_prompt() -> None:
    batch = plan(GROUPS, share_prompts=True)
    shared = {place: sequence.num_shared for place, sequence in sequences(batch).items() if sequence.num_shared}
    first = {
        (GROUPS[0].handle.location, 0),
        (GROUPS[0].handle.location, 2),
        (GROUPS[1].handle.location, 0),
        (GROUPS[1].handle.location, 3),
    }
    assert len(shared) == 2
    assert shared.keys() <= first
    assert set(shared.values()) == {PROMPT - 1}


def test_segment_without_sampled_tokens_does_not_run() -> None:
    record = group(0, [[2, 0], [4]], [1.0, 0.0])
    assert sequences(plan([record])).keys() == {(record.handle.location, 0), (record.handle.location, 2)}


rollouts = st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from([0.0, 0.5, 1.0]))
groups = st.lists(
    st.lists(
        st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from([0.0, 0.5, 1.0])), min_size=2, max_size=4
    ),
    min_size=1,
    max_size=4,
)


@given(groups, st.sampled_from(["sum", "token_mean", "sequence_mean", "prompt_mean", "constant"]), st.integers(1, 3))
def test_objective_does_not_depend_on_segmentation(
    drawn: list[list[tuple[list[int], float]]], reduction: Reduction, dp_size: int
) -> None:
    cut = [group(i, [nums for nums, _ in rollouts], [reward for _, reward in rollouts]) for i, rollouts in enumerate(drawn)]
    whole = [
        group(i, [[sum(nums)] for nums, _ in rollouts], [reward for _, reward in rollouts]) for i, rollouts in enumerate(drawn)
    ]

    def total(records: list[GroupRecord]) -> float:
        sampled = {record.handle.location: record.num_sampled for record in records}
        planned = sequences(plan(records, reduction=reduction, dp_size=dp_size)).items()
        return sum(s.weight * s.advantage * sampled[location][segment] for (location, segment), s in planned)

    assert total(cut) == pytest.approx(total(whole), abs=1e-12)


def test_table_keeps_segments_in_any_order() -> None:
    table = RecordTable.of(GROUPS[::-1]).by_index()
    assert table.num_segments.tolist() == [2, 1, 3, 1]
    assert table.num_sampled.tolist() == [2, 3, 4, 1, 2, 3, 6]
    assert table.num_sampled_by_rollout.tolist() == [5, 4, 6, 6]
    assert (RecordTable.of(GROUPS[:1]) + RecordTable.of(GROUPS[1:])).lengths.tolist() == table.lengths.tolist()
    assert table.rollout_of.tolist() == [0, 0, 1, 2, 2, 2, 3]
