"""A custom tool, and a reward that compares the completions of a group."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import titanrl
from titanrl.environments import ToolError


class Abacus:
    """Adds and subtracts whole numbers."""

    def total(self, terms: str) -> int:
        """Return the value of a sum.

        Args:
            terms: Whole numbers with + or - between them, such as 12+345-67.
        """
        if not re.fullmatch(r" *-?\d+( *[+-] *\d+)* *", terms):
            raise ToolError("Write whole numbers with + or - between them.")
        return sum(map(int, re.findall(r"[+-]?\d+", terms.replace(" ", ""))))


@titanrl.group_reward
def brief(completions: Sequence[str], entry: Mapping[str, Any], num_tokens: Sequence[int]) -> list[float]:
    """Return 1 for the correct completions with the fewest tokens in the group, else 0."""
    right = [f"<answer>{entry['answer']}</answer>" in completion for completion in completions]
    fewest = min((num for num, is_right in zip(num_tokens, right, strict=True) if is_right), default=0)
    return [float(is_right and num == fewest) for num, is_right in zip(num_tokens, right, strict=True)]
