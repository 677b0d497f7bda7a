"""Metrics of a step or an evaluation, computed from the reports of trainer, generators and buffer; see docs/metrics.md."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from titanrl.carriers.record import span
from titanrl.carriers.tables import RecordTable
from titanrl.carriers.types import TOLERANCE, EvaluationResult, GenerationStats, LossSums, OptimUpdate
from titanrl.config.data import DataConfig

LAG = "lag/"
"""Prefix of the trainer's sums by policy lag, which `algorithms/objective.py` computes."""


def rollout_metrics(
    records: RecordTable,
    *,
    num_tried: int,
    num_equal_rewards: int,
    num_tried_rollouts: int,
    num_errors: int,
    of_turns: bool = False,
) -> dict[str, float]:
    """Return the metrics of the rollouts in a batch: rewards, lengths, groups without signal, failed rewards.

    Args:
        records: Groups of the batch.
        num_tried: Number of groups in the batch and groups discarded since the previous batch.
        num_equal_rewards: Number of tried groups that have rewards, all of them equal.
        num_tried_rollouts: Number of rollouts in the tried groups, including rollouts without a reward.
        num_errors: Number of rollouts in the tried groups whose reward failed.
        of_turns: True if an environment inserts tokens between the policy's turns, so that lengths count sampled tokens only.
    """
    groups, num_rollouts = records.groups, len(records.rewards)
    after_prompt = records.lengths[records.segment_starts] - groups["prompt_len"][records.group_of]
    response_lens = records.num_sampled_by_rollout if of_turns else after_prompt
    nonfinite, sampled = int(groups["num_nonfinite"].sum()), int(records.num_sampled.sum())
    return {
        "reward/mean": mean(records.rewards.tolist()),
        **error_metrics(num_errors, num_tried_rollouts),
        **{f"reward/{part}": value for part, value in part_means(records).items()},
        "group/zero_variance_frac": num_equal_rewards / num_tried,
        "tokens/prompt_len_mean": mean(groups["prompt_len"].tolist()),
        "tokens/prompt_len_max": float(groups["prompt_len"].max()),
        "tokens/response_len_mean": mean(response_lens.tolist()),
        "tokens/response_len_max": float(response_lens.max()),
        "tokens/truncated_frac": int(groups["num_truncated"].sum()) / num_rollouts,
        "tokens/overlong_frac": int(groups["num_overlong"].sum()) / num_rollouts,
        "tokens/nonfinite_frac": nonfinite / max(nonfinite + sampled, 1),
        "group/generate_s_mean": mean(groups["generate_s"].tolist()),
        "group/score_s_mean": mean(groups["score_s"].tolist()),
    }


def state_metrics(records: RecordTable) -> dict[str, float]:
    """Return the fraction of turns whose state another turn of the group has, too."""
    turns = records.turns
    group_of_U = np.repeat(records.group_of[records.rollout_of], turns.num_turns)
    _, places_U, counts = np.unique([group_of_U, turns.states], axis=1, return_inverse=True, return_counts=True)
    is_shared_U = (counts[places_U] > 1) & (turns.states != 0)
    return {"episode/shared_state_frac": float(is_shared_U.mean()) if len(is_shared_U) else 0.0}


def error_metrics(num_errors: int, num_completions: int) -> dict[str, float]:
    """Return the number and the fraction of completions whose reward failed, and the number of all completions."""
    return {
        "reward/error_frac": num_errors / max(num_completions, 1),
        "reward/num_errors": float(num_errors),
        "reward/num_completions": float(num_completions),
    }


def episode_metrics(counts: Mapping[str, int]) -> dict[str, float]:
    """Return the metrics of an environment's episodes; empty without an environment."""
    if not counts:
        return {}
    num_episodes = max(counts["episodes"], 1)
    return {
        "episode/count": float(counts["episodes"]),
        "episode/turns_mean": counts["turns"] / num_episodes,
        "episode/malformed_calls_mean": counts["malformed_calls"] / num_episodes,
        # Dumps of earlier versions lack some counts.
        "episode/truncated_frac": counts.get("truncated", 0) / num_episodes,
        "episode/unjudged_frac": counts.get("unjudged", 0) / num_episodes,
        "episode/environment_s_mean": counts.get("environment_ms", 0) / 1000 / num_episodes,
        "episode/environment_s_max": counts.get("slowest_ms", 0) / 1000,
        "episode/environment_error_frac": counts["environment_error"] / num_episodes,
        "episode/timeout_frac": counts["timeout"] / num_episodes,
        "episode/reward_error_frac": counts["reward_error"] / num_episodes,
        "episode/generation_error_frac": counts.get("generation_error", 0) / num_episodes,
    }


