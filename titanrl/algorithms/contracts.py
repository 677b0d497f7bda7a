"""Protocols of the losses and advantages that a configuration can name. Importing this module does not import torch.

Shape suffixes: N tokens of a micro-batch, G completions of one prompt.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from titanrl.config.algorithm import ADVANTAGE_KEYS, LOSS_KEYS, AlgorithmConfig
from titanrl.config.errors import BrokenRule, BrokenRules
from titanrl.config.registry import LOSSES, LossTraits, Ratio
from titanrl.loading import import_object
from titanrl.plugins import check_call, unwrapped

if TYPE_CHECKING:
    from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])

LOSS_EXPECTED = "def loss(inputs: LossInputs, *, option: float = 1.0) -> Tensor"
ADVANTAGE_EXPECTED = "def advantage(group: GroupRewards) -> Sequence[float] | Sequence[Sequence[float]]"
_TRAITS = "titanrl_loss_traits"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Inputs of a policy loss: one value per token of a micro-batch, `[N]`.

    Values outside `mask_N` are 0, so that a loss does not have to treat prompts and padding.
    """

    logprobs_N: "Tensor"
    """Log-probability under the policy being trained, the only input with a gradient."""
    old_logprobs_N: "Tensor"
    """Log-probability under the policy in the denominator of the ratio, see `LossTraits.ratio`."""
    generator_logprobs_N: "Tensor"
    """Log-probability under the policy that sampled the token."""
    reference_logprobs_N: "Tensor | None"
    """Log-probability under the reference policy; None if `algorithm.kl.coef` is 0."""
    entropy_N: "Tensor"
    """Entropy of the distribution of the policy being trained."""
    advantages_N: "Tensor"
    """Advantage of the token's sequence."""
    mask_N: "Tensor"
    """True at the tokens that count."""
    sequence_N: "Tensor"
    """Id of the token's sequence in the micro-batch, an int64; `titanrl.algorithms.segments` sums over sequences."""

    @classmethod
    def of(
        cls,
        logprobs_N: "Tensor",
        old_logprobs_N: "Tensor",
        advantages_N: "Tensor",
        *,
        mask_N: "Tensor | None" = None,
        sequence_N: "Tensor | None" = None,
        generator_logprobs_N: "Tensor | None" = None,
        reference_logprobs_N: "Tensor | None" = None,
        entropy_N: "Tensor | None" = None,
    ) -> Self:
        """Build the inputs of a loss, with 0 at masked tokens and at those without a finite old log-probability.

        By default every token counts, all belong to one sequence, the old policy is the sampler, and entropies are 0.
        """
        import torch

        finite_N = old_logprobs_N.isfinite()
        mask_N = finite_N if mask_N is None else mask_N & finite_N
        zeros_N = torch.zeros_like(old_logprobs_N)

        def counted(values_N: "Tensor") -> "Tensor":
            return torch.where(mask_N, values_N, 0.0)

        old_N = counted(old_logprobs_N)
        samples_old = generator_logprobs_N is None or generator_logprobs_N is old_logprobs_N
        return cls(
            logprobs_N=counted(logprobs_N),
            old_logprobs_N=old_N,
            generator_logprobs_N=old_N if samples_old or generator_logprobs_N is None else counted(generator_logprobs_N),
            reference_logprobs_N=None if reference_logprobs_N is None else counted(reference_logprobs_N),
            entropy_N=zeros_N if entropy_N is None else counted(entropy_N.detach()),
            advantages_N=counted(advantages_N),
            mask_N=mask_N,
            sequence_N=zeros_N.long() if sequence_N is None else sequence_N,
        )

    @property
    def log_ratio_N(self) -> "Tensor":
        """Logarithm of the importance ratio, with gradient; 0 at masked tokens."""
        return self.logprobs_N - self.old_logprobs_N

    @property
    def ratio_N(self) -> "Tensor":
        """Importance ratio, with gradient and within exp(-20) and exp(20); 1 at masked tokens."""
        from titanrl.algorithms.ratios import bounded_exp

        return bounded_exp(self.log_ratio_N)


