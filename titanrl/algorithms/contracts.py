"""Protocols of policy losses, advantages and priorities, checks of user-defined ones, and losses by Tinker's names.

This module does not import torch.

Shape suffixes: N tokens of a micro-batch, G completions of one prompt.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from pydantic import ValidationError

from titanrl.base.arguments import shown
from titanrl.base.plugins import Plugin, Point, check_call, import_object, unwrapped
from titanrl.config.algorithm import ADVANTAGE_KEYS, LOSS_KEYS, LOSSES, AlgorithmConfig, LossTraits, Ratio
from titanrl.config.errors import BrokenRule, BrokenRules

if TYPE_CHECKING:
    from torch import Tensor


Function = TypeVar("Function", bound=Callable[..., Any])

LOSS_EXPECTED = "def loss(inputs: LossInputs, *, option: float = 1.0) -> Tensor"
PRIORITY_EXPECTED = "def priority(group: GroupRewards, advantages: Sequence[float]) -> float"
ADVANTAGE_EXPECTED = "def advantage(group: GroupRewards) -> Sequence[float] | Sequence[Sequence[float]]"
_TRAITS = "titanrl_loss_traits"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Inputs of a policy loss: one value per token of a micro-batch, `[N]`.

    Values outside `mask_N` are 0, so a loss does not have to handle prompts and padding.
    """

    logprobs_N: "Tensor"
    """Log-probability under the current policy, the only input that requires grad."""
    old_logprobs_N: "Tensor"
    """Log-probability under the policy in the denominator of the importance ratio, see `LossTraits.ratio`."""
    generator_logprobs_N: "Tensor"
    """Log-probability under the policy that sampled the token."""
    reference_logprobs_N: "Tensor | None"
    """Log-probability under the reference policy; None if `algorithm.kl.coef` is 0."""
    entropy_N: "Tensor"
    """Entropy of the current policy's distribution at the token, without gradient."""
    advantages_N: "Tensor"
    """Advantage of the token."""
    mask_N: "Tensor"
    """True at loss tokens: sampled tokens that contribute to the loss."""
    sequence_N: "Tensor"
    """Id of the token's sequence in the micro-batch, int64. `titanrl.algorithms.segments` reduces over sequences."""

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
        """Build the inputs of a loss, with 0 at masked tokens.

        Tokens whose old log-probability is not finite are masked. By default all tokens are unmasked and belong to one
        sequence, the old policy is also the sampler, and entropies are 0.
        """
        import torch

        finite_N = old_logprobs_N.isfinite()
        mask_N = finite_N if mask_N is None else mask_N & finite_N
        zeros_N = torch.zeros_like(old_logprobs_N)

        def masked(values_N: "Tensor") -> "Tensor":
            return torch.where(mask_N, values_N, 0.0)

        old_N = masked(old_logprobs_N)
        is_sampler = generator_logprobs_N is None or generator_logprobs_N is old_logprobs_N
        return cls(
            logprobs_N=masked(logprobs_N),
            old_logprobs_N=old_N,
            generator_logprobs_N=old_N if is_sampler or generator_logprobs_N is None else masked(generator_logprobs_N),
            reference_logprobs_N=None if reference_logprobs_N is None else masked(reference_logprobs_N),
            entropy_N=zeros_N if entropy_N is None else masked(entropy_N.detach()),
            advantages_N=masked(advantages_N),
            mask_N=mask_N,
            sequence_N=zeros_N.long() if sequence_N is None else sequence_N,
        )

    @property
    def log_ratio_N(self) -> "Tensor":
        """Log of the importance ratio, with gradient; 0 at masked tokens."""
        return self.logprobs_N - self.old_logprobs_N

    @property
    def ratio_N(self) -> "Tensor":
        """Importance ratio `exp(log_ratio_N)`, clamped to [exp(-20), exp(20)], beyond which it has no gradient; 1 at masked
        tokens."""
        from titanrl.algorithms.ratios import bounded_exp

        return bounded_exp(self.log_ratio_N)


