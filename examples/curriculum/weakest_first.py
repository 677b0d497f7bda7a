"""A sampler that draws from the level whose groups differ most in their rewards, where there is most to learn."""

from collections.abc import Mapping
from typing import Any

from titanrl import Outcome


class WeakestFirst:
    """Draws from the level with the largest spread of rewards, and every so often from each of the others."""

    def __init__(self, num_levels: int, seed: int, *, explore_every: int = 4) -> None:
        """Start with equal spreads."""
        self.spreads = [1.0] * num_levels
        self.num_choices, self.explore_every = seed, explore_every

    def choose(self) -> int:
        """Return the level with the largest spread, or the next one in turn."""
        self.num_choices += 1
        if self.num_choices % self.explore_every == 0:
            return self.num_choices // self.explore_every % len(self.spreads)
        return max(range(len(self.spreads)), key=lambda level: self.spreads[level])

    def observe(self, outcome: Outcome) -> None:
        """Move the spread of a level towards that of a group."""
        spread = max(outcome.rewards) - min(outcome.rewards)
        self.spreads[outcome.level] += 0.1 * (spread - self.spreads[outcome.level])

    def metrics(self) -> Mapping[str, float]:
        """Return the spread of each level."""
        return {f"spread_{level}": spread for level, spread in enumerate(self.spreads)}

    def state_dict(self) -> Mapping[str, Any]:
        """Return spreads and count."""
        return {"spreads": self.spreads, "num_choices": self.num_choices}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with a state."""
        self.spreads, self.num_choices = list(state["spreads"]), state["num_choices"]
