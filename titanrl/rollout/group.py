"""One group: a prompt, its completions and their rewards. This module knows no actors, only a `generate` and a `score` call."""

import hashlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from titanrl.config.sections import RolloutConfig, TrainerConfig
from titanrl.sandbox.scores import Score
from titanrl.types import (
    Completion,
    GenerationRequest,
    Group,
    GroupHandle,
    GroupRecord,
    Prompt,
    Rollout,
    SamplingParams,
    ScorerFailure,
)

Generate = Callable[[Sequence[GenerationRequest]], Awaitable[list[Completion]]]
"""Function from requests to their completions, in the same order."""
ScoreAnswers = Callable[[Sequence[tuple[str, Mapping[str, Any]]]], Awaitable[list[Score]]]
"""Function from pairs of completion text and prompt entry to their scores, in the same order."""
Decode = Callable[[Sequence[int]], str]
"""Function from token ids to their text."""


async def roll_out(
    prompt: Prompt, requests: Sequence[GenerationRequest], generate: Generate, score: ScoreAnswers, decode: Decode
) -> Group:
    """Sample completions of a prompt and score them. Completions whose scorer failed become `failures`, not rollouts."""
    started = time.perf_counter()
    completions = await generate(requests)
    generated = time.perf_counter()
    texts = [decode(completion.token_ids.tolist()) for completion in completions]
    pairs = list(zip(completions, await score([(text, prompt.entry) for text in texts]), strict=True))
    scored = [(completion, score.parts) for completion, score in pairs if score.status == "ok"]
    failed = [(completion, score.detail) for completion, score in pairs if score.status != "ok"]
    return Group(
        prompt=prompt,
        rollouts=rollouts_of(prompt, [completion for completion, _ in scored], [parts for _, parts in scored]),
        generate_s=generated - started,
        score_s=time.perf_counter() - generated,
        failures=tuple(ScorerFailure(completion=completion, error=error) for completion, error in failed),
    )


def sampling_requests(prompt: Prompt, config: RolloutConfig, seed: int) -> list[GenerationRequest]:
    """Return the requests of one training group. The seed of each depends only on the run's seed, the prompt and its place."""
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
    """Return the request of an evaluation."""
    return GenerationRequest(
        token_ids=prompt.token_ids, sampling=SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, seed=None)
    )


def derive_seed(*parts: int) -> int:
    """Hash the parts to a 63-bit seed."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def rollouts_of(prompt: Prompt, completions: Sequence[Completion], parts: Sequence[Mapping[str, float]]) -> tuple[Rollout, ...]:
    """Join the prompt and each completion to a training sequence. The sequences are slices of arrays of the whole group."""
    if not completions:
        return ()
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
    """Apply `trainer.overlong` to rollouts that are longer than a row; return the group and the number of such rollouts.

    `truncate` cuts the end off. `skip` also masks every token. `error` changes nothing, so packing fails.
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
    """Summarize a group for the controller: numbers only, no tokens."""
    rollouts = group.rollouts
    num_sampled, num_nonfinite, min_version, max_version = _token_counts(rollouts)
    return GroupRecord(
        index=group.prompt.index,
        task=group.prompt.task,
        handle=handle,
        has_payload=has_payload,
        rewards=tuple(rollout.reward for rollout in rollouts),
        reward_parts={
            part: tuple(float(rollout.reward_parts[part]) for rollout in rollouts)
            for part in (rollouts[0].reward_parts if rollouts else ())
        },
        prompt_len=len(group.prompt.token_ids),
        lengths=tuple(len(rollout.token_ids) for rollout in rollouts),
        num_sampled=num_sampled,
        num_truncated=sum(rollout.finish_reason == "length" for rollout in rollouts),
        num_overlong=num_overlong,
        num_nonfinite=num_nonfinite,
        min_version=min_version,
        max_version=max_version,
        generate_s=group.generate_s,
        score_s=group.score_s,
        num_errors=len(group.failures),
        first_error=group.failures[0].error if group.failures else "",
    )


def _token_counts(rollouts: Sequence[Rollout]) -> tuple[tuple[int, ...], int, int, int]:
    """Return the tokens of each rollout that count in the loss, the nonfinite ones of all, and the first and last version."""
    if not rollouts:
        return (), 0, -1, -1
    ends = np.cumsum([len(rollout.token_ids) for rollout in rollouts])
    mask = np.concatenate([rollout.mask for rollout in rollouts])
    counts = mask & np.isfinite(np.concatenate([rollout.logprobs for rollout in rollouts]))
    counts_until = np.cumsum(counts)[ends - 1]
    versions = np.concatenate([rollout.versions for rollout in rollouts])
    versions = versions[versions >= 0]
    num_nonfinite = int(np.count_nonzero(mask) - counts_until[-1])
    return tuple(np.diff(counts_until, prepend=0).tolist()), num_nonfinite, int(versions.min()), int(versions.max())
