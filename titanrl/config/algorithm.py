"""The section `algorithm`: objective and optimizer of the policy, with its presets, and the built-in losses and advantages.

A built-in is plain data: its import path, and the traits that the rules depend on. Checking a configuration imports no torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import Field, NonNegativeFloat, PositiveFloat, PrivateAttr, model_validator

from titanrl.config.errors import BrokenRule
from titanrl.config.sections import (
    LIVE,
    Count,
    Decay,
    Fraction,
    LearningRateDecay,
    OrImportPath,
    Section,
    Share,
    Steps,
    StepsOrZero,
    Tokens,
)

Traits = TypeVar("Traits")
Proximal = Literal["sampler", "step_start", "interval_start"]
Reduction = Literal["sum", "token_mean", "sequence_mean", "sequence_mean_token_sum", "prompt_mean", "constant"]
KLEstimator = Literal["k1", "k2", "k3", "k3_straight_through"]
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
    has_critic: bool = False
    """True if advantages are computed from the values of a critic, which the trainer then trains, too."""


_LOSSES, _ADVANTAGES = "titanrl.algorithms.losses", "titanrl.algorithms.advantages"

LOSSES: Mapping[str, BuiltIn[LossTraits]] = {
    "ppo": BuiltIn(f"{_LOSSES}:ppo", LossTraits(ratio="proximal", zero_without_advantage=True)),
    "importance_sampling": BuiltIn(f"{_LOSSES}:importance_sampling", LossTraits(ratio="sampler", zero_without_advantage=True)),
    "reinforce": BuiltIn(f"{_LOSSES}:reinforce", LossTraits(ratio="none", zero_without_advantage=True)),
    "gspo": BuiltIn(f"{_LOSSES}:gspo", LossTraits(ratio="proximal", zero_without_advantage=True)),
    "cispo": BuiltIn(f"{_LOSSES}:cispo", LossTraits(ratio="proximal", zero_without_advantage=True)),
    "dro": BuiltIn(f"{_LOSSES}:dro", LossTraits(ratio="sampler")),
    "sapo": BuiltIn(f"{_LOSSES}:sapo", LossTraits(ratio="proximal", zero_without_advantage=True)),
    "dppo_tv": BuiltIn(f"{_LOSSES}:dppo_tv", LossTraits(ratio="proximal", zero_without_advantage=True)),
    "dppo_kl": BuiltIn(f"{_LOSSES}:dppo_kl", LossTraits(ratio="proximal", zero_without_advantage=True)),
    "clip_cov": BuiltIn(f"{_LOSSES}:clip_cov", LossTraits(ratio="proximal")),
    "kl_cov": BuiltIn(f"{_LOSSES}:kl_cov", LossTraits(ratio="proximal")),
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
    "gae": BuiltIn("titanrl.algorithms.gae:gae", AdvantageTraits(keeps_equal_rewards=True, has_critic=True)),
}
"""Values of `algorithm.advantage`."""

CUSTOM_ADVANTAGE = AdvantageTraits(keeps_equal_rewards=True)
"""Traits of a custom advantage estimator, which may depend on more than rewards."""

KEYS_OF_LOSSES: Mapping[str, tuple[str, ...]] = {
    "dual_clip": ("ppo",),
    "dro_beta": ("dro",),
    "sapo_temperatures": ("sapo",),
    "dppo_threshold": ("dppo_tv", "dppo_kl"),
    "cov_share": ("clip_cov", "kl_cov"),
    "clip_cov_bounds": ("clip_cov",),
    "kl_cov_coef": ("kl_cov",),
}
"""Keys that only some of the losses have, and these losses."""
LOSS_KEYS = ("clip_low", "clip_high", *KEYS_OF_LOSSES)
"""Keys passed to a loss that has a parameter of the same name."""
ADVANTAGE_KEYS = ("std_ddof", "pass_k", "turn_discount", "token_discount")
"""Keys passed to an advantage estimator that has a parameter of the same name."""

Bounds = Annotated[tuple[PositiveFloat, PositiveFloat], Field(strict=False)]

ALGORITHM_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"advantage": "grpo", "loss": "ppo", "clip_low": 0.2, "clip_high": 0.2, "reduction": "sequence_mean"},
    "dr_grpo": {"advantage": "dr_grpo", "loss": "ppo", "clip_low": 0.2, "clip_high": 0.2, "reduction": "constant"},
    "dapo": {"advantage": "grpo", "loss": "ppo", "clip_low": 0.2, "clip_high": 0.28, "reduction": "token_mean"},
    "gspo": {"advantage": "grpo", "loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "reduction": "sequence_mean"},
    "cispo": {"advantage": "grpo", "loss": "cispo", "clip_low": 1.0, "clip_high": 3.0, "reduction": "token_mean"},
    "sapo": {"advantage": "grpo", "loss": "sapo", "sapo_temperatures": [1.0, 1.05], "reduction": "sequence_mean"},
    "ppo": {"advantage": "gae", "loss": "ppo", "clip_low": 0.2, "clip_high": 0.2, "reduction": "token_mean"},
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
        """Version under which the trainer stores the reference policy: `INITIAL` or `AVERAGE`."""
        return INITIAL if self.reference == "initial" else AVERAGE

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.coef and self.place == "loss" and self.estimator == "k1":
            rule = "as a loss, k1 has an expected gradient of zero, so it only adds noise"
            yield self.broken("estimator place", rule, "set estimator to k3_straight_through, or place to reward")
        if self.coef and self.place == "reward" and self.estimator != "k1":
            rule = "a KL penalty in the reward requires the unbiased estimator k1"
            yield self.broken("estimator place", rule, "set estimator to k1, or place to loss")


class CriticConfig(Section):
    """Critic of `advantage: gae`: a second model in the trainer's processes, which predicts the return at each token.

    It starts as a copy of the policy with a head of one output, which is zero. All of its parameters are trained.
    """

    learning_rate: PositiveFloat = 1e-5
    """Learning rate of the critic, which is constant. The other options of AdamW are those of `algorithm`."""
    max_grad_norm: PositiveFloat = 1.0
    """Maximum global norm of the critic's gradient; larger gradients are scaled down to it."""
    token_lambda: Share = 1.0
    """GAE's lambda between two tokens of a turn: 1 uses the rewards of all later tokens, 0 only the value of the next token."""
    turn_lambda: Share = 0.95
    """GAE's lambda between the last token of a turn and the next turn."""
    value_clip: PositiveFloat | None = 0.2
    """Maximum change of a token's value per step: beyond it, the critic's loss has no gradient, unless it grew. Null does not
    clip."""
    standardize: bool = True
    """Subtract the mean of the advantages over the tokens of the batch, and divide by their standard deviation."""
    bootstrap_truncated: bool = True
    """Add the value after the last token to the return of a completion or episode that was cut at its length limit. `false`
    treats the cut as an end, as a task with a fixed limit requires."""
    warmup_steps: StepsOrZero = 0
    """Number of steps at the start of the run in which only the critic is trained."""


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
        return {key: bounds for key, bounds in self if key.startswith(("reject_", "veto_")) and bounds is not None}

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
            rule = "denominator: post has an effect only if a rejection is enabled"
            fix = "remove denominator, or set a bound such as reject_token_prox_over_behavior"
            yield self.broken("denominator", rule, fix)
        if self.batch_normalize and self.weight == "none":
            rule = "batch_normalize normalizes importance weights, so weight must not be none"
            yield self.broken("batch_normalize weight", rule, "set weight to token or sequence, or remove batch_normalize")
        for key, (low, high) in self.bounds.items():
            if not low <= 1.0 <= high or low == high:
                rule = "bounds must be [low, high] with low <= 1 <= high and low < high"
                yield self.broken(key, rule, "write them like [0.5, 2.0]")


