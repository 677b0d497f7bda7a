"""Result of runs, without a server.

Of one run: the page of `titanrl board` frozen into a file, the closing lines, and the notebook view. Of several: their scores
with confidence intervals, the configuration keys in which they differ, and their curves, as tables or such a page. Runs whose
configurations differ only in `seed` are one variant, and its scores are means over the seeds. Runs with equal seeds are
different variants, because only something outside of their configurations, such as a reward's code, makes them differ.
"""

import base64
import hashlib
import html
import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

import yaml

from titanrl.base.errors import TitanRLError
from titanrl.base.files import COMMIT_FILE, in_shell, replace_text
from titanrl.carriers.record import encode
from titanrl.config.load import parse
from titanrl.metrics.reading import (
    Hits,
    Points,
    Rows,
    RunRecord,
    TrainedSegment,
    awaited_by_both,
    count,
    ends_of,
    evaluated_sets,
    fixed,
    flat,
    series,
    without_reward,
)
from titanrl.metrics.views import MAX_POINTS, SIGNALS, Json, RunView, readable, unit_of, whole_group

FIRST_BYTES = 1_000_000
"""Size limit for sampled groups from the start of the run, in bytes of JSON."""
NEWEST_BYTES = 1_500_000
"""Size limit for sampled groups from the end of the run, in bytes of JSON."""
EVALUATION_BYTES = 1_000_000
"""Size limit for samples of evaluations, in bytes of JSON."""
CURVE_BYTES = 2_000_000
"""Size limit for the curves of a run, in bytes of JSON. Above it, they have fewer points."""
MAX_TOKENS = 400
"""Tokens of a completion in a file."""
NOTABLE = 0.15
"""Difference between the idle fractions of trainer and generators above which `idle_line` suggests moving devices."""
CURVES = {
    "reward/mean": "mean reward",
    "loss/train": "loss",
    "loss/eval": "held-out loss",
    "policy/kl_teacher": "KL from the teacher",
    "policy/entropy": "entropy",
    "grad/norm": "gradient norm",
    "mismatch/logprob_abs_max": "largest mismatch",
    "optim/lr": "learning rate",
    "time/step_s": "step time, s",
}
"""Curves of a notebook by metric, after those of the evaluation sets."""
NOTEBOOK_POINTS = 240
"""Points of a curve in a notebook; longer ones are drawn as means of neighboring steps."""
WIDTH, HEIGHT, MARGIN = 240, 56, 4
"""Size of a curve of a notebook in pixels."""
NUM_SAMPLES = 4
"""Newest completions shown in a notebook, of different prompts."""
MAX_CHARS = 600
"""Characters shown there of a prompt or a completion."""


def page_file(name: str) -> str:
    """Return a file of the page: `board.html`, `board.css` or `board.js`."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def write_report(run_dir: Path, summary: Mapping[str, str]) -> Path:
    """Write `report.html` from the files in `run_dir`, and return its path.

    Args:
        run_dir: Run directory. All its files are optional.
        summary: Text by label. The entry `outcome` is shown below the title, the others below the charts.
    """
    view = RunView(run_dir, run_dir.resolve().name)
    run = frozen_run(view)
    run["run"]["outcome"] = summary.get("outcome", "")
    run["run"]["facts"] |= {label: text for label, text in summary.items() if label != "outcome"}
    report = run_dir / "report.html"
    replace_text(report, frozen_page({"page": f"#/run/{view.name}", "name": view.name, "runs": {view.name: run}}))
    return report


def frozen_page(data: Json) -> str:
    """Return the page with its data, which needs no server."""
    style, script = page_file("board.css"), page_file("board.js")
    rules = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:"
    # "<" is escaped, so that no data can close the element that contains them.
    text = encode(data).replace("<", "\\u003c")
    page = page_file("board.html")
    for old, new in (
        ('<meta charset="utf-8">', f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{rules}">'),
        ('<link rel="stylesheet" href="/board.css">', f"<style>{style}</style>"),
        ("null</script>", f"{text}</script>"),
        ('<script type="module" src="/board.js"></script>', f'<script type="module">{script}</script>'),
    ):
        before, found, after = page.partition(old)
        assert found, f"board.html has no {old}"
        page = before + new + after
    return page


def _hash(text: str) -> str:
    """Return the source by which a content security policy allows a text, and no other one."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def frozen_run(view: RunView, *, curves_only: bool = False) -> Json:
    """Return what the page of a run shows, within size limits: the first and the newest groups, and the newest evaluations."""
    charts = view.charts([])
    size = MAX_POINTS
    while size > 25 and len(json.dumps(charts)) > CURVE_BYTES:
        size //= 2
        charts = view.charts([], size)
    if curves_only:
        return {"charts": charts}
    groups, total = _groups(view)
    samples = view.record.evaluations()
    kept = list(_within(EVALUATION_BYTES, (whole_group(view.record, each, max_tokens=0) for each in reversed(samples))))[::-1]
    sets = dict.fromkeys(sample.set or "" for sample in samples)
    timeline = view.timeline()
    note = "" if len(groups) == total else f"the first and the newest of {total} recorded groups"
    return {
        "run": view.overview(),
        "charts": charts,
        "rollouts": {"groups": groups, **view.record.values_of("rollouts")},
        "evaluations": {"tables": {name: view.evaluations(name) for name in sets}, "groups": kept},
        "timeline": timeline if timeline["processes"] else None,
        "events": view.recent_events(),
        "config": view.configuration(),
        "note": note,
    }


