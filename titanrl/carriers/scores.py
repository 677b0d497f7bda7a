"""Data types of the sandbox: the rewards to load, and the scores that the scoring processes return."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from titanrl.carriers.rewards import MAX_PARTS, PART_NAME, TokenRewards

SEPARATOR = b"\x1e"
"""Byte between the results of two answers in a reply; JSON never contains it."""
MAX_RESULT_BYTES = 16 << 10
"""Maximum length of the result of one answer: 32 parts with the longest names, or an error."""
MAX_TOKEN_BYTES = 64
"""Additional length per token of an answer for a custom reward, which may return token rewards."""

INVALID = "TypeError: the reward returned"
"""Start of the error of a value that is not a reward."""
DENIED = "which the sandbox denies"
"""Part of the error of a reward that needs what the sandbox denies."""

ProcessFailure = Literal["timeout", "crash"]
"""Reason why a scoring process returned no scores."""
Status = Literal["ok", "error"] | ProcessFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """A reward to load in the sandbox, and the scores that it may return.

    Example: `RewardSpec(name="answer", factory="titanrl.rewards.scorers:exact", bounds=(0.0, 1.0))`
    """

    name: str
    """Name of the reward."""
    factory: str
    """Import path `module:function` of a function that returns the reward function. It is called once, with `kwargs`."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the factory."""
    bounds: tuple[float, float] = (-math.inf, math.inf)
    """Smallest and largest valid value. They also limit the score that a malicious completion can forge."""
    is_custom: bool = False
    """True for a user-defined function. If it tries to use the network, scoring fails with an error that names the remedy."""
    returns_text: bool = False
    """True for a function that returns text instead of a reward, such as the one that runs code snippets."""

    def allows(self, parts: Mapping[Any, object]) -> bool:
        """Return True if all parts are finite numbers within the bounds and have valid names for this reward."""
        low, high = self.bounds
        return 0 < len(parts) <= MAX_PARTS and all(
            self._is_name(name) and isinstance(value, float) and math.isfinite(value) and low <= value <= high
            for name, value in parts.items()
        )

    def allows_tokens(self, rewards: Mapping[object, object]) -> bool:
        """Return True if this reward may return token rewards, and these are in the format of `encoded_score`."""
        return not rewards or (self.is_custom and all(map(self._is_name, rewards)) and all(map(_are_tokens, rewards.values())))

    def max_result_bytes(self, num_tokens: int) -> int:
        """Return the maximum length of the result of one answer."""
        return MAX_RESULT_BYTES + MAX_TOKEN_BYTES * num_tokens * self.is_custom

    def _is_name(self, name: object) -> bool:
        if not isinstance(name, str) or not name.startswith(f"{self.name}/"):
            return name == self.name
        return self.is_custom and PART_NAME.fullmatch(name.removeprefix(f"{self.name}/")) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The score of one completion, or the reason why it has none.

    Example: `Score(parts={"answer": 1.0}, status="ok")`
    """

    parts: Mapping[str, float]
    """Unweighted rewards by part; empty unless the status is `ok`."""
    status: Status
    """`ok`; `error`: the reward raised or returned no valid score; `timeout`: it took too long; `crash`: its process died."""
    detail: str = ""
    """Error message in printable ASCII; empty if the status is `ok`. Do not trust it: a completion can forge it."""
    token_rewards: Mapping[str, TokenRewards] = field(default_factory=dict)
    """Token rewards by part. Their sum is the reward of the part."""

    @classmethod
    def of(cls, parts: Mapping[str, float | TokenRewards]) -> "Score":
        """Create a score from the values that a reward function returned."""
        token_rewards = {part: value for part, value in parts.items() if isinstance(value, TokenRewards)}
        if not token_rewards:
            return cls(parts=parts, status="ok")  # type: ignore[arg-type]  # all values are numbers
        numbers = {part: value.total if isinstance(value, TokenRewards) else value for part, value in parts.items()}
        return cls(parts=numbers, status="ok", token_rewards=token_rewards)

    def moved(self, num_chars: int) -> "Score":
        """Return the score for the text with `num_chars` additional characters at its start."""
        if not num_chars or not self.token_rewards:
            return self
        return replace(self, token_rewards={part: own.moved(num_chars) for part, own in self.token_rewards.items()})


def encoded_score(parts: Mapping[str, float | TokenRewards]) -> dict[str, Any]:
    """Convert the parts of a reward to JSON values."""
    if not any(isinstance(value, TokenRewards) for value in parts.values()):
        return {"parts": parts}
    score = Score.of(parts)
    tokens = {part: [own.whole, own.tokens, own.steps] for part, own in score.token_rewards.items()}
    return {"parts": score.parts, "tokens": tokens}


def parse_scores(reply: bytes, spec: RewardSpec, num_tokens: Sequence[int]) -> list[Score] | None:
    """Parse the untrusted reply of a scoring process; return None unless it has one JSON value per answer.

    Args:
        reply: Results of the answers, joined by `SEPARATOR`.
        spec: Reward that scored them.
        num_tokens: Number of tokens of each answer, which limits the length of its result.
    """
    results = reply.split(SEPARATOR, len(num_tokens)) if num_tokens else []
    if len(results) != len(num_tokens) or (reply and not num_tokens):
        return None
    if any(len(result) > spec.max_result_bytes(num) for result, num in zip(results, num_tokens, strict=True)):
        return None
    try:
        return [_parse_result(result, spec) for result in results]
    except (ValueError, RecursionError):  # not JSON
        return None


def _parse_result(encoded: bytes, spec: RewardSpec) -> Score:
    match result := json.loads(encoded):
        case {"parts": dict(parts)} if "tokens" not in result and spec.allows(parts):
            return Score(parts=parts, status="ok")
        case {"parts": dict(parts), "tokens": dict(tokens)} if spec.allows_tokens(tokens):
            score = Score.of(parts | {part: _token_rewards(*rewards) for part, rewards in tokens.items()})
            if spec.allows(score.parts):  # sums recomputed here, because those in the reply cannot be trusted
                return score
        case {"error": str(detail)}:
            return Score(parts={}, status="error", detail=ascii(detail)[1:-1])
    low, high = spec.bounds
    expected = f"finite numbers from {low:g} to {high:g}"
    return Score(
        parts={}, status="error", detail=f"invalid score (got {encoded.decode()!a:.200}). The reward must return {expected}."
    )


def _token_rewards(whole: float, tokens: list[float], steps: list[list[Any]]) -> TokenRewards:
    return TokenRewards(whole=whole, tokens=tokens, steps=[(end, reward) for end, reward in steps])


def _are_tokens(rewards: object) -> bool:
    """Return True for a valid encoding of `TokenRewards`: `[whole, tokens, steps]` with finite rewards and positive ends."""
    match rewards:
        case [whole, list(tokens), list(steps)]:
            pairs = [step for step in steps if isinstance(step, list) and len(step) == 2]
            values = (whole, *tokens, *(reward for _, reward in pairs))
            are_ends = len(pairs) == len(steps) and all(type(end) is int and end > 0 for end, _ in pairs)
            return are_ends and all(isinstance(value, float) and math.isfinite(value) for value in values)
    return False
