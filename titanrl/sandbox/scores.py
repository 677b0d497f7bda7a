"""The scorer to load, and the scores that come back from the scoring processes."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from titanrl.config.sections import DataConfig

ProcessFailure = Literal["timeout", "crash"]
"""Reason why a scoring process returned no scores."""
Status = Literal["ok", "error"] | ProcessFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerSpec:
    """The scorer to load, and the scores that it may return.

    Example: `ScorerSpec(factory="titanrl.rollout.scorers:imported", kwargs={"path": "my_package.rewards:length"})`
    """

    factory: str
    """`module:function`, called once. It returns the scorer: a function from (text, entry) to the reward by part."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the factory."""
    parts: tuple[str, ...] = ("answer",)
    """Parts of the reward. A score with other parts is an error."""
    bounds: tuple[float, float] = (-math.inf, math.inf)
    """Smallest and largest value of a part. A completion that forges its score stays within them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The score of one completion, or the reason why it has none.

    Example: `Score(parts={"answer": 1.0}, status="ok")`
    """

    parts: Mapping[str, float]
    """Reward by part; empty unless the status is `ok`."""
    status: Status
    """`error`: the scorer raised, or returned no valid score; `timeout`: it took too long; `crash`: its process died."""
    detail: str = ""
    """Error text in printable ASCII; empty if the status is `ok`. A completion may have written it."""


def scorer_spec(data: DataConfig) -> ScorerSpec:
    """Return the scorer that the configuration selects."""
    module = "titanrl.rollout.scorers"
    if data.scorer is not None:
        return ScorerSpec(factory=f"{module}:imported", kwargs={"path": data.scorer})
    if data.source == "jsonl":
        return ScorerSpec(factory=f"{module}:exact", bounds=(0.0, 1.0))
    kwargs = {"task": data.task, "config": data.task_config}
    return ScorerSpec(factory=f"{module}:reasoning_gym", kwargs=kwargs, bounds=(0.0, 1.0))


def parse_scores(reply: bytes, spec: ScorerSpec, num_answers: int) -> list[Score] | None:
    """Parse the reply of a scoring process, which may hold any bytes; return None if it is no list of results."""
    try:
        results = json.loads(reply)
    except (ValueError, RecursionError):
        return None
    if not isinstance(results, list) or len(results) != num_answers:
        return None
    return [_parse_result(result, spec) for result in results]


def _parse_result(result: object, spec: ScorerSpec) -> Score:
    low, high = spec.bounds
    match result:
        case {"parts": dict(parts)} if parts.keys() == set(spec.parts) and all(
            isinstance(value, float) and math.isfinite(value) and low <= value <= high for value in parts.values()
        ):
            return Score(parts=parts, status="ok")
        case {"error": str(detail)}:
            return Score(parts={}, status="error", detail=ascii(detail)[1:-1])
    expected = f"finite numbers from {low:g} to {high:g} for the parts {', '.join(spec.parts)}"
    return Score(parts={}, status="error", detail=f"invalid score (got {result!a:.200}). The scorer must return {expected}.")
