"""Whether trainer and generators were matched: how long each waited, and what to change."""

from statistics import median

from titanrl.metrics.series import Rows, series

NOTABLE = 0.15
"""Share of the time that one side may wait longer than the other without a word about it."""


def balance_line(rows: Rows) -> str:
    """How long trainer and generators waited, and how to split devices better; empty without a step that tells.

    Medians over the steps, of which the first fifth is left out: caches are cold and the buffer is filling.
    """
    steps = rows[len(rows) // 5 :]
    trainer, generators = ([value for _, value in series(steps, f"perf/{side}_idle_frac")] for side in ("trainer", "generator"))
    if not trainer or not generators:
        return ""
    ages = [value for _, value in series(steps, "staleness/max")]
    idle = median(trainer), median(generators)
    return (
        f"trainer {idle[0]:.0%}, generators {idle[1]:.0%} of the time; {advice(*idle, synchronous=max(ages, default=0) == 0)}"
    )


def advice(trainer_idle: float, generator_idle: float, *, synchronous: bool) -> str:
    """What would let both sides work more."""
    if synchronous:
        return "they take turns, as max_staleness is 0; with 1 they would work at the same time"
    if trainer_idle > generator_idle + NOTABLE:
        return "give the generators more devices (generator.replicas) or the trainer fewer"
    if generator_idle > trainer_idle + NOTABLE:
        return "give the trainer more devices (trainer.parallelism.dp_shard) or the generators fewer"
    if min(trainer_idle, generator_idle) > NOTABLE:
        return "both wait for each other: raise max_staleness, or rollout.window if a few completions are very long"
    return "they are well matched"