def environment_metrics(by_task: Mapping[str, Mapping[str, tuple[float, int]]], *, is_mixture: bool) -> dict[str, float]:
    """Return the means of the metrics that environments reported, over all tasks and, in a mixture, also by task.

    `by_task` has sum and count of the values, by task and by metric name.
    """
    sums: dict[str, list[tuple[float, int]]] = {}
    for of_task in by_task.values():
        for name, pair in of_task.items():
            sums.setdefault(name, []).append(pair)
    values = {
        f"environment/{name}_mean": sum(total for total, _ in pairs) / sum(num for _, num in pairs)
        for name, pairs in sums.items()
    }
    for task, of_task in by_task.items() if is_mixture else ():
        values |= {f"task/{task}/environment/{name}_mean": total / num for name, (total, num) in of_task.items()}
    return values


def staleness_metrics(losses: LossSums) -> dict[str, float]:
    """Return the log-probability mismatch between generator and trainer, by policy lag.

    At lag 0 the mismatch is due to numerics alone; at higher lags it is also due to staleness. A batch without such tokens has
    no value, because 0 would mean that the log-probabilities agree.
    """
    counts = {int(name.removeprefix(LAG)): count for name, count in losses.sums.items() if name.removeprefix(LAG).isdigit()}
    sums = {lag: losses.sums[f"{LAG}{lag}/logprob_abs"] for lag in counts}
    num_tokens, num_stale = max(sum(counts.values()), 1.0), sum(counts.values()) - counts[0]
    values = {f"staleness/lag_{lag}_frac": count / num_tokens for lag, count in counts.items()}
    if counts[0]:
        values["mismatch/numeric/logprob_abs_mean"] = sums[0] / counts[0]
        values["mismatch/numeric/logprob_abs_max"] = losses.maxima[f"{LAG}0/logprob_abs"]
    if num_stale:
        values["mismatch/stale/logprob_abs_mean"] = (sum(sums.values()) - sums[0]) / num_stale
        values["mismatch/stale/logprob_abs_max"] = losses.maxima[f"{LAG}stale/logprob_abs"]
    values |= {
        f"mismatch/stale/logprob_abs_mean_lag_{lag}": sums[lag] / count for lag, count in counts.items() if lag and count
    }
    return values


def replay_metrics(replayed: RecordTable, *, version: int, num_stored: int, num_evicted: int) -> dict[str, float]:
    """Return the metrics of the replayed groups of a batch, which trains `version`.

    `num_stored` groups are stored for replay; `num_evicted` were evicted for newer ones since the run began.
    """
    groups = replayed.groups
    values = {"replay/groups": len(groups), "replay/stored": num_stored, "replay/evicted": num_evicted}
    metrics = {name: float(value) for name, value in values.items()}
    if len(groups):
        ages = version - groups["min_version"]
        metrics |= {"replay/age_mean": float(ages.mean()), "replay/age_max": float(ages.max())}
        metrics["replay/reward_mean"] = mean(replayed.rewards.tolist())
        metrics["replay/weight_mean"] = float(groups["weight"].mean())
    return metrics


def loss_metrics(losses: LossSums, num_updates: int = 1) -> dict[str, float]:
    """Convert sums over ranks and micro-batches to metrics.

    Loss terms are already normalized per optimizer step, so they become means over `num_updates`. Other sums become means over
    tokens.
    """
    sums = {name: value for name, value in losses.sums.items() if not name.startswith(LAG)}
    num_tokens = max(sums.pop("num_tokens"), 1.0)
    values = {name: value / (num_updates if name.startswith("loss/") else num_tokens) for name, value in sums.items()}
    if "correction_weight" in values:
        weight, weight_squared = values.pop("correction_weight"), values.pop("correction_weight_squared")
        values["correction/ess"] = weight**2 / weight_squared if weight_squared else 0.0
    return {**values, **{name: value for name, value in losses.maxima.items() if not name.startswith(LAG)}}


def optimizer_metrics(updates: Sequence[OptimUpdate], learning_rate: float) -> dict[str, float]:
    """Return the metrics of the optimizer steps on a batch."""
    mappings = [[update.experts for update in updates if update.experts], [update.critic for update in updates]]
    return {
        **{name: mean([each[name] for each in found]) for found in mappings for name in (found[0] if found else ())},
        "grad/norm": mean([update.grad_norm for update in updates]),
        "optim/lr": learning_rate,
        "optim/steps": float(len(updates)),
        "optim/skipped": mean([float(update.skipped) for update in updates]),
        "optim/empty": mean([float(update.is_empty) for update in updates]),
    }


