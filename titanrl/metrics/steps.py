"""Metrics of a step, from the reports of trainer, generators and buffer. docs/metrics.md lists names and units."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from titanrl.config.sections import RolloutConfig
from titanrl.tables import RecordTable
from titanrl.types import GenerationStats, LossSums, OptimUpdate

LAG = "lag/"
"""Prefix of the trainer's sums by lag, which `algorithms/lag_metrics.py` computes."""


def rollout_metrics(
    records: RecordTable,
    *,
    num_tried: int,
    num_without_signal: int,
    num_tried_rollouts: int,
    num_errors: int,
    of_turns: bool = False,
) -> dict[str, float]:
    """Return the metrics of the rollouts: rewards, lengths, groups without signal, failed rewards.

    Args:
        records: Groups of the batch.
        num_tried: Groups of the batch and groups discarded since the previous one.
        num_without_signal: Tried groups whose rewards are all equal.
        num_tried_rollouts: Rollouts of the tried groups, those without a reward included.
        num_errors: Rollouts of the tried groups whose reward failed.
        of_turns: True if an environment adds tokens between those that the policy samples.
    """
    groups, num_rollouts = records.groups, len(records.rewards)
    after_prompt = records.lengths[records.segment_starts] - groups["prompt_len"][records.group_of]
    response_lens = records.num_sampled_by_rollout if of_turns else after_prompt
    nonfinite, sampled = int(groups["num_nonfinite"].sum()), int(records.num_sampled.sum())
    return {
        "reward/mean": mean(records.rewards.tolist()),
        "reward/error_frac": num_errors / max(num_tried_rollouts, 1),
        **{f"reward/{part}": mean(values[~np.isnan(values)].tolist()) for part, values in records.reward_parts.items()},
        "group/zero_variance_frac": num_without_signal / num_tried,
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


def rejection_metrics(drops: Mapping[Any, int], num_tried: int, rollout: RolloutConfig) -> dict[str, float]:
    """Return the shares of the tried groups that were rejected by `group_filter` and `min_group_size`, if they are set."""
    values = {}
    if rollout.group_filter is not None:
        values["group/filtered_frac"] = drops.get("filtered", 0) / num_tried
    if rollout.min_group_size > 1:
        values["group/too_small_frac"] = drops.get("too small", 0) / num_tried
    return values


def episode_metrics(counts: Mapping[str, int]) -> dict[str, float]:
    """Return the metrics of episodes in an environment, from their counts; none without an environment."""
    if not counts:
        return {}
    num_episodes = max(counts["episodes"], 1)
    return {
        "episode/count": float(counts["episodes"]),
        "episode/turns_mean": counts["turns"] / num_episodes,
        "episode/malformed_calls_mean": counts["malformed_calls"] / num_episodes,
        "episode/environment_error_frac": counts["environment_error"] / num_episodes,
        "episode/timeout_frac": counts["timeout"] / num_episodes,
        "episode/reward_error_frac": counts["reward_error"] / num_episodes,
    }


def environment_metrics(by_task: Mapping[str, Mapping[str, tuple[float, int]]], *, is_mixture: bool) -> dict[str, float]:
    """Return the means of the numbers that environments reported, over all tasks and, in a mixture, of each.

    Args:
        by_task: Sum and number of values, by task and name.
        is_mixture: True if the run has several tasks.
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


def age_metrics(ages: Sequence[int]) -> dict[str, float]:
    """Return the age of a batch from the ages of its groups, in published versions."""
    return {"staleness/mean": mean(ages), "staleness/max": float(max(ages))}


def staleness_metrics(losses: LossSums) -> dict[str, float]:
    """Return the mismatch of generator and trainer by lag: at lag 0 it is due to numerics alone, above it also to staleness."""
    counts = {int(name.removeprefix(LAG)): count for name, count in losses.sums.items() if name.removeprefix(LAG).isdigit()}
    sums = {lag: losses.sums[f"{LAG}{lag}/logprob_abs"] for lag in counts}
    num_tokens, num_stale = max(sum(counts.values()), 1.0), sum(counts.values()) - counts[0]
    values = {f"staleness/lag_{lag}_frac": count / num_tokens for lag, count in counts.items()}
    if counts[0]:
        values["mismatch/numeric/logprob_abs_mean"] = sums[0] / counts[0]
    if num_stale:
        values["mismatch/stale/logprob_abs_mean"] = (sum(sums.values()) - sums[0]) / num_stale
    values |= {
        f"mismatch/stale/logprob_abs_mean_lag_{lag}": sums[lag] / count for lag, count in counts.items() if lag and count
    }
    return values


def buffer_metrics(
    *, num_in_flight: int, num_ready: int, num_held: int, num_tried: int, num_bytes: int, num_spilled_bytes: int
) -> dict[str, float]:
    """Return the state of the buffer when the batch was taken: groups, and bytes of their tokens in all storage shards."""
    return {
        "buffer/bytes": float(num_bytes),
        "buffer/spilled_bytes": float(num_spilled_bytes),
        "buffer/inflight": float(num_in_flight),
        "buffer/ready": float(num_ready),
        "buffer/waiting": float(num_held),
        "buffer/tried": float(num_tried),
    }


def replay_metrics(replayed: RecordTable, *, version: int, num_stored: int, num_evicted: int) -> dict[str, float]:
    """Return the metrics of the replayed groups of a batch.

    Args:
        replayed: Records of the groups, with their importance weights.
        version: Version of the weights that the batch trains.
        num_stored: Groups that are kept for replay.
        num_evicted: Groups that are not kept any more since the run began, because newer ones needed their place.
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
    """Turn sums over ranks and micro-batches into metrics.

    Loss terms are complete for an optimizer step, and become means over `num_updates`; other sums become means over tokens.
    """
    sums = {name: value for name, value in losses.sums.items() if not name.startswith(LAG)}
    num_tokens = max(sums.pop("num_tokens"), 1.0)
    values = {name: value / (num_updates if name.startswith("loss/") else num_tokens) for name, value in sums.items()}
    if "correction_weight" in values:
        weight, weight_squared = values.pop("correction_weight"), values.pop("correction_weight_squared")
        values["correction/ess"] = weight**2 / weight_squared if weight_squared else 0.0
    return {**values, **losses.maxima}


def supervised_metrics(*, loss: float, trained_tokens: int, num_tokens: int, epoch: float) -> dict[str, float]:
    """Return the metrics of a batch of examples.

    Args:
        loss: Mean cross-entropy of the tokens to train on.
        trained_tokens: Tokens to train on.
        num_tokens: Tokens of the examples.
        epoch: Number of times that the examples have been trained on, this batch included.
    """
    values = {"tokens/trained": trained_tokens, "tokens/examples": num_tokens}
    return {"loss/train": loss, "data/epoch": epoch, **{name: float(value) for name, value in values.items()}}


def optimizer_metrics(updates: Sequence[OptimUpdate], learning_rate: float) -> dict[str, float]:
    """Return the metrics of the optimizer steps on a batch."""
    return {
        "grad/norm": mean([update.grad_norm for update in updates]),
        "optim/lr": learning_rate,
        "optim/steps": float(len(updates)),
        "optim/skipped": mean([float(update.skipped) for update in updates]),
    }


def speed_metrics(*, trained_tokens: int, generated: GenerationStats, trainer_busy_s: float, step_s: float) -> dict[str, float]:
    """Return the throughput of each side while it worked, and the share of time it waited.

    Args:
        trained_tokens: Tokens the trainer computed: those of all packed rows.
        generated: Work of the generators since the previous step.
        trainer_busy_s: Seconds the trainer computed since the previous optimizer step.
        step_s: Wall seconds of the step.
    """
    values = {"perf/trainer_idle_frac": max(0.0, 1.0 - trainer_busy_s / step_s), "time/step_s": step_s}
    if trainer_busy_s > 0.0:
        values["perf/train_tokens_per_s"] = trained_tokens / trainer_busy_s
    if generated.busy_s > 0.0:
        values["perf/gen_tokens_per_s"] = generated.num_tokens * generated.num_replicas / generated.busy_s
    if generated.wall_s > 0.0:
        # Decoding is booked when an engine step ends, so it may have begun before the interval.
        values["perf/generator_idle_frac"] = max(0.0, 1.0 - generated.busy_s / generated.wall_s)
    return values


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean, 0 without values. Adding from the left gives the same bits for the same values."""
    return sum(values) / len(values) if values else 0.0