class PolicyLoss(Protocol):
    """A policy loss: a function of a micro-batch that returns one loss per token, `[N]`.

    The framework does the rest: it weights and sums the losses of the tokens that count, applies the off-policy correction,
    and adds divergence and entropy. Parameters after the first are options: those named like a key of `algorithm` (`clip_low`,
    `clip_high`, `dual_clip`, `dro_beta`, `sapo_temperatures`) get its value, others that of `algorithm.loss_options`.

    A loss may return a pair: the losses, and further values per token for the metrics. The mean of `NAME` over the tokens
    becomes `policy/NAME_mean`, for flags `policy/NAME_frac`. `ratio` and `clip` replace the values computed from `ratio_N`.

    Example:
        @titanrl.policy_loss(ratio="proximal", zero_without_advantage=True)
        def clipped(inputs: LossInputs, *, clip_high: float, floor: float = 0.5) -> torch.Tensor:
            return -inputs.ratio_N.clamp(floor, 1 + clip_high) * inputs.advantages_N
    """

    def __call__(self, inputs: LossInputs, /) -> "Tensor | tuple[Tensor, Mapping[str, Tensor]]":
        """Return the loss of each token, or a pair of the losses and further values per token."""
        ...


def policy_loss(*, ratio: Ratio, zero_without_advantage: bool = False) -> Callable[[Function], Function]:
    """Declare the traits of a policy loss, which the rules of the configuration depend on.

    Without this decorator a loss is trained synchronously, without correction weights and with untruncated sampling only.

    Args:
        ratio: `sampler` if the loss contains the ratio of the policy to the sampling policy, `proximal` if that to the policy
            that `algorithm.proximal` selects, `none` without a ratio.
        zero_without_advantage: True if the gradient is 0 where the advantage is 0. Such sequences are then left out.
    """

    def declare(loss: Function) -> Function:
        setattr(loss, _TRAITS, LossTraits(ratio=ratio, zero_without_advantage=zero_without_advantage))
        return loss

    return declare


def declared_traits(loss: object) -> LossTraits | None:
    """Return the traits that `policy_loss` declared for a loss, or for a partial's function; None without a declaration."""
    traits: LossTraits | None = getattr(unwrapped(loss), _TRAITS, None)
    return traits


def loss_arguments(loss: Callable[..., Any], algorithm: AlgorithmConfig) -> dict[str, Any]:
    """Return the options of a loss: the keys of `algorithm` that it has parameters for, and `loss_options`."""
    return _named(loss, LOSS_KEYS, algorithm) | algorithm.loss_options


def bound_loss(algorithm: AlgorithmConfig, own: Callable[..., Any] | None = None) -> PolicyLoss:
    """Return the loss of a configuration with its options.

    Args:
        algorithm: Name of the loss, and its options.
        own: Loss of the user; None selects the built-in one of that name.
    """
    loss = import_object(LOSSES[algorithm.loss].path, key="algorithm.loss") if own is None else own
    bound: PolicyLoss = partial(loss, **loss_arguments(loss, algorithm))
    return bound if own is None else partial(_named_in_errors, bound, algorithm.loss)


def _named_in_errors(loss: PolicyLoss, name: str, inputs: LossInputs) -> "Tensor | tuple[Tensor, Mapping[str, Tensor]]":
    try:
        return loss(inputs)
    except Exception as error:  # the loss is the user's and may raise anything
        raise ValueError(f"algorithm.loss: {name} raised {type(error).__name__}: {error}. Correct the loss.") from error


