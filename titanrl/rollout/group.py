"""Groups: samples and scores the completions of a prompt, summarizes them for the controller, and writes them to the record.

This module does not depend on actors; it receives `generate` and `score` as callables. docs/record.md describes the record.
"""

import copy
import hashlib
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from titanrl.algorithms.advantages import returns_differ, token_returns_differ
from titanrl.base.plugins import Point
from titanrl.carriers.record import Columns, RecordFile, joined, share, span
from titanrl.carriers.rewards import Answers, Scored
from titanrl.carriers.supports import placed
from titanrl.carriers.tables import RecordTable
from titanrl.carriers.types import (
    Completion,
    GenerationRequest,
    Group,
    GroupHandle,
    GroupRecord,
    GroupTokens,
    GroupTurns,
    IntArray,
    OnTokens,
    Prompt,
    Rejection,
    Rollout,
    SamplingParams,
    ScorerFailure,
    Segment,
)
from titanrl.config.algorithm import AlgorithmConfig
from titanrl.config.data import DataConfig
from titanrl.config.schema import Config
from titanrl.config.sections import RolloutConfig, TrainerConfig
from titanrl.data.tokenizer import Tokenizer

Generate = Callable[[Sequence[GenerationRequest]], Awaitable[list[Completion]]]
"""Function from requests to their completions, in the same order."""


class GenerateTokens(Protocol):
    """Function from requests to their completions, which can pass the tokens of a request on while they are sampled."""

    async def __call__(self, requests: Sequence[GenerationRequest], *, on_tokens: OnTokens | None = None) -> list[Completion]:
        """Return the completions of one turn in the same order.

        `on_tokens` gets the tokens of the only request while they are sampled, except the last ones. None waits for the whole
        completion. So does a turn in a round, in which synchronous training samples all groups together.
        """


ScoreAnswers = Callable[[Answers], Awaitable[list[Scored]]]
"""Function from the answers to one prompt to their rewards, in the same order."""
Decode = Callable[[Sequence[int]], str]
"""Function from token ids to their text."""


_UNUSABLE = "the completion was cancelled, or has no token"


async def roll_out(
    prompt: Prompt,
    requests: Sequence[GenerationRequest],
    generate: Generate,
    score: ScoreAnswers,
    decode: Decode,
    decode_raw: Decode | None = None,
) -> Group:
    """Sample and score completions of a prompt.

    Completions whose reward failed, and those that were cancelled or have no token, become `failures` instead of rollouts.
    `decode_raw` decodes with the special tokens.
    """
    started = time.perf_counter()
    sampled = await generate(requests)
    generated = time.perf_counter()
    completions = [completion for completion in sampled if len(completion.token_ids) and completion.finish_reason != "abort"]
    unusable = [completion for completion in sampled if not len(completion.token_ids) or completion.finish_reason == "abort"]
    token_ids = tuple(completion.token_ids.tolist() for completion in completions)
    answers = Answers(
        entry=prompt.entry,
        completions=tuple(map(decode, token_ids)),
        num_tokens=tuple(len(completion.token_ids) for completion in completions),
        finish_reasons=tuple(completion.finish_reason for completion in completions),
        token_ids=token_ids,
        decode=decode,
        decode_raw=decode_raw,
    )
    with span("score"):
        scores = await score(answers) if completions else ()
    failed = [(completion, score) for completion, score in zip(completions, scores, strict=True) if score.reward is None]
    return Group(
        prompt=prompt,
        rollouts=rollouts_of(prompt, completions, scores),
        generate_s=generated - started,
        score_s=time.perf_counter() - generated,
        failures=(
            *(ScorerFailure(completion=completion, error=score.error) for completion, score in failed),
            *(ScorerFailure(completion=completion, error=_UNUSABLE, outcome="generation_error") for completion in unusable),
        ),
    )


def sampling_requests(prompt: Prompt, config: RolloutConfig, seed: int, *, experts: bool = False) -> list[GenerationRequest]:
    """Return the requests of a training group, spare ones included (`rollout.num_spare_completions`).

    Their seeds depend only on the run's seed, the prompt and the position.
    """
    return [
        GenerationRequest(
            token_ids=prompt.token_ids,
            sampling=training_sampling(config, seed=derive_seed(seed, prompt.index, g), experts=experts),
        )
        for g in range(config.num_requests)
    ]


