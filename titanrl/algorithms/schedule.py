"""Learning-rate schedule."""

from typing import Literal

Decay = Literal["constant", "linear"]


def learning_rate(step: int, *, peak: float, num_warmup_steps: int, decay: Decay, num_steps: int) -> float:
    """Learning rate of optimizer step `step`, counted from 0.

    Rises linearly to `peak` over the warm-up, then stays, or falls linearly so that it would be 0 at step `num_steps`.
    """
    if step < num_warmup_steps:
        return peak * (step + 1) / num_warmup_steps
    if decay == "constant":
        return peak
    return peak * max(num_steps - step, 0) / max(num_steps - num_warmup_steps, 1)