def _groups(view: RunView) -> tuple[list[Json], int]:
    """Return the first and the newest groups, and the number of all."""
    record = view.record
    hits, advantages = record.search().of_groups(), record.advantages()
    trained: dict[int, list[TrainedSegment]] = defaultdict(list)
    for segment in record.trained() if len(hits) else ():
        trained[segment.index].append(segment)

    def whole(hits: Hits) -> Iterable[Json]:
        for hit in readable(hits):
            if hit is not None:
                index = hit.group.index
                yield whole_group(record, hit.group, trained.get(index, ()), advantages.get(index, ()), max_tokens=MAX_TOKENS)

    first = list(_within(FIRST_BYTES, whole(hits)))
    newest = list(_within(NEWEST_BYTES, whole(hits[len(first) :][::-1])))
    return [*first, *reversed(newest)], len(hits)


def _within(limit: int, values: Iterable[Any]) -> Iterable[Any]:
    """Yield values as long as their JSON texts are within a limit in bytes."""
    for value in values:
        limit -= len(json.dumps(value))
        if limit < 0:
            return
        yield value


# Closing lines


def conclude(
    run_dir: Path, *, code: int, cause: str, num_steps: int, max_staleness: int = 0, command: str = "titanrl train"
) -> list[str]:
    """Write the report of a run, if it recorded any metrics, and return the closing lines for the console.

    This function does not raise, so that a full disk or a damaged file cannot hide why the run failed. Such problems are among
    the lines.

    Args:
        run_dir: Run directory.
        code: Exit code of the run.
        cause: Reason for a nonzero exit code.
        num_steps: Policy version at which training is complete.
        max_staleness: Configured bound on staleness.
        command: Command that resumes the run, without its arguments.
    """
    rows: Rows = []
    sentence, idle, failed, report = "", "", "", None
    problems = []
    try:
        rows = RunRecord(run_dir).metrics()
        sentence, idle, failed = learned(rows), idle_line(rows, max_staleness), failed_rewards(rows)
    except Exception as error:  # a damaged file must not hide why the run failed
        problems.append(f"metrics.jsonl cannot be read ({type(error).__name__}: {error})")
    if code != 0:
        # The cause of a failure is printed later, as the last line.
        reason = f": {cause}" if code in SIGNALS else ""
        sentence = f"Stopped after step {rows[-1]['step'] if rows else 0}{reason}. {sentence}".strip()
    try:
        facts = {"Failed rewards": failed} if failed else {}
        report = write_report(run_dir, {"outcome": sentence, **facts}) if rows else None
    except Exception as error:  # nor must a missing package or a full disk
        problems.append(f"the report cannot be written ({type(error).__name__}: {error})")
    where, argument, checkpoints = relative(run_dir), in_shell(relative(run_dir)), run_dir / "checkpoints"
    lines = [sentence] if sentence else []
    lines += [f"warning  {problem}" for problem in problems]
    lines += [f"failed   {failed}"] if failed else []
    lines += [f"idle     {idle}"] if idle else []
    lines.append(f"run      {where}")
    if report is not None:
        lines.append(f"report   {relative(report)}")
    if (checkpoints / "final" / "config.json").exists():
        lines += [f"model    {where}/checkpoints/final", f"chat     titanrl chat {argument}"]
    is_finished = code == 0 and bool(rows) and rows[-1]["version"] >= num_steps
    if not is_finished and any(checkpoints.glob(f"step-*/{COMMIT_FILE}")):
        lines.append(f"resume   {command} --resume {argument}")
    return lines


