"""The section `distill`: on-policy distillation, and the keys of other sections that it does not use."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from titanrl.base.choices import Dtype
from titanrl.config.errors import BrokenRule
from titanrl.config.section import Bytes, Count, Decay, InputPath, Processes, Section

UNUSED: Mapping[str, tuple[str, ...]] = {
    "rollout": ("top_p", "top_k", "min_p", "dynamic_sampling", "window", "num_spare_completions"),
    "replay": ("fraction",),
    "algorithm": (
        *(
            "preset",
            "advantage",
            "std_ddof",
            "pass_k",
            "loss",
            "loss_options",
            "proximal",
            "clip_low",
            "clip_high",
            "dual_clip",
        ),
        *("dro_beta", "sapo_temperatures", "kl", "ema_decay", "entropy_coef", "correction", "reduction", "constant_length"),
        "updates_per_publish",
    ),
}
"""Keys by section that distillation does not use. Setting one to a value other than its default is an error."""


class TeacherConfig(Section):
    """The teacher model, served by a separate vLLM engine."""

    path: InputPath
    """Directory of the teacher in Hugging Face format. Its vocabulary must be the policy's."""
    tp: Processes = 1
    """Tensor-parallel degree of the teacher's engine."""
    dtype: Dtype = "float32"
    """Data type of the teacher's weights."""
    max_num_seqs: Count = 256
    """Maximum number of sequences that the engine processes concurrently."""
    kv_cache_bytes: Bytes = 64 << 20
    """KV-cache size in bytes. CPU only; on accelerators set `gpu_memory_utilization` in `vllm`."""
    vllm: dict[str, Any] = {}
    """Additional arguments of `vllm.EngineArgs`."""


class DistillConfig(Section):
    """On-policy distillation (`titanrl distill`). The policy samples completions, and the teacher's log-probabilities of their
    tokens serve as the reward."""

    teacher: TeacherConfig
    """The teacher model."""
    loss: Literal["importance_sampling", "ppo"] = "importance_sampling"
    """Policy loss. `ppo` clips the ratio of the policy to the sampling policy to 1 +- 0.2."""
    discount: Decay = 0.0
    """Discount factor per token for the log-probability differences of later tokens in a token's advantage. With 0, only the
    token's own difference counts."""


def unused_keys(sections: Mapping[str, Section]) -> Iterator[BrokenRule]:
    """Yield a rule for each key that is set although distillation does not use it.

    Args:
        sections: The sections of `UNUSED`, by name.
    """
    for name, keys in UNUSED.items():
        section = sections[name]
        for key in keys:
            value, default = getattr(section, key), type(section).model_fields[key].get_default()
            if value != default:
                yield BrokenRule(
                    values={f"{name}.{key}": value},
                    rule="distillation does not use this key, because its advantages come from the teacher's log-probabilities",
                    fix=f"remove {name}.{key}",
                )
