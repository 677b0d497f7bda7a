"""Registry of the built-in losses, advantage estimators and trackers.

An entry has the import path of its function or class, and the traits that the configuration's rules depend on. Entries are
plain data, so checking a configuration does not import torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

Traits = TypeVar("Traits")
Ratio = Literal["sampler", "proximal", "none", "undeclared"]


@dataclass(frozen=True, slots=True)
class BuiltIn(Generic[Traits]):
    """A built-in object.

    Example: `BuiltIn("titanrl.algorithms.losses:dro", LossTraits(ratio="sampler"))`
    """

    path: str
    """Import path of the function or class."""
    traits: Traits
    """Properties that the rules of the configuration depend on."""
    options: tuple[str, ...] = ()
    """Parameters of a loss that `algorithm.loss_options` sets, because they are not keys of `algorithm`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTraits:
    """Properties of a policy loss. A custom loss declares them with `titanrl.policy_loss`."""

    ratio: Ratio = "undeclared"
    """Denominator of the importance ratio in the loss: `sampler` for the sampling policy, `proximal` for the policy that
    `algorithm.proximal` selects, `none` for a loss without a ratio. A loss that is `undeclared` cannot be combined with keys
    that depend on the ratio."""
    zero_without_advantage: bool = False
    """True if loss and gradient are 0 where the advantage is 0, so that such sequences need no forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageTraits:
    """Properties of an advantage estimator."""

    keeps_equal_rewards: bool = False
    """True if a group with equal rewards can have nonzero advantages."""
    is_standardized: bool = False
    """True if advantages are standardized over the tokens of the batch."""
    divides_by_mean: bool = False
    """True if advantages are divided by the mean reward, so rewards must not be negative."""
    is_scale_free: bool = False
    """True if scaling all rewards and the divisor's `eps` by the same factor changes nothing."""
    compares_parts: bool = False
    """True if each part of the reward is normalized separately, and their weighted sum over the batch."""


_LOSSES, _ADVANTAGES, _TRACKERS = "titanrl.algorithms.losses", "titanrl.algorithms.advantages", "titanrl.metrics.trackers"

LOSSES: Mapping[str, BuiltIn[LossTraits]] = {
    "ppo": BuiltIn(f"{_LOSSES}:ppo", LossTraits(ratio="proximal", zero_without_advantage=True)),
    "importance_sampling": BuiltIn(f"{_LOSSES}:importance_sampling", LossTraits(ratio="sampler", zero_without_advantage=True)),
    "reinforce": BuiltIn(f"{_LOSSES}:reinforce", LossTraits(ratio="none", zero_without_advantage=True)),
    "gspo": BuiltIn(f"{_LOSSES}:gspo", LossTraits(ratio="proximal", zero_without_advantage=True)),
    "cispo": BuiltIn(f"{_LOSSES}:cispo", LossTraits(ratio="proximal", zero_without_advantage=True)),
    "dro": BuiltIn(f"{_LOSSES}:dro", LossTraits(ratio="sampler")),
    "sapo": BuiltIn(f"{_LOSSES}:sapo", LossTraits(ratio="proximal", zero_without_advantage=True)),
}
"""Values of `algorithm.loss`."""

ADVANTAGES: Mapping[str, BuiltIn[AdvantageTraits]] = {
    "grpo": BuiltIn(f"{_ADVANTAGES}:grpo", AdvantageTraits(is_scale_free=True)),
    "dr_grpo": BuiltIn(f"{_ADVANTAGES}:dr_grpo", AdvantageTraits()),
    "rloo": BuiltIn(f"{_ADVANTAGES}:rloo", AdvantageTraits()),
    "reinforce_pp": BuiltIn(f"{_ADVANTAGES}:reinforce_pp", AdvantageTraits(keeps_equal_rewards=True, is_standardized=True)),
    "reinforce_pp_baseline": BuiltIn(f"{_ADVANTAGES}:dr_grpo", AdvantageTraits(is_standardized=True)),
    "maxrl": BuiltIn(f"{_ADVANTAGES}:maxrl", AdvantageTraits(is_scale_free=True, divides_by_mean=True)),
    "pass_at_k": BuiltIn(f"{_ADVANTAGES}:pass_at_k", AdvantageTraits(is_scale_free=True)),
    "gdpo": BuiltIn(f"{_ADVANTAGES}:gdpo", AdvantageTraits(compares_parts=True)),
}
"""Values of `algorithm.advantage`."""

CUSTOM_ADVANTAGE = AdvantageTraits(keeps_equal_rewards=True)
"""Traits of a custom advantage estimator, which may depend on more than rewards."""

TRACKERS: Mapping[str, str] = {
    "tensorboard": f"{_TRACKERS}:TensorBoardTracker",
    "wandb": f"{_TRACKERS}:WandbTracker",
    "trackio": f"{_TRACKERS}:TrackioTracker",
}
"""Values of `logging.loggers`: the name, which is also the name of the package to install, and the import path of the class."""