def learned(rows: Rows) -> str:
    """Describe how the mean reward (or the loss, in supervised fine-tuning) changed on held-out data and in training."""
    if training := series(rows, "loss/train"):
        name, heldout = "Loss", {"loss": ("held-out", series(rows, "loss/eval"))}
    else:
        name, training = "Mean reward", series(rows, "reward/mean")
        heldout = {task: (f"held-out {task}", series(rows, f"eval/{task}/mean")) for task in evaluated_sets(rows)}
    changes = []
    for task, (label, points) in heldout.items():
        if points:
            failed = without_reward(partial(series, rows), task)
            without = f" (completions without a reward: {' -> '.join(failed)})" if failed else ""
            changes.append(f"{label} {fixed(points[0][1])} -> {fixed(points[-1][1])}{without}")
    if training:
        first, last, _ = ends_of(training)
        changes.append(
            f"training {fixed(first)} -> {fixed(last)} over {len(training)} steps"
            if len(training) > 1
            else f"training {fixed(first)}"
        )
    return f"{name}: {', '.join(changes)}" if changes else ""


def failed_rewards(rows: Rows) -> str:
    """Return how many completions of the whole run had no reward in training; empty if none failed."""
    failed, total = (sum(value for _, value in series(rows, f"reward/num_{name}")) for name in ("errors", "completions"))
    if not failed:
        return ""
    where = "scorer_error in events.jsonl has the first error of each step"
    return f"{failed:.0f} of {total:.0f} completions had no reward in training ({where})"


def idle_line(rows: Rows, max_staleness: int) -> str:
    """Summarize the idle fractions of trainer and generators, with advice; return an empty string without these metrics.

    The fractions are medians over the steps. The first fifth is left out, because caches are cold and the buffer is filling.
    `max_staleness` is the configured bound: a short asynchronous run may have no stale token.
    """
    steps = rows[len(rows) // 5 :]
    trainers = [value for _, value in series(steps, "perf/trainer_idle_frac")]
    generators = [value for _, value in series(steps, "perf/generator_idle_frac")]
    if not trainers or not generators:
        return ""
    trainer, generator = median(trainers), median(generators)
    shares = f"trainer {trainer:.0%}, generators {generator:.0%} of the time (median)"
    if not series(steps, "staleness/max"):  # a distillation is always synchronous
        return shares
    if awaited := awaited_by_both(partial(series, steps)):
        advice = f"both wait for {awaited}"
    elif max_staleness == 0:
        advice = "they alternate because max_staleness is 0; set it to 1 to overlap generation and training"
    elif trainer > generator + NOTABLE:
        advice = "generation is the bottleneck: give the generators more devices (generator.replicas) or the trainer fewer"
    elif generator > trainer + NOTABLE:
        advice = (
            "training is the bottleneck: give the trainer more devices (trainer.parallelism.dp_shard) or the generators fewer"
        )
    elif min(trainer, generator) > NOTABLE:
        advice = "each waits for the other: raise max_staleness, or rollout.window if a few completions are very long"
    else:
        advice = "they are well balanced"
    return f"{shares}; {advice}"


def relative(path: Path) -> Path:
    """Return the shorter of the absolute path and the path relative to the current directory."""
    return Path(min(os.path.relpath(path), str(path), key=len))


# Notebooks


def run_html(run: RunRecord, title: str, state: str) -> str:
    """Return what a notebook shows of a run, as HTML without scripts. Every text of the run is escaped."""
    rows = run.metrics()
    curves = ""
    for name, label in ({f"eval/{task}/mean": f"held-out {task}" for task in evaluated_sets(rows)} | CURVES).items():
        if points := series(rows, name):
            first, last, covered = ends_of(points)
            text = f"{label}: {last:.4g}" if len(points) == 1 else f"{label}: {first:.4g} \u2192 {last:.4g} ({covered})"
            caption = f"<figcaption>{escaped(text)}</figcaption>"
            curves += f"<figure style='margin:0'>{curve_svg(points, text)}{caption}</figure>"
    samples = ""
    for hit in islice((hit for hit in readable(run.search().of_groups()[::-1]) if hit is not None), NUM_SAMPLES):
        reward = hit.completion.reward
        score = "no reward" if reward is None else f"reward {reward:.3g}"
        samples += (
            f"<details open=''><summary>prompt {hit.group.index}, version {hit.group.version}, {score}</summary>"
            f"<pre style='white-space:pre-wrap'><span style='opacity:0.6'>"
            f"{escaped(_shortened(hit.group.rendered or hit.group.prompt))}</span>"
            f"{escaped(_shortened(hit.completion.text))}</pre></details>"
        )
    return (
        f'<div class="titanrl"><p><b>{escaped(title)}</b>: {escaped(state)}</p>'
        f'<div style="display:flex;flex-wrap:wrap;gap:12px">{curves or "<p>No step yet.</p>"}</div>'
        f"{f'<p>Last samples</p>{samples}' if samples else ''}</div>"
    )


def curve_svg(points: Points, label: str) -> str:
    """Return a line of (step, value) pairs as an SVG, scaled between the lowest and the highest finite value."""
    size = -(-len(points) // NOTEBOOK_POINTS)
    runs = [points[start : start + size] for start in range(0, len(points), size)]
    thinned = [(sum(step for step, _ in run) / len(run), sum(value for _, value in run) / len(run)) for run in runs]
    (first, _), (last, _), values = thinned[0], thinned[-1], [value for _, value in thinned]
    low, high = min(values), max(values)

    def place(value: float, start: float, end: float, length: int) -> float:
        return MARGIN + (length - 2 * MARGIN) * ((value - start) / (end - start) if end > start else 0.5)

    xy = [(place(step, first, last, WIDTH), HEIGHT - place(value, low, high, HEIGHT)) for step, value in thinned]
    shape = f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in xy)}"/>' if len(xy) > 1 else ""
    end = f'<circle cx="{xy[-1][0]:.1f}" cy="{xy[-1][1]:.1f}" r="2" fill="currentColor"/>'
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escaped(label)}" '
        f'fill="none" stroke="currentColor" stroke-width="1.5">{shape}{end}</svg>'
    )


