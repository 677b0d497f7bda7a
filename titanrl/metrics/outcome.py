"""Closing lines of a run: how the reward changed, where the results are, and the commands to run next."""

import os
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from titanrl.base.files import COMMIT_FILE, in_shell
from titanrl.metrics.report import write_report
from titanrl.metrics.run_directory import read_metrics
from titanrl.metrics.series import Rows, by_step, first_and_last_five, heldout_tasks, series

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes of a run that SIGINT or SIGTERM interrupted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a run."""

    sentence: str
    """Change of the held-out and training rewards; for a run that stopped early, preceded by its last step."""
    report: Path | None
    """Path of the report; None if the run completed no step or the report could not be written."""
    exported: bool
    """True if the trained model was exported."""
    resumable: bool
    """True if a checkpoint exists and training is not finished."""
    idle: str
    """Idle fractions of trainer and generators, with advice; empty if the run did not record them."""
    failed: str
    """Number of completions whose reward failed in training; empty if there is none."""
    problems: tuple[str, ...]
    """Files that could not be read or written, one message each."""


def summarize(run_dir: Path, *, code: int, cause: str, num_steps: int, max_staleness: int = 0) -> Outcome:
    """Write the report of a run, if it recorded any metrics, and return its result.

    This function does not raise, so that a full disk or a damaged file cannot hide why the run failed. Such problems are listed
    in the result.

    Args:
        run_dir: Run directory.
        code: Exit code of the run.
        cause: Reason for a nonzero exit code.
        num_steps: Policy version at which training is complete.
        max_staleness: Configured bound on staleness.
    """
    rows: Rows = []
    sentence, idle, failed, report = "", "", "", None
    problems = []
    try:
        metrics = run_dir / "metrics.jsonl"
        rows = by_step(read_metrics(metrics)) if metrics.exists() else []
        sentence, idle, failed = learned(rows), balance_line(rows, max_staleness), failed_rewards(rows)
    except Exception as error:  # a damaged file must not hide why the run failed
        problems.append(f"metrics.jsonl cannot be read ({type(error).__name__}: {error})")
    if code != 0:
        # The cause of a failure is printed later, as the last line.
        reason = f": {cause}" if code in (INTERRUPTED, TERMINATED) else ""
        sentence = f"Stopped after step {rows[-1]['step'] if rows else 0}{reason}. {sentence}".strip()
    try:
        facts = {"Failed rewards": failed} if failed else {}
        report = write_report(run_dir, {"outcome": sentence, **facts}) if rows else None
    except Exception as error:  # nor must a missing package or a full disk
        problems.append(f"the report cannot be written ({type(error).__name__}: {error})")
    is_finished = code == 0 and bool(rows) and rows[-1]["version"] >= num_steps
    return Outcome(
        sentence=sentence,
        report=report,
        exported=(run_dir / "checkpoints" / "final" / "config.json").exists(),
        resumable=not is_finished and any((run_dir / "checkpoints").glob(f"step-*/{COMMIT_FILE}")),
        idle=idle,
        failed=failed,
        problems=tuple(problems),
    )


def learned(rows: Rows) -> str:
    """Describe how the mean reward (or the loss, in supervised fine-tuning) changed on held-out data and in training."""
    if losses := series(rows, "loss/train"):
        heldout = {"held-out": series(rows, "loss/eval")}
        name, training = "Loss", losses
    else:
        heldout = {f"held-out {task}": series(rows, f"eval/{task}/mean") for task in heldout_tasks(rows)}
        name, training = "Mean reward", series(rows, "reward/mean")
    changes = [
        f"{label} {points[0][1]:.3f} -> {points[-1][1]:.3f}{_without_reward(rows, label.removeprefix('held-out '))}"
        for label, points in heldout.items()
        if points
    ]
    if training:
        changes.append("training {:.3f} -> {:.3f} over {} steps".format(*first_and_last_five(training), len(training)))
    return f"{name}: {', '.join(changes)}" if changes else ""


def failed_rewards(rows: Rows) -> str:
    """Return how many completions of the whole run had no reward in training; empty if none failed."""
    failed = sum(value for _, value in series(rows, "reward/num_errors"))
    total = sum(value for _, value in series(rows, "reward/num_completions"))
    if not failed:
        return ""
    return f"{failed:.0f} of {total:.0f} completions had no reward in training (scorer_error in events.jsonl has the errors)"


def _without_reward(rows: Rows, task: str) -> str:
    """Return how many completions of the first and the last evaluation have no reward; empty if none failed."""
    failed, total = (series(rows, f"eval/{task}/{name}") for name in ("num_errors", "num_completions"))
    if not failed or not any(value for _, value in (failed[0], failed[-1])):
        return ""
    counts = [f"{failed[at][1]:.0f} of {total[at][1]:.0f}" for at in (0, -1)]
    return f" (completions without a reward: {' -> '.join(counts)})"


def last_lines(run_dir: Path, outcome: Outcome, *, command: str = "titanrl train") -> list[str]:
    """Return the closing lines of a run for the console.

    Args:
        run_dir: Run directory.
        outcome: Result of the run.
        command: Command that resumes the run, without its arguments.
    """
    where, argument = relative(run_dir), in_shell(relative(run_dir))
    lines = [outcome.sentence] if outcome.sentence else []
    lines += [f"warning  {problem}" for problem in outcome.problems]
    if outcome.failed:
        lines.append(f"failed   {outcome.failed}")
    if outcome.idle:
        lines.append(f"idle     {outcome.idle}")
    lines.append(f"run      {where}")
    if outcome.report is not None:
        lines.append(f"report   {relative(outcome.report)}")
    if outcome.exported:
        lines += [f"model    {where}/checkpoints/final", f"chat     titanrl chat {argument}"]
    if outcome.resumable:
        lines.append(f"resume   {command} --resume {argument}")
    return lines


def relative(path: Path) -> Path:
    """Return the shorter of the absolute path and the path relative to the current directory."""
    return Path(min(os.path.relpath(path), str(path), key=len))


NOTABLE = 0.15
"""Difference between the idle fractions of trainer and generators above which `advice` suggests moving devices."""


def balance_line(rows: Rows, max_staleness: int) -> str:
    """Summarize the idle fractions of trainer and generators, with advice; return an empty string without these metrics.

    The fractions are medians over the steps. The first fifth is left out, because caches are cold and the buffer is filling.
    `max_staleness` is the configured bound: a short asynchronous run may have no stale token.
    """
    steps = rows[len(rows) // 5 :]
    trainer, generators = ([value for _, value in series(steps, f"perf/{role}_idle_frac")] for role in ("trainer", "generator"))
    if not trainer or not generators:
        return ""
    idle = median(trainer), median(generators)
    shares = f"trainer {idle[0]:.0%}, generators {idle[1]:.0%} of the time (median)"
    if not series(steps, "staleness/max"):  # a distillation is always synchronous
        return shares
    return f"{shares}; {advice(*idle, synchronous=max_staleness == 0)}"


def advice(trainer_idle: float, generator_idle: float, *, synchronous: bool) -> str:
    """Suggest how to reduce the idle time."""
    if synchronous:
        return "they alternate because max_staleness is 0; set it to 1 to overlap generation and training"
    if trainer_idle > generator_idle + NOTABLE:
        return "generation is the bottleneck: give the generators more devices (generator.replicas) or the trainer fewer"
    if generator_idle > trainer_idle + NOTABLE:
        return (
            "training is the bottleneck: give the trainer more devices (trainer.parallelism.dp_shard) or the generators fewer"
        )
    if min(trainer_idle, generator_idle) > NOTABLE:
        return "each waits for the other: raise max_staleness, or rollout.window if a few completions are very long"
    return "they are well balanced"
