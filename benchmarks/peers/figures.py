"""Turn the record of a run into figures, and the figures of several runs into medians. All functions are pure."""

import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TARGET_SCORE = 0.8
"""Held-out score whose time since the launch is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Measurements of one run."""

    launched: float
    """Unix time at which the process was started."""
    rows: Sequence[Mapping[str, Any]]
    """A row per step and evaluation, in the form of a peer's record."""
    cpu_s: Sequence[tuple[float, Mapping[str, float]]]
    """Times, and the CPU seconds used until then by role."""
    peak_bytes: int
    """Peak memory of all processes together."""
    others_share: float
    """Share of the cores that other commands used."""


def speed_figures(run: Run, *, num_skipped: int, num_dropped: int) -> dict[str, Any]:
    """Return the figures of a run without evaluations.

    Args:
        run: Measurements.
        num_skipped: Steps at the start to leave out, because caches are cold.
        num_dropped: Steps at the end to leave out, because an asynchronous run generates nothing more beside them.
    """
    steps = [row for row in run.rows if "step" in row]
    counted = steps[num_skipped : len(steps) - num_dropped]
    start = steps[num_skipped - 1]["time"] if num_skipped else counted[0]["time"] - counted[0]["step_s"]
    end = counted[-1]["time"]
    tokens = sum(row["tokens"] for row in counted)
    before, after = cpu_at(run.cpu_s, start), cpu_at(run.cpu_s, end)
    return {
        "tokens_per_s": tokens / (end - start),
        "step_s": (end - start) / len(counted),
        "generate_s": statistics.fmean(row["generate_s"] for row in counted),
        "train_s": statistics.fmean(row["train_s"] for row in counted),
        "train_tokens_per_s": tokens / sum(row["train_s"] for row in counted),
        "tokens_per_step": tokens / len(counted),
        "cpu_ms_per_token": {role: 1e3 * (after[role] - before.get(role, 0.0)) / tokens for role in after},
        **start_figures(run),
        "peak_bytes": run.peak_bytes,
    }


def score_figures(run: Run) -> dict[str, Any]:
    """Return the figures of a run with evaluations. The time to the target score is None if no evaluation reached it."""
    scores = [(row["time"] - run.launched, row["score"]) for row in run.rows if "score" in row]
    reached = (seconds for seconds, score in scores if score >= TARGET_SCORE)
    return {
        "time_to_score_s": next(reached, None),
        "score_first": scores[0][1],
        "score_last": scores[-1][1],
        **start_figures(run),
    }


def start_figures(run: Run) -> dict[str, float]:
    """Return wall and CPU seconds from the launch until the first step was done, and the share of other commands."""
    first = next(row["time"] for row in run.rows if "step" in row)
    return {
        "first_step_s": first - run.launched,
        "first_step_cpu_s": sum(cpu_at(run.cpu_s, first).values()),
        "others_share": run.others_share,
    }


def cpu_at(samples: Sequence[tuple[float, Mapping[str, float]]], time: float) -> Mapping[str, float]:
    """Return the CPU seconds by role at a time, by linear interpolation; those of the nearest sample outside the range."""
    after = bisect_left(samples, time, key=lambda sample: sample[0])
    if after == 0 or after == len(samples):
        return samples[min(after, len(samples) - 1)][1]
    (t0, before), (t1, later) = samples[after - 1 : after + 1]
    share = (time - t0) / (t1 - t0)
    return {role: before.get(role, 0.0) + share * (value - before.get(role, 0.0)) for role, value in later.items()}


def medians(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the medians over runs of every number, also of numbers in a mapping. A number that a run lacks is left out."""
    found: dict[str, Any] = {}
    for name, value in rows[0].items():
        values = [row[name] for row in rows if row.get(name) is not None]
        if isinstance(value, Mapping):
            found[name] = medians(values)
        elif len(values) == len(rows):
            found[name] = statistics.median(values)
    return found


def best(trials: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the setting of the trial with the most tokens per second."""
    setting: Mapping[str, Any] = max(trials, key=lambda trial: trial["figures"]["tokens_per_s"])["setting"]
    return setting


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the medians of the turns by payload and system, with the setting."""
    made: dict[str, Any] = {}
    for run in runs:
        if run["turn"] is not None:
            made.setdefault(run["payload"], {}).setdefault(run["system"], []).append(run)
    return {
        payload: {
            system: {"turns": len(rows), "setting": rows[0]["setting"], **medians([row["figures"] for row in rows])}
            for system, rows in systems.items()
        }
        for payload, systems in made.items()
    }
