"""One group: a prompt, its completions, their rewards. No actor is known here, only a `generate` and a `score` call."""

import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from titanrl.config.sections import RolloutConfig
from titanrl.types import Completion, GenerationRequest, Group, GroupRecord, Handle, Prompt, Rollout, SamplingParams

Generate = Callable[[Sequence[GenerationRequest]], Awaitable[list[Completion]]]
"""Completions for requests, in their order."""
Score = Callable[[Sequence[tuple[str, Mapping[str, Any]]]], Awaitable[list[Mapping[str, float]]]]
"""Reward parts for (completion text, verifier entry) pairs, in their order."""
Decode = Callable[[Sequence[int]], str]
"""Text of tokens."""


async def roll_out(
    prompt: Prompt, requests: Sequence[GenerationRequest], generate: Generate, score: Score, decode: Decode
) -> Group:
    """Sample completions of a prompt and score them."""
    started = time.perf_counter()
    completions = await generate(requests)
    generated = time.perf_counter()
    texts = [decode(completion.token_ids.tolist()) for completion in completions]
    parts = await score([(text, prompt.entry) for text in texts])
    rollouts = tuple(rollout_of(prompt, completion, part) for completion, part in zip(completions, parts, strict=True))
    return Group(prompt=prompt, rollouts=rollouts, generate_s=generated - started, score_s=time.perf_counter() - generated)


def sampling_requests(prompt: Prompt, config: RolloutConfig, seed: int) -> list[GenerationRequest]:
    """The requests of one training group; each has a seed of its own, from (run seed, prompt, place in the group) alone."""
    return [
        GenerationRequest(
            token_ids=prompt.token_ids,
            sampling=SamplingParams(
                max_new_tokens=config.max_new_tokens, temperature=config.temperature, seed=derive_seed(seed, prompt.index, g)
            ),
        )
        for g in range(config.group_size)
    ]


def greedy_request(prompt: Prompt, max_new_tokens: int) -> GenerationRequest:
    """The request of an evaluation."""
    return GenerationRequest(
        token_ids=prompt.token_ids, sampling=SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, seed=None)
    )


def derive_seed(*parts: int) -> int:
    """A 63-bit seed that depends on every part."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def rollout_of(prompt: Prompt, completion: Completion, parts: Mapping[str, float]) -> Rollout:
    """Prompt and completion as one training sequence."""
    num_prompt = len(prompt.token_ids)

    def after_prompt(values: np.ndarray, before: float, dtype: type[np.generic]) -> np.ndarray:
        return np.concatenate([np.full(num_prompt, before, dtype), values.astype(dtype)])

    return Rollout(
        token_ids=np.concatenate([np.asarray(prompt.token_ids, np.int64), completion.token_ids]),
        mask=after_prompt(np.ones(len(completion.token_ids)), False, np.bool_),
        logprobs=after_prompt(completion.logprobs, 0.0, np.float32),
        versions=after_prompt(completion.versions, -1, np.int64),
        reward=float(sum(parts.values())),
        reward_parts=dict(parts),
        finish_reason=completion.finish_reason,
    )


def record_of(group: Group, handle: Handle) -> GroupRecord:
    """What the controller gets to know of a group."""
    rollouts = group.rollouts
    versions = np.concatenate([rollout.versions[rollout.mask] for rollout in rollouts])
    return GroupRecord(
        index=group.prompt.index,
        task=group.prompt.task,
        handle=handle,
        has_payload=group.has_signal,
        rewards=tuple(rollout.reward for rollout in rollouts),
        reward_parts={
            part: tuple(float(rollout.reward_parts[part]) for rollout in rollouts) for part in rollouts[0].reward_parts
        },
        prompt_len=len(group.prompt.token_ids),
        lengths=tuple(len(rollout.token_ids) for rollout in rollouts),
        num_sampled=tuple(int(np.isfinite(rollout.logprobs[rollout.mask]).sum()) for rollout in rollouts),
        num_truncated=sum(rollout.finish_reason == "length" for rollout in rollouts),
        min_version=int(versions.min()),
        max_version=int(versions.max()),
        generate_s=group.generate_s,
        score_s=group.score_s,
    )
