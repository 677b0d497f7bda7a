"""The report of a run, `report.html`: a single file that opens in any browser, without a server or network access."""

import base64
import gzip
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from titanrl.base.files import DamagedError, replace_text
from titanrl.metrics.reading import RecordedCompletion, RecordedGroup, RunRecord
from titanrl.metrics.series import (
    NUM_ENDS,
    Points,
    Rows,
    count,
    ends_of,
    heldout_tasks,
    phase_seconds,
    series,
    without_reward,
)

TEMPLATE = Path(__file__).with_name("report_template.html.j2")
FIRST_BYTES = 1_000_000
"""Size limit for sampled groups from the start of the run, in bytes of JSON."""
NEWEST_BYTES = 1_500_000
"""Size limit for sampled groups from the end of the run, in bytes of JSON."""
MAX_COMPLETIONS = 64
"""Completions shown per group."""
MAX_TOKENS = 400
"""Tokens shown per completion."""
MAX_CHARS = 4000
"""Characters shown of a prompt or an error, and characters of a completion that the search covers."""
MAX_POINTS = 400
"""Points per line of a chart. Longer series are drawn as means of neighboring steps, to keep the file small."""
MAX_PHASES = 6
"""Layers in the step-time chart. The shortest phases are merged into "other"."""
NUM_COLORS = 6
"""Colors of lines; the template defines them."""

Trace = dict[str, Any]
"""A line of a chart, as plotly.js takes it, without colors: the page applies those of its light or dark scheme."""
Headline = Callable[[Mapping[str, Points]], str]
"""Function from the points of each line, by label, to the headline of a chart."""


class Figure(NamedTuple):
    """A key figure at the top of the report."""

    label: str
    value: str
    note: str


class Chart(NamedTuple):
    """One chart of the report."""

    title: str
    """Name of the quantity, with its unit."""
    headline: str
    """Key values of the chart, such as the first and last mean."""
    figure: str
    """Traces and layout as JSON for plotly.js."""
    metrics: frozenset[str] = frozenset()
    """Metrics that the chart shows."""


def write_report(run_dir: Path, summary: Mapping[str, str]) -> Path:
    """Write `report.html` from the files in `run_dir`, and return its path.

    Args:
        run_dir: Run directory. All its files are optional.
        summary: Text by label. The entry `outcome` is shown below the title, the others below the key figures.
    """
    run = RunRecord(run_dir)
    rows = run.metrics()
    samples, total = _sampled_groups(run)
    charts = [chart for chart in _charts(rows) if chart is not None]
    report = run_dir / "report.html"
    write_page(
        report,
        kind="report",
        name=run_dir.resolve().name,
        outcome=summary.get("outcome", ""),
        facts={label: text for label, text in summary.items() if label != "outcome"},
        figures=_figures(rows),
        config=run.config,
        charts=charts,
        others=_other_charts(rows, frozenset().union(*(chart.metrics for chart in charts))),
        samples=samples,
        has_rollouts=not series(rows, "loss/train"),
        samples_note=f"Showing {'all' if len(samples) == total else 'the first and the newest of'} {total} recorded groups.",
    )
    return report


def write_page(
    path: Path, *, kind: str, name: str, charts: Sequence[Chart], samples: Sequence[str] = (), **values: Any
) -> None:
    """Write a page; the other arguments are those of the template.

    Raises:
        OSError: The file cannot be written.
    """
    import jinja2  # slow to import, and needed only for pages

    absent = {"outcome": "", "facts": {}, "figures": [], "tables": [], "config": "", "others": {}, "has_rollouts": False}
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    values = {**absent, "samples_note": "", **values}
    shown = [*charts, *(chart for group in values["others"].values() for chart in group)]
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        kind=kind,
        name=name,
        curves=charts,
        charts=_for_script([chart.figure for chart in shown]),
        plotly=_packed_plotly() if shown else "",
        samples=_for_script(samples) if samples else "",
        **values,
    )
    replace_text(path, page)


def _for_script(items: Sequence[str]) -> str:
    """Join JSON texts to a JSON array. Escape "<", so that no data can close the script element that contains the array."""
    return f"[{','.join(items)}]".replace("<", "\\u003c")


