"""Groups and evaluation samples in the record of a run; docs/record.md describes the lines."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from titanrl.carriers.record import Columns, RecordFile, joined, share
from titanrl.carriers.types import Completion, Group, Rollout, ScorerFailure, Segment
from titanrl.config.schema import Config
from titanrl.data.tokenizer import Tokenizer
from titanrl.rollout.group import num_equal

SHARES = {"rollouts": 0.5, "evaluations": 0.1, "vocabulary": 0.02}
"""Fractions of `logging.record_bytes` for the kinds of records that this module writes."""


class GroupRecorder:
    """Records groups of one process, with their tokens. Any thread may call its methods."""

    def __init__(self, run_dir: Path, process: str, config: Config, tokenizer: Tokenizer) -> None:
        """Create no file yet. `process` is the name of this process, such as `rollout_0`."""
        limit, num = config.logging.record_bytes, config.rollout.num_workers
        self._files = {kind: RecordFile(run_dir, kind, process, share(limit, part, num)) for kind, part in SHARES.items()}
        self._tokenizer = tokenizer
        self._known: set[int] = set()  # tokens whose text this process has recorded

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
                {**_completion(ids, decode), **values_of}
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
    segments = [[*rollout.segments] for rollout in group.rollouts] + [[_unscored(each.completion)] for each in group.failures]
    flat = [segment for of_completion in segments for segment in of_completion]
    columns = {
        "token_ids": joined([segment.token_ids for segment in flat], np.int32),
        "mask": joined([segment.mask for segment in flat], np.bool_),
        "logprobs": joined([segment.logprobs for segment in flat], np.float32),
        "versions": joined([segment.versions for segment in flat], np.int32),
    }
    if any(rollout.token_rewards is not None for rollout in group.rollouts):
        columns["rewards"] = joined(
            [*map(_token_rewards, group.rollouts), *(np.zeros(len(each.completion.token_ids)) for each in group.failures)],
            np.float64,
        )
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


def _token_rewards(rollout: Rollout) -> np.ndarray[Any, Any]:
    mask = np.concatenate([segment.mask for segment in rollout.segments])
    rewards = np.zeros(len(mask))
    if rollout.token_rewards is not None:
        rewards[mask] = rollout.token_rewards
    return rewards


def _unscored(completion: Completion) -> Segment:
    mask = np.ones(len(completion.token_ids), np.bool_)
    return Segment(token_ids=completion.token_ids, mask=mask, logprobs=completion.logprobs, versions=completion.versions)


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


def _completion(ids: list[int], decode: Callable[[list[int]], str]) -> dict[str, Any]:
    return {"text": decode(ids), "num_tokens": len(ids)}
