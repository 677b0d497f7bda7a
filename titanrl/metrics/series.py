"""Reading series out of a run's metrics."""

import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

Rows = Sequence[Mapping[str, float]]
"""Metrics by step, one mapping per step, in order; each has `step`."""
Points = list[tuple[float, float]]
"""(step, value)."""


def by_step(lines: Iterable[Mapping[str, Any]]) -> Rows:
    """One row per step, in order: an evaluation may stand on a line of its own, and a newer line wins."""
    rows: dict[int, dict[str, float]] = {}
    for line in lines:
        rows.setdefault(line["step"], {}).update(line)
    return [rows[step] for step in sorted(rows)]


def series(rows: Rows, name: str) -> Points:
    """Steps and values of one metric, without steps that do not have it."""
    return [(row["step"], row[name]) for row in rows if row.get(name) is not None]


def first_and_last_five(points: Points) -> tuple[float, float]:
    """Means of the first and of the last five values."""
    values = [value for _, value in points]
    return fmean(values[:5]), fmean(values[-5:])


def heldout_tasks(rows: Rows) -> list[str]:
    """Tasks with a held-out evaluation, in order of appearance."""
    names = {name: None for row in rows for name in row}
    return [match[1] for name in names if (match := re.fullmatch(r"eval/(.+)/mean", name))]


def phase_seconds(values: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each phase in a step's metrics, without the step's total."""
    names = {name: name.removeprefix("time/").removesuffix("_s") for name in values if name.startswith("time/")}
    return {phase: values[name] for name, phase in names.items() if phase != "step"}
