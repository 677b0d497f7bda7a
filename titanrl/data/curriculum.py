"""Curriculum samplers, which choose the difficulty level of each prompt from the outcomes of earlier prompts."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from titanrl.base.plugins import Plugin, Point, check_call
from titanrl.config.data import SAMPLERS, CurriculumConfig

EXPECTED = "def sampler(num_levels: int, seed: int) -> Sampler"
METHODS = ("choose", "observe", "metrics", "state_dict", "load_state_dict")
"""Methods that a sampler must have."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one group, as reported to a sampler."""

    level: int
    """Level of the group's prompt."""
    index: int
    """Index of the prompt in the run; later prompts have greater indices."""
    rewards: tuple[float, ...]
    """Rewards of the completions, except those whose reward failed. Never empty."""


class Sampler(Protocol):
    """Chooses the level of each prompt.

    A sampler runs in the buffer's process and is called from one thread. Its state is saved in checkpoints. The outcomes of all
    finished groups, including groups that are not trained on, arrive before the next choice, in the order of their prompts. So
    that a run can be repeated, a choice must depend only on the arguments of the sampler and on the choices and outcomes so
    far, and must use no other source of randomness.
    """

    def choose(self) -> int:
        """Return the level of the next prompt, from 0."""
        ...

    def observe(self, outcome: Outcome) -> None:
        """Record the outcome of a group."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Return metrics to report, by name."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state. It must be picklable."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Restore a state."""
        ...


class SamplerFactory(Protocol):
    """A class or function that creates a sampler from the number of levels, the seed, and `curriculum.options` as keyword
    arguments.

    Example:
        def hardest_last(num_levels: int, seed: int, patience: int = 10) -> Sampler:
            return MySampler(num_levels, patience)
    """

    def __call__(self, num_levels: int, seed: int, /) -> Sampler:
        """Return a sampler in its initial state."""
        ...


class SuccessRate:
    """Moves to the next level when the current one is solved often enough, and back when it is solved too rarely.

    The success rate is the share of successful completions among the last `window` groups of the current level. Groups of other
    levels, such as those in flight during a move, are ignored.
    """

    def __init__(self, config: CurriculumConfig, seed: int) -> None:
        """Start at `start_level`."""
        self._config, self._seed = config, seed
        self._level = config.start_level
        self._rates: deque[float] = deque(maxlen=config.window)
        self._num_choices = self._num_moves = 0

    def choose(self) -> int:
        """Return the current level or, with probability `review`, a lower one."""
        self._num_choices += 1
        if not (self._config.review and self._level):
            return self._level
        drawn = np.random.default_rng((self._seed, self._num_choices))
        return int(drawn.integers(self._level)) if drawn.random() < self._config.review else self._level

    def observe(self, outcome: Outcome) -> None:
        """Count a group of the current level, and move when the window is full."""
        config = self._config
        if outcome.level != self._level:
            return
        self._rates.append(sum(reward >= config.solved_from for reward in outcome.rewards) / len(outcome.rewards))
        if len(self._rates) < config.window:
            return
        if self._rate >= config.raise_at and self._level + 1 < config.num_levels:
            self._move(1)
        elif self._rate <= config.lower_at and self._level:
            self._move(-1)

    def metrics(self) -> Mapping[str, float]:
        """Return the level, the number of moves, and the success rate if the window is not empty."""
        values = {"level": float(self._level), "moves": float(self._num_moves)}
        return values | ({"success_rate": self._rate} if self._rates else {})

    def state_dict(self) -> Mapping[str, Any]:
        """Return the level, the window and the counters."""
        return {
            "level": self._level,
            "rates": list(self._rates),
            "num_choices": self._num_choices,
            "num_moves": self._num_moves,
        }

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Restore a state. If the run now has fewer levels, continue at the last one."""
        self._level = min(state["level"], self._config.num_levels - 1)
        self._rates = deque(state["rates"] if self._level == state["level"] else (), maxlen=self._config.window)
        self._num_choices, self._num_moves = state["num_choices"], state["num_moves"]

    @property
    def _rate(self) -> float:
        return sum(self._rates) / len(self._rates)

    def _move(self, change: int) -> None:
        self._level += change
        self._num_moves += 1
        self._rates.clear()


def make_sampler(config: CurriculumConfig, seed: int, plugin: Plugin | None, *, key: str) -> Sampler:
    """Return the sampler of a curriculum.

    Args:
        config: Section `curriculum`.
        seed: Seed of the run.
        plugin: Custom sampler given as an object; None if the configuration has an import path or a built-in name.
        key: Configuration key of the sampler.

    Raises:
        ValueError: The custom sampler cannot be created, or lacks a method.
    """
    if config.sampler in SAMPLERS:
        return SuccessRate(config, seed)
    plugin = plugin or Plugin(key=key, name=config.sampler)
    factory = plugin.load()
    check_sampler(factory, key=key, name=plugin.name, options=config.options)
    try:
        sampler: Sampler = factory(config.num_levels, seed, **config.options)
    except Exception as error:  # custom code may raise anything
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{key}: creating the sampler raised {cause} (got {plugin.name}). Correct it, or its options."
        ) from error
    missing = [method for method in METHODS if not callable(getattr(sampler, method, None))]
    if missing:
        raise ValueError(
            f"{key}: the sampler lacks the methods {', '.join(missing)} (got {plugin.name}). Implement {', '.join(METHODS)}."
        )
    return sampler


def check_sampler(candidate: object, *, key: str, name: str, options: Mapping[str, Any]) -> None:
    """Check that an object has the signature of `SamplerFactory`.

    Raises:
        ValueError: It cannot be called like this.
    """
    check_call(candidate, SamplerFactory.__call__, key=key, name=name, expected=EXPECTED, options=options)


POINT = Point(
    key="data.curriculum.sampler",
    argument="sampler",
    protocol=SamplerFactory.__call__,
    expected=EXPECTED,
    checked=lambda sampler, plugin, config: check_sampler(
        sampler, key=plugin.key, name=plugin.name, options=config.data.curriculum.options
    ),
)
