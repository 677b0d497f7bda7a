"""A curriculum sampler that draws from the level whose groups differ most in their rewards, where there is most to learn."""

from collections.abc import Mapping
from typing import Any

from titanrl import Outcome


class WeakestFirst:
    """Draws from the level with the largest spread of rewards, and regularly from each level in turn."""

    def __init__(self, num_levels: int, seed: int, *, explore_every: int = 4) -> None:
        """Start with equal spreads; every `explore_every`-th choice takes the next level in turn."""
        self.spreads = [1.0] * num_levels
        self.num_choices, self.explore_every = seed, explore_every

    def choose(self) -> int:
        """Return the level with the largest spread, or the next one in turn."""
        self.num_choices += 1
        if self.num_choices % self.explore_every == 0:
            return self.num_choices // self.explore_every % len(self.spreads)
        return max(range(len(self.spreads)), key=lambda level: self.spreads[level])

    def observe(self, outcome: Outcome) -> None:
        """Move the level's spread towards the spread of the group."""
        spread = max(outcome.rewards) - min(outcome.rewards)
        self.spreads[outcome.level] += 0.1 * (spread - self.spreads[outcome.level])

    def metrics(self) -> Mapping[str, float]:
        """Return the spread of each level."""
        return {f"spread_{level}": spread for level, spread in enumerate(self.spreads)}

    def state_dict(self) -> Mapping[str, Any]:
        """Return the spreads and the number of choices."""
        return {"spreads": self.spreads, "num_choices": self.num_choices}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the spreads and the number of choices."""
        self.spreads, self.num_choices = list(state["spreads"]), state["num_choices"]