def speed_metrics(*, trained_tokens: int, generated: GenerationStats, trainer_busy_s: float, step_s: float) -> dict[str, float]:
    """Return the throughput of trainer and generators while busy, and the fraction of time each was idle.

    Args:
        trained_tokens: Number of tokens that the trainer processed, in all packed rows.
        generated: Work of the generators since the previous step.
        trainer_busy_s: Seconds that the trainer computed since the previous optimizer step.
        step_s: Wall-clock seconds of the step.
    """
    values = {"perf/trainer_idle_frac": max(0.0, 1.0 - trainer_busy_s / step_s), "time/step_s": step_s}
    if trainer_busy_s > 0.0:
        values["perf/train_tokens_per_s"] = trained_tokens / trainer_busy_s
    if generated.busy_s > 0.0:
        values["perf/gen_tokens_per_s"] = generated.num_tokens * generated.num_replicas / generated.busy_s
    if generated.wall_s > 0.0:
        # An engine step is counted when it ends, so it may have started before the interval.
        values["perf/generator_idle_frac"] = max(0.0, 1.0 - generated.busy_s / generated.wall_s)
    return values


def part_means(records: RecordTable) -> dict[str, float]:
    """Return the mean of each reward part over the rollouts of the tasks that have it. A rollout without the part counts as 0.

    So the parts of a task have the same denominator as its reward, and their means times their weights add up to its mean.
    """
    task_of = records.tasks[records.group_of]
    means = {}
    for part, values in records.reward_parts.items():
        missing = np.isnan(values)
        if not missing.all():
            has_part = np.isin(task_of, task_of[~missing])
            means[part] = mean(np.where(missing, 0.0, values)[has_part].tolist())
    return means


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean; 0 for an empty sequence. Summation from the left makes the result bitwise reproducible."""
    return sum(values) / len(values) if values else 0.0


def task_metrics(records: RecordTable, tasks: Mapping[str, DataConfig], dropped: Mapping[str, int]) -> dict[str, float]:
    """Return the metrics of each task in a batch.

    A run with a single task has no per-task metrics. A task without groups in the batch has only its counts of groups.

    Args:
        records: Groups of the batch.
        tasks: Tasks by name, in the order of their indices.
        dropped: Number of groups discarded since the previous batch, by task.
    """
    values: dict[str, float] = {}
    for number, (name, task) in enumerate(tasks.items() if len(tasks) > 1 else ()):
        own = records.take(np.flatnonzero(records.tasks == number))
        values |= {f"task/{name}/groups": float(len(own)), f"task/{name}/dropped": float(dropped.get(name, 0))}
        if len(own):
            solved_from = 1.0 if task.curriculum is None else task.curriculum.solved_from
            values |= {
                f"task/{name}/reward_mean": mean(own.rewards.tolist()),
                f"task/{name}/solved_frac": float(np.mean(own.rewards >= solved_from - TOLERANCE)),
                **{f"task/{name}/reward/{part}": value for part, value in part_means(own).items()},
                f"task/{name}/response_len_mean": mean(own.num_sampled_by_rollout.tolist()),
                f"task/{name}/truncated_frac": int(own.groups["num_truncated"].sum()) / len(own.rewards),
                f"task/{name}/generate_s_mean": mean(own.groups["generate_s"].tolist()),
            }
    return values


def evaluation_metrics(result: EvaluationResult) -> dict[str, float]:
    """Return the metrics of an evaluation, `eval/<set>/*`."""
    values = {
        "mean": result.mean,
        "response_len_mean": result.response_len_mean,
        **result.statistics,
        "error_frac": result.num_errors / result.num_completions,
        "num_errors": float(result.num_errors),
        "num_completions": float(result.num_completions),
    }
    num_scored = result.num_completions - result.num_errors
    values["truncated_frac"] = result.num_truncated / num_scored
    if result.num_unjudged:
        values["unjudged_frac"] = result.num_unjudged / num_scored
    values |= {f"environment/{name}_mean": value for name, value in result.environment.items()}
    return {f"eval/{result.task}/{name}": value for name, value in values.items()}


class PhaseTimer:
    """Stopwatch for named phases. Use one timer per asyncio task.

    A nested phase pauses the enclosing one. Each second is therefore counted once, and the phases of a step never add up to
    more than its wall-clock time.

    Example: `with timer.phase("train"): ...`, then `timer.take() == {"time/train_s": 0.11}`.
    """

    def __init__(
        self, on_change: Callable[[str | None], object] = lambda name: None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Start without a phase. `on_change` gets the name of the innermost phase when it changes, and None between phases."""
        self._on_change = on_change
        self._clock = clock
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}
        self._charged_until = clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent in the body of the `with` statement to the phase `name`."""
        self._charge()
        self._open.append(name)
        self._announce()
        try:
            with span(name, "phase"):
                yield
        finally:
            self._charge()
            closed = self._open.pop()
            assert closed == name, f"phases {name} and {closed} overlap, but neither contains the other"
            self._announce()

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase since the previous call, `{"time/<phase>_s": ...}`, and reset them to 0."""
        self._charge()
        taken = {f"time/{name}_s": seconds for name, seconds in self._seconds.items()}
        self._seconds = {}
        return taken

    def _charge(self) -> None:
        now = self._clock()
        if self._open:
            name = self._open[-1]
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._charged_until
        self._charged_until = now

    def _announce(self) -> None:
        self._on_change(self._open[-1] if self._open else None)