def _packed_plotly() -> str:
    """Return plotly.js, gzipped and base64-encoded: 2 MB instead of 5. The page decompresses it."""
    from plotly.offline import get_plotlyjs  # takes a third of a second

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


def _figures(rows: Rows) -> list[Figure]:
    figures = []
    for label, name in (("Mean reward", "reward/mean"), ("Training loss", "loss/train")):
        if points := series(rows, name):
            first, last, note = ends_of(points)
            figures.append(Figure(label, f"{first:.3f} \u2192 {last:.3f}" if len(points) > 1 else f"{first:.3f}", note))
    heldout = [(task, "mean reward", f"eval/{task}/mean") for task in heldout_tasks(rows)]
    for task, unit, name in [*heldout, ("loss", "nats per token", "loss/eval")]:
        if points := series(rows, name):
            (start, before), (end, after) = points[0], points[-1]
            note = f"{unit} at steps {start} and {end}"
            if failed := without_reward(rows, task):
                note += f"; {' and '.join(failed)} completions had no reward and are not in the mean"
            figures.append(Figure(f"Held-out {task}", f"{before:.3f} \u2192 {after:.3f}", note))
    if rows:
        figures.append(Figure("Steps", f"{rows[-1]['step']}", f"policy version {rows[-1]['version']}"))
    if seconds := [sum(phases.values()) for row in rows if (phases := phase_seconds(row))]:
        figures.append(Figure("Step time", f"{median(seconds):.2f} s", "median over steps"))
    if rates := series(rows, "perf/gen_tokens_per_s"):
        figures.append(Figure("Generation", count(median(rate for _, rate in rates)), "tokens per second while busy, median"))
    if mismatch := series(rows, "mismatch/logprob_abs_max"):
        largest = max(value for _, value in mismatch)
        figures.append(Figure("Largest mismatch", f"{largest:.1e}", "nats on one token, trainer vs. generator"))
    return figures


# Charts


def _charts(rows: Rows) -> list[Chart | None]:
    """Return the charts in the order of the page; None for a chart without data."""
    heldout = {f"eval/{task}/mean": task for task in heldout_tasks(rows)}
    environment = {name: found[1] for row in rows for name in row if (found := re.fullmatch("environment/(.+)_mean", name))}
    mismatch = {"mismatch/logprob_abs_mean": "mean", "mismatch/logprob_abs_max": "max"}
    is_zero = not any(value for name in mismatch for _, value in series(rows, name))
    logarithmic = {} if is_zero else {"type": "log", "tickformat": ".0e", "dtick": 1}
    lengths = {"tokens/response_len_mean": "mean", "tokens/response_len_max": "max"}
    rates = {"perf/gen_tokens_per_s": "generator", "perf/train_tokens_per_s": "trainer"}
    return [
        _rewards(rows),
        _lines(rows, "Held-out mean reward", heldout, _ends(".3f"), mode="lines+markers"),
        _lines(rows, "Loss, nats per token", {"loss/train": "training", "loss/eval": "held-out"}, _ends(".3f")),
        _lines(rows, "KL divergence from the teacher, nats per token", {"policy/kl_teacher": "divergence"}, _ends(".3f")),
        _lines(rows, "Response length, tokens", lengths, _ends(".1f")),
        _lines(rows, "Environment metrics, means over episodes", environment, _ends(".3g")),
        _lines(rows, "Entropy, nats", {"policy/entropy": "entropy"}, _ends(".3f")),
        _lines(rows, "Log-probability mismatch, nats", mismatch, _largest, logarithmic),
        _step_times(rows),
        _lines(rows, "Throughput while busy, tokens per second", rates, _medians),
        _lines(rows, "Gradient norm", {"grad/norm": "norm"}, _ends(".3g")),
        _lines(rows, "Fraction of groups without gradient", {"group/zero_variance_frac": "fraction"}, _ends(".2f")),
    ]


def _ends(spec: str) -> Headline:
    """Return a headline function that shows the first and last value of each line, formatted with `spec`."""
    return lambda found: ", ".join(
        f"{label} {points[0][1]:{spec}} to {points[-1][1]:{spec}}" for label, points in found.items()
    )


