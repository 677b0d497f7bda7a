"""Curricula: samplers that choose the level of difficulty of each prompt, from what earlier prompts led to."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from titanrl.config.curriculum import SAMPLERS, CurriculumConfig
from titanrl.plugins import Plugin, check_call

EXPECTED = "def sampler(num_levels: int, seed: int) -> Sampler"
METHODS = ("choose", "observe", "metrics", "state_dict", "load_state_dict")
"""Methods of a sampler."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one group, for a sampler."""

    level: int
    """Level of its prompt."""
    index: int
    """Position of its prompt in the run; later prompts have greater ones."""
    rewards: tuple[float, ...]
    """Rewards of its completions, without those whose reward failed; not empty."""


class Sampler(Protocol):
    """Chooses levels. It runs in the process of the buffer, is called from one thread, and its state is in checkpoints.

    The outcomes of all groups arrive before the next choice, also those of groups that are not trained on, in the order of
    their prompts. A choice must depend only on the arguments, the choices and outcomes so far, and no other randomness, so that
    a run can be repeated.
    """

    def choose(self) -> int:
        """Return the level of the next prompt, from 0."""
        ...

    def observe(self, outcome: Outcome) -> None:
        """Note the outcome of a group."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Return numbers to report, by name."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state, which can be pickled."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Continue with a state."""
        ...


class SamplerFactory(Protocol):
    """A class or function that makes a sampler. It gets the number of levels, a seed, and `curriculum.options` as keywords.

    Example:
        def hardest_last(num_levels: int, seed: int, patience: int = 10) -> Sampler:
            return MySampler(num_levels, patience)
    """

    def __call__(self, num_levels: int, seed: int, /) -> Sampler:
        """Return a sampler at its beginning."""
        ...


class SuccessRate:
    """Move to the next level when the present one is solved often enough, and back when it is solved too rarely.

    The success rate is the share of successful completions among the last `window` groups of the present level. Groups of other
    levels, such as those that were in flight during a move, do not count.
    """

    def __init__(self, config: CurriculumConfig, seed: int) -> None:
        """Start at `start_level`."""
        self._config, self._seed = config, seed
        self._level = config.start_level
        self._rates: deque[float] = deque(maxlen=config.window)
        self._num_choices = self._num_moves = 0

    def choose(self) -> int:
        """Return the present level, or one below it for the share `review` of the prompts."""
        self._num_choices += 1
        if not (self._config.review and self._level):
            return self._level
        drawn = np.random.default_rng((self._seed, self._num_choices))
        return int(drawn.integers(self._level)) if drawn.random() < self._config.review else self._level

    def observe(self, outcome: Outcome) -> None:
        """Count a group of the present level, and move when the window is full."""
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
        """Return the level, the moves so far, and the success rate if there is one."""
        values = {"level": float(self._level), "moves": float(self._num_moves)}
        return values | ({"success_rate": self._rate} if self._rates else {})

    def state_dict(self) -> Mapping[str, Any]:
        """Return level, window and counts."""
        return {
            "level": self._level,
            "rates": list(self._rates),
            "num_choices": self._num_choices,
            "num_moves": self._num_moves,
        }

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Continue with a state. If the run has fewer levels by now, it is at the last one."""
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
        config: Section of the curriculum.
        seed: Seed of the run.
        plugin: The user's sampler; None if the configuration names one by an import path, or a built-in one.
        key: Configuration key of the sampler.

    Raises:
        ValueError: The user's sampler cannot be used.
    """
    if config.sampler in SAMPLERS:
        return SuccessRate(config, seed)
    plugin = plugin or Plugin(key=key, name=config.sampler)
    factory = plugin.load()
    check_sampler(factory, key=key, name=plugin.name, options=config.options)
    try:
        sampler: Sampler = factory(config.num_levels, seed, **config.options)
    except Exception as error:  # the class is the user's and may raise anything
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{key}: making the sampler raised {cause} (got {plugin.name}). Correct it, or its options."
        ) from error
    missing = [method for method in METHODS if not callable(getattr(sampler, method, None))]
    if missing:
        raise ValueError(
            f"{key}: the sampler has no {' and no '.join(missing)} (got {plugin.name}). "
            f"Its methods must be {', '.join(METHODS)}."
        )
    return sampler


def check_sampler(candidate: object, *, key: str, name: str, options: Mapping[str, Any]) -> None:
    """Check that an object can be called as `SamplerFactory`.

    Raises:
        ValueError: It cannot.
    """
    check_call(candidate, SamplerFactory.__call__, key=key, name=name, expected=EXPECTED, options=options)
