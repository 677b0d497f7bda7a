"""Sections below `algorithm` that add to the loss or correct it, and the presets."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from titanrl.config.errors import BrokenRule
from titanrl.config.section import Section

Bounds = Annotated[tuple[PositiveFloat, PositiveFloat], Field(strict=False)]

ALGORITHM_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"advantage": "grpo", "loss": "ppo", "clip_low": 0.2, "clip_high": 0.2, "reduction": "sequence_mean"},
    "dr_grpo": {"advantage": "dr_grpo", "loss": "ppo", "clip_low": 0.2, "clip_high": 0.2, "reduction": "constant"},
    "dapo": {"advantage": "grpo", "loss": "ppo", "clip_low": 0.2, "clip_high": 0.28, "reduction": "token_mean"},
    "gspo": {"advantage": "grpo", "loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "reduction": "sequence_mean"},
    "cispo": {"advantage": "grpo", "loss": "cispo", "clip_low": 1.0, "clip_high": 3.0, "reduction": "token_mean"},
    "sapo": {"advantage": "grpo", "loss": "sapo", "sapo_temperatures": [1.0, 1.05], "reduction": "sequence_mean"},
}
"""Keys of `algorithm` that each preset sets."""

_GEOMETRIC = {"reject_geometric_prox_over_behavior": [0.999, 1.001], "veto_prox_over_behavior": [1e-4, 1e4]}
CORRECTION_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "token_tis": {"weight": "token", "max_prox_over_behavior": 2.0},
    "sequence_tis": {"weight": "sequence", "max_prox_over_behavior": 2.0},
    "icepop": {"weight": "token", "max_prox_over_behavior": 5.0, "reject_token_prox_over_behavior": [0.5, 5.0]},
    "sequence_mis": {"weight": "sequence", "max_prox_over_behavior": 2.0, "reject_sequence_prox_over_behavior": [0.5, 2.0]},
    "sequence_rejection": {"reject_sequence_prox_over_behavior": [0.5, 2.0]},
    "geometric_rejection": _GEOMETRIC,
    "geometric_token_tis": {**_GEOMETRIC, "weight": "token", "max_prox_over_behavior": 2.0},
}
"""Keys of `algorithm.correction` that each preset sets."""


def with_preset(values: Any, presets: Mapping[str, Mapping[str, Any]]) -> Any:
    """A section as it was written, with the keys of its preset put in where none is written."""
    name = values.get("preset") if isinstance(values, dict) else None
    return {**presets[name], **values} if isinstance(name, str) and name in presets else values


class KLConfig(Section):
    """Divergence from a frozen reference policy, estimated on the sampled tokens; u = log policy - log reference."""

    coef: NonNegativeFloat = 0.0
    """Weight of the term; 0: no reference is needed."""
    estimator: Literal["k1", "k2", "k3", "k3_straight_through"] = "k3_straight_through"
    """k1 = u, k2 = u^2 / 2, k3 = exp(-u) - 1 + u; `k3_straight_through` has k3's value and k2's gradient, the exact one."""
    place: Literal["loss", "reward"] = "loss"
    """`loss` adds the term to the loss; `reward` takes k1 of a token and all later ones off its advantage."""
    importance_weighted: bool = True
    """In the loss, weigh each token by the ratio of policy to sampling policy, so that stale tokens count as fresh ones do."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.coef and self.place == "loss" and self.estimator == "k1":
            yield BrokenRule(
                values={"estimator": self.estimator, "place": self.place},
                rule="as a loss k1 has a gradient of 0 in expectation, so it adds only noise",
                fix="set estimator to k3_straight_through, or place to reward",
            )
        if self.coef and self.place == "reward" and self.estimator != "k1":
            yield BrokenRule(
                values={"estimator": self.estimator, "place": self.place},
                rule="a reward takes the unbiased estimator, k1",
                fix="set estimator to k1, or place to loss",
            )


class CorrectionConfig(Section):
    """What is done where the proximal policy (`algorithm.proximal`) and the one that sampled disagree.

    `prox_over_behavior` is the direction of every bound: probability under the proximal policy over that under the sampling
    policy. With `proximal: sampler` the current policy stands for the proximal one.
    """

    preset: (
        Literal[
            "token_tis",
            "sequence_tis",
            "icepop",
            "sequence_mis",
            "sequence_rejection",
            "geometric_rejection",
            "geometric_token_tis",
        ]
        | None
    ) = None
    """A recipe; it sets keys of this section that are not written beside it (docs/algorithms.md)."""
    weight: Literal["none", "token", "sequence"] = "none"
    """Truncated importance sampling: the loss of a token is multiplied by its ratio, or by the product over its sequence."""
    max_prox_over_behavior: PositiveFloat = 2.0
    """What these weights are truncated at."""
    batch_normalize: bool = False
    """Divide the weights by their mean over the step, by token or by sequence; takes a forward pass first."""
    reject_token_prox_over_behavior: Bounds | None = None
    """Tokens with a ratio outside leave the loss."""
    reject_sequence_prox_over_behavior: Bounds | None = None
    """Sequences with a product of ratios outside leave the loss."""
    reject_geometric_prox_over_behavior: Bounds | None = None
    """Sequences with a geometric mean of ratios outside leave the loss."""
    veto_prox_over_behavior: Bounds | None = None
    """Sequences with any ratio outside leave the loss."""

    denominator: Literal["pre", "post"] = "pre"
    """Whether loss weights count tokens and sequences before or after rejection; `post` takes a forward pass first."""

    @model_validator(mode="before")
    @classmethod
    def _put_in_preset(cls, values: Any) -> Any:
        return with_preset(values, CORRECTION_PRESETS)

    @property
    def bounds(self) -> Mapping[str, tuple[float, float]]:
        """The rejections that are on, by key."""
        by_key = {
            "reject_token_prox_over_behavior": self.reject_token_prox_over_behavior,
            "reject_sequence_prox_over_behavior": self.reject_sequence_prox_over_behavior,
            "reject_geometric_prox_over_behavior": self.reject_geometric_prox_over_behavior,
            "veto_prox_over_behavior": self.veto_prox_over_behavior,
        }
        return {key: bounds for key, bounds in by_key.items() if bounds is not None}

    @property
    def is_on(self) -> bool:
        """Whether anything is weighted or rejected."""
        return self.weight != "none" or bool(self.bounds)

    @property
    def is_measured(self) -> bool:
        """Whether the whole step is looked at before its first gradient."""
        return self.batch_normalize or self.denominator == "post"

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.denominator == "post" and not self.bounds:
            yield BrokenRule(
                values={"denominator": self.denominator},
                rule="without a rejection there is no difference between pre and post",
                fix="remove denominator, or set a bound such as reject_token_prox_over_behavior",
            )
        if self.batch_normalize and self.weight == "none":
            yield BrokenRule(
                values={"batch_normalize": True, "weight": self.weight},
                rule="batch_normalize divides weights, and there are none",
                fix="set weight to token or sequence, or remove batch_normalize",
            )
        for key, (low, high) in self.bounds.items():
            if not low <= 1.0 <= high or low == high:
                yield BrokenRule(
                    values={key: [low, high]},
                    rule="bounds are [low, high] around 1, the ratio of policies that agree",
                    fix="write them like [0.5, 2.0]",
                )
