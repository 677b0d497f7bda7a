"""Load balance between trainer and generators: their idle time, and advice on dividing the devices."""

from statistics import median

from titanrl.metrics.series import Rows, series

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
