"""A reward for models with random weights, whose completions are all equally bad."""

from collections.abc import Mapping, Sequence
from typing import Any

import titanrl


@titanrl.group_reward
def by_place(completions: Sequence[str], entry: Mapping[str, Any]) -> list[float]:
    """Return a reward that grows with the index in the group, so that every group has nonzero advantages."""
    return [place / len(completions) for place in range(len(completions))]


@titanrl.group_reward
async def by_place_in_loop(completions: Sequence[str], entry: Mapping[str, Any]) -> list[float]:
    """Return the same reward without a thread."""
    return [place / len(completions) for place in range(len(completions))]
