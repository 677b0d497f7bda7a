"""Conversion between groups and the rows of a dump, one row per rollout. docs/howto/dump.md describes the columns."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from titanrl.carriers.supports import Supports, join
from titanrl.carriers.turns import Turn
from titanrl.carriers.types import Completion, Group, Prompt, Rollout, ScorerFailure, Segment

if TYPE_CHECKING:
    import pyarrow


def table_of(rows: Sequence[Mapping[str, Any]]) -> "pyarrow.Table":
    """Convert rows to a pyarrow table with the documented columns."""
    import pyarrow

    lists = {"token_ids": "int32", "mask": "bool", "logprobs": "float32", "versions": "int32", "segment_lengths": "int32"}
    lists |= {"support_counts": "int32", "support_words": "int32"}
    lists |= {"prompt_token_ids": "int32", "turn_segments": "int32", "turn_ends": "int32"}
    lists |= {"turn_rewards": "float64", "token_rewards": "float64"}
    scalars = {
        **dict.fromkeys(("index", "rollout", "worker", "support_vocabulary"), "int64"),
        **dict.fromkeys(("task", "status", "outcome", "error", "finish_reason", "question"), "string"),
        **dict.fromkeys(("reward", "generate_s", "score_s"), "float64"),
        **dict.fromkeys(("reward_parts", "messages", "entry", "counts", "metrics"), "string"),
    }
    kinds = {name: pyarrow.type_for_alias(kind) for name, kind in (lists | scalars).items()}
    fields = [(name, pyarrow.list_(kinds[name]) if name in lists else kinds[name]) for name in COLUMNS if name in kinds]
    fields.insert(2, ("sampled_at", pyarrow.timestamp("us", tz="UTC")))
    columns = {name: [row[name] for row in rows] for name, _ in fields}
    schema = pyarrow.schema(fields)
    return pyarrow.table(columns, schema=schema)


COLUMNS = (
    "index",
    "rollout",
    "sampled_at",
    "worker",
    "task",
    "status",
    "outcome",
    "error",
    "finish_reason",
    "reward",
    "reward_parts",
    "metrics",
    "token_ids",
    "mask",
    "logprobs",
    "versions",
    "support_counts",
    "support_words",
    "support_vocabulary",
    "segment_lengths",
    "turn_segments",
    "turn_ends",
    "turn_rewards",
    "token_rewards",
    "messages",
    "question",
    "entry",
    "prompt_token_ids",
    "generate_s",
    "score_s",
    "counts",
)
"""Columns of `rollouts/*.parquet`, in file order."""
TOKEN_COLUMNS = ("token_ids", "mask", "logprobs", "versions", "support_counts", "support_words")
"""Columns with per-token values, which are read as arrays."""


def rows_of(group: Group, status: str, sampled_at: int, worker: int) -> Iterator[dict[str, Any]]:
    """Yield one row per rollout of a group: first the scored rollouts in order, then the failed ones."""
    prompt = group.prompt
    common = {
        "index": prompt.index,
        "sampled_at": sampled_at,
        "worker": worker,
        "task": prompt.task,
        "status": status,
        "question": _text(prompt.text),
        "entry": _json(prompt.entry),
        "prompt_token_ids": np.array(prompt.token_ids, np.int32),
        "generate_s": group.generate_s,
        "score_s": group.score_s,
        "counts": _json(group.counts),
    }
    for number, rollout in enumerate(group.rollouts):
        messages = _json(group.conversations[number]) if group.conversations else None
        yield {**common, "rollout": number, "messages": messages, **_scored(rollout)}
    for number, failure in enumerate(group.failures, len(group.rollouts)):
        yield {**common, "rollout": number, "messages": None, **_failed(failure)}


def _scored(rollout: Rollout) -> dict[str, Any]:
    segments, turns = rollout.segments, rollout.turns
    return {
        "outcome": "ok",
        "error": None,
        "finish_reason": rollout.finish_reason,
        "reward": rollout.reward,
        "reward_parts": _json(rollout.reward_parts),
        "metrics": _json(rollout.metrics),
        "token_ids": np.concatenate([segment.token_ids for segment in segments]).astype(np.int32),
        "mask": np.concatenate([segment.mask for segment in segments]),
        "logprobs": np.concatenate([segment.logprobs for segment in segments]),
        "versions": np.concatenate([segment.versions for segment in segments]).astype(np.int32),
        **_support_columns(segments),
        "segment_lengths": [len(segment.token_ids) for segment in segments],
        "turn_segments": [turn.segment for turn in turns],
        "turn_ends": [turn.end for turn in turns],
        "turn_rewards": [turn.reward for turn in turns],
        "token_rewards": rollout.token_rewards,
    }


def _support_columns(segments: Sequence[Segment]) -> dict[str, Any]:
    """Return the columns of truncated sampling. Either all segments of a rollout have supports, or none has."""
    supports = [segment.supports for segment in segments if segment.supports is not None]
    if not supports:
        return {"support_counts": [], "support_words": [], "support_vocabulary": None}
    joined = join(supports)
    return {
        "support_counts": joined.counts_S,
        "support_words": joined.words_K,
        "support_vocabulary": joined.vocab_size,
    }


def _failed(failure: ScorerFailure) -> dict[str, Any]:
    completion = failure.completion
    return {
        "outcome": failure.outcome,
        "error": _text(failure.error),
        "finish_reason": completion.finish_reason,
        "reward": None,
        "reward_parts": "{}",
        "metrics": "{}",
        "token_ids": completion.token_ids.astype(np.int32),
        "mask": np.ones(len(completion.token_ids), np.bool_),
        "logprobs": completion.logprobs,
        "versions": completion.versions.astype(np.int32),
        **_support_columns(()),
        "segment_lengths": [len(completion.token_ids)],
        "turn_segments": [],
        "turn_ends": [],
        "turn_rewards": [],
        "token_rewards": None,
    }


def group_of(rows: Sequence[Mapping[str, Any]], index: int) -> Group:
    """Rebuild a group from its rows; `index` becomes its prompt's position in the stream."""
    rows = sorted(rows, key=lambda row: row["rollout"])
    scored, first = [row for row in rows if row["outcome"] == "ok"], rows[0]
    return Group(
        prompt=Prompt(
            index=index,
            task=first["task"],
            text=first["question"],
            token_ids=tuple(first["prompt_token_ids"]),
            entry=json.loads(first["entry"]),
        ),
        rollouts=tuple(map(_rollout, scored)),
        generate_s=first["generate_s"],
        score_s=first["score_s"],
        failures=tuple(
            ScorerFailure(completion=_completion(row), error=row["error"], outcome=row["outcome"])
            for row in rows
            if row["outcome"] != "ok"
        ),
        conversations=tuple(json.loads(row["messages"]) for row in scored if row["messages"] is not None),
        counts=json.loads(first["counts"]),
    )


