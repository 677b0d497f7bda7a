"""Curves of a run as SVG that takes its colours from the page, light or dark.

matplotlib is imported here, so import this module only to write a report.
"""

import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from titanrl.metrics.series import Points, Rows, first_and_last_five, heldout_tasks, phase_seconds, series
from titanrl.metrics.text import count

MAX_POINTS = 400
"""Points drawn per line; longer series are drawn as means of neighbours, so that the file stays small."""
MAX_PHASES = 6
"""Phases drawn of their own in the step-time chart; the shortest beyond are summed."""

# Stand-ins that matplotlib draws with and `_as_html` replaces by the page's CSS variables.
INK, GRID = "#fe00a0", "#fe00a1"
SERIES = tuple(f"#fe000{number}" for number in range(1, 7))
_VARIABLES = {INK: "var(--muted)", GRID: "var(--line)"} | {
    color: f"var(--series-{n})" for n, color in enumerate(SERIES, start=1)
}

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.edgecolor": GRID,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.prop_cycle": cycler(color=SERIES),
    "figure.constrained_layout.use": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.columnspacing": 1.2,
    "legend.frameon": False,
    "legend.handlelength": 1.2,
    "lines.linewidth": 1.6,
    "text.color": INK,
    "xtick.color": GRID,
    "xtick.labelcolor": INK,
    "ytick.color": GRID,
    "ytick.labelcolor": INK,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One chart of the report."""

    title: str
    """What is drawn."""
    headline: str
    """The same in a few figures."""
    svg: str
    """Inline SVG."""


def draw_curves(rows: Rows) -> list[Curve]:
    """The charts that `rows` has data for."""
    curves = []
    for number, (title, draw) in enumerate(_CHARTS.items()):
        with matplotlib.rc_context({**_STYLE, "svg.hashsalt": str(number)}):
            figure = Figure(figsize=(4.4, 2.3))
            axes = figure.add_subplot()
            headline = draw(axes, rows)
            if headline is not None:
                _finish(axes)
                curves.append(Curve(title=title, headline=headline, svg=_as_html(figure, title)))
    return curves


def thin(points: Points) -> Points:
    """At most `MAX_POINTS` points: means of runs of neighbours."""
    size = -(-len(points) // MAX_POINTS)
    runs = [points[start : start + size] for start in range(0, len(points), size)] if size > 1 else []
    return [(fmean(step for step, _ in run), fmean(value for _, value in run)) for run in runs] or points


def _reward(axes: Axes, rows: Rows) -> str | None:
    points = series(rows, "reward/mean")
    if not points:
        return None
    axes.plot(*zip(*thin(points), strict=True))
    first, last = first_and_last_five(points)
    for value, part in ((first, points[:5]), (last, points[-5:])):
        axes.hlines(value, part[0][0], part[-1][0], colors=SERIES[1], linewidth=2.4)
    return f"{first:.3f} to {last:.3f}, means of the first and last five steps"


def _heldout(axes: Axes, rows: Rows) -> str | None:
    parts = []
    for task in heldout_tasks(rows):
        points = series(rows, f"eval/{task}/mean")
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=task.replace("$", r"\$"))
            parts.append(f"{task} {points[0][1]:.3f} to {points[-1][1]:.3f}")
    axes.set_ylim(bottom=0.0)
    return ", ".join(parts) or None


def _plot(axes: Axes, rows: Rows, names: Mapping[str, str]) -> dict[str, Points]:
    """One line from zero up per metric that has data, `{name: label}`; the points drawn, by label."""
    found = {label: points for name, label in names.items() if (points := series(rows, name))}
    for label, points in found.items():
        axes.plot(*zip(*thin(points), strict=True), label=label)
    axes.set_ylim(bottom=0.0)
    return found


def _lines(names: Mapping[str, str], spec: str) -> Callable[[Axes, Rows], str | None]:
    """A chart of one line per metric, with first and last values under the format `spec` as headline."""

    def draw(axes: Axes, rows: Rows) -> str | None:
        found = _plot(axes, rows, names).items()
        return ", ".join(f"{label} {points[0][1]:{spec}} to {points[-1][1]:{spec}}" for label, points in found) or None

    return draw


def _mismatch(axes: Axes, rows: Rows) -> str | None:
    found = _plot(axes, rows, {"mismatch/logprob_abs_mean": "mean", "mismatch/logprob_abs_max": "max"})
    if not found:
        return None
    largest = max(value for points in found.values() for _, value in points)
    if largest > 0:
        axes.set_yscale("log", nonpositive="mask")
        axes.autoscale(axis="y")
    return f"trainer against generator, at most {largest:.1e} nats"


def _rates(axes: Axes, rows: Rows) -> str | None:
    found = _plot(axes, rows, {"perf/gen_tokens_per_s": "generator", "perf/train_tokens_per_s": "trainer"})
    medians = {label: median(value for _, value in points) for label, points in found.items()}
    return ", ".join(f"{label} {count(rate)}" for label, rate in medians.items()) + ", medians" if medians else None


def _step_time(axes: Axes, rows: Rows) -> str | None:
    by_step = {row["step"]: phases for row in rows if (phases := phase_seconds(row))}
    if not by_step:
        return None
    stack = _stack(by_step)
    steps = [step for step, _ in next(iter(stack.values()))]
    axes.stackplot(steps, *([value for _, value in points] for points in stack.values()), labels=list(stack), alpha=0.75)
    totals = sorted(sum(phases.values()) for phases in by_step.values())
    # A slow first step, with compilation or cold caches, must not flatten the rest.
    axes.set_ylim(0.0, 1.3 * totals[int(0.95 * (len(totals) - 1))])
    return f"median {median(totals):.2f} s, longest {totals[-1]:.2f} s"


def _stack(by_step: Mapping[float, Mapping[str, float]]) -> dict[str, Points]:
    """Seconds by phase, the longest phase first, the shortest summed as "other"."""
    names = {name for phases in by_step.values() for name in phases}
    ordered = sorted(names, key=lambda name: -sum(phases.get(name, 0.0) for phases in by_step.values()))
    layers = {name: [name] for name in ordered[: MAX_PHASES - 1]}
    if rest := ordered[MAX_PHASES - 1 :]:
        layers[rest[0] if len(rest) == 1 else "other"] = rest
    return {
        label: thin([(step, sum(phases.get(name, 0.0) for name in layer)) for step, phases in by_step.items()])
        for label, layer in layers.items()
    }


_CHARTS: dict[str, Callable[[Axes, Rows], str | None]] = {
    "Reward": _reward,
    "Held-out accuracy": _heldout,
    "Response length, tokens": _lines({"tokens/response_len_mean": "mean", "tokens/response_len_max": "max"}, ".1f"),
    "Entropy, nats": _lines({"policy/entropy": "entropy"}, ".3f"),
    "Log-probability mismatch": _mismatch,
    "Step time by phase, seconds": _step_time,
    "Tokens per second": _rates,
    "Gradient norm": _lines({"grad/norm": "norm"}, ".3g"),
    "Groups without signal": _lines({"group/zero_variance_frac": "share"}, ".2f"),
}


def _finish(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.margins(x=0.02)
    axes.set_axisbelow(True)
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        axes.legend(handles, labels, ncols=len(labels), loc="lower left", bbox_to_anchor=(-0.02, 1.0))


def _as_html(figure: Figure, title: str) -> str:
    """SVG without what only a file of its own needs, coloured by the page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-label="{title}">', svg, count=1)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, variable)
    return svg.replace("xlink:href", "href")
