"""Time series extracted from the metrics of a run."""

import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

Rows = Sequence[Mapping[str, float]]
"""Metrics in step order, one mapping per step; each contains `step`."""
Points = list[tuple[float, float]]
"""(step, value) pairs."""


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


def first_and_last_five(points: Points) -> tuple[float, float]:
    """Return the mean of the first five values and the mean of the last five."""
    values = [value for _, value in points]
    return fmean(values[:5]), fmean(values[-5:])


def heldout_tasks(rows: Rows) -> list[str]:
    """Return the names of the evaluation sets, in order of appearance."""
    names = {name: None for row in rows for name in row}
    return [match[1] for name in names if (match := re.fullmatch(r"eval/(.+)/mean", name))]


def phase_seconds(values: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each phase of a step, without the total `time/step_s`."""
    names = {name: name.removeprefix("time/").removesuffix("_s") for name in values if name.startswith("time/")}
    return {phase: values[name] for name, phase in names.items() if phase != "step" and values[name] is not None}
