"""Exceptions for batches that cannot be taken, and the messages that explain why."""

from collections import Counter
from collections.abc import Sequence

from titanrl.base.errors import TitanRLError
from titanrl.carriers.types import GroupRecord


class StarvationError(TitanRLError):
    """No batch with a signal was complete in time; the message names the cause and a fix."""


class RolloutError(TitanRLError):
    """A rollout worker failed; the message is the worker's exception."""


class ScorerError(RolloutError):
    """The reward failed on every completion; the message contains the first exception."""


def scorer_failed(tried: str, error: str) -> ScorerError:
    """Return the exception for a reward or environment that failed on the completions that `tried` describes."""
    if error.startswith("data.environment: "):
        return ScorerError(f"{error} (it affects {tried}). Correct the environment, or raise its time limits.")
    return ScorerError(
        f"data.rewards: the reward failed on {tried} (first error: {error}). Correct the reward; if it lacks time or memory, "
        "raise sandbox.timeout_s or sandbox.memory_bytes."
    )


def all_scorers_failed(records: Sequence[GroupRecord]) -> ScorerError:
    """Return the exception for a reward that failed on all completions of the first groups."""
    num_rollouts = sum(record.num_errors for record in records)
    return scorer_failed(f"all {num_rollouts} completions of the first {len(records)} groups", records[0].first_error)


def why_starved(tried: Sequence[GroupRecord], indices: Sequence[int], num_groups: int, waited_s: float) -> str:
    """Explain why no batch of `num_groups` groups was complete after `waited_s` seconds.

    Args:
        tried: Groups that finished since the last batch.
        indices: Positions of the prompts whose groups are in flight, oldest first.
        num_groups: Groups per batch.
        waited_s: Seconds since the batch was requested.
    """
    in_flight = f"groups in flight: {len(indices)}"
    if indices:
        in_flight += f", the oldest for prompt {indices[0]}"
    if not tried:
        return (
            f"rollout.starvation_timeout_s: no group finished in {waited_s:g} s; {in_flight}. "
            "See logs/rollout_0_0.log and logs/generator_0_0.log, or raise the timeout."
        )
    with_signal = sum(record.has_payload for record in tried)
    silent = [record for record in tried if record.rewards and not (record.has_payload or record.rejection)]
    equal = Counter(record.rewards[0] for record in silent if not record.has_signal)
    reasons = [f"{count} with every reward {reward:g}" for reward, count in equal.most_common(3)]
    if num_masked := sum(record.has_signal for record in silent):
        reasons.append(f"{num_masked} without a token to train on (algorithm.mask_truncated, trainer.overlong)")
    if unscored := [record for record in tried if not record.rewards]:
        reasons.append(f"{len(unscored)} whose reward always failed ({unscored[0].first_error}; see data.rewards)")
    rejected = Counter(record.rejection for record in tried)
    if rejected["filtered"]:
        reasons.append(f"{rejected['filtered']} rejected by rollout.group_filter")
    if rejected["too small"]:
        error = next(record.first_error for record in tried if record.rejection == "too small")
        reasons.append(f"{rejected['too small']} with fewer rewards than rollout.min_group_size (first error: {error})")
    if len(tasks := Counter(record.task for record in tried)) > 1:
        signals = Counter(record.task for record in tried if record.has_payload)
        reasons.append(f"with a signal by task: {', '.join(f'{task} {signals[task]} of {num}' for task, num in tasks.items())}")
    others = ", ".join(reasons) or "none"
    return (
        f"rollout.starvation_timeout_s: no batch of {num_groups} groups with a signal in {waited_s:g} s. "
        f"{len(tried)} groups finished, {with_signal} with a signal; the others: {others}; {in_flight}. "
        "If rewards are all low, the task is too hard for the policy: use warm_start, an easier data.task_config or "
        "a larger rollout.group_size. If they are all high, the task is solved."
    )