def _medians(found: Mapping[str, Points]) -> str:
    rates = (f"{label} {count(median(value for _, value in points))}" for label, points in found.items())
    return f"{', '.join(rates)} (median)"


def _largest(found: Mapping[str, Points]) -> str:
    return f"trainer vs. generator, at most {max(value for points in found.values() for _, value in points):.1e} nats"


def _lines(
    rows: Rows, title: str, labels: Mapping[str, str], headline: Headline, axis: Mapping[str, Any] | None = None, **style: Any
) -> Chart | None:
    """Return a chart with one line per metric of `labels`, whose vertical axis begins at 0.

    `axis` and `style` are more plotly properties of the vertical axis and of the lines.
    """
    found = {label: points for name, label in labels.items() if (points := series(rows, name))}
    if not found:
        return None
    traces = [make_trace(points, label, **style) for label, points in found.items()]
    return make_chart(title, headline(found), traces, labels, rangemode="tozero", **(axis or {}))


def _other_charts(rows: Rows, shown: Collection[str]) -> dict[str, list[Chart]]:
    """Return a chart for each metric that has none yet, by the first part of its name."""
    charts: dict[str, list[Chart]] = {}
    for name in sorted({name for row in rows for name in row} - {"step", "version", "time", *shown}):
        if points := series(rows, name):
            headline = f"{points[0][1]:.3g} to {points[-1][1]:.3g}"
            found = make_chart(name, headline, [make_trace(points, name)], rangemode="tozero")
            charts.setdefault(name.partition("/")[0], []).append(found)
    return charts


def _rewards(rows: Rows) -> Chart | None:
    points = series(rows, "reward/mean")
    if not points:
        return None
    first, last, note = ends_of(points)
    traces, headline = [make_trace(points, "reward")], f"{first:.3f} to {last:.3f} ({note})"
    if len(points) >= 2 * NUM_ENDS:
        steps = [step for step, _ in points]
        means = {
            "x": [steps[0], steps[NUM_ENDS - 1], None, steps[-NUM_ENDS], steps[-1]],
            "y": [first, first, None, last, last],
        }
        traces.append({"type": "scatter", **means, "name": f"{NUM_ENDS}-step mean", "mode": "lines", "line": {"width": 4}})
    return make_chart("Mean reward", headline, traces, {"reward/mean"})


def _step_times(rows: Rows) -> Chart | None:
    """Stack the seconds of each phase, the longest phase first; the shortest ones are summed as "other"."""
    by_number = {row["step"]: phases for row in rows if (phases := phase_seconds(row))}
    if not by_number:
        return None
    names = {name for phases in by_number.values() for name in phases}
    ordered = sorted(names, key=lambda name: -sum(phases.get(name, 0.0) for phases in by_number.values()))
    layers = {name: [name] for name in ordered[: MAX_PHASES - 1]}
    if rest := ordered[MAX_PHASES - 1 :]:
        layers[rest[0] if len(rest) == 1 else "other"] = rest
    traces = []
    for label, layer in layers.items():
        points = [(step, sum(phases.get(name, 0.0) for name in layer)) for step, phases in by_number.items()]
        traces.append(make_trace(points, label, stackgroup="phases", line={"width": 0.5}))
    totals = sorted(sum(phases.values()) for phases in by_number.values())
    # Limit the axis, so that a slow first step (compilation, cold caches) does not flatten the others.
    limits = [0.0, 1.3 * totals[int(0.95 * (len(totals) - 1))]]
    cut = " (cut off)" if totals[-1] > limits[1] else ""
    headline = f"median {median(totals):.2f} s, longest {totals[-1]:.2f} s{cut}"
    shown = {f"time/{name}_s" for name in names}
    return make_chart("Step time by phase, seconds", headline, traces, shown, range=limits)


def make_trace(points: Points, name: str, **style: Any) -> Trace:
    """Return a line of a chart. `style` are more plotly properties, and `series`, the number of a color from 1."""
    points = thin(points)
    steps, values = [step for step, _ in points], [float(f"{value:.5g}") for _, value in points]
    return {"type": "scatter", "x": steps, "y": values, "name": name, "mode": "lines", **style}