def escaped(text: str) -> str:
    """Return a text as HTML without markup, control characters and characters that reorder others."""
    return html.escape("".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in text))


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}..."


NAMING = frozenset({"name", "output_dir", "cache_dir"})
"""Keys of the configuration that only say where files are."""
SEED = "seed"
MISSING = "(not set)"
"""Value of a key that the configuration of a run does not have."""
UNKNOWN = "(no config.yaml)"
"""Value of every key of a run without a configuration."""
_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """A run with its metrics.

    Example: `ComparedRun(name="rate_5e-5", path=Path("runs/rate_5e-5"), config={"seed": 0}, rows=rows)`
    """

    name: str
    """Name of the run directory, with as many of its parents as are needed to tell the runs apart."""
    path: Path
    """Run directory."""
    config: Mapping[str, Any]
    """Value by dotted key of the configuration, with the changes during the run; empty if it is missing."""
    rows: Rows
    """Metrics, one row per step."""

    @property
    def seed(self) -> str:
        """Seed of the run, in which the runs of a variant differ."""
        return repr(self.config.get(SEED))

    @property
    def identity(self) -> object:
        """Value that is equal for all runs of a variant, and different for others."""
        kept = {key: value for key, value in self.config.items() if key != SEED and key not in NAMING}
        return repr(sorted(kept.items())) if kept else self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Runs whose configurations differ only in the seed."""

    runs: Sequence[ComparedRun]

    @property
    def name(self) -> str:
        """Name of the first run, and the number of seeds if there are several."""
        return self.runs[0].name if len(self.runs) == 1 else f"{self.runs[0].name} ({len(self.runs)} seeds)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One metric of one variant. Values are means over the seeds."""

    first: float
    """First value of an evaluation, or mean of the first steps of training."""
    final: float
    """Last value, or mean of the last steps."""
    final_ci95: float | None
    """Half-width of the 95 % confidence interval of `final`; None if it is unknown. Over several seeds, the interval is that of
    their mean (Student's t); of one run, it is that of its evaluation."""
    best: float
    """Highest value, or the lowest of a loss. The best of several noisy evaluations is higher than the policy's true score."""
    best_step: float
    """Median over the seeds of the step with the best value."""
    num_seeds: int
    """Number of seeds with a run that has the metric."""


