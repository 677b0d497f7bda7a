"""Groups, their rollouts and their records, from hand-made completions."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.records import plan_rewards
from titanrl.carriers.rewards import Answers, Scored
from titanrl.carriers.supports import supports_of
from titanrl.carriers.tables import RecordTable
from titanrl.carriers.types import Completion, GenerationRequest, Group, GroupHandle, Prompt, Rollout, Segment
from titanrl.config.algorithm import AlgorithmConfig
from titanrl.config.data import DataConfig
from titanrl.config.sections import RolloutConfig, TrainerConfig
from titanrl.rollout.group import (
    common_prefixes,
    credited_values_differ,
    derive_seed,
    fit_to_rows,
    mask_truncated,
    record_of,
    roll_out,
    rollouts_of,
    sampling_requests,
)

PROMPT = Prompt(index=7, task="sums", text="1 + 1 =", token_ids=(5, 6), entry={"answer": "2"})
HANDLE = GroupHandle(shard=0, location=3, serial=1)
BROKEN = Scored(reward=None, parts={}, error="answer: ZeroDivisionError: division by zero")


def completion(token_ids: list[int], *, version: int = 4, cut: bool = False) -> Completion:
    return Completion(
        token_ids=np.array(token_ids),
        logprobs=np.full(len(token_ids), -0.5, np.float32),
        versions=np.full(len(token_ids), version),
        finish_reason="length" if cut else "stop",
    )


branching = st.lists(st.tuples(st.integers(0, 1), st.booleans()), min_size=1, max_size=8)


@given(st.lists(st.tuples(st.lists(branching, min_size=1, max_size=4), st.sampled_from([0.0, 1.0])), min_size=2, max_size=4))
def test_segments_share_no_sampled_token(drawn: list[tuple[list[list[tuple[int, bool]]], float]]) -> None:
    rollouts = tuple(
        Rollout(segments=tuple(map(segment_of, segments)), reward=reward, reward_parts={}, finish_reason="stop")
        for segments, reward in drawn
    )
    group = Group(prompt=replace(PROMPT, token_ids=()), rollouts=rollouts, generate_s=0.0, score_s=0.0)
    record = record_of(group, HANDLE, has_payload=True, num_overlong=0)
    keys = {"constant_length": 1, "row_tokens": 20, "rows_per_microbatch": 1, "dp_size": 1}
    algorithm = AlgorithmConfig(advantage="dr_grpo")
    batch = plan_rewards(RecordTable.of([record]), algorithm=algorithm, share_prompts=True, **keys)
    segments = [segment for rollout in rollouts for segment in rollout.segments]
    for row in [row for microbatch in batch.microbatches for rank in microbatch.rows for row in rank]:
        last: dict[int, int] = {}  # last token at each position
        for sequence in row:
            segment, shared = segments[sequence.segment], sequence.num_shared
            assert [last[position] for position in range(shared)] == segment.token_ids[:shared].tolist()
            assert not segment.mask[: shared + 1].any()
            last |= dict(enumerate(segment.token_ids.tolist()))


def segment_of(tokens: list[tuple[int, bool]]) -> Segment:
    ids, mask = (np.array(column) for column in zip((0, False), *tokens, strict=True))
    return Segment(token_ids=ids, mask=mask, logprobs=np.zeros(len(ids), np.float32), versions=np.where(mask, 0, -1))


def test_branch_follows_the_segment_that_samples_its_context() -> None:
    # Call 0 is continued by call 1; call 2 has the same question and reply, and other text then; call 3 only the question.
    whole = [(1, False), (2, True), (3, False), (4, True)]
    branches = [[(1, False), (2, False), (5, False), (6, True)], whole, [(1, False), (7, False), (8, True)]]
    assert common_prefixes([segment_of(tokens) for tokens in branches]) == ((1, 3), (0, 0), (2, 2))


def test_rollout_masks_the_prompt() -> None:
    (rollout,) = rollouts_of(PROMPT, [completion([7, 1])], [Scored(reward=1.25, parts={"answer": 1.0, "format": 0.5})])
    assert rollout.segments[0].token_ids.tolist() == [5, 6, 7, 1]
    assert rollout.segments[0].mask.tolist() == [False, False, True, True]
    assert rollout.segments[0].versions.tolist() == [-1, -1, 4, 4]
    assert rollout.segments[0].logprobs.tolist() == [0.0, 0.0, -0.5, -0.5]
    assert (rollout.reward, rollout.reward_parts) == (1.25, {"answer": 1.0, "format": 0.5})


def test_supports_are_aligned_with_tokens_and_truncated_with_them() -> None:
    supports = supports_of([np.array([7, 9], np.int32), np.array([1], np.int32)], 100)
    truncated = replace(completion([7, 1]), supports=supports)
    rollouts = rollouts_of(PROMPT, [truncated, completion([7, 1])], scored(1.0, 0.0))
    (segment,), (other,) = (rollout.segments for rollout in rollouts)
    assert segment.supports.counts_S.tolist() == [0, 0, 2, 1]
    assert segment.supports.ids(3).tolist() == [1]
    assert other.supports is None
    group = Group(prompt=PROMPT, rollouts=rollouts, generate_s=0.0, score_s=0.0)
    cut = fit_to_rows(group, TrainerConfig(row_tokens=3, overlong="truncate"))[0].rollouts[0].segments[0].supports
    assert (cut.counts_S.tolist(), cut.words_K.tolist()) == ([0, 0, 2], [7, 9])


def test_experts_cover_the_prompt_and_are_truncated_with_tokens() -> None:
    experts = np.array([1, 2, 3, 255], np.uint8)[:, None, None]
    rollouts = rollouts_of(PROMPT, [replace(completion([7, 1]), experts=experts)], scored(1.0))
    assert rollouts[0].segments[0].experts is experts
    group = Group(prompt=PROMPT, rollouts=rollouts, generate_s=0.0, score_s=0.0)
    cut = fit_to_rows(group, TrainerConfig(row_tokens=3, overlong="truncate"))[0].rollouts[0].segments[0].experts
    assert cut.ravel().tolist() == [1, 2, 3]


def scored(*rewards: float) -> list[Scored]:
    return [Scored(reward=reward, parts={"answer": reward}) for reward in rewards]


def rolled_out(completions: list[Completion], scores: list[Scored]) -> tuple[Group, Answers]:
    """Return the group of these completions and scores, and the answers that the rewards received."""
    got: list[Answers] = []

    async def generate(requests: Sequence[GenerationRequest]) -> list[Completion]:
        return completions

    async def score(answers: Answers) -> list[Scored]:
        got.append(answers)
        return scores

    requests = sampling_requests(PROMPT, RolloutConfig(group_size=len(scores)), seed=0)
    group = asyncio.run(roll_out(PROMPT, requests, generate, score, lambda ids: " ".join(map(str, ids))))
    (answers,) = got
    return group, answers


def test_group_is_scored_by_its_texts() -> None:
    group, answers = rolled_out([completion([8, 1]), completion([9, 7, 1], cut=True)], scored(1.0, 0.0))
    assert replace(answers, decode=None) == Answers(
        entry={"answer": "2"},
        completions=("8 1", "9 7 1"),
        num_tokens=(2, 3),
        finish_reasons=("stop", "length"),
        token_ids=([8, 1], [9, 7, 1]),
    )
    assert answers.decode is not None
    assert answers.decode([9, 7]) == "9 7"
    assert group.rewards_differ
    record = record_of(group, HANDLE, has_payload=True, num_overlong=0)
    assert record.rewards == (1.0, 0.0)
    assert (record.lengths, record.num_sampled, record.num_truncated) == ((4, 5), (2, 3), 1)
    assert (record.min_version, record.max_version) == (4, 4)


def test_rollouts_without_a_reward_are_left_out_and_counted() -> None:
    completions = [completion([7, 1], cut=True), completion([8, 9, 1], version=5), completion([9, 1])]
    group, _ = rolled_out(completions, [BROKEN, *scored(1.0, 0.0)])
    assert [rollout.segments[0].token_ids.tolist() for rollout in group.rollouts] == [[5, 6, 8, 9, 1], [5, 6, 9, 1]]
    assert [failure.completion.token_ids.tolist() for failure in group.failures] == [[7, 1]]
    record = record_of(group, HANDLE, has_payload=True, num_overlong=0)
    assert (record.rewards, record.reward_parts) == ((1.0, 0.0), {"answer": (1.0, 0.0)})
    assert (record.lengths, record.num_sampled, record.num_truncated) == ((5, 4), (3, 2), 0)
    assert (record.num_errors, record.first_error) == (1, "answer: ZeroDivisionError: division by zero")


def test_parts_of_only_some_completions_are_recorded() -> None:
    both = Scored(reward=1.5, parts={"answer": 1.0, "judge/style": 0.5})
    group, _ = rolled_out([completion([8, 1]), completion([9, 1])], [both, *scored(0.0)])
    record = record_of(group, HANDLE, has_payload=True, num_overlong=0)
    assert record.reward_parts == {"answer": (1.0, 0.0), "judge/style": (0.5, pytest.approx(math.nan, nan_ok=True))}
    table = RecordTable.of([record])
    assert {part: values.tolist() for part, values in table.reward_parts.items()} == {
        "answer": [1.0, 0.0],
        "judge/style": [0.5, pytest.approx(math.nan, nan_ok=True)],
    }


def test_group_without_scored_rollout_has_an_empty_record() -> None:
    group, _ = rolled_out([completion([7, 1]), completion([8, 1])], [BROKEN, BROKEN])
    record = record_of(group, HANDLE, has_payload=False, num_overlong=0)
    assert not record.rewards_differ
    assert (record.rewards, record.lengths, record.num_sampled, record.reward_parts) == ((), (), (), {})
    assert (record.num_errors, record.min_version) == (2, -1)


def test_failed_rollout_does_not_affect_the_others() -> None:
    completions = [completion([7, 1]), completion([8, 9, 1]), completion([9, 1])]
    with_failure, _ = rolled_out(completions, [*scored(1.0), BROKEN, *scored(0.0)])
    smaller, _ = rolled_out([completions[0], completions[2]], scored(1.0, 0.0))
    plans = [
        plan_rewards(
            RecordTable.of([record_of(group, HANDLE, has_payload=True, num_overlong=0)]),
            algorithm=AlgorithmConfig(reduction=reduction),
            constant_length=8,
            row_tokens=64,
            rows_per_microbatch=1,
            dp_size=1,
        )
        for reduction in ("prompt_mean", "sequence_mean", "constant")
        for group in (with_failure, smaller)
    ]
    assert plans[::2] == plans[1::2]


def test_tokens_without_a_finite_log_probability_do_not_count() -> None:
    odd = Completion(
        token_ids=np.array([8, 1]),
        logprobs=np.array([-np.inf, -0.5], np.float32),
        versions=np.array([4, 4]),
        finish_reason="stop",
    )
    group, _ = rolled_out([odd, completion([9, 1])], scored(0.0, 1.0))
    record = record_of(group, HANDLE, has_payload=True, num_overlong=0)
    assert (record.num_sampled, record.num_nonfinite) == ((1, 2), 1)


def test_seed_of_a_completion_depends_on_run_prompt_and_position() -> None:
    requests = sampling_requests(PROMPT, RolloutConfig(group_size=8), seed=0)
    seeds = [request.sampling.seed for request in requests]
    assert len(set(seeds)) == 8
    assert seeds == [request.sampling.seed for request in sampling_requests(PROMPT, RolloutConfig(group_size=8), seed=0)]
    assert derive_seed(0, 7, 0) != derive_seed(1, 7, 0)
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds)


def overlong_group() -> Group:
    """Return a group with two and five sampled tokens, one of them without a finite log-probability."""
    completions = completion([7, 1]), completion([7, 8, 9, 7, 1], version=3)
    completions[1].logprobs[1] = -np.inf
    rollouts = rollouts_of(PROMPT, completions, scored(1.0, 0.0))
    return Group(prompt=PROMPT, rollouts=rollouts, generate_s=0.0, score_s=0.0)


def test_truncate_cuts_and_counts_overlong_sequences() -> None:
    group, num_overlong = fit_to_rows(overlong_group(), TrainerConfig(row_tokens=5, overlong="truncate"))
    assert num_overlong == 1
    record = record_of(group, HANDLE, has_payload=True, num_overlong=num_overlong)
    assert (record.lengths, record.num_sampled, record.num_overlong, record.num_nonfinite) == ((4, 5), (2, 2), 1, 1)
    assert group.rollouts[1].segments[0].token_ids.tolist() == [5, 6, 7, 8, 9]
    assert record.rewards == (1.0, 0.0)


def test_truncate_may_cut_every_sampled_token_of_a_group() -> None:
    group, num_overlong = fit_to_rows(overlong_group(), TrainerConfig(row_tokens=1, overlong="truncate"))
    record = record_of(group, HANDLE, has_payload=False, num_overlong=num_overlong)
    assert (record.lengths, record.num_sampled, record.num_overlong) == ((1, 1), (0, 0), 2)
    assert (record.min_version, record.max_version) == (-1, -1)


def test_skip_masks_and_counts_overlong_sequences() -> None:
    group, num_overlong = fit_to_rows(overlong_group(), TrainerConfig(row_tokens=5, overlong="skip"))
    record = record_of(group, HANDLE, has_payload=True, num_overlong=num_overlong)
    assert (record.lengths, record.num_sampled, record.num_overlong, record.num_nonfinite) == ((4, 5), (2, 0), 1, 0)
    assert (record.min_version, record.max_version) == (3, 4)


def test_sequences_that_fit_are_unchanged() -> None:
    group = overlong_group()
    assert fit_to_rows(group, TrainerConfig(row_tokens=7, overlong="skip")) == (group, 0)
    assert fit_to_rows(group, TrainerConfig(row_tokens=5)) == (group, 0)


# Truncated completions


def truncated_group() -> Group:
    """Three completions of 2, 3 and 4 tokens with the rewards 1, 0 and 0; the last one is truncated."""
    completions = [completion([7, 1]), completion([7, 8, 1]), completion([7, 8, 9, 7], cut=True)]
    group, _ = rolled_out(completions, scored(1.0, 0.0, 0.0))
    return group


def test_masked_truncated_completions_keep_reward_and_length() -> None:
    group = truncated_group()
    record = record_of(mask_truncated(group), HANDLE, has_payload=True, num_overlong=0)
    assert (record.rewards, record.lengths, record.num_sampled) == ((1.0, 0.0, 0.0), (4, 5, 6), (2, 3, 0))
    assert (record.num_truncated, record.num_nonfinite, record.max_version) == (1, 0, 4)
    assert group.rollouts[2].segments[0].mask.tolist() == [False] * 2 + [True] * 4  # the group that is recorded is unchanged


@pytest.mark.parametrize(
    ("reduction", "first", "second"),
    [
        ("token_mean", 1 / 5, 1 / 5),  # 2 + 3 tokens
        ("sequence_mean", 1 / (2 * 2), 1 / (2 * 3)),  # two sequences
        ("sequence_mean_token_sum", 1 / 2, 1 / 2),
        ("prompt_mean", 1 / 5, 1 / 5),  # one prompt with 5 tokens
        ("constant", 1 / (2 * 10), 1 / (2 * 10)),
        ("sum", 1.0, 1.0),
    ],
)
def test_masked_completions_count_in_the_baseline_but_not_in_the_loss(reduction: str, first: float, second: float) -> None:
    record = record_of(mask_truncated(truncated_group()), HANDLE, has_payload=True, num_overlong=0)
    batch = plan_rewards(
        RecordTable.of([record]),
        algorithm=AlgorithmConfig.model_validate({"reduction": reduction}),
        constant_length=10,
        row_tokens=20,
        rows_per_microbatch=1,
        dp_size=1,
    )
    sequences = [s for microbatch in batch.microbatches for rank in microbatch.rows for row in rank for s in row]
    assert {s.segment: s.weight for s in sequences} == pytest.approx({0: first, 1: second}, rel=1e-15)
    assert batch.advantages_N == pytest.approx([2 / 3, -1 / 3, -1 / 3], rel=1e-15)


def test_only_parts_with_a_nonzero_weight_can_differ() -> None:
    data = DataConfig.model_validate({"rewards": {"right": "exact", "seen": {"function": "exact", "weight": 0.0}}})

    def group_of(*parts: dict[str, float]) -> Group:
        scores = [Scored(reward=1.0, parts=values) for values in parts]
        return rolled_out([completion([7, 1])] * len(parts), scores)[0]

    gdpo = AlgorithmConfig(advantage="gdpo")
    differing = group_of({"right": 1.0, "seen": 0.0}, {"right": 0.0, "seen": 0.0})
    assert credited_values_differ(differing, differing, gdpo, data)
    assert not credited_values_differ(differing, differing, AlgorithmConfig(), data)
    equal = group_of({"right": 1.0, "seen": 0.0}, {"right": 1.0, "seen": 1.0})
    assert not credited_values_differ(equal, equal, gdpo, data)
    record = record_of(truncated_group(), HANDLE, has_payload=True, num_overlong=0, parts_differ=True)
    assert replace(record, rewards=(1.0, 1.0)).rewards_differ
    assert not replace(record, rewards=(1.0, 1.0), parts_differ=False).rewards_differ


def test_requests_carry_the_sampling_options() -> None:
    config = RolloutConfig(group_size=2, temperature=0.7, top_p=0.9, top_k=20, min_p=0.05)
    for request in sampling_requests(PROMPT, config, seed=0):
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.7, 0.9, 20, 0.05)
        assert sampling.supports
    assert not sampling_requests(PROMPT, RolloutConfig(group_size=2, temperature=0.7), seed=0)[0].sampling.supports
