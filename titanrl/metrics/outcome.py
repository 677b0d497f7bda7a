"""How a run ended, in a few lines: what was learned, where everything is, what to do next."""

import os
from dataclasses import dataclass
from pathlib import Path

from titanrl.metrics.balance import balance_line
from titanrl.metrics.report import write_report
from titanrl.metrics.run_directory import read_metrics
from titanrl.metrics.series import Rows, by_step, first_and_last_five, heldout_tasks, series

INTERRUPTED = 130
"""Exit code of a run that was stopped from outside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a run."""

    sentence: str
    """What happened, and what was learned."""
    report: Path | None
    """The report; None if there was nothing to report."""
    exported: bool
    """Whether the trained model was written."""
    resumable: bool
    """Whether there is a checkpoint to go on from."""
    idle: str
    """How long trainer and generators waited, and what to change."""


def summarize(run_dir: Path, *, code: int, cause: str) -> Outcome:
    """Say how a run ended, and write its report if it took a step."""
    metrics = run_dir / "metrics.jsonl"
    rows = by_step(read_metrics(metrics)) if metrics.exists() else []
    # The cause of a failure stands in the very last line; it would only be said twice.
    reason = f": {cause}" if code == INTERRUPTED else ""
    stopped = f"stopped after step {rows[-1]['step'] if rows else 0}{reason}. "
    sentence = ("" if code == 0 else stopped) + learned(rows)
    report = write_report(run_dir, {"outcome": sentence.strip()}) if rows else None
    return Outcome(
        sentence=sentence.strip(),
        report=report,
        exported=(run_dir / "checkpoints" / "final" / "config.json").exists(),
        resumable=any((run_dir / "checkpoints").glob("step-*/controller.json")),
        idle=balance_line(rows),
    )


def learned(rows: Rows) -> str:
    """Held-out accuracy and reward, first and last."""
    parts = []
    for task in heldout_tasks(rows):
        points = series(rows, f"eval/{task}/mean")
        parts.append(f"held-out {task} {points[0][1]:.3f} -> {points[-1][1]:.3f}")
    rewards = series(rows, "reward/mean")
    if rewards:
        parts.append("reward {:.3f} -> {:.3f} over {} steps".format(*first_and_last_five(rewards), len(rewards)))
    return ", ".join(parts)


def last_lines(run_dir: Path, outcome: Outcome) -> list[str]:
    """What the console ends with."""
    where = relative(run_dir)
    lines = [outcome.sentence] if outcome.sentence else []
    if outcome.idle:
        lines.append(f"idle     {outcome.idle}")
    lines.append(f"run      {where}")
    if outcome.report is not None:
        lines.append(f"report   {relative(outcome.report)}")
    if outcome.exported:
        lines += [f"model    {where}/checkpoints/final", f"chat     python -m titanrl.chat {where}"]
    if outcome.resumable:
        lines.append(f"resume   python -m titanrl.grpo --resume {where}")
    return lines


def relative(path: Path) -> Path:
    """Return a path as the user would type it: relative to the current directory, unless the absolute path is shorter."""
    return Path(min(os.path.relpath(path), str(path), key=len))
