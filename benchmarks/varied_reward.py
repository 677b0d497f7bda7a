"""A reward for models with random weights, whose completions have nothing to tell them apart."""

from collections.abc import Mapping, Sequence
from typing import Any

import titanrl


@titanrl.group_reward
def by_place(completions: Sequence[str], entry: Mapping[str, Any]) -> list[float]:
    """Return a reward that grows with the place in the group, so that every group has advantages."""
    return [place / len(completions) for place in range(len(completions))]