class PolicyLoss(Protocol):
    """Policy loss: a function of a micro-batch that returns one loss per token, `[N]`.

    The objective (`titanrl.algorithms.objective`) weights and sums the losses of the unmasked tokens, applies the off-policy
    correction, and adds the KL and entropy terms. Parameters after the first are options. An option named like a key in
    `titanrl.config.algorithm.LOSS_KEYS` receives the value of that key of `algorithm`. Other options come from
    `algorithm.loss_options`.

    A loss may return a pair of the losses and a dict of additional per-token values for the metrics. The mean of a value `NAME`
    over the tokens is logged as `policy/NAME_mean`, or as `policy/NAME_frac` if it is a bool tensor. Values named `ratio` and
    `clip` replace those of the standard metrics: the importance ratio `ratio_N`, and False for all tokens.
    docs/howto/loss.md has an example.
    """

    def __call__(self, inputs: LossInputs, /) -> "Tensor | tuple[Tensor, Mapping[str, Tensor]]":
        """Return the loss of each token, or a pair of the losses and additional per-token values."""
        ...


def policy_loss(*, ratio: Ratio, zero_without_advantage: bool = False) -> Callable[[Function], Function]:
    """Declare properties of a policy loss that the validation of the configuration depends on.

    A loss without this decorator can only be used synchronously, without correction weights and without truncated sampling.

    Args:
        ratio: Denominator of the loss's importance ratio: `sampler` for the sampling policy, `proximal` for the policy that
            `algorithm.proximal` selects, `none` if the loss has no ratio.
        zero_without_advantage: True if the gradient is 0 wherever the advantage is 0. The trainer then skips such sequences.

    Raises:
        ValueError: `ratio` is none of these.
    """
    choices = ("sampler", "proximal", "none")
    if ratio not in choices:
        raise ValueError(f"policy_loss: ratio must be one of {', '.join(choices)} (got {ratio!r}). Correct it.")

    def declare(loss: Function) -> Function:
        setattr(loss, _TRAITS, LossTraits(ratio=ratio, zero_without_advantage=zero_without_advantage))
        return loss

    return declare


def declared_traits(loss: object) -> LossTraits | None:
    """Return the traits that `policy_loss` declared for a loss or for the function of a partial; None if undeclared."""
    traits: LossTraits | None = getattr(unwrapped(loss), _TRAITS, None)
    return traits


def loss_arguments(loss: Callable[..., Any], algorithm: AlgorithmConfig) -> dict[str, Any]:
    """Return the keyword arguments of a loss: the keys of `algorithm` that it takes, and `algorithm.loss_options`."""
    return _named(loss, LOSS_KEYS, algorithm) | algorithm.loss_options


def bound_loss(algorithm: AlgorithmConfig, custom: Callable[..., Any] | None = None) -> PolicyLoss:
    """Return the loss of a configuration, or a user-defined loss, with its options bound."""
    loss = import_object(LOSSES[algorithm.loss].path, key="algorithm.loss") if custom is None else custom
    bound: PolicyLoss = partial(loss, **loss_arguments(loss, algorithm))
    return bound if custom is None else partial(_named_in_errors, bound, algorithm.loss)


def _named_in_errors(loss: PolicyLoss, name: str, inputs: LossInputs) -> "Tensor | tuple[Tensor, Mapping[str, Tensor]]":
    try:
        return loss(inputs)
    except Exception as error:  # user-defined code may raise anything
        raise ValueError(f"algorithm.loss: {name} raised {type(error).__name__}: {error}. Correct the loss.") from error


def check_loss(
    loss: Any,
    *,
    name: str,
    algorithm: AlgorithmConfig,
    key: str = "algorithm.loss",
    options_key: str = "algorithm.loss_options",
) -> None:
    """Check that a user-defined object is a policy loss and takes the options in `algorithm.loss_options`.

    `name`, its import path or name, and the two configuration keys are for error messages. Raise `ValueError` if the object is
    not callable or does not accept the arguments.
    """
    options = option_names(loss) if callable(loss) else None
    for option, value in algorithm.loss_options.items():
        if options is not None and option not in options:
            fix = f"choose one of its options: {', '.join(options)}" if options else "remove it"
            values = {f"{options_key}.{option}": value, key: name}
            raise BrokenRules(BrokenRule(values, "the loss has no such option", fix))
    arguments = loss_arguments(loss, algorithm) if callable(loss) else ()
    check_call(loss, PolicyLoss.__call__, key=key, name=name, expected=LOSS_EXPECTED, options=arguments)


