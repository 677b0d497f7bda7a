"""Last lines of a run: what the policy learned, where the results are, and which commands come next."""

import os
from dataclasses import dataclass
from pathlib import Path

from titanrl.files import COMMIT_FILE
from titanrl.metrics.balance import balance_line
from titanrl.metrics.report import write_report
from titanrl.metrics.run_directory import read_metrics
from titanrl.metrics.series import Rows, by_step, first_and_last_five, heldout_tasks, series

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes of a run that was ended by SIGINT and by SIGTERM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a run."""

    sentence: str
    """Held-out and training rewards, behind the step at which the run stopped if it stopped early."""
    report: Path | None
    """The report; None if the run took no step or the report could not be written."""
    exported: bool
    """True if the trained model was written."""
    resumable: bool
    """True if there is a checkpoint and training is not finished."""
    idle: str
    """Idle fractions of trainer and generators, with advice."""
    problems: tuple[str, ...]
    """Sentences about the files that could not be read or written."""


def summarize(run_dir: Path, *, code: int, cause: str, num_steps: int) -> Outcome:
    """Write the report of a run, if it took a step, and return its result.

    Never raise: the cause of a failed run must be printed, even if the disk is full or a file is damaged.

    Args:
        run_dir: The run's own folder.
        code: Exit code of the run.
        cause: Why the run ended, if the code is not 0.
        num_steps: Policy version at which training is finished.
    """
    rows: Rows = []
    sentence, idle, report = "", "", None
    problems = []
    try:
        metrics = run_dir / "metrics.jsonl"
        rows = by_step(read_metrics(metrics)) if metrics.exists() else []
        sentence, idle = learned(rows), balance_line(rows)
    except Exception as error:  # a damaged file must not hide how the run ended
        problems.append(f"metrics.jsonl cannot be read ({type(error).__name__}: {error})")
    if code != 0:
        # Without an interrupt the cause is printed as the very last line.
        reason = f": {cause}" if code in (INTERRUPTED, TERMINATED) else ""
        sentence = f"stopped after step {rows[-1]['step'] if rows else 0}{reason}. {sentence}".strip()
    try:
        report = write_report(run_dir, {"outcome": sentence}) if rows else None
    except Exception as error:  # nor may a missing package or a full disk
        problems.append(f"the report cannot be written ({type(error).__name__}: {error})")
    is_finished = code == 0 and bool(rows) and rows[-1]["version"] >= num_steps
    return Outcome(
        sentence=sentence,
        report=report,
        exported=(run_dir / "checkpoints" / "final" / "config.json").exists(),
        resumable=not is_finished and any((run_dir / "checkpoints").glob(f"step-*/{COMMIT_FILE}")),
        idle=idle,
        problems=tuple(problems),
    )


def learned(rows: Rows) -> str:
    """Return the first and the last mean reward, or loss, on held-out prompts and in training."""
    if losses := series(rows, "loss/train"):
        heldout = series(rows, "loss/eval")
        changes = [f"on held-out examples {heldout[0][1]:.3f} -> {heldout[-1][1]:.3f}"] if heldout else []
        changes.append("in training {:.3f} -> {:.3f} over {} steps".format(*first_and_last_five(losses), len(losses)))
        return f"loss {', '.join(changes)}"
    changes = [
        f"on held-out {task} {points[0][1]:.3f} -> {points[-1][1]:.3f}"
        for task in heldout_tasks(rows)
        if (points := series(rows, f"eval/{task}/mean"))
    ]
    rewards = series(rows, "reward/mean")
    if rewards:
        changes.append("in training {:.3f} -> {:.3f} over {} steps".format(*first_and_last_five(rewards), len(rewards)))
    return f"mean reward {', '.join(changes)}" if changes else ""


def last_lines(run_dir: Path, outcome: Outcome, *, command: str = "titanrl train") -> list[str]:
    """Return the lines that the console ends with; `command` continues the run."""
    where = relative(run_dir)
    lines = [outcome.sentence] if outcome.sentence else []
    lines += [f"problem  {problem}" for problem in outcome.problems]
    if outcome.idle:
        lines.append(f"idle     {outcome.idle}")
    lines.append(f"run      {where}")
    if outcome.report is not None:
        lines.append(f"report   {relative(outcome.report)}")
    if outcome.exported:
        lines += [f"model    {where}/checkpoints/final", f"chat     python -m titanrl.chat {where}"]
    if outcome.resumable:
        lines.append(f"resume   {command} --resume {where}")
    return lines


def relative(path: Path) -> Path:
    """Return a path as the user would type it: relative to the current directory, unless the absolute path is shorter."""
    return Path(min(os.path.relpath(path), str(path), key=len))
