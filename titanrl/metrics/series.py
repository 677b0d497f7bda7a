"""Time series extracted from the metrics of a run, and the compact formatting of numbers."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

Rows = Sequence[Mapping[str, float]]
"""Metrics in step order, one mapping per step; each contains `step`."""
Points = list[tuple[float, float]]
"""(step, value) pairs."""
NUM_ENDS = 5
"""Number of steps at either end of a run whose mean is its first and its last value."""


def by_step(lines: Iterable[Mapping[str, Any]]) -> Rows:
    """Merge the lines of `metrics.jsonl` into one row per step, in step order.

    An evaluation writes a separate line for its step. If lines of the same step share a metric, the last one wins.
    """
    rows: dict[int, dict[str, float]] = {}
    for line in lines:
        rows.setdefault(line["step"], {}).update(line)
    return [rows[step] for step in sorted(rows)]


def series(rows: Rows, name: str) -> Points:
    """Return the values of one metric, without the steps where it is missing or null."""
    return [(row["step"], row[name]) for row in rows if row.get(name) is not None]


def awaited_by_both(points: Callable[[str], Points]) -> str:
    """Return what trainer and generators wait for most of the time: the rewards or the environment; empty if neither.

    `points` is a function from the name of a metric to its steps and values, of which the medians decide.
    """

    def usual(name: str) -> float:
        values = [value for _, value in points(name)]
        return median(values) if values else 0.0

    # In synchronous training they alternate, so the fractions add up to 1 plus the share in which neither works.
    if usual("perf/trainer_idle_frac") + usual("perf/generator_idle_frac") < 1.5:
        return ""
    score_s, environment_s = usual("group/score_s_mean"), usual("episode/environment_s_mean")
    if score_s > usual("group/generate_s_mean"):
        return f"the rewards, which take {score_s:.2g} s per group"
    return f"the environment, which takes {environment_s:.2g} s per episode" if environment_s else ""


def ends_of(points: Points) -> tuple[float, float, str]:
    """Return the means of the first and of the last values, and how many steps they cover, as text.

    A mean covers at most `NUM_ENDS` steps, and no step is in both.
    """
    values = [value for _, value in points]
    size = max(1, min(NUM_ENDS, len(values) // 2))
    covered = "the only step" if len(values) == 1 else "first and last step" if size == 1 else f"means of {size} steps"
    return fmean(values[:size]), fmean(values[-size:]), covered


def evaluated_sets(rows: Rows) -> list[str]:
    """Return the names of the evaluation sets, in order of appearance."""
    names = {name: None for row in rows for name in row}
    return [match[1] for name in names if (match := re.fullmatch(r"eval/(.+)/mean", name))]


def without_reward(rows: Rows, task: str) -> list[str]:
    """Return how many completions of the first and the last evaluation have no reward, as `2 of 5`; empty if all have one."""
    failed, total = (series(rows, f"eval/{task}/{name}") for name in ("num_errors", "num_completions"))
    if not any(number for _, number in (*failed[:1], *failed[-1:])):
        return []
    return [f"{failed[at][1]:.0f} of {total[at][1]:.0f}" for at in (0, -1)]


def phase_seconds(values: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each phase of a step, without the total `time/step_s`."""
    names = {name: name.removeprefix("time/").removesuffix("_s") for name in values if name.startswith("time/")}
    return {phase: values[name] for name, phase in names.items() if phase != "step" and values[name] is not None}


_BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_ASCII_BLOCKS = "_.-=+*#@"


def duration(seconds: float) -> str:
    """Format seconds as `12.3 s`, `1:02` or `1:02:03`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def count(number: float) -> str:
    """Format a count with at most three digits and a metric suffix: `950`, `2.1k`, `340k`, `1.2M`."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            scaled = number / limit
            return f"{scaled:.1f}{unit}" if scaled < 10 else f"{scaled:.0f}{unit}"
    return f"{number:.0f}"


def fixed(value: float, spec: str = ".3f") -> str:
    """Format a number with a fixed number of decimals; one that would have many digits with four significant ones."""
    return format(value, ".4g" if abs(value) >= 1e9 and spec.endswith("f") else spec)


def sparkline(values: Sequence[float], *, ascii_only: bool = False) -> str:
    """Return one block character per value, scaled between the lowest and the highest value."""
    blocks = _ASCII_BLOCKS if ascii_only else _BLOCKS
    low, high = min(values, default=0.0), max(values, default=0.0)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((value - low) * scale)] for value in values)
