"""The rewards to load, and the scores that come back from the scoring processes."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from titanrl.rewards import MAX_PARTS, PART_NAME

ProcessFailure = Literal["timeout", "crash"]
"""Reason why a scoring process returned no scores."""
Status = Literal["ok", "error"] | ProcessFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """A reward to load in the sandbox, and the scores that it may return.

    Example: `RewardSpec(name="answer", factory="titanrl.rollout.scorers:exact", bounds=(0.0, 1.0))`
    """

    name: str
    """Name of the reward."""
    factory: str
    """`module:function`, called once. It returns the reward function."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the factory."""
    bounds: tuple[float, float] = (-math.inf, math.inf)
    """Smallest and largest value. A completion that forges its score stays within them."""
    is_own: bool = False
    """True for a function of the user. Attempts of it to use the network are failures that name the remedy."""
    returns_text: bool = False
    """True for the function that runs a snippet of code and returns its output, instead of a reward (`snippets`)."""

    def allows(self, parts: Mapping[object, object]) -> bool:
        """Return True if these are finite numbers within the bounds, under names of this reward."""
        low, high = self.bounds
        return 0 < len(parts) <= MAX_PARTS and all(
            self._is_name(name) and isinstance(value, float) and math.isfinite(value) and low <= value <= high
            for name, value in parts.items()
        )

    def _is_name(self, name: object) -> bool:
        if not isinstance(name, str) or not name.startswith(f"{self.name}/"):
            return name == self.name
        return self.is_own and PART_NAME.fullmatch(name.removeprefix(f"{self.name}/")) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The score of one completion, or the reason why it has none.

    Example: `Score(parts={"answer": 1.0}, status="ok")`
    """

    parts: Mapping[str, float]
    """Unweighted reward by part; empty unless the status is `ok`."""
    status: Status
    """`error`: a reward raised, or returned no valid score; `timeout`: it took too long; `crash`: its process died."""
    detail: str = ""
    """Error text in printable ASCII; empty if the status is `ok`. A completion may have written it."""


def parse_scores(reply: bytes, spec: RewardSpec, num_answers: int) -> list[Score] | None:
    """Parse the reply of a scoring process, which may hold any bytes; return None if it is no list of results."""
    try:
        results = json.loads(reply)
    except (ValueError, RecursionError):
        return None
    if not isinstance(results, list) or len(results) != num_answers:
        return None
    return [_parse_result(result, spec) for result in results]


def _parse_result(result: object, spec: RewardSpec) -> Score:
    match result:
        case {"parts": dict(parts)} if spec.allows(parts):
            return Score(parts=parts, status="ok")
        case {"error": str(detail)}:
            return Score(parts={}, status="error", detail=ascii(detail)[1:-1])
    low, high = spec.bounds
    expected = f"finite numbers from {low:g} to {high:g}"
    return Score(parts={}, status="error", detail=f"invalid score (got {result!a:.200}). The reward must return {expected}.")