def training_sampling(
    config: RolloutConfig, *, seed: int, stop_ids: tuple[int, ...] = (), experts: bool = False
) -> SamplingParams:
    """Return the sampling options of training groups; `stop_ids` end a completion in addition to those of the configuration.

    If top-p, top-k or min-p is set, each token's support, the tokens that it was sampled from, is returned as well. With
    `experts`, so are the experts that the generator chose.
    """
    return SamplingParams(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        seed=seed,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        supports=config.is_truncated,
        experts=experts,
        stop=config.stop_texts,
        stop_ids=(*stop_ids, *config.stop_ids),
    )


def derive_seed(*parts: int) -> int:
    """Hash the parts into a 63-bit seed."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def rollouts_of(prompt: Prompt, completions: Sequence[Completion], scores: Sequence[Scored]) -> tuple[Rollout, ...]:
    """Combine the prompt and each completion that has a reward into a rollout with one segment.

    For speed, the arrays of all segments are slices of arrays that cover the group.
    """
    kept = [(completion, scored) for completion, scored in zip(completions, scores, strict=True) if scored.reward is not None]
    if not kept:
        return ()
    num_prompt = len(prompt.token_ids)

    def after_prompt(before: npt.NDArray[Any], columns: Iterable[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        return np.concatenate([piece for values in columns for piece in (before, values)])

    lengths = [len(completion.token_ids) for completion, _ in kept]
    token_ids = after_prompt(np.array(prompt.token_ids, np.int64), (completion.token_ids for completion, _ in kept))
    logprobs = after_prompt(np.zeros(num_prompt, np.float32), (completion.logprobs for completion, _ in kept))
    versions = after_prompt(np.full(num_prompt, -1), (completion.versions for completion, _ in kept))
    sampled = np.ones(max(lengths), np.bool_)
    mask = after_prompt(np.zeros(num_prompt, np.bool_), (sampled[:length] for length in lengths))
    rollouts, end = [], 0
    for (completion, scored), length in zip(kept, lengths, strict=True):
        assert scored.reward is not None
        sequence, supports = slice(end, end := end + num_prompt + length), completion.supports
        if supports is not None:
            supports = placed([(num_prompt, supports)], num_prompt + length)
        rollouts.append(
            Rollout(
                segments=(
                    Segment(
                        token_ids=token_ids[sequence],
                        mask=mask[sequence],
                        logprobs=logprobs[sequence],
                        versions=versions[sequence],
                        supports=supports,
                        experts=completion.experts,  # of the prompt, too
                    ),
                ),
                reward=scored.reward,
                reward_parts=scored.parts,
                finish_reason=completion.finish_reason,
                token_rewards=None if scored.token_rewards is None else np.array(scored.token_rewards, np.float64),
            )
        )
    return tuple(rollouts)


def fit_to_rows(group: Group, config: TrainerConfig) -> tuple[Group, int]:
    """Apply `trainer.overlong` to segments longer than a row; return the group and the number of affected rollouts.

    `truncate` drops the end of the segment, which may be all of its sampled tokens. `skip` also masks its remaining tokens.
    `error` changes nothing, so packing fails.
    """
    limit = config.row_tokens
    is_overlong = [any(len(segment.token_ids) > limit for segment in rollout.segments) for rollout in group.rollouts]
    if config.overlong == "error" or not any(is_overlong):
        return group, 0

    def fitting(segment: Segment) -> Segment:
        if len(segment.token_ids) <= limit:
            return segment
        return Segment(
            token_ids=segment.token_ids[:limit],
            mask=segment.mask[:limit] & (config.overlong == "truncate"),
            logprobs=segment.logprobs[:limit],
            versions=segment.versions[:limit],
            supports=None if segment.supports is None else segment.supports[:limit],
            experts=None if segment.experts is None else segment.experts[:limit],
        )

    rollouts = tuple(replace(rollout, segments=tuple(map(fitting, rollout.segments))) for rollout in group.rollouts)
    return replace(group, rollouts=rollouts), sum(is_overlong)


def mask_truncated(group: Group) -> Group:
    """Mask all tokens of rollouts truncated at the length limit (`algorithm.mask_truncated`). Their rewards are kept."""

    def masked(rollout: Rollout) -> Rollout:
        segments = tuple(replace(segment, mask=np.zeros_like(segment.mask)) for segment in rollout.segments)
        return replace(rollout, segments=segments)

    rollouts = tuple(masked(rollout) if rollout.finish_reason == "length" else rollout for rollout in group.rollouts)
    return replace(group, rollouts=rollouts)


def credited_values_differ(group: Group, trained: Group, algorithm: AlgorithmConfig, data: DataConfig) -> bool:
    """Return True if the advantage compares other values than rewards, and at least one of them differs within the group.

    These are reward parts with a nonzero weight, or the discounted returns of turns or tokens. `trained` is the group with the
    tokens to train on.
    """
    if algorithm.advantage_traits.compares_parts:
        values: dict[str, set[float]] = {}
        for rollout in group.rollouts:
            for part, value in rollout.reward_parts.items():
                values.setdefault(part, set()).add(value)
        if any(len(different) > 1 and data.weight_of(part) != 0.0 for part, different in values.items()):
            return True
    if algorithm.credit in ("turn", "state"):
        rewards = [[turn.reward for turn in rollout.turns] or [rollout.reward] for rollout in group.rollouts]
        states = [[turn.state for turn in rollout.turns] or [0] for rollout in group.rollouts]
        return returns_differ(rewards, algorithm.turn_discount, states if algorithm.credit == "state" else None)
    if algorithm.credit == "token":
        nowhere = GroupHandle(shard=0, location=0, serial=0)
        record = record_of(trained, nowhere, has_payload=False, num_overlong=0, whole=group)
        return token_returns_differ(RecordTable.of([record]), algorithm.token_discount)
    return False


def record_of(
    group: Group,
    handle: GroupHandle,
    *,
    has_payload: bool,
    num_overlong: int,
    rejection: Rejection | None = None,
    parts_differ: bool = False,
    num_generated: int = 0,
    whole: Group | None = None,
) -> GroupRecord:
    """Summarize a group with the tokens to train on for the controller, without its tokens; `GroupRecord` describes the fields.

    Loss tokens are those in the mask with a finite log-probability. `whole` is the group as sampled, if some of its tokens are
    not trained on.
    """
    rollouts = group.rollouts
    segments = [segment for rollout in rollouts for segment in rollout.segments]
    num_sampled = tuple(int(np.count_nonzero(segment.mask & np.isfinite(segment.logprobs))) for segment in segments)
    num_in_mask = sum(int(np.count_nonzero(segment.mask)) for segment in segments)
    versions = np.concatenate([np.zeros(0, np.int64), *(segment.versions for segment in segments)])
    versions = versions[versions >= 0]
    return GroupRecord(
        index=group.prompt.index,
        task=group.prompt.task,
        handle=handle,
        has_payload=has_payload,
        rewards=tuple(rollout.reward for rollout in rollouts),
        reward_parts=_parts_of(rollouts),
        prompt_len=prompt_len(group),
        num_segments=tuple(len(rollout.segments) for rollout in rollouts),
        lengths=tuple(len(segment.token_ids) for segment in segments),
        num_sampled=num_sampled,
        num_truncated=sum(rollout.finish_reason == "length" for rollout in rollouts),
        num_overlong=num_overlong,
        num_nonfinite=num_in_mask - sum(num_sampled),
        min_version=int(versions.min()) if versions.size else -1,
        max_version=int(versions.max()) if versions.size else -1,
        generate_s=group.generate_s,
        score_s=group.score_s,
        num_errors=len(group.failures),
        first_error=group.failures[0].error if group.failures else "",
        rejection=rejection,
        parts_differ=parts_differ,
        num_generated=num_generated,
        counts=group.counts,
        turns=_group_turns(rollouts),
        tokens=_group_tokens(rollouts, (whole or group).rollouts),
        metrics=summed_metrics([group]),
        truncated=tuple(i for i, rollout in enumerate(rollouts) if rollout.finish_reason == "length"),
        # With one segment each, rollouts can share only what precedes the first sampled token, which `prompt_len` covers.
        prefixes=common_prefixes(segments) if len(segments) != len(rollouts) else (),
    )


def _parts_of(rollouts: Sequence[Rollout]) -> dict[str, tuple[float, ...]]:
    """Return the rewards by part; NaN where a rollout lacks the part."""
    parts = dict.fromkeys(part for rollout in rollouts for part in rollout.reward_parts)
    return {part: tuple(rollout.reward_parts.get(part, math.nan) for rollout in rollouts) for part in parts}


def summed_metrics(groups: Sequence[Group]) -> dict[str, tuple[float, int]]:
    """Return the sum of each metric that environments reported, and the number of rollouts that have it."""
    values: dict[str, list[float]] = {}
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        for name, value in rollout.metrics.items():
            values.setdefault(name, []).append(value)
    return {name: (math.fsum(numbers), len(numbers)) for name, numbers in values.items()}


def _group_turns(rollouts: Sequence[Rollout]) -> GroupTurns | None:
    """Return the turns of a group; None if no rollout has any, so that each segment is one turn."""
    if not any(rollout.turns for rollout in rollouts):
        return None
    num_turns, num_sampled = [], []
    for rollout in rollouts:
        for number, segment in enumerate(rollout.segments):
            ends = [turn.end for turn in rollout.turns if turn.segment == number]
            counted_until = np.concatenate([[0], np.cumsum(segment.mask & np.isfinite(segment.logprobs))])
            # The segment may have been truncated before the end of a turn.
            num_sampled += np.diff(counted_until[np.minimum(ends, len(segment.mask)).astype(int)], prepend=0).tolist()
            num_turns.append(len(ends))
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    return GroupTurns(
        num_turns=tuple(num_turns),
        rewards=tuple(turn.reward for turn in turns),
        num_sampled=tuple(num_sampled),
        states=tuple(turn.state for turn in turns),
    )


def _group_tokens(trained: Sequence[Rollout], sampled: Sequence[Rollout]) -> GroupTokens | None:
    """Return the token rewards of a group; None if it has none.

    The reward of a token that does not count in the loss is assigned to the last earlier token that does, if there is one.
    A rollout without token rewards has the rewards of its turns at their ends, or else its reward at its last loss token.
    """
    if all(rollout.token_rewards is None for rollout in sampled):
        return None
    num_rewards, positions, rewards = [], [], []
    for kept, whole in zip(trained, sampled, strict=True):
        counts = []  # for each sampled token of a segment, whether it counts in the loss
        for trained_segment, segment in zip(kept.segments, whole.segments, strict=True):
            counts_S = np.zeros(len(segment.mask), np.bool_)
            counts_S[: len(trained_segment.mask)] = trained_segment.mask & np.isfinite(trained_segment.logprobs)
            counts.append(counts_S[segment.mask])
        counted_until: IntArray = np.cumsum(np.concatenate(counts))
        if whole.token_rewards is not None:
            values = whole.token_rewards
        elif whole.turns:
            before = np.cumsum([0, *(int(np.count_nonzero(segment.mask)) for segment in whole.segments)])
            ends = [
                int(before[turn.segment] + np.count_nonzero(whole.segments[turn.segment].mask[: turn.end]))
                for turn in whole.turns
            ]
            counted_until = np.concatenate([[0], counted_until])[ends]
            values = np.array([turn.reward for turn in whole.turns])
        else:
            counted_until, values = counted_until[-1:], np.array([whole.reward])
        has_token = (counted_until > 0) & (values != 0.0)
        num_rewards.append(int(np.count_nonzero(has_token)))
        positions += (counted_until[has_token] - 1).tolist()
        rewards += values[has_token].tolist()
    return GroupTokens(num_rewards=tuple(num_rewards), positions=tuple(positions), rewards=tuple(rewards))


def prompt_len(group: Group) -> int:
    """Return the length of the prompt or, in an environment, of the prefix before any sampled token that all rollouts share."""
    if group.prompt.token_ids:
        return len(group.prompt.token_ids)
    firsts = [rollout.segments[0] for rollout in group.rollouts]
    limit = min((int(np.argmax(first.mask)) if first.mask.any() else len(first.mask) for first in firsts), default=0)
    if not limit:
        return 0
    equal = np.all([first.token_ids[:limit] == firsts[0].token_ids[:limit] for first in firsts], axis=0)
    return limit if equal.all() else int(np.argmin(equal))


def common_prefixes(segments: Sequence[Segment]) -> tuple[tuple[int, int], ...]:
    """Return `GroupRecord.prefixes` of the segments of a group.

    A sampled token is shared only with segments that have it as context. So segments whose sampled tokens begin early come
    first, then long ones, as far as segments with the most tokens in common stay together.

    Shape suffixes: K segments, sorted by their tokens, O those already in the order.
    """
    sorted_K = sorted(range(len(segments)), key=lambda each: segments[each].token_ids.astype(">i8").tobytes())
    tokens = [segments[each].token_ids for each in sorted_K]
    neighbors = np.array(list(map(num_equal, tokens, tokens[1:])), np.int64)  # number of first tokens in common
    limits = [max(int(np.argmax(np.append(segments[each].mask, True))) - 1, 0) for each in sorted_K]
    order_O = np.zeros(0, np.int64)  # of indices in `sorted_K`
    for each in sorted(range(len(segments)), key=lambda each: (limits[each], -len(tokens[each]), sorted_K[each])):
        before, after = neighbors[:each][::-1], neighbors[each:]  # in common is the least number between two
        common_K = np.concatenate([np.minimum.accumulate(before)[::-1], [0], np.minimum.accumulate(after)])
        common_O = common_K[order_O]
        nearest = np.flatnonzero(common_O == common_O.max(initial=0))
        order_O = np.insert(order_O, nearest[-1] + 1 if len(nearest) else 0, each)
    prefixes = [(0, 0)] * len(segments)
    for place, pair in enumerate(pairwise(order_O.tolist()), 1):
        prefixes[sorted_K[pair[1]]] = (place, min(int(neighbors[min(pair) : max(pair)].min()), limits[pair[1]]))
    return tuple(prefixes)


def num_equal(first: IntArray, second: IntArray) -> int:
    """Return the number of first tokens that two sequences have in common."""
    size = min(len(first), len(second))
    is_equal = first[:size] == second[:size]
    return size if is_equal.all() else int(np.argmin(is_equal))


def num_generated(group: Group) -> int:
    """Return the number of tokens that the generators sampled for a group, including completions without a reward."""
    sampled = sum(int(np.count_nonzero(segment.mask)) for rollout in group.rollouts for segment in rollout.segments)
    return sampled + sum(len(failure.completion.token_ids) for failure in group.failures)


FILTER_EXPECTED = "def keep(group: ScoredGroup) -> bool"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """The completions of one prompt and their rewards. Sequences have one value per completion, `[G]`.

    Completions without a reward are left out.

    Example: `ScoredGroup(index=3, task="chain_sum", entry={"question": "2 + 2 =", "answer": "4", "metadata": {}},
    completions=("4", "5"), rewards=(1.0, 0.0), parts={"answer": (1.0, 0.0)}, num_tokens=(2, 2),
    finish_reasons=("stop", "stop"), num_errors=0)`
    """

    index: int
    """Index of the prompt in the stream."""
    task: str
    """Name of the task."""
    entry: Mapping[str, Any]
    """Data of the prompt: `question`, `answer`, `metadata`."""
    completions: Sequence[str]
    """Texts of the completions."""
    rewards: Sequence[float]
    """Total rewards of the completions."""
    parts: Mapping[str, Sequence[float]]
    """Values of each reward part; NaN if a completion does not have the part."""
    num_tokens: Sequence[int]
    """Numbers of sampled tokens."""
    finish_reasons: Sequence[str]
    """Reasons why the completions ended: `stop` or `length`."""
    num_errors: int
    """Number of completions without a reward: it failed, or the completion was cancelled or is empty."""


class GroupFilter(Protocol):
    """A function that decides whether a group is trained on.

    If it returns False, the group is dropped and another prompt replaces it. The function runs in the event loop of the rollout
    workers, after scoring, so it should return within milliseconds.

    Example:
        def not_solved(group: ScoredGroup) -> bool:
            return sum(group.rewards) < 0.9 * len(group.rewards)
    """

    def __call__(self, group: ScoredGroup, /) -> bool:
        """Return True to train on the group."""
        ...


FILTER = Point(key="rollout.group_filter", argument="group_filter", protocol=GroupFilter.__call__, expected=FILTER_EXPECTED)


def keeps(group_filter: Callable[[ScoredGroup], object], group: Group, decode: Callable[[list[int]], str], name: str) -> bool:
    """Return True if a filter keeps a group with at least one reward; `name` is for error messages."""
    scored = scored_group(group, decode)
    try:
        kept = group_filter(scored)
    except Exception as error:  # user code may raise anything
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(f"rollout.group_filter: {name} raised {cause} (got group {scored.index}). Correct it.") from error
    if not isinstance(kept, bool | np.bool_):
        raise ValueError(
            f"rollout.group_filter: {name} must return True or False (got {kept!r}). Write it as `{FILTER_EXPECTED}`."
        )
    return bool(kept)


def scored_group(group: Group, decode: Callable[[list[int]], str]) -> ScoredGroup:
    """Convert a group to the argument of a filter."""
    rollouts, prompt = group.rollouts, group.prompt
    sampled = [rollout.sampled.token_ids.tolist() for rollout in rollouts]
    return ScoredGroup(
        index=prompt.index,
        task=prompt.task,
        entry=copy.deepcopy(prompt.entry),  # which later epochs read, too
        completions=tuple(map(decode, sampled)),
        rewards=tuple(rollout.reward for rollout in rollouts),
        parts=_parts_of(rollouts),
        num_tokens=tuple(map(len, sampled)),
        finish_reasons=tuple(rollout.finish_reason for rollout in rollouts),
        num_errors=len(group.failures),
    )


SHARES = {"rollouts": 0.5, "evaluations": 0.1, "vocabulary": 0.02}
"""Fractions of `logging.record_bytes` for the kinds of records that this module writes."""


class GroupRecorder:
    """Records groups of one process, with their tokens. Any thread may call its methods."""

    def __init__(self, run_dir: Path, process: str, config: Config, tokenizer: Tokenizer) -> None:
        """Create no file yet. `process` is the name of this process, such as `rollout_0`."""
        limit, num = config.logging.record_bytes, config.rollout.num_workers
        self._files = {kind: RecordFile(run_dir, kind, process, share(limit, part, num)) for kind, part in SHARES.items()}
        self._tokenizer = tokenizer
        self._known: set[int] = set()  # tokens whose text this process has recorded; two threads may record one twice

    def rollouts(
        self, group: Group, decode: Callable[[list[int]], str], *, status: str, version: int, environment: str | None = None
    ) -> None:
        """Record a group that was sampled for training.

        `decode` maps sampled tokens to the text that rewards receive, `status` is `kept` or why the group is not trained on,
        and `version` is the newest policy version that sampled the group.
        """
        self._append("rollouts", group, decode, status=status, version=version, environment=environment)

    def evaluation(
        self, name: str, groups: Sequence[Group], decode: Callable[[list[int]], str], *, environment: str | None = None
    ) -> None:
        """Record groups that were sampled to evaluate a set, in an environment of this name."""
        for group in groups:
            values = {"set": name, "version": newest_version(group), "environment": environment}
            self._append("evaluations", group, decode, **values)

    def _append(self, kind: str, group: Group, decode: Callable[[list[int]], str], **values: Any) -> None:
        lengths, columns = columns_of(group)
        new = set(np.unique(columns["token_ids"]).tolist()) - self._known
        if new:
            self._known |= new
            self._files["vocabulary"].append(({"texts": {token: self._tokenizer.token_text(token) for token in new}}, {}))
        num_unsampled = int(np.argmax(columns["mask"])) if columns["mask"].any() else len(columns["mask"])
        completions = [*(_rollout(group, number) for number in range(len(group.rollouts))), *map(_failure, group.failures)]
        rendered = group.prompt.token_ids or (columns["token_ids"][:num_unsampled].tolist() if group.rollouts else ())
        line = {
            "time": time.time(),
            "index": group.prompt.index,
            "task": group.prompt.task,
            **values,
            "prompt": group.prompt.text,
            "rendered": self._tokenizer.decode_raw(rendered) if len(rendered) else "",
            "answer": group.prompt.entry.get("answer"),
            "generate_s": group.generate_s,
            "score_s": group.score_s,
            "counts": group.counts,
            "completions": [
                {"text": decode(ids), "num_tokens": len(ids), **values_of}
                for ids, values_of in zip(sampled_ids(lengths, columns), completions, strict=True)
            ],
        }
        segments = [branch_points(rollout.segments) for rollout in group.rollouts] + [[{}] for _ in group.failures]
        for completion, lengths_of, branches in zip(line["completions"], lengths, segments, strict=True):
            completion["segments"] = [
                {"num_tokens": length, **branch} for length, branch in zip(lengths_of, branches, strict=True)
            ]
        self._files[kind].append((line, columns))


def newest_version(group: Group) -> int:
    """Return the newest policy version that sampled a group; -1 if none sampled a token."""
    completions = [*(rollout.sampled for rollout in group.rollouts), *(failure.completion for failure in group.failures)]
    return max((int(completion.versions.max()) for completion in completions if len(completion.versions)), default=-1)


def branch_points(segments: Sequence[Segment]) -> list[dict[str, int]]:
    """Return for each segment the earlier one with which it has the most first tokens in common, and their number.

    The mapping is empty for the first segment, and for one that has no token in common with an earlier one.
    """
    branches: list[dict[str, int]] = [{}]
    for number, segment in enumerate(segments[1:], 1):
        shared = [
            (num_equal(earlier.token_ids, segment.token_ids), -parent) for parent, earlier in enumerate(segments[:number])
        ]
        num_shared, parent = max(shared, default=(0, 0))
        branches.append({"parent": -parent, "num_shared": num_shared} if num_shared else {})
    return branches


def columns_of(group: Group) -> tuple[list[list[int]], Columns]:
    """Return the lengths of the segments of each completion, and the tokens of all of them, one after the other."""
    segments = [[*rollout.segments] for rollout in group.rollouts]
    for sampled in (each.completion for each in group.failures):
        mask = np.ones(len(sampled.token_ids), np.bool_)
        segments.append([Segment(token_ids=sampled.token_ids, mask=mask, logprobs=sampled.logprobs, versions=sampled.versions)])
    flat = [segment for of_completion in segments for segment in of_completion]
    columns = {
        "token_ids": joined([segment.token_ids for segment in flat], np.int32),
        "mask": joined([segment.mask for segment in flat], np.bool_),
        "logprobs": joined([segment.logprobs for segment in flat], np.float32),
        "versions": joined([segment.versions for segment in flat], np.int32),
    }
    if any(rollout.token_rewards is not None for rollout in group.rollouts):
        rewards = []
        for rollout in group.rollouts:
            mask = np.concatenate([segment.mask for segment in rollout.segments])
            rewards.append(np.zeros(len(mask)))
            if rollout.token_rewards is not None:
                rewards[-1][mask] = rollout.token_rewards
        rewards += [np.zeros(len(each.completion.token_ids)) for each in group.failures]
        columns["rewards"] = joined(rewards, np.float64)
    return [[len(segment.token_ids) for segment in of_completion] for of_completion in segments], columns


def sampled_ids(lengths: Sequence[Sequence[int]], columns: Columns) -> Iterator[list[int]]:
    """Yield the sampled tokens of each completion, from the results of `columns_of`."""
    mask = columns["mask"]
    sampled = columns["token_ids"][mask].tolist()
    before = np.append(0, np.cumsum(mask))  # sampled tokens before each place
    start = 0
    for end in before[np.cumsum([sum(of_completion) for of_completion in lengths], dtype=np.int64)].tolist():
        yield sampled[start:end]
        start = end


def _rollout(group: Group, number: int) -> dict[str, Any]:
    rollout = group.rollouts[number]
    return {
        "finish_reason": rollout.finish_reason,
        "outcome": "ok",
        "reward": rollout.reward,
        "reward_parts": rollout.reward_parts,
        **({"metrics": rollout.metrics} if rollout.metrics else {}),
        **({"turns": [[turn.segment, turn.end, turn.reward] for turn in rollout.turns]} if rollout.turns else {}),
        **({"messages": group.conversations[number]} if number < len(group.conversations) else {}),
    }


def _failure(failure: ScorerFailure) -> dict[str, Any]:
    values = {"outcome": failure.outcome, "reward": None, "error": failure.error}
    return {"finish_reason": failure.completion.finish_reason, **values}
