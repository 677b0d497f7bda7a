"""Choice of the next prompt: the task of a mixture, the level of a curriculum, and the index in the stream of prompts.

The task ratio applies to the groups that are trained on. The next task is the one furthest behind its share, counting the
groups in batches and the outstanding groups (in flight or finished). When a group is dropped, for whatever reason, it no longer
counts for its task. Neither filters nor failures nor slow tasks therefore change the ratio.
"""

import inspect
import operator
import pickle
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np

from titanrl.base.plugins import Plugin, Plugins, Point, check_call
from titanrl.carriers.types import TOLERANCE
from titanrl.config.data import SAMPLERS, CurriculumConfig, TaskConfig
from titanrl.config.schema import Config

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

    def observe(self, outcome: Outcome) -> None:
        """Record the outcome of a group."""

    def metrics(self) -> Mapping[str, float]:
        """Return metrics to report, by name."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state. It must be picklable."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Restore a state."""


class SamplerFactory(Protocol):
    """A class or function that creates a sampler from the number of levels, the seed, and `curriculum.options` as keyword
    arguments.

    Example:
        def hardest_last(num_levels: int, seed: int, patience: int = 10) -> Sampler:
            return MySampler(num_levels, patience)
    """

    def __call__(self, num_levels: int, seed: int, /) -> Sampler:
        """Return a sampler in its initial state."""


class SuccessRate:
    """Moves to the next level when the current one is solved often enough, and back when it is solved too rarely.

    The success rate is the share of successful completions among the last `window` groups of the current level. Groups of other
    levels, such as those in flight during a move, are ignored.
    """

    def __init__(self, config: CurriculumConfig, seed: int) -> None:
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
        self._rates.append(sum(reward >= config.solved_from - TOLERANCE for reward in outcome.rewards) / len(outcome.rewards))
        if len(self._rates) < config.window:
            return
        if self._rate >= config.raise_at and self._level + 1 < config.num_levels:
            change = 1
        elif self._rate <= config.lower_at and self._level:
            change = -1
        else:
            return
        self._level += change
        self._num_moves += 1
        self._rates.clear()

    def metrics(self) -> Mapping[str, float]:
        """Return the level, the number of moves, and the success rate if there is one."""
        values = {"level": float(self._level), "moves": float(self._num_moves)}
        return values | ({"success_rate": self._rate} if self._rates else {})

    def state_dict(self) -> Mapping[str, Any]:
        """Return the level, the window and the counters."""
        counts = {"num_choices": self._num_choices, "num_moves": self._num_moves}
        return {"level": self._level, "rates": list(self._rates), **counts}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Restore a state. If the run now has fewer levels, continue at the last one."""
        self._level = min(state["level"], self._config.num_levels - 1)
        self._rates = deque(state["rates"] if self._level == state["level"] else (), maxlen=self._config.window)
        self._num_choices, self._num_moves = state["num_choices"], state["num_moves"]

    @property
    def _rate(self) -> float:
        return sum(self._rates) / len(self._rates)


def make_sampler(config: CurriculumConfig, seed: int, plugin: Plugin | None, *, key: str) -> Sampler:
    """Return the sampler of a curriculum. `plugin` is a custom sampler given as an object, and `key` its configuration key.

    Raise `ValueError` if the custom sampler cannot be created, or lacks a method.
    """
    if config.sampler in SAMPLERS:
        return SuccessRate(config, seed)
    plugin = plugin or Plugin(key=key, name=config.sampler)
    factory = plugin.load()
    check_call(factory, SamplerFactory.__call__, key=key, name=plugin.name, expected=EXPECTED, options=config.options)
    with _named(key, "creating the sampler", plugin.name):
        sampler: Sampler = factory(config.num_levels, seed, **config.options)
    for method in METHODS:
        expected = f"def {method}{inspect.signature(protocol := getattr(Sampler, method))}"
        check_call(getattr(sampler, method, None), protocol, key=key, name=f"{plugin.name}.{method}", expected=expected)
    with _named(key, "state_dict(), which must return a mapping to save in checkpoints,", plugin.name):
        pickle.dumps(dict(sampler.state_dict()))
    return sampler


@contextmanager
def _named(key: str, call: str, name: str) -> Iterator[None]:
    """Convert any exception raised in the body, which calls code of the user, to a `ValueError`."""
    try:
        yield
    except Exception as error:  # custom code may raise anything
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(f"{key}: {call} raised {cause} (got {name}). Correct it, or its options.") from error


POINT = Point(
    key="data.curriculum.sampler",
    argument="sampler",
    protocol=SamplerFactory.__call__,
    expected=EXPECTED,
    checked=lambda sampler, plugin, config: make_sampler(config.data.curriculum, config.seed, plugin, key=plugin.key),
)


class Draw(NamedTuple):
    """The prompt of a group, as chosen by `Mixture`.

    Example: `Draw(stream_index=17, task=1)` is prompt 17 of the only level of the second task.
    """

    stream_index: int
    """Index in the stream of the level."""
    task: int = 0
    """Index of the task."""
    level: int = 0
    """Level of the task's curriculum; 0 without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedTask:
    """One task of a mixture, or the only task of a run."""

    name: str
    """Name in metrics."""
    weight: float = 1.0
    """Share of the groups, relative to the other tasks."""
    sampler: Sampler | None = None
    """Sampler that chooses the level; None if there is only one."""
    num_levels: int = 1


