"""A reward that returns token rewards, and one that differs between the completions of any policy."""

from collections.abc import Mapping, Sequence
from typing import Any

import titanrl


def first(completion: str, entry: Mapping[str, Any], token_ids: Sequence[int]) -> titanrl.TokenRewards:
    """Reward the first token."""
    return titanrl.TokenRewards(tokens=[0.125, *[0.0] * (len(token_ids) - 1)])


def parity(completion: str, entry: Mapping[str, Any]) -> float:
    """Reward completions with an odd number of characters."""
    return len(completion) % 2
