"""The subsections of `algorithm` for the KL penalty and the off-policy correction, and the presets."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from titanrl.base.choices import KLEstimator
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
    """Return the values of a section, with the values of its preset as defaults."""
    name = values.get("preset") if isinstance(values, dict) else None
    return {**presets[name], **values} if isinstance(name, str) and name in presets else values


INITIAL, AVERAGE = 0, -1
"""Versions under which the trainer stores the reference policies: the initial weights, and their moving average."""


class KLConfig(Section):
    """KL penalty toward a reference policy, estimated on the sampled tokens. In the formulas below, u = log policy - log
    reference."""

    coef: NonNegativeFloat = 0.0
    """Coefficient of the KL penalty. 0 disables it, and no reference policy is kept."""
    reference: Literal["initial", "ema"] = "initial"
    """Reference policy: `initial` is the weights at the start of the run, `ema` their exponential moving average
    (`algorithm.ema_decay`)."""
    estimator: KLEstimator = "k3_straight_through"
    """Estimator of the KL divergence: k1 = u, k2 = u^2 / 2, k3 = exp(-u) - 1 + u. `k3_straight_through` has the value of k3 and
    the unbiased gradient of k2."""
    place: Literal["loss", "reward"] = "loss"
    """`loss` adds the penalty to the loss. `reward` reduces each token's advantage by `coef` times the sum of k1 over this and
    all later tokens."""
    importance_weighted: bool = True
    """Weight each token's KL loss by the ratio of the policy to the sampling policy, which corrects for stale tokens."""

    @property
    def reference_version(self) -> int:
        """Version under which the trainer stores the reference policy."""
        return INITIAL if self.reference == "initial" else AVERAGE

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.coef and self.place == "loss" and self.estimator == "k1":
            yield BrokenRule(
                values={"estimator": self.estimator, "place": self.place},
                rule="as a loss, k1 has an expected gradient of zero, so it only adds noise",
                fix="set estimator to k3_straight_through, or place to reward",
            )
        if self.coef and self.place == "reward" and self.estimator != "k1":
            yield BrokenRule(
                values={"estimator": self.estimator, "place": self.place},
                rule="a KL penalty in the reward requires the unbiased estimator k1",
                fix="set estimator to k1, or place to loss",
            )


class CorrectionConfig(Section):
    """Off-policy correction: importance weights, and rejection of tokens or sequences by their probability ratio.

    The ratio is `prox_over_behavior`: the token's probability under the proximal policy (`algorithm.proximal`), divided by its
    probability under the sampling policy. With `proximal: sampler`, the current policy takes the place of the proximal policy.
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
    """Published recipe to take defaults of this section from (docs/algorithms.md). Keys that you set override it; null uses the
    defaults below."""
    weight: Literal["none", "token", "sequence"] = "none"
    """Truncated importance sampling: multiply each token's loss by its own ratio (`token`), or by the product of the ratios of
    its sequence (`sequence`)."""
    max_prox_over_behavior: PositiveFloat = 2.0
    """Upper bound of the importance weights of `weight`."""
    batch_normalize: bool = False
    """Divide the importance weights by their mean over the batch of the step, per token or per sequence. Requires an extra
    forward pass."""
    reject_token_prox_over_behavior: Bounds | None = None
    """Reject tokens whose ratio is outside these bounds `[low, high]`; null rejects none."""
    reject_sequence_prox_over_behavior: Bounds | None = None
    """Reject sequences whose product of ratios is outside these bounds; null rejects none."""
    reject_geometric_prox_over_behavior: Bounds | None = None
    """Reject sequences whose geometric mean of ratios is outside these bounds; null rejects none."""
    veto_prox_over_behavior: Bounds | None = None
    """Reject sequences in which any token's ratio is outside these bounds; null rejects none."""
    denominator: Literal["pre", "post"] = "pre"
    """Token and sequence counts that normalize the loss: before (`pre`) or after (`post`) rejection. `post` requires an extra
    forward pass."""

    @model_validator(mode="before")
    @classmethod
    def _put_in_preset(cls, values: Any) -> Any:
        return with_preset(values, CORRECTION_PRESETS)

    @property
    def bounds(self) -> Mapping[str, tuple[float, float]]:
        """Bounds of the enabled rejections, by key."""
        by_key = {
            "reject_token_prox_over_behavior": self.reject_token_prox_over_behavior,
            "reject_sequence_prox_over_behavior": self.reject_sequence_prox_over_behavior,
            "reject_geometric_prox_over_behavior": self.reject_geometric_prox_over_behavior,
            "veto_prox_over_behavior": self.veto_prox_over_behavior,
        }
        return {key: bounds for key, bounds in by_key.items() if bounds is not None}

    @property
    def is_on(self) -> bool:
        """True if any weight or rejection is enabled."""
        return self.weight != "none" or bool(self.bounds)

    @property
    def is_measured(self) -> bool:
        """True if statistics of the whole step are needed before its first gradient."""
        return self.batch_normalize or self.denominator == "post"

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.denominator == "post" and not self.bounds:
            yield BrokenRule(
                values={"denominator": self.denominator},
                rule="denominator: post has an effect only if a rejection is enabled",
                fix="remove denominator, or set a bound such as reject_token_prox_over_behavior",
            )
        if self.batch_normalize and self.weight == "none":
            yield BrokenRule(
                values={"batch_normalize": True, "weight": self.weight},
                rule="batch_normalize normalizes importance weights, so weight must not be none",
                fix="set weight to token or sequence, or remove batch_normalize",
            )
        for key, (low, high) in self.bounds.items():
            if not low <= 1.0 <= high or low == high:
                yield BrokenRule(
                    values={key: [low, high]},
                    rule="bounds must be [low, high] with low <= 1 <= high and low < high",
                    fix="write them like [0.5, 2.0]",
                )