class AlgorithmConfig(Section):
    """Objective and optimizer of the policy."""

    preset: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "ppo"] | None = None
    """Published algorithm to take defaults of this section from (docs/algorithms.md). Keys that you set override it; null uses
    the defaults below."""
    advantage: Annotated[str, OrImportPath(tuple(ADVANTAGES))] = "dr_grpo"
    """Advantage estimator (docs/algorithms.md). `dr_grpo` subtracts the group's mean reward; `grpo` also divides by the group's
    standard deviation, `maxrl` by the group's mean. `rloo` subtracts the mean of the other completions. `reinforce_pp`
    standardizes rewards over the batch; `reinforce_pp_baseline` subtracts the group's mean first. `pass_at_k` optimizes the
    best of `pass_k` completions. `gdpo` applies `grpo` to each part of the reward and standardizes their weighted sum over the
    batch. `gae` compares with the values of a critic, per token (docs/howto/critic.md). Or the import path of a custom
    estimator (docs/howto/advantage.md)."""
    std_ddof: Literal[0, 1] = 0
    """Delta degrees of freedom of the standard deviation in `grpo` and, for each part of the reward, in `gdpo`; 1 is the
    unbiased estimate."""
    pass_k: Count | None = None
    """Value of k for `advantage: pass_at_k`."""
    credit: Literal["rollout", "turn", "state", "token"] = "rollout"
    """Unit of credit assignment. `rollout` gives all tokens of a completion the same advantage. `turn` compares each turn's
    discounted return with those of the same turn in the group's other completions. `state` compares it with the returns of
    the group's turns in the same state of the environment (GiGPO). `token` compares the discounted returns, from rewards per
    token, of the tokens at the same place in the group's completions (docs/algorithms.md)."""
    state_weight: NonNegativeFloat = 1.0
    """Weight of the comparison between turns in the same state, which is added to that between completions, with `credit:
    state`."""
    turn_discount: Share = 1.0
    """Discount factor per later turn in the return of a turn, with `credit: turn` or `state`, `advantage: gae` or a custom
    advantage."""
    token_discount: Share = 1.0
    """Discount factor per later token in the return of a token, with `credit: token`, `advantage: gae` or a custom
    advantage."""
    loss: Annotated[str, OrImportPath(tuple(LOSSES))] = "ppo"
    """Per-token policy loss (docs/algorithms.md), or the import path of a custom loss (docs/howto/loss.md)."""
    loss_options: dict[str, Any] = {}
    """Additional keyword arguments of the loss, for parameters that are not keys of this section."""
    proximal: Proximal = "sampler"
    """Policy in the denominator of the importance ratio of `ppo`, `gspo`, `cispo` and `sapo`: `sampler` is the policy that
    sampled the token, `step_start` the policy at the start of the step, `interval_start` the last published policy. With the
    latter two, `correction` covers the remaining ratio to the sampling policy (decoupled PPO)."""
    clip_low: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    """Lower clip range: the ratio is clipped below 1 - clip_low."""
    clip_high: PositiveFloat = 0.2
    """Upper clip range: the ratio is clipped above 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """Dual-clip PPO: upper bound of the ratio for negative advantages. 3 is common; null disables it."""
    dro_beta: PositiveFloat = 0.05
    """Weight of the squared log-ratio in the loss `dro`."""
    sapo_temperatures: Annotated[tuple[PositiveFloat, PositiveFloat], Field(strict=False)] = (1.0, 1.05)
    """Gate temperatures of the loss `sapo` for positive and negative advantages."""
    dppo_threshold: PositiveFloat | None = None
    """Divergence from the policy in the denominator of the ratio beyond which the losses `dppo_tv` and `dppo_kl` mask a token;
    null uses 0.15 and 0.05."""
    cov_share: Fraction = 2e-4
    """Share of the tokens that the losses `clip_cov` and `kl_cov` select by covariance."""
    clip_cov_bounds: Bounds = (1.0, 5.0)
    """Covariances between which `clip_cov` selects tokens."""
    kl_cov_coef: PositiveFloat = 1.0
    """Coefficient of the penalty on the tokens that `kl_cov` selects."""
    critic: CriticConfig = CriticConfig()
    """Critic, with `advantage: gae`."""
    kl: KLConfig = KLConfig()
    """KL penalty toward a reference policy."""
    ema_decay: Fraction | None = None
    """Decay of an exponential moving average of the weights: the share of the average that each optimizer step keeps, such as
    0.99. `kl.reference: ema` uses it as the reference policy. Null keeps no average."""
    entropy_coef: NonNegativeFloat = 0.0
    """Coefficient of the entropy bonus, which is subtracted from each token's loss; 0 disables it. With `entropy_target`, the
    coefficient to start from."""
    entropy_target: Annotated[PositiveFloat | None, LIVE] = None
    """Entropy of the policy, in nats per token, that the entropy bonus keeps up (docs/algorithms.md): each step raises the
    coefficient by `entropy_delta` if the entropy of the previous step was lower, and lowers it otherwise, down to 0. Above the
    target there is no bonus. Null keeps `entropy_coef` constant."""
    entropy_delta: Annotated[PositiveFloat, LIVE] = 0.005
    """Change of the entropy bonus's coefficient per step, with `entropy_target`."""
    correction: CorrectionConfig = CorrectionConfig()
    """Off-policy correction."""
    mask_truncated: bool = False
    """Exclude completions that were cut at `rollout.max_new_tokens` from the loss and its normalization, like DAPO's overlong
    filtering. Their rewards still count in the group's baseline."""
    reduction: Reduction = "token_mean"
    """Aggregation of token losses into a scalar (docs/algorithms.md). It is normalized over the whole batch, so the result does
    not depend on micro-batches or ranks."""
    constant_length: Tokens | None = None
    """Divisor of each sequence's loss sum with `reduction: constant`; null uses `rollout.max_new_tokens`."""
    learning_rate: Annotated[PositiveFloat, LIVE] = 1e-6
    """Peak learning rate."""
    num_warmup_steps: Annotated[StepsOrZero, LIVE] = 0
    """Number of linear learning-rate warm-up steps."""
    lr_decay: Annotated[LearningRateDecay, LIVE] = "constant"
    """Learning-rate schedule after the warm-up: `constant`, or `linear` or `cosine` decay to zero at the last step."""
    num_decay_steps: Annotated[Steps | None, LIVE] = None
    """Number of last steps in which the rate decays, after a constant phase (warmup-stable-decay); null decays from the end of
    the warm-up."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Optimizer. `muon` orthogonalizes the updates of the two-dimensional weights of the layers, scaled to the size of AdamW's,
    so that the same learning rate fits both; AdamW updates the other weights."""
    muon_momentum: Fraction = 0.95
    """Momentum of Muon."""
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    weight_decay: Annotated[NonNegativeFloat, LIVE] = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: Annotated[PositiveFloat, LIVE] = 1.0
    """Maximum global gradient norm; larger gradients are scaled down to it."""
    updates_per_publish: Count = 1
    """Number of steps between two publications of weights to the generators. Each step trains on its own batch of
    `rollout.groups_per_step` groups. Must divide `num_steps`."""
    max_skipped_steps: Count = 10
    """Number of consecutive optimizer steps that may be skipped because of a non-finite gradient of the policy or the critic.
    The run then ends with an error. Skipped steps do not count towards `num_steps`."""
    _declared: LossTraits | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _put_in_preset(cls, values: Any) -> Any:
        return with_preset(values, ALGORITHM_PRESETS)

    def with_loss_traits(self, traits: LossTraits) -> Self:
        """Return a copy with the traits that a custom loss declares."""
        algorithm = self.model_copy()
        algorithm._declared = traits
        return algorithm

    @property
    def loss_traits(self) -> LossTraits:
        """Properties of the loss; those of a custom loss are undeclared until it is loaded."""
        return LOSSES[self.loss].traits if self.loss in LOSSES else self._declared or LossTraits()

    @property
    def knows_loss(self) -> bool:
        """True if the loss is built in or has been loaded, so that rules about its ratio can be checked."""
        return self.loss in LOSSES or self._declared is not None

    @property
    def advantage_traits(self) -> AdvantageTraits:
        """Properties of the advantage estimator."""
        return ADVANTAGES[self.advantage].traits if self.advantage in ADVANTAGES else CUSTOM_ADVANTAGE

    @property
    def has_critic(self) -> bool:
        """True if a critic is trained, whose values the advantages are computed from."""
        return self.advantage_traits.has_critic

    @property
    def ratio_starts_at_sampler(self) -> bool:
        """True if the loss contains the importance ratio of the policy to the sampling policy."""
        ratio = self.loss_traits.ratio
        return ratio == "sampler" or (ratio == "proximal" and self.proximal == "sampler")

    @property
    def divides_by_proximal(self) -> bool:
        """True if the denominator of the loss's ratio is a proximal policy other than the sampler."""
        return self.proximal != "sampler" and self.loss_traits.ratio in ("proximal", "undeclared")

    @property
    def has_entropy_bonus(self) -> bool:
        """True if the objective has an entropy bonus, whose coefficient may be 0 in some steps."""
        return self.entropy_coef > 0 or self.entropy_target is not None

    @property
    def runs_without_advantage(self) -> bool:
        """True if sequences with advantage 0 need a forward pass, because they have a gradient or contribute to batch
        statistics."""
        has_gradient = not self.loss_traits.zero_without_advantage or self.has_critic
        return self.kl.coef > 0 or self.has_entropy_bonus or self.correction.is_measured or has_gradient

    @property
    def trains_on_equal_rewards(self) -> bool:
        """True if groups whose rewards are all equal need a forward pass."""
        return self.runs_without_advantage or self.advantage_traits.keeps_equal_rewards

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.constant_length is not None and self.reduction != "constant":
            yield self.broken(
                "constant_length reduction",
                "constant_length is allowed only when reduction is constant",
                "remove constant_length, or set algorithm.reduction to constant",
            )
        yield from self.broken_pass_k()
        if self.num_decay_steps is not None and self.lr_decay == "constant":
            rule = "a constant rate does not decay"
            yield self.broken("num_decay_steps lr_decay", rule, "set lr_decay to linear or cosine, or remove num_decay_steps")
        if self.clip_cov_bounds[0] >= self.clip_cov_bounds[1]:
            yield self.broken("clip_cov_bounds", "the first bound must be below the second", "write them like [1.0, 5.0]")
        if self.entropy_target is None and self.changed("entropy_delta"):
            rule = "entropy_delta has an effect only with entropy_target"
            yield self.broken("entropy_delta entropy_target", rule, "set entropy_target, or remove entropy_delta")
        if self.kl.reference == "ema" and self.ema_decay is None:
            yield self.broken(
                "ema_decay kl.reference",
                "kl.reference: ema requires a moving average of the weights",
                "set algorithm.ema_decay, for example to 0.99, or algorithm.kl.reference to initial",
            )
        is_custom = self.advantage not in ADVANTAGES
        if self.credit != "rollout" and is_custom:
            rule = "a custom advantage selects the unit of credit by what it returns (docs/howto/advantage.md)"
            yield self.broken("credit advantage", rule, "remove credit")
        elif self.credit != "rollout" and self.has_critic:
            rule = "gae assigns credit to each token by itself"
            yield self.broken("credit advantage", rule, "remove credit; see critic.turn_lambda and critic.token_lambda")
        elif self.credit == "state" and self.advantage == "reinforce_pp":
            rule = "reinforce_pp has no baseline, so there is nothing that turns in the same state could be compared with"
            yield self.broken("credit advantage", rule, "set advantage to grpo, dr_grpo, rloo, maxrl or reinforce_pp_baseline")
        elif self.credit != "rollout" and self.advantage in ("pass_at_k", "gdpo"):
            rule = f"{self.advantage} compares whole completions, so credit must be rollout"
            fix = "remove credit, or set advantage to dr_grpo, grpo, rloo, maxrl, reinforce_pp or reinforce_pp_baseline"
            yield self.broken("credit advantage", rule, fix)
        for unit, discount in (("turn", self.turn_discount), ("token", self.token_discount)):
            units = ("turn", "state") if unit == "turn" else (unit,)
            if discount != 1.0 and self.credit not in units and not is_custom and not self.has_critic:
                rule = f"{unit}_discount has an effect only with credit: {unit}"
                yield self.broken(f"{unit}_discount credit", rule, f"set credit to {unit}, or remove {unit}_discount")
        if self.state_weight != 1.0 and self.credit != "state":
            rule = "state_weight has an effect only with credit: state"
            yield self.broken("state_weight credit", rule, "set credit to state, or remove state_weight")
        if not self.has_critic and self.critic != CriticConfig():
            unused = [f"critic.{key}" for key in self.critic.changed(*CriticConfig.model_fields)]
            rule = "only advantage: gae has a critic"
            yield self.broken(" ".join(["advantage", *unused]), rule, "set advantage to gae, or remove the keys of critic")
        for key in LOSS_KEYS:
            if key in self.loss_options:
                rule = f"{key} is a key of algorithm, which already passes it to the loss"
                yield self.broken(f"loss_options.{key}", rule, f"set algorithm.{key} instead")
        known = LOSSES[self.loss].options if self.loss in LOSSES else tuple(self.loss_options)
        for key in self.loss_options.keys() - {*known, *LOSS_KEYS}:
            yield BrokenRule(
                {f"loss_options.{key}": self.loss_options[key], "loss": self.loss},
                f"the loss {self.loss} has no such option",
                f"choose one of its options: {', '.join(known)}" if known else "remove it",
            )
        for key in self.changed(*KEYS_OF_LOSSES) if self.loss in LOSSES else ():
            if self.loss not in KEYS_OF_LOSSES[key]:
                allowed = " or ".join(KEYS_OF_LOSSES[key])
                rule = f"{key} is allowed only when loss is {allowed}"
                yield self.broken(f"{key} loss", rule, f"remove {key}, or set algorithm.loss to {allowed}")
        if self.optimizer != "muon" and self.changed("muon_momentum"):
            rule = "muon_momentum is allowed only when optimizer is muon"
            yield self.broken("muon_momentum optimizer", rule, "remove muon_momentum, or set algorithm.optimizer to muon")

    def broken_pass_k(self, prefix: str = "") -> Iterator[BrokenRule]:
        """Yield a rule if `pass_k` does not fit the advantage. `prefix` is prepended to the keys, for the settings of one
        task."""
        if self.advantage in ADVANTAGES and (self.pass_k is None) == (self.advantage == "pass_at_k"):
            yield BrokenRule(
                {f"{prefix}pass_k": self.pass_k, f"{prefix}advantage": self.advantage},
                "pass_k is required when advantage is pass_at_k, and allowed only then",
                "set pass_k to the number of completions to take the best of"
                if self.pass_k is None
                else "remove pass_k, or set advantage to pass_at_k",
            )
