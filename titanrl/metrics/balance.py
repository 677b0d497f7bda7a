"""Balance of trainer and generators: how long each waited, and how to divide the devices better."""

from statistics import median

from titanrl.metrics.series import Rows, series

NOTABLE = 0.15
"""Largest difference between the idle fractions of the two sides that needs no advice."""


def balance_line(rows: Rows) -> str:
    """Return the idle fractions of trainer and generators with advice, or an empty string without such metrics.

    The fractions are medians over the steps without the first fifth, in which caches are cold and the buffer fills.
    """
    steps = rows[len(rows) // 5 :]
    trainer, generators = ([value for _, value in series(steps, f"perf/{side}_idle_frac")] for side in ("trainer", "generator"))
    if not trainer or not generators:
        return ""
    idle = median(trainer), median(generators)
    shares = f"trainer {idle[0]:.0%}, generators {idle[1]:.0%} of the time"
    if not (ages := [value for _, value in series(steps, "staleness/max")]):  # a distillation is always synchronous
        return shares
    return f"{shares}; {advice(*idle, synchronous=max(ages) == 0)}"


def advice(trainer_idle: float, generator_idle: float, *, synchronous: bool) -> str:
    """Return a suggestion that would let both sides work more."""
    if synchronous:
        return "they take turns because max_staleness is 0; with 1 they would work at the same time"
    if trainer_idle > generator_idle + NOTABLE:
        return "give the generators more devices (generator.replicas) or the trainer fewer"
    if generator_idle > trainer_idle + NOTABLE:
        return "give the trainer more devices (trainer.parallelism.dp_shard) or the generators fewer"
    if min(trainer_idle, generator_idle) > NOTABLE:
        return "both wait for each other: raise max_staleness, or rollout.window if a few completions are very long"
    return "they are well matched"
