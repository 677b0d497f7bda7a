"""The section `distill`: on-policy distillation, and the keys of other sections that it does not use."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from titanrl.config.choices import Dtype
from titanrl.config.errors import BrokenRule
from titanrl.config.section import Bytes, Count, Decay, FilePath, Processes, Section

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
"""Keys, by section, that have no effect on a distillation; a value other than the default is an error."""


class TeacherConfig(Section):
    """The teacher, served by one vLLM engine with processes of its own."""

    path: FilePath
    """Directory of a model in Hugging Face format with the vocabulary of the policy."""
    tp: Processes = 1
    """Tensor-parallel degree of the engine."""
    dtype: Dtype = "float32"
    """Data type of the weights."""
    max_num_seqs: Count = 256
    """Maximum number of sequences that the engine processes concurrently."""
    kv_cache_bytes: Bytes = 64 << 20
    """KV-cache size on CPU. On accelerators vLLM's `gpu_memory_utilization` sets it."""
    vllm: dict[str, Any] = {}
    """Additional `vllm.EngineArgs`."""


class DistillConfig(Section):
    """On-policy distillation (`titanrl distill`): the policy samples, and a teacher's log-probabilities of its tokens are the
    reward."""

    teacher: TeacherConfig
    """The teacher."""
    loss: Literal["importance_sampling", "ppo"] = "importance_sampling"
    """Policy loss; `ppo` clips the ratio of policy to sampling policy to 1 +- 0.2."""
    discount: Decay = 0.0
    """Factor per token for later tokens in the advantage of a token; 0 counts only the token's own log-probabilities."""


def unused_keys(sections: Mapping[str, Section]) -> Iterator[BrokenRule]:
    """Yield the keys of other sections that were set although a distillation does not use them.

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
                    rule="distillation does not use this key: its advantages are differences of log-probabilities",
                    fix=f"remove {name}.{key}",
                )