def checked_custom_loss(returned: object) -> "tuple[Tensor, Mapping[str, float]]":
    """Return what a custom loss returned, a scalar with gradient and metrics.

    Raise `TypeError` if it returned something else.
    """
    import torch

    fix = "Return (loss, metrics), with a scalar computed from the log-probabilities and a mapping of numbers."
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)):
        raise TypeError(f"loss: must return a pair of loss and metrics (got {shown(returned)}). {fix}")
    value, metrics = returned
    if not (isinstance(value, torch.Tensor) and value.numel() == 1 and (value.requires_grad or not torch.is_grad_enabled())):
        raise TypeError(f"loss: must return a scalar tensor with gradient (got {shown(value)}). {fix}")
    if own := sorted({"loss/policy", "loss:sum", "num_tokens"} & metrics.keys()):
        raise TypeError(f"loss: must not return metrics of the session's own names (got {own[0]}). Rename it.")
    return value, metrics


def _check_declared(loss: Any, plugin: Plugin, config: Any) -> None:
    check_loss(loss, name=plugin.name, algorithm=config.algorithm)
    config.with_loss_traits(declared_traits(loss) or LossTraits())


LOSS = Point(
    key="algorithm.loss", argument="loss", protocol=PolicyLoss.__call__, expected=LOSS_EXPECTED, checked=_check_declared
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRewards:
    """Rewards of all completions of one prompt, the input of an advantage. Each sequence has one entry per completion, `[G]`.

    Example: `GroupRewards(rewards=(1.0, 0.0), parts={"right": (1.0, 0.0)}, num_tokens=(12, 26), index=3)`
    """

    rewards: Sequence[float]
    """Summed reward of each completion."""
    parts: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Values of each reward component by name; NaN for completions without the component."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of each component in the summed reward."""
    num_tokens: Sequence[int] = ()
    """Number of loss tokens of each completion."""
    index: int = 0
    """Index of the prompt in the prompt stream."""
    turn_rewards: Sequence[Sequence[float]] = ()
    """Rewards of the turns of each completion. The last turn includes the reward of the completion."""
    turn_tokens: Sequence[Sequence[int]] = ()
    """Number of loss tokens of each turn; the turns of a completion sum to `num_tokens`."""
    turn_states: Sequence[Sequence[int]] = ()
    """State of the environment in which each turn was taken, as a hash; 0 if unknown, as without an environment."""
    token_rewards: Sequence[Sequence[float]] = ()
    """Rewards of the loss tokens of each completion. The last token of a turn includes the turn's reward, and the last token of
    a completion includes the completion's reward. Empty if no reward of the batch is a token reward."""


class Advantage(Protocol):
    """Advantage estimator: a function of the rewards of one group that returns one number per completion, `[G]`.

    It may instead return a list of numbers per completion: one per turn, or one per loss token. If the lengths match both, the
    numbers are taken as turn advantages.

    The controller calls it once per group and step. Parameters named `std_ddof`, `pass_k`, `turn_discount` or `token_discount`
    receive the values of these keys of `algorithm`.

    Example:
        def centred(group: GroupRewards) -> list[float]:
            mean = sum(group.rewards) / len(group.rewards)
            return [reward - mean for reward in group.rewards]
    """

    def __call__(self, group: GroupRewards, /) -> Sequence[float] | Sequence[Sequence[float]]:
        """Return the advantages of the completions, or for each completion the advantages of its turns or tokens."""
        ...


def advantage_arguments(advantage: Callable[..., Any], algorithm: AlgorithmConfig) -> dict[str, Any]:
    """Return the keys of `algorithm` that an advantage takes as parameters, with their values."""
    return _named(advantage, ADVANTAGE_KEYS, algorithm)


ADVANTAGE = Point(
    key="algorithm.advantage",
    argument="advantage",
    protocol=Advantage.__call__,
    expected=ADVANTAGE_EXPECTED,
    options=lambda advantage, config: advantage_arguments(advantage, config.algorithm),
    in_controller=True,
)


class Priority(Protocol):
    """Replay priority: a function that scores how useful it is to train on a group again.

    Example: `def hard(group, advantages): return 1.0 - sum(group.rewards) / len(group.rewards)`
    """

    def __call__(self, group: GroupRewards, advantages: Any, /) -> float:
        """Return the priority of a group that was just trained on. Only its absolute value is used."""
        ...


PRIORITY = Point(
    key="replay.priority", argument="priority", protocol=Priority.__call__, expected=PRIORITY_EXPECTED, in_controller=True
)


def _named(function: Callable[..., Any], keys: Sequence[str], algorithm: AlgorithmConfig) -> dict[str, Any]:
    options = option_names(function) or ()
    return {key: getattr(algorithm, key) for key in keys if key in options}


def option_names(function: Callable[..., Any]) -> list[str] | None:
    """Return the names of all parameters after the first; None if the function takes **kwargs or its signature is unknown."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[1:]
    except (TypeError, ValueError):  # some builtins have no signature
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL]


_RATIO_BOUNDS: Mapping[str, tuple[float, float]] = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0), "gspo": (1 - 3e-4, 1 + 4e-4)}
"""Default `clip_low_threshold` and `clip_high_threshold`, the bounds of the ratio itself. Tinker has no defaults for gspo, so
these are those of the GSPO paper (arXiv:2507.18071)."""
_TINKER_NAMES = {"clip_low": "clip_low_threshold", "clip_high": "clip_high_threshold", "dro_beta": "beta"}
"""Tinker's option names by key of `algorithm`."""


def tinker_algorithm(loss_fn: str, loss_fn_config: Mapping[str, Any]) -> AlgorithmConfig:
    """Return the configuration with which `policy_loss` computes a built-in loss, with the importance ratio to the sampler.

    The options are the keys of `algorithm` that the loss takes. Where Tinker has a name for a key, the option has that name.
    Raise `ValueError` if the loss or an option is unknown, or a value is invalid.
    """
    if loss_fn not in LOSSES:
        names = ", ".join(sorted([*LOSSES, "cross_entropy"]))
        raise ValueError(f"loss_fn: unknown loss (got {loss_fn!r}). Choose one of {names}, or an import path.")
    taken = loss_arguments(import_object(LOSSES[loss_fn].path, key="loss_fn"), AlgorithmConfig())
    keys = {_TINKER_NAMES.get(key, key): key for key in taken}
    for name, value in loss_fn_config.items():
        if name not in keys:
            options = ", ".join(sorted(keys)) or "none"
            raise ValueError(f"loss_fn_config.{name}: {loss_fn} has no such option (got {value}). Its options: {options}.")
    values: dict[str, Any] = {"loss": loss_fn}
    values |= {keys[name]: value for name, value in loss_fn_config.items() if name in taken or name == "beta"}
    # Tinker's thresholds bound the ratio; our keys are distances from 1.
    if loss_fn in _RATIO_BOUNDS:
        low, high = _RATIO_BOUNDS[loss_fn]
        bounds = {"clip_low_threshold": low, "clip_high_threshold": high}
        for name in bounds.keys() & loss_fn_config.keys():
            if not isinstance(loss_fn_config[name], int | float):
                raise ValueError(f"loss_fn_config.{name}: must be a number (got {loss_fn_config[name]!r}).")
            bounds[name] = loss_fn_config[name]
        values["clip_low"], values["clip_high"] = 1.0 - bounds["clip_low_threshold"], bounds["clip_high_threshold"] - 1.0
    return _validated(values, loss_fn_config, {key: name for name, key in keys.items()})


def _validated(values: Mapping[str, Any], given: Mapping[str, Any], names: Mapping[str, str]) -> AlgorithmConfig:
    """Return a configuration; `names` are those of the options that `given` has, by key, for the message of a `ValueError`."""
    try:
        return AlgorithmConfig.model_validate(values)
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        key = ".".join(map(str, details["loc"]))
        name = names.get(key, key)
        text = details["msg"].removeprefix("Value error, ")
        bound = f" for {key}, its distance from 1" if name.endswith("_threshold") else ""
        raise ValueError(f"loss_fn_config.{name}: {text}{bound} (got {given.get(name, details['input'])}).") from None


def custom_algorithm(
    loss: Callable[..., Any], traits: LossTraits, name: str, loss_fn_config: Mapping[str, Any]
) -> AlgorithmConfig:
    """Return the configuration with which `policy_loss` computes a user-defined loss.

    Options that are keys of `algorithm` set these keys. The others become `algorithm.loss_options`. Raise `ValueError` if the
    loss does not take one of the options.
    """
    keys = {key: value for key, value in loss_fn_config.items() if key in LOSS_KEYS}
    options = {key: value for key, value in loss_fn_config.items() if key not in LOSS_KEYS}
    algorithm = _validated({"loss": name, "loss_options": options, **keys}, loss_fn_config, {}).with_loss_traits(traits)
    check_loss(loss, name=name, algorithm=algorithm, key="loss_fn", options_key="loss_fn_config")
    return algorithm
