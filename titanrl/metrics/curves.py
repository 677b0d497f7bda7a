"""Charts of the report, as plotly figures.

Importing plotly takes a third of a second, so import this module only when a report is written.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import plotly.graph_objects as go

from titanrl.metrics.series import Points, Rows, count, first_and_last_five, heldout_tasks, phase_seconds, series

MAX_POINTS = 400
"""Maximum number of points per line. Longer series are drawn as means of neighboring steps, to keep the file small."""
MAX_PHASES = 6
"""Maximum number of layers in the step-time chart. The shortest phases are merged into "other"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart of the report."""

    title: str
    """Name of the quantity, with its unit."""
    headline: str
    """Key values of the chart, such as the first and last mean."""
    figure: str
    """Traces and layout as JSON for plotly.js, without colors: the page applies those of its light or dark scheme."""


Drawing = tuple[str, go.Figure]
"""Headline and figure."""


def draw_curves(rows: Rows) -> list[Chart]:
    """Return a chart for each quantity that `rows` contains."""
    charts = []
    for title, draw in _CHARTS.items():
        drawing = draw(rows)
        if drawing is not None:
            headline, figure = drawing
            figure.update_layout(showlegend=len(figure.data) > 1)
            content = figure.to_plotly_json()
            del content["layout"]["template"]  # its colors suit only a light page
            charts.append(Chart(title=title, headline=headline, figure=json.dumps(content, separators=(",", ":"))))
    return charts


def thin(points: Points) -> Points:
    """Reduce a series to at most `MAX_POINTS` points by averaging runs of neighboring points."""
    size = -(-len(points) // MAX_POINTS)
    runs = [points[start : start + size] for start in range(0, len(points), size)] if size > 1 else []
    return [(fmean(step for step, _ in run), fmean(value for _, value in run)) for run in runs] or points


def _line(points: Points, name: str, **style: Any) -> go.Scatter:
    steps, values = [step for step, _ in points], [_short(value) for _, value in points]
    return go.Scatter(x=steps, y=values, name=name, mode=style.pop("mode", "lines"), **style)


def _short(value: float) -> float:
    """Round `value` to five significant digits."""
    return float(f"{value:.5g}")


def _from_zero(figure: go.Figure) -> go.Figure:
    return figure.update_yaxes(rangemode="tozero")


def _reward(rows: Rows) -> Drawing | None:
    points = series(rows, "reward/mean")
    if not points:
        return None
    first, last = first_and_last_five(points)
    ends = go.Scatter(
        x=[points[:5][0][0], points[:5][-1][0], None, points[-5:][0][0], points[-5:][-1][0]],
        y=[first, first, None, last, last],
        name="5-step mean",
        mode="lines",
        line={"width": 4},
    )
    figure = go.Figure([_line(thin(points), "reward"), ends])
    return f"{first:.3f} to {last:.3f} (first and last five steps)", figure


def _heldout(rows: Rows) -> Drawing | None:
    found = {task: points for task in heldout_tasks(rows) if (points := series(rows, f"eval/{task}/mean"))}
    headline = ", ".join(f"{task} {points[0][1]:.3f} to {points[-1][1]:.3f}" for task, points in found.items())
    traces = [_line(points, task, mode="lines+markers") for task, points in found.items()]
    return (headline, _from_zero(go.Figure(traces))) if found else None


def _lines(names: Mapping[str, str], headline: Callable[[Mapping[str, Points]], str]) -> Callable[[Rows], Drawing | None]:
    """Return a function that draws one line per metric.

    Args:
        names: Labels of the lines, by metric name.
        headline: Function from the points of each line, by label, to the headline of the chart.
    """

    def draw(rows: Rows) -> Drawing | None:
        found = {label: points for name, label in names.items() if (points := series(rows, name))}
        figure = go.Figure([_line(thin(points), label) for label, points in found.items()])
        return (headline(found), _from_zero(figure)) if found else None

    return draw


def _environment(rows: Rows) -> Drawing | None:
    prefix, suffix = "environment/", "_mean"
    names = dict.fromkeys(name for row in rows for name in row if name.startswith(prefix) and name.endswith(suffix))
    labels = {name: name.removeprefix(prefix).removesuffix(suffix) for name in names}
    return _lines(labels, _first_to_last(".3g"))(rows)


def _first_to_last(spec: str) -> Callable[[Mapping[str, Points]], str]:
    """Return a headline function that shows the first and last value of each line, formatted with `spec`."""
    return lambda found: ", ".join(
        f"{label} {points[0][1]:{spec}} to {points[-1][1]:{spec}}" for label, points in found.items()
    )


def _medians(found: Mapping[str, Points]) -> str:
    rates = (f"{label} {count(median(value for _, value in points))}" for label, points in found.items())
    return f"{', '.join(rates)} (median)"


def _largest(found: Mapping[str, Points]) -> str:
    return f"trainer vs. generator, at most {max(value for points in found.values() for _, value in points):.1e} nats"


def _mismatch(rows: Rows) -> Drawing | None:
    drawing = _lines({"mismatch/logprob_abs_mean": "mean", "mismatch/logprob_abs_max": "max"}, _largest)(rows)
    if drawing is not None and any(value for trace in drawing[1].data for value in trace.y):
        drawing[1].update_yaxes(type="log", tickformat=".0e", dtick=1)
    return drawing


def _step_time(rows: Rows) -> Drawing | None:
    by_step = {row["step"]: phases for row in rows if (phases := phase_seconds(row))}
    if not by_step:
        return None
    layers = _stack(by_step)
    figure = go.Figure([_line(points, name, stackgroup="phases", line={"width": 0.5}) for name, points in layers.items()])
    totals = sorted(sum(phases.values()) for phases in by_step.values())
    # Limit the axis, so that a slow first step (compilation, cold caches) does not flatten the others.
    figure.update_yaxes(range=[0.0, 1.3 * totals[int(0.95 * (len(totals) - 1))]])
    return f"median {median(totals):.2f} s, longest {totals[-1]:.2f} s", figure


def _stack(by_step: Mapping[float, Mapping[str, float]]) -> dict[str, Points]:
    """Return the seconds of each phase, the longest phase first; the shortest ones are summed as "other"."""
    names = {name for phases in by_step.values() for name in phases}
    ordered = sorted(names, key=lambda name: -sum(phases.get(name, 0.0) for phases in by_step.values()))
    layers = {name: [name] for name in ordered[: MAX_PHASES - 1]}
    if rest := ordered[MAX_PHASES - 1 :]:
        layers[rest[0] if len(rest) == 1 else "other"] = rest
    return {
        label: thin([(step, sum(phases.get(name, 0.0) for name in layer)) for step, phases in by_step.items()])
        for label, layer in layers.items()
    }


_CHARTS: dict[str, Callable[[Rows], Drawing | None]] = {
    "Mean reward": _reward,
    "Held-out mean reward": _heldout,
    "Loss, nats per token": _lines({"loss/train": "training", "loss/eval": "held-out"}, _first_to_last(".3f")),
    "KL divergence from the teacher, nats per token": _lines({"policy/kl_teacher": "divergence"}, _first_to_last(".3f")),
    "Response length, tokens": _lines(
        {"tokens/response_len_mean": "mean", "tokens/response_len_max": "max"}, _first_to_last(".1f")
    ),
    "Environment metrics, means over episodes": _environment,
    "Entropy, nats": _lines({"policy/entropy": "entropy"}, _first_to_last(".3f")),
    "Log-probability mismatch, nats": _mismatch,
    "Step time by phase, seconds": _step_time,
    "Throughput while busy, tokens per second": _lines(
        {"perf/gen_tokens_per_s": "generator", "perf/train_tokens_per_s": "trainer"}, _medians
    ),
    "Gradient norm": _lines({"grad/norm": "norm"}, _first_to_last(".3g")),
    "Fraction of groups without gradient": _lines({"group/zero_variance_frac": "fraction"}, _first_to_last(".2f")),
}
