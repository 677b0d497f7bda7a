"""One group: a prompt, its completions, their rewards. No actor is known here, only a `generate` and a `score` call."""

import hashlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from titanrl.config.sections import RolloutConfig, TrainerConfig
from titanrl.types import Completion, GenerationRequest, Group, GroupHandle, GroupRecord, Prompt, Rollout, SamplingParams

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
    rollouts = rollouts_of(prompt, completions, parts)
    return Group(prompt=prompt, rollouts=rollouts, generate_s=generated - started, score_s=time.perf_counter() - generated)


def sampling_requests(prompt: Prompt, config: RolloutConfig, seed: int) -> list[GenerationRequest]:
    """The requests of one training group; each has a seed of its own, from (run seed, prompt, place in the group) alone."""
    return [
        GenerationRequest(
            token_ids=prompt.token_ids,
            sampling=SamplingParams(
                max_new_tokens=config.max_new_tokens,
                temperature=config.temperature,
                seed=derive_seed(seed, prompt.index, g),
                top_p=config.top_p,
                top_k=config.top_k,
                min_p=config.min_p,
            ),
        )
        for g in range(config.num_requests)
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


def rollouts_of(prompt: Prompt, completions: Sequence[Completion], parts: Sequence[Mapping[str, float]]) -> tuple[Rollout, ...]:
    """Prompt and completions as training sequences, each a piece of arrays that hold the whole group."""
    num_prompt = len(prompt.token_ids)

    def after_prompt(before: npt.NDArray[Any], columns: Iterable[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        return np.concatenate([piece for values in columns for piece in (before, values)])

    lengths = [len(completion.token_ids) for completion in completions]
    token_ids = after_prompt(np.array(prompt.token_ids, np.int64), (completion.token_ids for completion in completions))
    logprobs = after_prompt(np.zeros(num_prompt, np.float32), (completion.logprobs for completion in completions))
    versions = after_prompt(np.full(num_prompt, -1), (completion.versions for completion in completions))
    sampled = np.ones(max(lengths), np.bool_)
    mask = after_prompt(np.zeros(num_prompt, np.bool_), (sampled[:length] for length in lengths))
    rollouts, end = [], 0
    for completion, length, part in zip(completions, lengths, parts, strict=True):
        sequence = slice(end, end := end + num_prompt + length)
        rollouts.append(
            Rollout(
                token_ids=token_ids[sequence],
                mask=mask[sequence],
                logprobs=logprobs[sequence],
                versions=versions[sequence],
                reward=float(sum(part.values())),
                reward_parts=dict(part),
                finish_reason=completion.finish_reason,
            )
        )
    return tuple(rollouts)


def fit_to_rows(group: Group, config: TrainerConfig) -> tuple[Group, int]:
    """The group as it is trained on, and how many of its rollouts were longer than a row and are dealt with as `overlong` says.

    `truncate` cuts the end off; `skip` also leaves no token that counts; `error` changes nothing, so that packing fails.
    """
    limit = config.row_tokens
    is_overlong = [len(rollout.token_ids) > limit for rollout in group.rollouts]
    if config.overlong == "error" or not any(is_overlong):
        return group, 0
    rollouts = tuple(
        replace(
            rollout,
            token_ids=rollout.token_ids[:limit],
            mask=rollout.mask[:limit] & (config.overlong == "truncate"),
            logprobs=rollout.logprobs[:limit],
            versions=rollout.versions[:limit],
        )
        if overlong
        else rollout
        for rollout, overlong in zip(group.rollouts, is_overlong, strict=True)
    )
    return replace(group, rollouts=rollouts), sum(is_overlong)


def record_of(group: Group, handle: GroupHandle, *, has_payload: bool, num_overlong: int) -> GroupRecord:
    """What the controller gets to know of a group."""
    rollouts = group.rollouts
    lengths = tuple(len(rollout.token_ids) for rollout in rollouts)
    mask = np.concatenate([rollout.mask for rollout in rollouts])
    counts = mask & np.isfinite(np.concatenate([rollout.logprobs for rollout in rollouts]))
    counts_until = np.cumsum(counts)[np.cumsum(lengths) - 1]
    versions = np.concatenate([rollout.versions for rollout in rollouts])
    versions = versions[versions >= 0]
    return GroupRecord(
        index=group.prompt.index,
        task=group.prompt.task,
        handle=handle,
        has_payload=has_payload,
        rewards=tuple(rollout.reward for rollout in rollouts),
        reward_parts={
            part: tuple(float(rollout.reward_parts[part]) for rollout in rollouts) for part in rollouts[0].reward_parts
        },
        prompt_len=len(group.prompt.token_ids),
        lengths=lengths,
        num_sampled=tuple(np.diff(counts_until, prepend=0).tolist()),
        num_truncated=sum(rollout.finish_reason == "length" for rollout in rollouts),
        num_overlong=num_overlong,
        num_nonfinite=int(np.count_nonzero(mask) - counts_until[-1]),
        min_version=int(versions.min()),
        max_version=int(versions.max()),
        generate_s=group.generate_s,
        score_s=group.score_s,
    )