class Mixture:
    """Chooses the prompt of each position, and remembers the choices for positions that may be sampled again.

    The buffer reports what becomes of the group of a position: `draw` when the group is admitted, `observe` when it has
    finished, `count_trained` when it is put into a batch, `uncount_trained` if that batch is not trained on, and `withdraw` if
    the group is dropped or will be sampled again.

    The choices depend only on the weights, the samplers, and the order of the calls. A run with one task and no curriculum
    takes its prompts in stream order and needs no state.
    """

    def __init__(self, tasks: Sequence[MixedTask] = (MixedTask(name=""),)) -> None:
        self._tasks = tasks
        self._numbers = {task.name: number for number, task in enumerate(tasks)}
        self._num_trained = [0] * len(tasks)  # groups put into batches
        self._num_outstanding = [0] * len(tasks)  # groups in flight or finished
        self._num_before = [0] * len(tasks)  # groups of earlier weights, which do not count for the present ones
        self._next_indices: list[Counter[int]] = [Counter() for _ in tasks]  # next index by level
        self._draws: dict[int, Draw] = {}
        self._observed: set[int] = set()  # positions whose outcome has been stored
        self._outcomes: dict[int, tuple[int, Outcome]] = {}  # with the task, passed to its sampler before the next choice

    @property
    def has_state(self) -> bool:
        """True if there is more than one task or level to choose from."""
        return len(self._tasks) > 1 or self._tasks[0].sampler is not None

    def reweigh(self, weights: Sequence[float]) -> None:
        """Change the weights of the tasks, in their order. The ratio applies to the groups admitted from now on."""
        self._tasks = [replace(task, weight=weight) for task, weight in zip(self._tasks, weights, strict=True)]
        self._num_before = [sum(counts) for counts in zip(self._num_trained, self._num_outstanding, strict=True)]

    def number_of(self, name: str) -> int:
        """Return the index of a task."""
        return self._numbers.get(name, 0)

    def draw(self, index: int) -> Draw:
        """Reserve a position and return its prompt: the same as in an earlier reservation, or the next one."""
        if not self.has_state:
            return Draw(index)
        draw = self._draws.get(index)
        if draw is None:
            draw = self._draws[index] = self._next()
        self._num_outstanding[draw.task] += 1
        return draw

    def withdraw(self, indices: Iterable[int]) -> None:
        """Count groups as not outstanding any more: they are dropped, or will be sampled again."""
        for index in indices if self.has_state else ():
            self._num_outstanding[self._draws[index].task] -= 1

    def count_trained(self, indices: Iterable[int]) -> None:
        """Count finished groups as trained on, because they have been put into a batch."""
        for index in indices if self.has_state else ():
            task = self._draws[index].task
            self._num_trained[task] += 1
            self._num_outstanding[task] -= 1

    def uncount_trained(self, indices: Iterable[int], *, is_dropped: bool) -> None:
        """Count groups as finished again, or as dropped, because their batch was not trained on."""
        for index in indices if self.has_state else ():
            task = self._draws[index].task
            self._num_trained[task] -= 1
            self._num_outstanding[task] += not is_dropped

    def observe(self, index: int, rewards: tuple[float, ...]) -> None:
        """Store the rewards of a group for the sampler of its task, once per position."""
        if not self.has_state or not rewards or index in self._observed:
            return
        self._observed.add(index)
        draw = self._draws[index]
        self._outcomes[index] = draw.task, Outcome(draw.level, index, rewards)

    def forget_others(self, *kept: Iterable[int]) -> None:
        """Forget the choices of all positions except these."""
        if self.has_state:
            indices = set(chain(*kept))
            self._draws = {index: draw for index, draw in self._draws.items() if index in indices}
            self._observed &= {*indices, *self._outcomes}

    def metrics(self) -> dict[str, float]:
        """Return each task's share of the groups in batches, and the metrics of the samplers."""
        values, total = dict[str, float](), sum(self._num_trained)
        if len(self._tasks) > 1:
            for task, number in zip(self._tasks, self._num_trained, strict=True):
                values |= {f"task/{task.name}/groups_total": float(number), f"task/{task.name}/share": number / max(total, 1)}
        for task in self._tasks:
            if task.sampler is not None:
                with _named("curriculum.sampler", "metrics()", task.name):
                    values |= {f"curriculum/{task.name}/{name}": float(value) for name, value in task.sampler.metrics().items()}
        return values

    def state_dict(self, *, untrained: Collection[int] = (), from_index: int | None = None) -> dict[str, Any] | None:
        """Return the state from which a resumed run continues; None if there is no state.

        `untrained` are positions of groups in batches that were not trained on. Everything is sampled again from the position
        `from_index` on; None keeps finished groups.
        """
        if not self.has_state:
            return None
        num_trained = list(self._num_trained)
        for index in untrained:
            num_trained[self._draws[index].task] -= from_index is None or index >= from_index
        outcomes = {index: known for index, known in self._outcomes.items() if from_index is None or index < from_index}
        return {
            "names": [task.name for task in self._tasks],
            "weights": [task.weight for task in self._tasks],
            "num_trained": num_trained,
            "num_before": self._num_before,
            "places": [dict(indices) for indices in self._next_indices],
            "draws": {index: draw for index, draw in self._draws.items() if from_index is None or index >= from_index},
            "observed": {index for index in self._observed if index in outcomes or index not in self._outcomes},
            "outcomes": outcomes,
            "samplers": [None if task.sampler is None else task.sampler.state_dict() for task in self._tasks],
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> bool:
        """Restore a state. Call this before any other method.

        Counts, stream indices and sampler states are matched to tasks by name. Return False if the tasks or their levels have
        changed. Unfinished positions then get other prompts, and finished groups cannot be used.
        """
        names = [task.name for task in self._tasks]
        if state is None:
            return not self.has_state
        for before, name in enumerate(state["names"]):
            number = self._numbers.get(name)
            if number is not None:
                task = self._tasks[number]
                self._num_trained[number] = state["num_trained"][before]
                self._num_before[number] = state.get("num_before", [0] * len(state["names"]))[before]  # not in earlier versions
                self._next_indices[number] = Counter(state["places"][before])
                if task.sampler is not None and state["samplers"][before] is not None:
                    with _named("curriculum.sampler", "load_state_dict()", task.name):
                        task.sampler.load_state_dict(state["samplers"][before])
        weights = [task.weight for task in self._tasks]
        if state["names"] != names or state.get("weights", weights) != weights:  # not in earlier versions
            self._num_before = list(self._num_trained)  # as in `reweigh`
        if state["names"] != names:
            return False
        is_level = all(draw.level < self._tasks[draw.task].num_levels for draw in state["draws"].values())
        if is_level:
            self._draws, self._observed = dict(state["draws"]), set(state["observed"])
            self._outcomes = dict(state["outcomes"])
        return is_level

    def count_restored(self, indices: Iterable[int]) -> None:
        """Count finished groups of a restored state as outstanding."""
        for index in indices if self.has_state else ():
            self._num_outstanding[self._draws[index].task] += 1

    def _next(self) -> Draw:
        for index in sorted(self._outcomes):  # groups finish in any order
            task, outcome = self._outcomes[index]
            if (sampler := self._tasks[task].sampler) is not None:
                with _named("curriculum.sampler", "observe()", self._tasks[task].name):
                    sampler.observe(outcome)
        self._outcomes.clear()
        number = min(range(len(self._tasks)), key=self._lead)
        chosen = self._tasks[number]
        level = 0
        if chosen.sampler is not None:
            with _named("curriculum.sampler", "choose()", chosen.name):
                given: Any = chosen.sampler.choose()
            try:
                level = operator.index(given)
            except TypeError:
                level = -1
            if not 0 <= level < chosen.num_levels:
                raise ValueError(
                    f"curriculum.sampler: choose() returned a level that task {chosen.name} does not have (got {given!r}). "
                    f"Return an int from 0 to {chosen.num_levels - 1}."
                )
        stream_index = self._next_indices[number][level]
        self._next_indices[number][level] += 1
        return Draw(stream_index, number, level)

    def _lead(self, number: int) -> float:
        """Return how far a task would be ahead of its share after another half group (Sainte-Lague method)."""
        num_groups = self._num_trained[number] + self._num_outstanding[number] - self._num_before[number]
        return (num_groups + 0.5) / self._tasks[number].weight


def make_mixture(config: Config, plugins: Plugins) -> Mixture:
    """Return the `Mixture` of a run in its initial state. Raise `ValueError` if a custom sampler cannot be used."""
    tasks = []
    for name, task in config.data.tasks.items():
        sampler, curriculum = None, task.curriculum
        if curriculum is not None:
            key = f"{task.key(name)}.curriculum.sampler"
            sampler = make_sampler(curriculum, config.seed, plugins.get(key), key=key)
        weight = task.weight if isinstance(task, TaskConfig) else 1.0
        num_levels = 1 if curriculum is None else curriculum.num_levels
        tasks.append(MixedTask(name=name, weight=weight, sampler=sampler, num_levels=num_levels))
    return Mixture(tasks)
