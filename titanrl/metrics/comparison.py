"""Compare runs: their scores with confidence intervals, the configuration keys in which they differ, and their curves.

Runs whose configurations differ only in `seed` are one variant, and its scores are means over the seeds. Runs with equal seeds
are different variants, because only something outside of their configurations, such as a reward's code, makes them differ.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

import yaml

from titanrl.base.errors import TitanRLError
from titanrl.config.load import parse
from titanrl.metrics.reading import RunRecord, flat
from titanrl.metrics.report import frozen_page, frozen_run
from titanrl.metrics.series import Rows, count, ends_of, evaluated_sets, series
from titanrl.metrics.views import RunView, unit_of

NAMING = frozenset({"name", "output_dir", "cache_dir"})
"""Keys of the configuration that only say where files are."""
SEED = "seed"
MISSING = "(not set)"
"""Value of a key that the configuration of a run does not have."""
UNKNOWN = "(no config.yaml)"
"""Value of every key of a run without a configuration."""
_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


class Estimate(NamedTuple):
    """A value with the half-width of its 95 % confidence interval, None if that is unknown."""

    value: float
    ci95: float | None

    def __str__(self) -> str:
        return f"{self.value:.4g}" + ("" if self.ci95 is None else f" \u00b1 {self.ci95:.2g}")


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
    final: Estimate
    """Last value, or mean of the last steps. Over several seeds, the interval is that of their mean (Student's t); of one run,
    it is that of its evaluation."""
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
        ci95 = _t_975(len(finals) - 1) * stdev(finals) / math.sqrt(len(finals))
        final = Estimate(fmean(finals), ci95)
    else:
        own = series(runs[0].rows, f"{metric}_ci95") if len(runs) == 1 else []
        final = Estimate(finals[0], own[-1][1] if own else None)
    return Score(
        first=fmean(ends[run.path][0] for run in runs),
        final=final,
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
            best = f"{summary.best:.4g}", f"{summary.best_step:g}"
            rows.append((variant.name, f"{summary.first:.4g}", f"{summary.final}{missing}", *best))
        found.append(Table(metric, ("run", "first", "final", "best", "at step"), rows))
    costs = []
    for variant in variants:
        columns_of_runs = zip(*(_costs(run.rows) for run in variant.runs), strict=True)
        costs.append((variant.name, *(", ".join(dict.fromkeys(column)) for column in columns_of_runs)))
    columns = "run", "steps", "seconds per step, median", "tokens/s while generating, median"
    found.append(Table("Steps and speed", columns, costs))
    return [table for table in found if table.rows]


def _costs(rows: Rows) -> tuple[str, str, str]:
    seconds, rates = ([value for _, value in series(rows, name)] for name in ("time/step_s", "perf/gen_tokens_per_s"))
    step_s, tokens = f"{median(seconds):.3g}" if seconds else "-", count(median(rates)) if rates else "-"
    return f"{rows[-1]['step']:g}", step_s, tokens


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def as_dict(variants: Sequence[Variant], metrics: Sequence[str]) -> dict[str, Any]:
    """Return the comparison as JSON values."""
    compared = []
    for variant in variants:
        scores = {metric: found for metric in metrics if (found := score(variant, metric)) is not None}
        compared.append(
            {
                "name": variant.name,
                "runs": [
                    {"path": str(run.path), "seed": run.config.get(SEED), "steps": run.rows[-1]["step"]} for run in variant.runs
                ],
                "scores": {
                    metric: {
                        "first": found.first,
                        "final": found.final.value,
                        "final_ci95": found.final.ci95,
                        "best": found.best,
                        "best_step": found.best_step,
                        "num_seeds": found.num_seeds,
                    }
                    for metric, found in scores.items()
                },
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
