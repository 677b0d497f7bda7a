"""Groups, their rollouts and records, with hand-made completions."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from titanrl.config.sections import RolloutConfig, TrainerConfig
from titanrl.rollout.group import derive_seed, fit_to_rows, record_of, roll_out, rollouts_of, sampling_requests
from titanrl.types import Completion, GenerationRequest, Group, GroupHandle, Prompt

PROMPT = Prompt(index=7, task="sums", text="1 + 1 =", token_ids=(5, 6), entry={"answer": "2"})


def completion(token_ids: list[int], *, version: int = 4, cut: bool = False) -> Completion:
    return Completion(
        token_ids=np.array(token_ids),
        logprobs=np.full(len(token_ids), -0.5, np.float32),
        versions=np.full(len(token_ids), version),
        finish_reason="length" if cut else "stop",
    )


def test_a_rollout_masks_the_prompt_and_carries_version_and_log_probability_of_each_sampled_token() -> None:
    (rollout,) = rollouts_of(PROMPT, [completion([7, 1])], [{"answer": 1.0, "format": 0.5}])
    assert rollout.token_ids.tolist() == [5, 6, 7, 1]
    assert rollout.mask.tolist() == [False, False, True, True]
    assert rollout.versions.tolist() == [-1, -1, 4, 4]
    assert rollout.logprobs.tolist() == [0.0, 0.0, -0.5, -0.5]
    assert rollout.reward == 1.5


def test_a_group_is_generated_then_scored_by_its_text() -> None:
    scored: list[str] = []

    async def generate(requests: Sequence[GenerationRequest]) -> list[Completion]:
        return [completion([8 + place, 1], cut=place == 1) for place in range(len(requests))]

    async def score(answers: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Mapping[str, float]]:
        scored.extend(text for text, _ in answers)
        return [{"answer": float(text.startswith("8"))} for text, _ in answers]

    requests = sampling_requests(PROMPT, RolloutConfig(group_size=2), seed=0)
    group = asyncio.run(roll_out(PROMPT, requests, generate, score, lambda ids: " ".join(map(str, ids))))
    assert scored == ["8 1", "9 1"]
    assert group.has_signal
    record = record_of(group, GroupHandle(shard=0, slot=3, serial=1), has_payload=True, num_overlong=0)
    assert record.rewards == (1.0, 0.0)
    assert (record.lengths, record.num_sampled, record.num_truncated) == ((4, 4), (2, 2), 1)
    assert (record.min_version, record.max_version) == (4, 4)


def test_tokens_without_a_finite_log_probability_do_not_count() -> None:
    odd = Completion(
        token_ids=np.array([8, 1]),
        logprobs=np.array([-np.inf, -0.5], np.float32),
        versions=np.array([4, 4]),
        finish_reason="stop",
    )

    async def generate(requests: Sequence[GenerationRequest]) -> list[Completion]:
        return [odd, completion([9, 1])]

    async def score(answers: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Mapping[str, float]]:
        return [{"answer": 0.0}, {"answer": 1.0}]

    requests = sampling_requests(PROMPT, RolloutConfig(group_size=2), seed=0)
    group = asyncio.run(roll_out(PROMPT, requests, generate, score, str))
    record = record_of(group, GroupHandle(shard=0, slot=0, serial=1), has_payload=True, num_overlong=0)
    assert (record.num_sampled, record.num_nonfinite) == ((1, 2), 1)


def test_every_completion_has_a_seed_of_its_own_that_depends_on_nothing_else() -> None:
    requests = sampling_requests(PROMPT, RolloutConfig(group_size=8), seed=0)
    seeds = [request.sampling.seed for request in requests]
    assert len(set(seeds)) == 8
    assert seeds == [request.sampling.seed for request in sampling_requests(PROMPT, RolloutConfig(group_size=8), seed=0)]
    assert derive_seed(0, 7, 0) != derive_seed(1, 7, 0)
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds)


def overlong_group() -> Group:
    """Two prompt tokens and two or five sampled ones, one of these without a finite log-probability."""
    completions = completion([7, 1]), completion([7, 8, 9, 7, 1], version=3)
    completions[1].logprobs[1] = -np.inf
    rollouts = rollouts_of(PROMPT, completions, [{"answer": 1.0}, {"answer": 0.0}])
    return Group(prompt=PROMPT, rollouts=rollouts, generate_s=0.0, score_s=0.0)


def test_a_sequence_longer_than_a_row_loses_its_end_and_is_counted() -> None:
    group, num_overlong = fit_to_rows(overlong_group(), TrainerConfig(row_tokens=5, overlong="truncate"))
    assert num_overlong == 1
    record = record_of(group, GroupHandle(shard=0, slot=0, serial=1), has_payload=True, num_overlong=num_overlong)
    assert (record.lengths, record.num_sampled, record.num_overlong, record.num_nonfinite) == ((4, 5), (2, 2), 1, 1)
    assert group.rollouts[1].token_ids.tolist() == [5, 6, 7, 8, 9]
    assert record.rewards == (1.0, 0.0)


def test_a_sequence_longer_than_a_row_can_be_left_out_of_training_and_all_counts_but_its_own() -> None:
    group, num_overlong = fit_to_rows(overlong_group(), TrainerConfig(row_tokens=5, overlong="skip"))
    record = record_of(group, GroupHandle(shard=0, slot=0, serial=1), has_payload=True, num_overlong=num_overlong)
    assert (record.lengths, record.num_sampled, record.num_overlong, record.num_nonfinite) == ((4, 5), (2, 0), 1, 0)
    assert (record.min_version, record.max_version) == (3, 4)


def test_sequences_that_fit_are_left_as_they_are() -> None:
    group = overlong_group()
    assert fit_to_rows(group, TrainerConfig(row_tokens=7, overlong="skip")) == (group, 0)
    assert fit_to_rows(group, TrainerConfig(row_tokens=5)) == (group, 0)


def test_requests_carry_how_sampling_is_truncated() -> None:
    config = RolloutConfig(group_size=2, temperature=0.7, top_p=0.9, top_k=20, min_p=0.05)
    for request in sampling_requests(PROMPT, config, seed=0):
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.7, 0.9, 20, 0.05)