def check_loss(
    loss: Any,
    *,
    name: str,
    algorithm: AlgorithmConfig,
    key: str = "algorithm.loss",
    options_key: str = "algorithm.loss_options",
) -> None:
    """Check that an object is a policy loss, and has the options that `algorithm.loss_options` sets.

    Args:
        loss: Object of the user.
        name: Import path or name of the object.
        algorithm: Options of the loss.
        key: Key of the loss, for error messages.
        options_key: Key of the options, for error messages.

    Raises:
        ValueError: It is not callable, or does not accept the arguments.
    """
    options = option_names(loss) if callable(loss) else None
    if options is not None:
        for option, value in algorithm.loss_options.items():
            if option not in options:
                fix = f"choose one of its options: {', '.join(options)}" if options else "remove it"
                values = {f"{options_key}.{option}": value, key: name}
                raise BrokenRules(BrokenRule(values=values, rule="the loss has no such option", fix=fix))
    arguments = loss_arguments(loss, algorithm) if callable(loss) else ()
    check_call(loss, PolicyLoss.__call__, key=key, name=name, expected=LOSS_EXPECTED, options=arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRewards:
    """The rewards of one prompt's completions, for an advantage. Sequences have one value per completion, `[G]`.

    Example: `GroupRewards(rewards=(1.0, 0.0), parts={"right": (1.0, 0.0)}, num_tokens=(12, 26), index=3)`
    """

    rewards: Sequence[float]
    """Summed reward of each completion."""
    parts: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Values of each part of the reward; NaN where a completion does not have the part."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Factor of each part in the summed reward."""
    num_tokens: Sequence[int] = ()
    """Sampled tokens of each completion that count in the loss."""
    index: int = 0
    """Position of the prompt in the stream."""
    turn_rewards: Sequence[Sequence[float]] = ()
    """Rewards of the turns of each completion; that of the completion as a whole is part of its last turn's."""
    turn_tokens: Sequence[Sequence[int]] = ()
    """Sampled tokens of each turn that count in the loss; they add up to `num_tokens`."""
    token_rewards: Sequence[Sequence[float]] = ()
    """Rewards of the tokens of each completion that count in the loss, those of turns and of the completion as a whole as part
    of the last token's; empty if no reward of the batch is one of tokens."""


class Advantage(Protocol):
    """An advantage: a function of the rewards of one group that returns one number per completion, `[G]`.

    It may also return a list of numbers for each completion: one per turn, or one per token that counts in the loss. If both
    fit, they are those of turns.

    It runs in the controller, once per group and step. Parameters named `std_ddof`, `pass_k`, `turn_discount` or
    `token_discount` get these keys of `algorithm`.

    Example:
        def centred(group: GroupRewards) -> list[float]:
            mean = sum(group.rewards) / len(group.rewards)
            return [reward - mean for reward in group.rewards]
    """

    def __call__(self, group: GroupRewards, /) -> Sequence[float] | Sequence[Sequence[float]]:
        """Return the advantages of the group's completions, of their turns, or of their tokens."""
        ...


def advantage_arguments(advantage: Callable[..., Any], algorithm: AlgorithmConfig) -> dict[str, Any]:
    """Return the keys of `algorithm` that an advantage has parameters for."""
    return _named(advantage, ADVANTAGE_KEYS, algorithm)


def check_advantage(advantage: Any, *, name: str, algorithm: AlgorithmConfig) -> None:
    """Check that an object is an advantage.

    Raises:
        ValueError: It is not callable, or does not accept the arguments.
    """
    arguments = advantage_arguments(advantage, algorithm) if callable(advantage) else ()
    expected = ADVANTAGE_EXPECTED
    check_call(advantage, Advantage.__call__, key="algorithm.advantage", name=name, expected=expected, options=arguments)


def _named(function: Callable[..., Any], keys: Sequence[str], algorithm: AlgorithmConfig) -> dict[str, Any]:
    options = option_names(function) or ()
    return {key: getattr(algorithm, key) for key in keys if key in options}


def option_names(function: Callable[..., Any]) -> list[str] | None:
    """Return the names of the parameters after the first; None if any name is accepted or the signature is unknown."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[1:]
    except (TypeError, ValueError):  # some builtins have no signature
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL]