def _rollout(row: Mapping[str, Any]) -> Rollout:
    ends = np.cumsum(row["segment_lengths"])[:-1]
    token_ids, versions = (np.split(row[name].astype(np.int64), ends) for name in ("token_ids", "versions"))
    columns = zip(token_ids, np.split(row["mask"], ends), np.split(row["logprobs"], ends), versions, strict=True)
    turns = zip(row["turn_segments"], row["turn_ends"], row["turn_rewards"], strict=True)
    token_rewards = row.get("token_rewards")  # missing in dumps of earlier versions
    return Rollout(
        segments=tuple(
            Segment(token_ids=ids, mask=mask, logprobs=logprobs, versions=sampled_by, supports=supports)
            for (ids, mask, logprobs, sampled_by), supports in zip(columns, _supports(row), strict=True)
        ),
        reward=row["reward"],
        reward_parts=json.loads(row["reward_parts"]),
        finish_reason=row["finish_reason"],
        turns=tuple(Turn(segment=segment, end=end, reward=reward) for segment, end, reward in turns),
        token_rewards=None if token_rewards is None else np.array(token_rewards, np.float64),
        metrics=json.loads(row.get("metrics", "{}")),
    )


def _supports(row: Mapping[str, Any]) -> Sequence[Supports | None]:
    """Return the supports of each segment, or None per segment without truncated sampling."""
    lengths = row["segment_lengths"]
    if row["support_vocabulary"] is None:
        return [None] * len(lengths)
    counts, words = row["support_counts"], row["support_words"]
    supports = Supports(counts_S=counts, words_K=words, vocab_size=row["support_vocabulary"])
    ends = np.cumsum(lengths).tolist()
    return [supports[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _completion(row: Mapping[str, Any]) -> Completion:
    return Completion(
        token_ids=row["token_ids"].astype(np.int64),
        logprobs=row["logprobs"],
        versions=row["versions"].astype(np.int64),
        finish_reason=row["finish_reason"],
    )


def _text(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


def _json(value: object) -> str:
    """Encode a value as JSON; types that JSON does not support become strings."""
    return json.dumps(value, default=_plain)


def _plain(value: object) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.generic):
        return value.item()
    return str(value)
