"""Learning-rate schedule."""

from titanrl.config.choices import LearningRateDecay


def learning_rate(step: int, *, peak: float, num_warmup_steps: int, decay: LearningRateDecay, num_steps: int) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0.

    The rate rises linearly to `peak` during the warm-up. Then it stays constant, or falls linearly to 0 at step `num_steps`.
    """
    if step < num_warmup_steps:
        return peak * (step + 1) / num_warmup_steps
    if decay == "constant":
        return peak
    return peak * max(num_steps - step, 0) / max(num_steps - num_warmup_steps, 1)