class Table(NamedTuple):
    """A table for the console and for the page."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def read_runs(records: Sequence[RunRecord]) -> list[ComparedRun]:
    """Read the runs to compare; raise `TitanRLError` if a file cannot be read, or a run has no metrics."""
    paths = [record.path.resolve() for record in records]
    runs = []
    for record, path in zip(records, paths, strict=True):
        if paths.count(path) > 1:
            raise TitanRLError(f"{record.path}: is given twice. Give each run once.")
        try:
            rows, config, events = record.metrics(), parse(record.config)[0] or {}, record.events()
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise TitanRLError(f"{record.path}: cannot be read: {error}") from error
        if not rows:
            raise TitanRLError(f"{record.path}: has no metrics yet. Leave it out.")
        if not isinstance(config, dict):
            raise TitanRLError(f"{record.path / 'config.yaml'}: must be a mapping (got {type(config).__name__}).")
        steered = _with_changes(flat(config), events)
        runs.append(ComparedRun(name=_short(path, paths), path=record.path, config=steered, rows=rows))
    return runs


def _with_changes(config: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values of a configuration; of a key that was changed during the run, also the later values and their steps."""
    found = dict(config)
    for event in events if config else ():
        kind, value = event.get("kind"), _shown(event.get("value"))
        key = event.get("key") if kind == "set" else "algorithm.learning_rate" if kind == "learning_rate" else None
        if isinstance(key, str) and isinstance(step := event.get("step"), int):
            later = "the schedule" if kind == "learning_rate" and value == "null" else value
            found[key] = f"{_shown(found.get(key, MISSING))}, from step {step + 1} on {later}"
    return found


def _short(path: Path, paths: Sequence[Path]) -> str:
    """Return the shortest end of a path that no other path has."""
    names = ("/".join(path.parts[-length:]) for length in range(1, len(path.parts)))
    return next((name for name in names if sum(f"/{other}".endswith(f"/{name}") for other in paths) == 1), str(path))


def variants_of(runs: Sequence[ComparedRun]) -> list[Variant]:
    """Group the runs that differ only in the seed, in the order of their first runs."""
    groups: dict[object, list[ComparedRun]] = {}
    num_alike = Counter[object]()
    for run in runs:
        num_alike[run.identity, run.seed] += 1
        groups.setdefault((run.identity, num_alike[run.identity, run.seed]), []).append(run)
    return [Variant(runs=found) for found in groups.values()]


def differing_keys(variants: Sequence[Variant]) -> dict[str, list[Any]]:
    """Return the keys whose values differ between the variants with a configuration, with the value of each variant."""
    configs = [variant.runs[0].config for variant in variants]
    keys = dict.fromkeys(key for config in configs for key in config if key != SEED and key not in NAMING)
    values = {key: [config.get(key, MISSING) if config else UNKNOWN for config in configs] for key in keys}
    return {key: found for key, found in values.items() if len({repr(value) for value in found if value != UNKNOWN}) > 1}


def score(variant: Variant, metric: str) -> Score | None:
    """Summarize a metric of a variant; return None if none of its runs has it."""
    lowest = "loss/" in metric
    found = [(run, points) for run in variant.runs if (points := series(run.rows, metric))]
    if not found:
        return None
    is_evaluation = metric.startswith("eval/") or metric == "loss/eval"
    ends = {run.path: (points[0][1], points[-1][1]) if is_evaluation else ends_of(points)[:2] for run, points in found}
    bests = {run.path: (min if lowest else max)(points, key=lambda point: point[1]) for run, points in found}
    runs = [run for run, _ in found]
    finals = [ends[run.path][1] for run in runs]
    if len(finals) > 1:
        ci95: float | None = _t_975(len(finals) - 1) * stdev(finals) / math.sqrt(len(finals))
    else:
        own = series(runs[0].rows, f"{metric}_ci95")
        ci95 = own[-1][1] if own else None
    return Score(
        first=fmean(ends[run.path][0] for run in runs),
        final=fmean(finals),
        final_ci95=ci95,
        best=fmean(value for _, value in bests.values()),
        best_step=median(step for step, _ in bests.values()),
        num_seeds=len(finals),
    )


