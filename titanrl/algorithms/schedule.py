"""Learning-rate schedule and the AdamW hyperparameters of each optimizer step."""

from titanrl.base.choices import LearningRateDecay
from titanrl.carriers.types import AdamParams
from titanrl.config.algorithm import AlgorithmConfig
from titanrl.config.sections import SFTConfig


def learning_rate(step: int, *, peak: float, num_warmup_steps: int, decay: LearningRateDecay, num_steps: int) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0.

    During warm-up the rate increases linearly to `peak`. Then it stays constant or decreases linearly to 0 at step `num_steps`.
    """
    if step < num_warmup_steps:
        return peak * (step + 1) / num_warmup_steps
    if decay == "constant":
        return peak
    return peak * max(num_steps - step, 0) / max(num_steps - num_warmup_steps, 1)


def adam_params(options: AlgorithmConfig | SFTConfig, step: int, num_steps: int) -> AdamParams:
    """Return the hyperparameters of optimizer step `step` of `num_steps`, counted from 0."""
    rate = learning_rate(
        step,
        peak=options.learning_rate,
        num_warmup_steps=options.num_warmup_steps,
        decay=options.lr_decay,
        num_steps=num_steps,
    )
    return AdamParams(
        learning_rate=rate,
        beta1=options.betas[0],
        beta2=options.betas[1],
        eps=options.eps,
        weight_decay=options.weight_decay,
        max_grad_norm=options.max_grad_norm,
    )
