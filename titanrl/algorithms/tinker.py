"""Tinker's names of losses and of their options, translated to our configuration."""

from collections.abc import Mapping

from titanrl.config.sections import AlgorithmConfig

_RATIO_BOUNDS: Mapping[str, tuple[float, float]] = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0), "gspo": (1 - 3e-4, 1 + 4e-4)}
"""Default `clip_low_threshold` and `clip_high_threshold`: bounds of the ratio itself. Tinker gives no bounds for gspo; these
are the paper's."""
_OPTIONS: Mapping[str, frozenset[str]] = {
    **{loss: frozenset({"clip_low_threshold", "clip_high_threshold"}) for loss in _RATIO_BOUNDS},
    "dro": frozenset({"beta"}),
    "importance_sampling": frozenset(),
}


def tinker_algorithm(loss_fn: str, loss_fn_config: Mapping[str, float]) -> AlgorithmConfig:
    """Return the configuration under which `policy_loss` computes one of Tinker's losses, with its ratio to the sampler.

    Raises:
        ValueError: The loss, an option or its value is not known.
    """
    if loss_fn not in _OPTIONS:
        names = ", ".join(sorted(_OPTIONS))
        raise ValueError(f"loss_fn: unknown loss (got {loss_fn!r}). Choose one of {names}.")
    unknown = sorted(loss_fn_config.keys() - _OPTIONS[loss_fn])
    if unknown:
        options = ", ".join(sorted(_OPTIONS[loss_fn])) or "none"
        name = unknown[0]
        raise ValueError(
            f"loss_fn_config.{name}: {loss_fn} has no such option (got {loss_fn_config[name]}). Its options: {options}."
        )
    values: dict[str, object] = {"loss": loss_fn}
    if loss_fn in _RATIO_BOUNDS:
        low, high = _RATIO_BOUNDS[loss_fn]
        values["clip_low"] = 1.0 - loss_fn_config.get("clip_low_threshold", low)
        values["clip_high"] = loss_fn_config.get("clip_high_threshold", high) - 1.0
    if "beta" in loss_fn_config:
        values["dro_beta"] = loss_fn_config["beta"]
    return AlgorithmConfig.model_validate(values)