def _t_975(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution; beyond the table by its expansion around the normal quantile."""
    if freedom <= len(_T_975):
        return _T_975[freedom - 1]
    return 1.95996 + 2.3723 / freedom + 2.8225 / freedom**2


def metrics_to_compare(runs: Sequence[ComparedRun], more: Sequence[str] = ()) -> list[str]:
    """Return the metrics that at least one run has: those asked for, held-out scores, losses, and the mean reward."""
    heldout = dict.fromkeys(f"eval/{task}/mean" for run in runs for task in evaluated_sets(run.rows))
    known = {name for run in runs for row in run.rows for name in row}
    for name in more:
        if name not in known:
            raise TitanRLError(f"--metric: no run has {name!r}. docs/metrics.md lists the names.")
    return [name for name in dict.fromkeys([*more, *heldout, "loss/eval", "reward/mean", "loss/train"]) if name in known]


def tables(variants: Sequence[Variant], metrics: Sequence[str]) -> list[Table]:
    """Return a table of the keys that differ, one per metric, and one of the costs of the runs."""
    names = [variant.name for variant in variants]
    differing = differing_keys(variants)
    found = [Table("Keys that differ", ("key", *names), [(key, *map(_shown, values)) for key, values in differing.items()])]
    for metric in metrics:
        rows = []
        for variant in variants:
            summary = score(variant, metric)
            if summary is None:
                rows.append((variant.name, "-", "-", "-", "-"))
                continue
            seeds = f"{summary.num_seeds} seed{'s' if summary.num_seeds > 1 else ''}"
            missing = "" if summary.num_seeds == len(variant.runs) else f" (of {seeds})"
            final = f"{summary.final:.4g}" + ("" if summary.final_ci95 is None else f" \u00b1 {summary.final_ci95:.2g}")
            best = f"{summary.best:.4g}", f"{summary.best_step:g}"
            rows.append((variant.name, f"{summary.first:.4g}", f"{final}{missing}", *best))
        found.append(Table(metric, ("run", "first", "final", "best", "at step"), rows))
    costs = []
    for variant in variants:
        of_runs = []
        for run in variant.runs:
            seconds, rates = (
                [value for _, value in series(run.rows, name)] for name in ("time/step_s", "perf/gen_tokens_per_s")
            )
            step_s, tokens = f"{median(seconds):.3g}" if seconds else "-", count(median(rates)) if rates else "-"
            of_runs.append((f"{run.rows[-1]['step']:g}", step_s, tokens))
        costs.append((variant.name, *(", ".join(dict.fromkeys(column)) for column in zip(*of_runs, strict=True))))
    columns = "run", "steps", "seconds per step, median", "tokens/s while generating, median"
    found.append(Table("Steps and speed", columns, costs))
    return [table for table in found if table.rows]


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def as_dict(variants: Sequence[Variant], metrics: Sequence[str]) -> dict[str, Any]:
    """Return the comparison as JSON values."""
    compared = []
    for variant in variants:
        scores = {metric: asdict(found) for metric in metrics if (found := score(variant, metric)) is not None}
        compared.append(
            {
                "name": variant.name,
                "runs": [
                    {"path": str(run.path), "seed": run.config.get(SEED), "steps": run.rows[-1]["step"]} for run in variant.runs
                ],
                "scores": scores,
            }
        )
    names = [variant.name for variant in variants]
    differing = {key: dict(zip(names, values, strict=True)) for key, values in differing_keys(variants).items()}
    return {"variants": compared, "differing_keys": differing}


def compared(views: Sequence[RunView], more: Sequence[str] = ()) -> dict[str, Any]:
    """Return what the page that compares runs shows: the tables, and the metrics to draw; see `read_runs` for errors."""
    runs = read_runs([view.record for view in views])
    names = {view.record.path: view.name for view in views}
    variants, metrics = variants_of(runs), metrics_to_compare(runs, more)
    known = sorted({name for run in runs for row in run.rows for name in row} - {"step", "version", "time"})
    return {
        "variants": [{"name": variant.name, "runs": [names[run.path] for run in variant.runs]} for variant in variants],
        "tables": [table._asdict() for table in tables(variants, metrics)],
        "metrics": metrics,
        "names": [[name, unit_of(name)] for name in known],
    }


def comparison_page(records: Sequence[RunRecord], more: Sequence[str] = ()) -> str:
    """Return the page that compares runs: the tables, and the curves of each metric."""
    paths = [record.path.resolve() for record in records]
    views = [RunView(record.path, _short(own, paths)) for record, own in zip(records, paths, strict=True)]
    found = compared(views, more)
    data = {"page": "#/compare", "compare": {**found, "run_names": [view.name for view in views]}}
    return frozen_page({**data, "runs": {view.name: frozen_run(view, curves_only=True) for view in views}})
