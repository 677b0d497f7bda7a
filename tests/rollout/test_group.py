"""Groups, their rollouts and their records, from hand-made completions."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from titanrl.algorithms.batch_plan import plan_batch
from titanrl.config.sections import AlgorithmConfig, RolloutConfig, TrainerConfig
from titanrl.rollout.group import derive_seed, fit_to_rows, record_of, roll_out, rollouts_of, sampling_requests
from titanrl.sandbox.scores import Score
from titanrl.tables import RecordTable
from titanrl.types import Completion, GenerationRequest, Group, GroupHandle, Prompt

PROMPT = Prompt(index=7, task="sums", text="1 + 1 =", token_ids=(5, 6), entry={"answer": "2"})
HANDLE = GroupHandle(shard=0, slot=3, serial=1)
BROKEN = Score(parts={}, status="error", detail="ZeroDivisionError: division by zero")


def completion(token_ids: list[int], *, version: int = 4, cut: bool = False) -> Completion:
    return Completion(
        token_ids=np.array(token_ids),
        logprobs=np.full(len(token_ids), -0.5, np.float32),
        versions=np.full(len(token_ids), version),
        finish_reason="length" if cut else "stop",
    )


def test_rollout_masks_the_prompt() -> None:
    (rollout,) = rollouts_of(PROMPT, [completion([7, 1])], [{"answer": 1.0, "format": 0.5}])
    assert rollout.token_ids.tolist() == [5, 6, 7, 1]
    assert rollout.mask.tolist() == [False, False, True, True]
    assert rollout.versions.tolist() == [-1, -1, 4, 4]
    assert rollout.logprobs.tolist() == [0.0, 0.0, -0.5, -0.5]
    assert rollout.reward == 1.5


def scored(*rewards: float) -> list[Score]:
    return [Score(parts={"answer": reward}, status="ok") for reward in rewards]


def rolled_out(completions: list[Completion], scores: list[Score]) -> tuple[Group, list[str]]:
    """Return the group of these completions and scores, and the texts that the scorer got."""
    texts: list[str] = []

    async def generate(requests: Sequence[GenerationRequest]) -> list[Completion]:
        return completions

    async def score(answers: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Score]:
        texts.extend(text for text, _ in answers)
        return scores

    requests = sampling_requests(PROMPT, RolloutConfig(group_size=len(scores)), seed=0)
    return asyncio.run(roll_out(PROMPT, requests, generate, score, lambda ids: " ".join(map(str, ids)))), texts


def test_group_is_scored_by_its_texts() -> None:
    group, texts = rolled_out([completion([8, 1]), completion([9, 1], cut=True)], scored(1.0, 0.0))
    assert texts == ["8 1", "9 1"]
    assert group.has_signal
    record = record_of(group, HANDLE, has_payload=True, num_overlong=0)
    assert record.rewards == (1.0, 0.0)
    assert (record.lengths, record.num_sampled, record.num_truncated) == ((4, 4), (2, 2), 1)
    assert (record.min_version, record.max_version) == (4, 4)


def test_rollouts_whose_scorer_failed_are_left_out_and_counted() -> None:
    completions = [completion([7, 1], cut=True), completion([8, 9, 1], version=5), completion([9, 1])]
    group, _ = rolled_out(completions, [BROKEN, *scored(1.0, 0.0)])
    assert [rollout.token_ids.tolist() for rollout in group.rollouts] == [[5, 6, 8, 9, 1], [5, 6, 9, 1]]
    assert [failure.completion.token_ids.tolist() for failure in group.failures] == [[7, 1]]
    record = record_of(group, HANDLE, has_payload=True, num_overlong=0)
    assert (record.rewards, record.reward_parts) == ((1.0, 0.0), {"answer": (1.0, 0.0)})
    assert (record.lengths, record.num_sampled, record.num_truncated) == ((5, 4), (3, 2), 0)
    assert (record.num_errors, record.first_error) == (1, "ZeroDivisionError: division by zero")


def test_group_without_scored_rollout_has_an_empty_record() -> None:
    group, _ = rolled_out([completion([7, 1]), completion([8, 1])], [BROKEN, BROKEN])
    record = record_of(group, HANDLE, has_payload=False, num_overlong=0)
    assert not record.has_signal
    assert (record.rewards, record.lengths, record.num_sampled, record.reward_parts) == ((), (), (), {})
    assert (record.num_errors, record.min_version) == (2, -1)


def test_failed_rollout_changes_nothing_for_the_others() -> None:
    completions = [completion([7, 1]), completion([8, 9, 1]), completion([9, 1])]
    with_failure, _ = rolled_out(completions, [*scored(1.0), BROKEN, *scored(0.0)])
    smaller, _ = rolled_out([completions[0], completions[2]], scored(1.0, 0.0))
    plans = [
        plan_batch(
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


def test_seed_of_a_completion_depends_on_run_prompt_and_place() -> None:
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
    rollouts = rollouts_of(PROMPT, completions, [{"answer": 1.0}, {"answer": 0.0}])
    return Group(prompt=PROMPT, rollouts=rollouts, generate_s=0.0, score_s=0.0)


def test_truncate_cuts_and_counts_overlong_sequences() -> None:
    group, num_overlong = fit_to_rows(overlong_group(), TrainerConfig(row_tokens=5, overlong="truncate"))
    assert num_overlong == 1
    record = record_of(group, HANDLE, has_payload=True, num_overlong=num_overlong)
    assert (record.lengths, record.num_sampled, record.num_overlong, record.num_nonfinite) == ((4, 5), (2, 2), 1, 1)
    assert group.rollouts[1].token_ids.tolist() == [5, 6, 7, 8, 9]
    assert record.rewards == (1.0, 0.0)


def test_skip_masks_and_counts_overlong_sequences() -> None:
    group, num_overlong = fit_to_rows(overlong_group(), TrainerConfig(row_tokens=5, overlong="skip"))
    record = record_of(group, HANDLE, has_payload=True, num_overlong=num_overlong)
    assert (record.lengths, record.num_sampled, record.num_overlong, record.num_nonfinite) == ((4, 5), (2, 0), 1, 0)
    assert (record.min_version, record.max_version) == (3, 4)


def test_sequences_that_fit_are_unchanged() -> None:
    group = overlong_group()
    assert fit_to_rows(group, TrainerConfig(row_tokens=7, overlong="skip")) == (group, 0)
    assert fit_to_rows(group, TrainerConfig(row_tokens=5)) == (group, 0)


def test_requests_carry_the_sampling_options() -> None:
    config = RolloutConfig(group_size=2, temperature=0.7, top_p=0.9, top_k=20, min_p=0.05)
    for request in sampling_requests(PROMPT, config, seed=0):
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.7, 0.9, 20, 0.05)