def thin(points: Points) -> Points:
    """Reduce a series to at most `MAX_POINTS` points by averaging runs of neighboring points."""
    size = -(-len(points) // MAX_POINTS)
    runs = [points[start : start + size] for start in range(0, len(points), size)] if size > 1 else []
    return [(fmean(step for step, _ in run), fmean(value for _, value in run)) for run in runs] or points


def make_chart(title: str, headline: str, traces: Sequence[Trace], metrics: Iterable[str] = (), **axis: Any) -> Chart:
    """Return a chart of some metrics. `axis` are plotly properties of the vertical axis."""
    layout = {"showlegend": len(traces) > 1, **({"yaxis": axis} if axis else {})}
    figure = json.dumps({"data": traces, "layout": layout}, separators=(",", ":"))
    return Chart(title, headline, figure, frozenset(metrics))


# Sampled rollouts


def _sampled_groups(run: RunRecord) -> tuple[list[str], int]:
    """Return the first and the newest groups as JSON texts, and the total number of groups."""
    hits, advantages = run.search().of_groups(), run.advantages()

    def within(limit: int, numbers: Iterable[int]) -> dict[int, str]:
        texts: dict[int, str] = {}
        for number in numbers:
            try:
                group = hits[number].group
            except DamagedError:  # deleted since the search, to keep the size limit
                continue
            text = json.dumps(_group(run, group, advantages.get(group.index, ())), separators=(",", ":"))
            limit -= len(text)
            if limit < 0:
                break
            texts[number] = text
        return texts

    first = within(FIRST_BYTES, range(len(hits)))
    newest = within(NEWEST_BYTES, reversed(range(max(first, default=-1) + 1, len(hits))))
    return [*first.values(), *reversed(newest.values())], len(hits)


def _group(run: RunRecord, group: RecordedGroup, advantages: Sequence[float | None]) -> dict[str, Any]:
    """Return the data that the page shows for a group. `advantages` has no entries for completions whose reward failed."""
    rewards = [completion.reward for completion in group.completions if completion.reward is not None]
    # If the counts differ, some rollouts were left out of training. Which ones is not recorded, so no advantage is shown.
    recorded = iter(advantages if len(advantages) == len(rewards) else ())
    try:
        tokens = [_sampled(segments) for segments in group.tokens()]
    except DamagedError:  # show the texts without the tokens
        tokens = [([], []) for _ in group.completions]
    completions = [
        _completion(run, completion, None if completion.reward is None else next(recorded, None), *sampled)
        for completion, sampled in zip(group.completions, tokens, strict=True)
    ]
    return {
        "version": group.version,
        "index": group.index,
        "task": group.task,
        "prompt": group.prompt[:MAX_CHARS],
        "answer": group.answer,
        "mean": fmean(rewards) if rewards else None,
        "completions": completions[:MAX_COMPLETIONS],
    }


def _sampled(segments: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[float]]:
    """Return the sampled tokens of a completion and their log-probabilities, at most `MAX_TOKENS`."""
    token_ids = [token for segment in segments for token in segment["token_ids"][segment["mask"]].tolist()]
    logprobs = [value for segment in segments for value in segment["logprobs"][segment["mask"]].tolist()]
    return token_ids[:MAX_TOKENS], logprobs[:MAX_TOKENS]


def _completion(
    run: RunRecord, completion: RecordedCompletion, advantage: float | None, token_ids: Sequence[int], logprobs: Sequence[float]
) -> dict[str, Any]:
    return {
        "text": completion.text[:MAX_CHARS],
        "reward": None if completion.reward is None else round(completion.reward, 4),
        "error": completion.error[:MAX_CHARS],
        "advantage": None if advantage is None else round(advantage, 4),
        "num_tokens": completion.num_tokens,
        "finish_reason": completion.finish_reason,
        "tokens": run.token_texts(token_ids),
        "logprobs": [round(logprob, 3) if math.isfinite(logprob) else None for logprob in logprobs],
        "cut": completion.num_tokens > MAX_TOKENS,
    }
