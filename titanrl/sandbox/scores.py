"""The rewards to load, and the scores that come back from the scoring processes."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from titanrl.rewards import MAX_PARTS, PART_NAME, TokenRewards

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

    def allows(self, parts: Mapping[Any, object]) -> bool:
        """Return True if these are finite numbers within the bounds, under names of this reward."""
        low, high = self.bounds
        return 0 < len(parts) <= MAX_PARTS and all(
            self._is_name(name) and isinstance(value, float) and math.isfinite(value) and low <= value <= high
            for name, value in parts.items()
        )

    def allows_tokens(self, rewards: Mapping[object, object]) -> bool:
        """Return True if these are rewards of tokens as `encoded_score` writes them, and this reward is the user's."""
        return not rewards or (self.is_own and all(map(self._is_name, rewards)) and all(map(_are_tokens, rewards.values())))

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
    token_rewards: Mapping[str, TokenRewards] = field(default_factory=dict)
    """Rewards of tokens by part; the reward of the part is their sum."""

    @classmethod
    def of(cls, parts: Mapping[str, float | TokenRewards]) -> "Score":
        """Return the score that a reward returned."""
        token_rewards = {part: value for part, value in parts.items() if isinstance(value, TokenRewards)}
        if not token_rewards:
            return cls(parts=parts, status="ok")  # type: ignore[arg-type]  # all are numbers
        numbers = {part: value.total if isinstance(value, TokenRewards) else value for part, value in parts.items()}
        return cls(parts=numbers, status="ok", token_rewards=token_rewards)

    def moved(self, num_chars: int) -> "Score":
        """Return the score of a text with so many more characters at its start."""
        if not num_chars or not self.token_rewards:
            return self
        return replace(self, token_rewards={part: own.moved(num_chars) for part, own in self.token_rewards.items()})


def encoded_score(parts: Mapping[str, float | TokenRewards]) -> dict[str, Any]:
    """Return the parts of a reward as JSON values."""
    score = Score.of(parts)
    if not score.token_rewards:
        return {"parts": score.parts}
    tokens = {part: [own.whole, own.tokens, own.steps] for part, own in score.token_rewards.items()}
    return {"parts": score.parts, "tokens": tokens}


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
        case {"parts": dict(parts), "tokens": dict(tokens)} if spec.allows_tokens(tokens):
            score = Score.of(parts | {part: _token_rewards(*rewards) for part, rewards in tokens.items()})
            if spec.allows(score.parts):  # the sums of what was sent, not the sums that were sent
                return score
        case {"parts": dict(parts), **others} if "tokens" not in others and spec.allows(parts):
            return Score(parts=parts, status="ok")
        case {"error": str(detail)}:
            return Score(parts={}, status="error", detail=ascii(detail)[1:-1])
    low, high = spec.bounds
    expected = f"finite numbers from {low:g} to {high:g}"
    return Score(parts={}, status="error", detail=f"invalid score (got {result!a:.200}). The reward must return {expected}.")


def _token_rewards(whole: float, tokens: list[float], steps: list[list[Any]]) -> TokenRewards:
    return TokenRewards(whole=whole, tokens=tokens, steps=[(end, reward) for end, reward in steps])


def _are_tokens(rewards: object) -> bool:
    """Return True for finite rewards: of the whole, of tokens, and of steps with the places of their ends."""
    match rewards:
        case [whole, list(tokens), list(steps)]:
            pairs = [step for step in steps if isinstance(step, list) and len(step) == 2]
            values = (whole, *tokens, *(reward for _, reward in pairs))
            are_ends = len(pairs) == len(steps) and all(type(end) is int and end > 0 for end, _ in pairs)
            return are_ends and all(isinstance(value, float) and math.isfinite(value) for value in values)
    return False
