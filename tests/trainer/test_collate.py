"""Packed rows as tensors, by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from titanrl.carriers.supports import supports_of
from titanrl.carriers.tables import MicroBatch, RecordedGroups, SequencePlan
from titanrl.carriers.types import Datum, GroupHandle, Segment, sampled_datum
from titanrl.trainer.collate import collate, recorded_segments, row_length
from titanrl.trainer.passes import Location, RowSizes, build_rows, check_experts, check_supports, plan_data

HANDLE = GroupHandle(shard=0, location=0, serial=1)


def rollout(token_ids: list[int], num_prompt: int, logprobs: list[float]) -> Segment:
    sampled = len(token_ids) - num_prompt
    return Segment(
        token_ids=np.array(token_ids),
        mask=np.array([False] * num_prompt + [True] * sampled),
        logprobs=np.array([0.0] * num_prompt + logprobs, np.float32),
        versions=np.array([-1] * num_prompt + [4] * sampled),
    )


def plan(segment: int, length: int, advantage: float, weight: float, *, num_shared: int = 0) -> SequencePlan:
    sizes = {"length": length, "num_shared": num_shared}
    return SequencePlan(handle=HANDLE, segment=segment, advantage=advantage, weight=weight, **sizes)


PAYLOAD = {HANDLE: {0: rollout([5, 6, 7, 1], 2, [-0.5, -0.25]), 1: rollout([8, 9, 1], 1, [-1.0, float("nan")])}}


def test_token_values_are_at_predicting_position() -> None:
    rows = collate([(plan(0, 4, 2.0, 0.5), plan(1, 3, -1.0, 0.25))], PAYLOAD, 9)
    assert rows.tokens_BL.tolist() == [[5, 6, 7, 1, 8, 9, 1, 0, 0]]
    assert rows.positions_BL.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 1]]
    assert rows.targets_BL.tolist() == [[6, 7, 1, 0, 9, 1, 0, 0, 0]]
    assert rows.mask_BL.int().tolist() == [[0, 1, 1, 0, 1, 0, 0, 0, 0]]
    assert rows.logprobs_BL.tolist() == [[0, -0.5, -0.25, 0, -1.0, 0, 0, 0, 0]]
    assert rows.advantages_BL.tolist() == [[2, 2, 2, 0, -1, -1, 0, 0, 0]]
    assert rows.weights_BL.tolist() == [[0, 0.5, 0.5, 0, 0.25, 0, 0, 0, 0]]
    assert rows.sequence_N.tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 2]


def test_supports_are_at_predicting_position_of_trained_tokens() -> None:
    limited = supports_of([np.array(ids, np.int32) for ids in ([], [], [3, 7], [0, 1])], 100)
    with_nan = supports_of([np.array(ids, np.int32) for ids in ([], [9], [1])], 100)
    first, second = PAYLOAD[HANDLE][0], PAYLOAD[HANDLE][1]
    payload = {HANDLE: {0: replace(first, supports=limited), 1: replace(second, supports=with_nan), 2: first}}
    rows = collate([(plan(0, 4, 2.0, 0.5), plan(1, 3, -1.0, 0.25)), (plan(2, 4, 1.0, 1.0),)], payload, 9)
    assert rows.supports.sizes_N.tolist() == [100, 2, 2, 100, 1, 100, 100, 100, 100] + [100] * 9
    assert rows.supports.ids_I.tolist() == [3, 7, 0, 1, 9]
    assert rows.supports.id_tokens_I.tolist() == [1, 1, 2, 2, 4]
    assert collate([(plan(2, 4, 1.0, 1.0),)], payload, 9).supports is None


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.uint8)[:, None, None]


def test_experts_are_at_their_token_also_after_a_shared_prompt() -> None:
    first, second = PAYLOAD[HANDLE][0], PAYLOAD[HANDLE][1]
    payload = {HANDLE: {0: replace(first, experts=ids(1, 2, 3, 255)), 1: second, 2: replace(first, experts=ids(5, 6, 7, 255))}}
    rows = collate([(plan(0, 4, 2.0, 0.5), plan(1, 3, 1.0, 1.0)), (plan(2, 4, 1.0, 1.0, num_shared=1),)], payload, 9)
    assert rows.experts_BLYK.dtype == torch.uint8
    assert rows.experts_BLYK[:, :, 0, 0].tolist() == [[1, 2, 3, 255, 255, 255, 255, 255, 255], [6, 7, 255] + [255] * 6]
    assert rows.predicts_BL.int().tolist() == [[1, 1, 1, 0, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0, 0]]
    assert collate([(plan(1, 3, 1.0, 1.0),)], payload, 9).experts_BLYK is None
    payload[HANDLE][1] = replace(second, experts=np.zeros((3, 2, 1), np.uint8))
    with pytest.raises(ValueError, match="recorded with different models"):
        collate([(plan(0, 4, 2.0, 0.5), plan(1, 3, 1.0, 1.0))], payload, 9)


def test_experts_of_data_are_placed_and_checked() -> None:
    data = [sampled_datum([5, 6], [7, 1], [-0.5, -0.25], 1.0, experts=ids(1, 2, 3, 255)), sampled_datum([5], [7], [-0.5], 1.0)]
    locations = [Location(0, 0, slice(0, 3)), Location(1, 0, slice(3, 4))]
    rows = build_rows(data, locations, RowSizes(row_tokens=8, rows_per_microbatch=1, multiple=8))
    assert rows.experts_BLYK.ravel().tolist() == [1, 2, 3, 255, 255, 255, 255, 255]
    assert rows.predicts_BL.int().tolist() == [[1, 1, 1, 1, 0, 0, 0, 0]]
    check_experts(data, 1, 1, 4)
    with pytest.raises(ValueError, match=r"data\[0\].experts: the model has 3 experts \(got id 3\)"):
        check_experts(data, 1, 1, 3)
    with pytest.raises(ValueError, match=r"must have shape \(3, 2, 1\) \(got \(3, 1, 1\)\)"):
        check_experts(data, 2, 1, 4)


def test_sampled_token_outside_its_support_fails_assertion() -> None:
    wrong = replace(PAYLOAD[HANDLE][0], supports=supports_of([*map(int32, ([], [], [3, 7], [0, 2]))], 100))
    with pytest.raises(AssertionError, match="not in its support"):
        collate([(plan(0, 4, 2.0, 0.5),)], {HANDLE: {0: wrong}}, 9)


def datum(*supports: list[int], vocab_size: int = 100) -> Datum:
    return sampled_datum([5, 6], [7, 1], [-0.5, -0.25], 1.0, supports=supports_of([*map(int32, supports)], vocab_size))


def int32(ids: list[int]) -> np.ndarray:
    return np.array(ids, np.int32)


def test_supports_of_data_are_at_their_targets() -> None:
    data = [datum([3, 7], [1]), sampled_datum([5], [7], [-0.5], 1.0), datum([7], [0, 1])]
    sizes = RowSizes(row_tokens=8, rows_per_microbatch=2, multiple=8)
    check_supports(data, 100)
    (locations,) = plan_data([len(datum.model_input) for datum in data], sizes, 1, 0)
    rows = build_rows(data, locations, sizes)
    assert rows.supports is not None
    for location in locations:
        found = rows.supports.sizes_N.view(rows.tokens_BL.shape)[location.row, location.tokens].tolist()
        assert found == [[100, 2, 1], [100], [100, 1, 2]][location.index]
    assert build_rows(data[1:2], [Location(0, 0, slice(0, 1))], sizes).supports is None


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (datum([3, 7], [1], vocab_size=90), r"^data\[0\]\.supports: the model's vocabulary size is 100 \(got 90\)"),
        (datum([3, 7], [0]), r"target 2 is not in its support \(got token 1\)\. Give"),
        (datum([3, 7]), r"wrong length \(got 2\)\. Give one per input token: 3\."),
    ],
)
def test_supports_that_do_not_match_their_data_raise(wrong: Datum, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_supports([wrong], 100)


def test_spans_override_advantage_of_sequence() -> None:
    spans = ((2.0, 1), (-3.0, 1))
    payload = {HANDLE: {0: rollout([5, 6, 7, 1], 1, [-0.5, float("nan"), -0.25])}}
    rows = collate([(replace(plan(0, 4, 0.0, 0.5), spans=spans),)], payload, 5)
    assert rows.mask_BL.int().tolist() == [[1, 0, 1, 0, 0]]
    assert rows.advantages_BL.tolist() == [[2, 0, -3, 0, 0]]


def test_rank_without_rows_gets_one_empty_row() -> None:
    rows = collate([], {}, 4)
    assert rows.tokens_BL.shape == (1, 4)
    assert not rows.mask_BL.any()
    assert rows.weights_BL.sum() == 0


def test_sequence_ids_are_unique_over_rows() -> None:
    full, half = (plan(0, 4, 2.0, 0.5),), (plan(1, 3, -1.0, 0.25),)
    assert collate([full, half], PAYLOAD, 4).sequence_N.tolist() == [0, 0, 0, 0, 1, 1, 1, 2]


def test_shared_prompt_is_stored_once_except_last_token() -> None:
    payload = {HANDLE: {0: rollout([5, 6, 7, 8, 1], 3, [-0.5, -0.25]), 1: rollout([5, 6, 7, 9], 3, [-1.0])}}
    rows = collate([(plan(0, 5, 2.0, 0.5), plan(1, 4, -1.0, 0.25, num_shared=2))], payload, 8)
    assert rows.tokens_BL.tolist() == [[5, 6, 7, 8, 1, 7, 9, 0]]
    assert rows.positions_BL.tolist() == [[0, 1, 2, 3, 4, 2, 3, 0]]
    assert rows.targets_BL.tolist() == [[6, 7, 8, 1, 0, 9, 0, 0]]
    assert rows.mask_BL.int().tolist() == [[0, 0, 1, 1, 0, 1, 0, 0]]
    assert rows.logprobs_BL.tolist() == [[0, 0, -0.5, -0.25, 0, -1.0, 0, 0]]
    assert rows.weights_BL.tolist() == [[0, 0, 0.5, 0.5, 0, 0.25, 0, 0]]
    assert rows.sequence_N.tolist() == [0, 0, 0, 0, 0, 1, 1, 2]
    assert rows.shares_prompts


def test_sharing_sampled_token_is_refused() -> None:
    payload = {HANDLE: {0: rollout([5, 6, 7], 1, [-0.5, -0.25]), 1: rollout([5, 6, 9], 1, [-1.0, -1.0])}}
    with pytest.raises(AssertionError, match="sampled token"):
        collate([(plan(0, 3, 2.0, 0.5), plan(1, 3, -1.0, 0.25, num_shared=1))], payload, 8)


def test_plan_that_does_not_fit_payload_is_refused() -> None:
    with pytest.raises(AssertionError, match="does not fit"):
        collate([(plan(0, 3, 1.0, 1.0),)], PAYLOAD, 9)


def test_row_length_is_fullest_row_rounded_up() -> None:
    assert row_length([5, 17, 3], 128, 8) == 24
    assert row_length([125], 126, 8) == 126
    assert row_length([], 128, 16) == 16
    assert row_length([5], 128, 128) == 128


def test_recorded_values_belong_to_the_loss_tokens() -> None:
    handle, other = (GroupHandle(shard=0, location=location, serial=1) for location in (0, 1))
    segment = Segment(
        token_ids=np.array([5, 6, 7, 8]),
        mask=np.array([False, False, True, True]),
        logprobs=np.array([0.0, 0.0, -0.5, -0.75], np.float32),
        versions=np.array([-1, -1, 3, 4]),
    )
    plans = [
        SequencePlan(handle=of, segment=number, length=4, advantage=0.25, weight=0.125, num_shared=shared)
        for of, number, shared in ((handle, 0, 0), (handle, 1, 1), (other, 0, 0))
    ]
    row = tuple(plans)
    packed = collate([row], {handle: {0: segment, 1: segment}, other: {0: segment}}, 12)
    packed = replace(packed, proximal_BL=torch.full((1, 12), -2.0))
    recorded = RecordedGroups(step=9, update=1, indices={handle: 17})
    microbatch = MicroBatch(rows=(), mean_weight=0.5, recorded=recorded)
    logprobs_BL = torch.arange(12.0)[None]
    (first, columns), (second, others) = recorded_segments(microbatch, [row], packed, logprobs_BL)
    assert {name: value for name, value in first.items() if name != "time"} == {
        "step": 9,
        "update": 1,
        "index": 17,
        "segment": 0,
        "mean_weight": 0.5,
    }
    assert columns["positions"].tolist() == [2, 3]
    assert columns["logprobs"].tolist() == [1.0, 2.0]  # stored at the position before the token
    assert columns["generator_logprobs"].tolist() == [-0.5, -0.75]
    assert columns["versions"].tolist() == [3, 4]
    assert columns["advantages"].tolist() == [0.25, 0.25]
    assert columns["weights"].tolist() == [0.125, 0.125]
    assert columns["proximal_logprobs"].tolist() == [-2.0, -2.0]
    assert "reference_logprobs" not in columns
    # The second sequence is placed after the first, without the prompt token that it shares.
    assert second["segment"] == 1
    assert others["positions"].tolist() == [2, 3]
    assert others["logprobs"].tolist() == [4.0, 5.0]
