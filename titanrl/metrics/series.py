"""Time series from the metrics of a run."""

import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

Rows = Sequence[Mapping[str, float]]
"""Metrics in step order, one mapping per step; each contains `step`."""
Points = list[tuple[float, float]]
"""Pairs of step and value."""


def by_step(lines: Iterable[Mapping[str, Any]]) -> Rows:
    """Merge lines into one row per step, in order. An evaluation has a line of its own; a later line wins."""
    rows: dict[int, dict[str, float]] = {}
    for line in lines:
        rows.setdefault(line["step"], {}).update(line)
    return [rows[step] for step in sorted(rows)]


def series(rows: Rows, name: str) -> Points:
    """Return the values of one metric, without steps that lack it or have null."""
    return [(row["step"], row[name]) for row in rows if row.get(name) is not None]


def first_and_last_five(points: Points) -> tuple[float, float]:
    """Return the means of the first and of the last five values."""
    values = [value for _, value in points]
    return fmean(values[:5]), fmean(values[-5:])


def heldout_tasks(rows: Rows) -> list[str]:
    """Return the tasks with a held-out evaluation, in order of appearance."""
    names = {name: None for row in rows for name in row}
    return [match[1] for name in names if (match := re.fullmatch(r"eval/(.+)/mean", name))]


def phase_seconds(values: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each phase of a step, without the step's total."""
    names = {name: name.removeprefix("time/").removesuffix("_s") for name in values if name.startswith("time/")}
    return {phase: values[name] for name, phase in names.items() if phase != "step" and values[name] is not None}
