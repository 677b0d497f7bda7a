"""The section `algorithm`: objective and optimizer of the policy."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PrivateAttr, model_validator

from titanrl.config.choices import LearningRateDecay, Proximal, Reduction
from titanrl.config.errors import BrokenRule
from titanrl.config.objective import ALGORITHM_PRESETS, CorrectionConfig, KLConfig, with_preset
from titanrl.config.registry import ADVANTAGES, LOSSES, OWN_ADVANTAGE, AdvantageTraits, LossTraits
from titanrl.config.section import Count, Decay, Fraction, OrImportPath, Section, Share, StepsOrZero, Tokens

LOSS_KEYS = ("clip_low", "clip_high", "dual_clip", "dro_beta", "sapo_temperatures")
"""Keys that a loss gets if it has a parameter of the same name."""
ADVANTAGE_KEYS = ("std_ddof", "pass_k", "turn_discount", "token_discount")
"""Keys that an advantage gets if it has a parameter of the same name."""


class AlgorithmConfig(Section):
    """Objective and optimizer of the policy."""

    preset: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo"] | None = None
    """Published algorithm whose values become the defaults of this section (docs/algorithms.md)."""
    advantage: Annotated[str, OrImportPath(tuple(ADVANTAGES))] = "dr_grpo"
    """Advantage estimator. `dr_grpo` subtracts the group's mean reward; `grpo` also divides by the group's standard deviation,
    `maxrl` by the group's mean. `rloo` subtracts the mean of the other completions. `reinforce_pp` standardizes rewards over
    the batch; `reinforce_pp_baseline` subtracts the group's mean first. `pass_at_k` optimizes the best of `pass_k`
    completions. `gdpo` applies `grpo` to every part of the reward and scales the weighted sum over the batch. Also an import
    path of your own (docs/howto/advantage.md)."""
    std_ddof: Literal[0, 1] = 0
    """Delta degrees of freedom of the standard deviation in `advantage: grpo`, and of each part in `gdpo`."""
    pass_k: Count | None = None
    """Value of k for `advantage: pass_at_k`."""
    credit: Literal["rollout", "turn", "token"] = "rollout"
    """Unit of the advantage: `rollout` gives all tokens of a completion the same one. `turn` compares, for each turn, its
    discounted return with those of the same turn of the group's other completions. `token` does so for each token, with the
    rewards of tokens that a reward returns (docs/algorithms.md)."""
    turn_discount: Share = 1.0
    """Discount of the return of a turn per later turn, with `credit: turn` or an advantage of your own."""
    token_discount: Share = 1.0
    """Discount of the return of a token per later token, with `credit: token` or an advantage of your own."""
    loss: Annotated[str, OrImportPath(tuple(LOSSES))] = "ppo"
    """Per-token policy loss (docs/algorithms.md), or the import path of your own (docs/howto/loss.md)."""
    loss_options: dict[str, Any] = {}
    """Keyword arguments of the loss, in addition to the keys of this section that it has parameters for."""
    proximal: Proximal = "sampler"
    """Denominator of the ratio in `ppo`, `gspo`, `cispo` and `sapo`: the sampling policy, the policy at the start of the step,
    or the last published policy. `correction` covers the gap from the sampling policy to it (decoupled PPO)."""
    clip_low: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    """Lower clip range: the ratio is clipped below 1 - clip_low."""
    clip_high: PositiveFloat = 0.2
    """Upper clip range: the ratio is clipped above 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """Dual-clip PPO: upper bound of the ratio for negative advantages; 3 is common, null disables it."""
    dro_beta: PositiveFloat = 0.05
    """Weight of the squared log-ratio in `dro`."""
    sapo_temperatures: Annotated[tuple[PositiveFloat, PositiveFloat], Field(strict=False)] = (1.0, 1.05)
    """Gate temperatures of `sapo` for positive and negative advantages."""
    kl: KLConfig = KLConfig()
    """KL divergence from the reference policy."""
    ema_decay: Fraction | None = None
    """Keep an exponential moving average of the weights, of which each optimizer step keeps this share, such as 0.99; null
    keeps none. It is the reference policy with `kl.reference: ema`."""
    entropy_coef: NonNegativeFloat = 0.0
    """Entropy bonus: each token's loss is reduced by this value times the entropy of its distribution."""
    correction: CorrectionConfig = CorrectionConfig()
    """Off-policy correction."""
    mask_truncated: bool = False
    """Leave completions that were cut at `rollout.max_new_tokens` out of the loss and of its counts, as DAPO's overlong
    filtering. Their rewards stay in the baseline of the group."""
    reduction: Reduction = "token_mean"
    """Reduction of token losses to a scalar (docs/algorithms.md). Its weights use counts over the whole batch, so the result
    does not depend on micro-batches or ranks."""
    constant_length: Tokens | None = None
    """Divisor of each sequence's sum in `reduction: constant`; null means `rollout.max_new_tokens`."""
    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate."""
    num_warmup_steps: StepsOrZero = 0
    """Number of steps of linear learning-rate warm-up."""
    lr_decay: LearningRateDecay = "constant"
    """Schedule after the warm-up: constant, or linear decay to zero at the last step."""
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """Maximum global gradient norm; larger gradients are scaled down to it."""
    updates_per_publish: Count = 1
    """Number of steps, each on a batch of `rollout.groups_per_step` groups, per version published to the generators."""
    max_skipped_steps: Count = 10
    """Maximum number of consecutive optimizer steps skipped because of a non-finite gradient; then the run ends."""
    _declared: LossTraits | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _put_in_preset(cls, values: Any) -> Any:
        return with_preset(values, ALGORITHM_PRESETS)

    def with_loss_traits(self, traits: LossTraits) -> Self:
        """Return a copy that has the declared traits of a loss of the user."""
        algorithm = self.model_copy()
        algorithm._declared = traits
        return algorithm

    @property
    def loss_traits(self) -> LossTraits:
        """Properties of the loss; nothing is declared for a loss of the user that has not been loaded."""
        return LOSSES[self.loss].traits if self.loss in LOSSES else self._declared or LossTraits()

    @property
    def knows_loss(self) -> bool:
        """True if the loss is built-in or has been loaded, so that rules about its ratio can be checked."""
        return self.loss in LOSSES or self._declared is not None

    @property
    def advantage_traits(self) -> AdvantageTraits:
        """Properties of the advantage."""
        return ADVANTAGES[self.advantage].traits if self.advantage in ADVANTAGES else OWN_ADVANTAGE

    @property
    def ratio_starts_at_sampler(self) -> bool:
        """True if the loss contains the importance ratio of policy to sampling policy."""
        ratio = self.loss_traits.ratio
        return ratio == "sampler" or (ratio == "proximal" and self.proximal == "sampler")

    @property
    def divides_by_proximal(self) -> bool:
        """True if a proximal policy other than the sampler is in the denominator of the loss's ratio."""
        return self.proximal != "sampler" and self.loss_traits.ratio in ("proximal", "undeclared")

    @property
    def runs_without_advantage(self) -> bool:
        """True if sequences with advantage 0 need a forward pass, because they have a gradient or enter batch statistics."""
        has_gradient = not self.loss_traits.zero_without_advantage
        return self.kl.coef > 0 or self.entropy_coef > 0 or self.correction.is_measured or has_gradient

    @property
    def trains_on_equal_rewards(self) -> bool:
        """True if groups whose rewards are all equal need a forward pass."""
        return self.runs_without_advantage or self.advantage_traits.keeps_equal_rewards

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.constant_length is not None and self.reduction != "constant":
            yield BrokenRule(
                values={"constant_length": self.constant_length, "reduction": self.reduction},
                rule="constant_length is allowed only when reduction is constant",
                fix="remove constant_length, or set algorithm.reduction to constant",
            )
        yield from self.broken_pass_k()
        if self.correction.denominator == "post" and self.reduction == "prompt_mean":
            yield BrokenRule(
                values={"correction.denominator": "post", "reduction": self.reduction},
                rule="the tokens of a prompt are spread over ranks, and no rank can count those that rejection keeps",
                fix="set correction.denominator to pre, or reduction to sequence_mean",
            )
        if self.kl.reference == "ema" and self.ema_decay is None:
            yield BrokenRule(
                values={"ema_decay": self.ema_decay, "kl.reference": self.kl.reference},
                rule="the reference policy ema is the moving average that ema_decay keeps",
                fix="set ema_decay, for example to 0.99, or kl.reference to initial",
            )
        yield from self._broken_by_credit()
        yield from self._broken_by_loss_options()

    def broken_pass_k(self, prefix: str = "") -> Iterator[BrokenRule]:
        """Yield a rule if `pass_k` does not fit the advantage. `prefix` comes before the keys, for the settings of one task."""
        if self.advantage in ADVANTAGES and (self.pass_k is None) == (self.advantage == "pass_at_k"):
            yield BrokenRule(
                values={f"{prefix}pass_k": self.pass_k, f"{prefix}advantage": self.advantage},
                rule="pass_k is required when advantage is pass_at_k, and allowed only then",
                fix="set pass_k to the number of completions to take the best of"
                if self.pass_k is None
                else "remove pass_k, or set advantage to pass_at_k",
            )

    def _broken_by_credit(self) -> Iterator[BrokenRule]:
        is_own = self.advantage not in ADVANTAGES
        if self.credit != "rollout" and (is_own or self.advantage in ("pass_at_k", "gdpo")):
            yield BrokenRule(
                values={"credit": self.credit, "advantage": self.advantage},
                rule="an advantage of your own decides by what it returns (docs/howto/advantage.md)"
                if is_own
                else f"{self.advantage} compares whole completions",
                fix="remove credit" if is_own else "set advantage to dr_grpo, grpo, rloo, maxrl or one of reinforce_pp",
            )
        for unit, discount in (("turn", self.turn_discount), ("token", self.token_discount)):
            if discount != 1.0 and self.credit != unit and not is_own:
                yield BrokenRule(
                    values={f"{unit}_discount": discount, "credit": self.credit},
                    rule=f"only the returns of {unit}s are discounted by it",
                    fix=f"set credit to {unit}, or remove {unit}_discount",
                )

    def _broken_by_loss_options(self) -> Iterator[BrokenRule]:
        for key in LOSS_KEYS:
            if key in self.loss_options:
                yield BrokenRule(
                    values={f"loss_options.{key}": self.loss_options[key]},
                    rule=f"algorithm has a key {key} of its own, which losses get, too",
                    fix=f"set algorithm.{key} instead",
                )
        known = LOSSES[self.loss].options if self.loss in LOSSES else tuple(self.loss_options)
        for key in self.loss_options.keys() - {*known, *LOSS_KEYS}:
            yield BrokenRule(
                values={f"loss_options.{key}": self.loss_options[key], "loss": self.loss},
                rule="the loss has no such option",
                fix=f"choose one of its options: {', '.join(known)}" if known else "remove it",
            )
        if self.dual_clip is not None and self.loss in LOSSES and self.loss != "ppo":
            yield BrokenRule(
                values={"dual_clip": self.dual_clip, "loss": self.loss},
                rule="dual_clip is allowed only when loss is ppo",
                fix="remove dual_clip, or set algorithm.loss to ppo",
            )
