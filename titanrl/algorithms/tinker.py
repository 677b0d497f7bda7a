"""Translate Tinker's `loss_fn` and `loss_fn_config` to an `AlgorithmConfig`, for losses on user-provided data."""

from collections.abc import Callable, Mapping
from typing import Any

from titanrl.algorithms.contracts import check_loss, loss_arguments
from titanrl.base.loading import import_object
from titanrl.config.algorithm import LOSS_KEYS, LOSSES, AlgorithmConfig, LossTraits

_RATIO_BOUNDS: Mapping[str, tuple[float, float]] = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0), "gspo": (1 - 3e-4, 1 + 4e-4)}
"""Default `clip_low_threshold` and `clip_high_threshold`, the bounds of the ratio itself. Tinker has no defaults for gspo, so
these are those of the GSPO paper (arXiv:2507.18071)."""
_TINKER_NAMES = {"clip_low": "clip_low_threshold", "clip_high": "clip_high_threshold", "dro_beta": "beta"}
"""Tinker's option names by key of `algorithm`."""


def tinker_algorithm(loss_fn: str, loss_fn_config: Mapping[str, Any]) -> AlgorithmConfig:
    """Return the configuration with which `policy_loss` computes a built-in loss, with the importance ratio to the sampler.

    The options are the keys of `algorithm` that the loss takes. Where Tinker has a name for a key, the option has that name.

    Raises:
        ValueError: The loss or an option is unknown, or a value is invalid.
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
        values["clip_low"] = 1.0 - loss_fn_config.get("clip_low_threshold", low)
        values["clip_high"] = loss_fn_config.get("clip_high_threshold", high) - 1.0
    return AlgorithmConfig.model_validate(values)


def custom_algorithm(
    loss: Callable[..., Any], traits: LossTraits, name: str, loss_fn_config: Mapping[str, Any]
) -> AlgorithmConfig:
    """Return the configuration with which `policy_loss` computes a user-defined loss.

    Args:
        loss: User-defined loss.
        traits: Declared traits of the loss.
        name: Import path or name of the loss, for error messages.
        loss_fn_config: Options of the loss: keys of `algorithm` by name, and others as in `algorithm.loss_options`.

    Raises:
        ValueError: The loss does not take one of the options.
    """
    keys = {key: value for key, value in loss_fn_config.items() if key in LOSS_KEYS}
    options = {key: value for key, value in loss_fn_config.items() if key not in LOSS_KEYS}
    algorithm = AlgorithmConfig.model_validate({"loss": name, "loss_options": options, **keys}).with_loss_traits(traits)
    check_loss(loss, name=name, algorithm=algorithm, key="loss_fn", options_key="loss_fn_config")
    return algorithm
