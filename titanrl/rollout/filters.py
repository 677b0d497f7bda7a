"""Group filters: user-defined functions that decide which groups are trained on."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from titanrl.base.plugins import Point
from titanrl.carriers.types import Group

EXPECTED = "def keep(group: ScoredGroup) -> bool"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """The completions of one prompt and their rewards. Sequences have one value per completion, `[G]`.

    Completions whose reward failed are left out.

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
    """Number of completions whose reward failed."""


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


POINT = Point(key="rollout.group_filter", argument="group_filter", protocol=GroupFilter.__call__, expected=EXPECTED)


def keeps(group_filter: Callable[[ScoredGroup], object], group: Group, decode: Callable[[list[int]], str], name: str) -> bool:
    """Return True if a filter keeps a group.

    Args:
        group_filter: User-defined filter.
        group: Group with at least one reward.
        decode: Function from token ids to their text.
        name: Import path or name of the filter, for error messages.

    Raises:
        ValueError: The filter raised, or returned neither True nor False.
    """
    scored = scored_group(group, decode)
    try:
        kept = group_filter(scored)
    except Exception as error:  # user code may raise anything
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(f"rollout.group_filter: {name} raised {cause} (got group {scored.index}). Correct it.") from error
    if kept not in (True, False):
        raise ValueError(f"rollout.group_filter: {name} must return True or False (got {kept!r}). Write it as `{EXPECTED}`.")
    return bool(kept)


def scored_group(group: Group, decode: Callable[[list[int]], str]) -> ScoredGroup:
    """Convert a group to the argument of a filter."""
    rollouts, prompt = group.rollouts, group.prompt
    sampled = [rollout.sampled.token_ids.tolist() for rollout in rollouts]
    return ScoredGroup(
        index=prompt.index,
        task=prompt.task,
        entry=prompt.entry,
        completions=tuple(map(decode, sampled)),
        rewards=tuple(rollout.reward for rollout in rollouts),
        parts={
            part: tuple(rollout.reward_parts.get(part, math.nan) for rollout in rollouts)
            for part in dict.fromkeys(part for rollout in rollouts for part in rollout.reward_parts)
        },
        num_tokens=tuple(map(len, sampled)),
        finish_reasons=tuple(rollout.finish_reason for rollout in rollouts),
        num_errors=len(group.failures),
    )
