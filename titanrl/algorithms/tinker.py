"""Tinker's names of losses and of their options as our configuration."""

from collections.abc import Mapping

from titanrl.config.sections import AlgorithmConfig

_RATIO_BOUNDS: Mapping[str, tuple[float, float]] = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0), "gspo": (1 - 3e-4, 1 + 4e-4)}
"""Default `clip_low_threshold` and `clip_high_threshold`, bounds of the ratio itself; Tinker states none for gspo, these are
its paper's."""
_OPTIONS: Mapping[str, frozenset[str]] = {
    **{loss: frozenset({"clip_low_threshold", "clip_high_threshold"}) for loss in _RATIO_BOUNDS},
    "dro": frozenset({"beta"}),
    "importance_sampling": frozenset(),
}


def tinker_algorithm(loss_fn: str, loss_fn_config: Mapping[str, float]) -> AlgorithmConfig:
    """The configuration under which `policy_loss` is one of Tinker's losses, each anchored at the sampler.

    Raises ValueError if there is no such loss, or it has no such option or value.
    """
    if loss_fn not in _OPTIONS:
        raise ValueError(f"loss_fn={loss_fn}: must be one of {', '.join(sorted(_OPTIONS))}")
    odd = sorted(loss_fn_config.keys() - _OPTIONS[loss_fn])
    if odd:
        options = ", ".join(sorted(_OPTIONS[loss_fn])) or "none"
        raise ValueError(f"loss_fn_config.{odd[0]}: {loss_fn} has no such option; its options: {options}")
    values: dict[str, object] = {"loss": loss_fn}
    if loss_fn in _RATIO_BOUNDS:
        low, high = _RATIO_BOUNDS[loss_fn]
        values["clip_low"] = 1.0 - loss_fn_config.get("clip_low_threshold", low)
        values["clip_high"] = loss_fn_config.get("clip_high_threshold", high) - 1.0
    if "beta" in loss_fn_config:
        values["dro_beta"] = loss_fn_config["beta"]
    return AlgorithmConfig.model_validate(values)
