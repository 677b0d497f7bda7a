"""`ModelFamily`: the properties of an architecture that training, serving and preflight checks need; limits of vLLM.

This module imports neither torch nor torchtitan, because the dry run uses it. The functions of a family import them when they
are called.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from titanrl.config.device import DeviceKind
from titanrl.config.sections import Dtype, RecipeConfig
from titanrl.config.sizes import ModelShape

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec
    from torchtitan.protocols.module import Module

HFConfig = Mapping[str, Any]
"""Contents of a `config.json`, completed with the family's defaults."""
Projections = Literal["attention", "mlp"]
CPU_HEAD_DIMS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head dimensions for which vLLM 0.32.0 has a CPU attention kernel."""
CPU_BLOCK_TOKENS = 32
"""Block size of the KV cache on CPU, in tokens. It is the smallest size vLLM accepts, so that short prompts share blocks."""
PACKED_MULTIPLE = 32
"""Multiple that the sizes of experts must be on each rank of vLLM's own model on a CPU; vLLM would pad them."""
LOAD_FORMAT = "titanrl"
"""Value of vLLM's option `load_format` with which vLLM gets the weights from `titanrl.generator.native`."""


@dataclass(frozen=True, slots=True)
class VllmName:
    """Parameter of vLLM's native model that a trainer tensor is loaded into, for `generator.model_impl: native`.

    Example: the key projection is `VllmName("model.layers.{}.self_attn.qkv_proj.weight", part="k", dim=0)`
    """

    parameter: str
    """Name of vLLM's parameter, with `{}` for the layer index."""
    part: Literal["q", "k", "v", "gate", "up", "vocab"] | None = None
    """Rows of the parameter that hold the tensor: one projection of a fused parameter, or `vocab` for an embedding without its
    padding. None selects all rows."""
    dim: int | None = None
    """Dimension that tensor parallelism shards; None if the tensor is replicated, or if `part` is `vocab`."""
    axis: int = 0
    """Dimension of the rows that `part` selects; 1 for experts, whose first dimension is their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """Definition of a model family: everything that is specific to one `model_type` of Hugging Face.

    `titanrl.models.dense.dense_family` builds families that consist of torchtitan's dense decoder blocks.
    docs/howto/model_families.md describes how to add a family.
    """

    model_type: str
    """Value of `model_type` in config.json."""
    problems: Callable[[HFConfig], list[str]]
    """Function that returns an error message `key: what is wrong (got value). Fix.` for each unsupported option."""
    shape: Callable[[HFConfig], ModelShape]
    """Function that returns the sizes of the model."""
    spec: Callable[[HFConfig, "Module.Config", int], "ModelSpec"]
    """Function that returns torchtitan's spec: model, parallelization and state-dict adapter. Its arguments are the config, the
    inner attention, and the maximum number of positions in the run, which may be lower than that of the model."""
    vllm_names: Mapping[str, VllmName]
    """Parameters of vLLM's native model by trainer tensor name, with `{}` for the layer index."""
    lora_targets: Mapping[Projections, tuple[str, ...]]
    """torchtitan's module names of the linear layers that each value of `trainer.lora.targets` selects."""
    vllm_lora_modules: Mapping[Projections, tuple[str, ...]] = field(default_factory=dict)
    """The same layers' module names in vLLM's model, for `weights.lora: adapters`; empty if vLLM's model has no adapters."""
    tensors: Callable[[HFConfig], Mapping[str, tuple[int, ...]]] | None = None
    """Function that returns the shapes of all tensors of a checkpoint by Hugging Face name, so that the dry run can compare
    them with the weight files. With None, they are first compared when the trainer loads them."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of transformers for keys that config.json may omit."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Further keys of config.json that must be positive integers, and their largest values."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names that config.json may have for some keys, and the names of these keys."""
    renderer: str | None = None
    """Renderer that `data.environment.renderer: auto` selects: `template`, or a name from the package `renderers`; None if
    unknown."""
    recipe: Callable[[RecipeConfig], dict[str, Any]] | None = None
    """Function that returns the config.json of a tiny model; None if `model.recipe` cannot build this family."""
    published: Mapping[str, ModelShape] = field(default_factory=dict)
    """Sizes of published models by Hugging Face hub id, for a dry run before the download."""

    def completed(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return the contents of a config.json, completed with the defaults of transformers for missing keys."""
        hf: dict[str, Any] = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, **self.defaults, **raw}
        hf |= {key: raw[alias] for alias, key in self.aliases.items() if alias in raw and key not in raw}
        hidden, heads = hf.get("hidden_size"), hf.get("num_attention_heads")
        if hf.get("num_key_value_heads") is None:
            hf["num_key_value_heads"] = heads
        if hf.get("head_dim") is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
            hf["head_dim"] = hidden // heads
        return hf


def vllm_problems(
    hf_config: HFConfig,
    *,
    device: DeviceKind,
    dtype: Dtype,
    tp: int,
    kv_cache_bytes: int,
    max_len: int,
) -> list[str]:
    """Return an error message for each reason why vLLM cannot serve a model. Only the CPU backend has such limits.

    `kv_cache_bytes` is the total over the ranks of a replica, and `max_len` the longest prompt plus completion, in tokens.
    """
    if device != "cpu":
        return []
    problems = []
    head_dim = hf_config["head_dim"]
    if head_dim not in CPU_HEAD_DIMS:
        supported = ", ".join(map(str, CPU_HEAD_DIMS))
        problems.append(
            f"head_dim: vLLM has no CPU attention kernel for this head size (got {head_dim}). Use a model with {supported}."
        )
    bytes_per_value = {"float32": 4, "bfloat16": 2}[dtype]
    values_per_token = 2 * hf_config["num_hidden_layers"] * (hf_config["num_key_value_heads"] // tp) * head_dim
    num_blocks = -(-max_len // CPU_BLOCK_TOKENS) + 1  # vLLM reserves one block
    needed_bytes = tp * num_blocks * CPU_BLOCK_TOKENS * values_per_token * bytes_per_value
    if kv_cache_bytes < needed_bytes:
        problems.append(
            f"kv_cache_bytes: too small for one sequence of {max_len} tokens (got {kv_cache_bytes}). "
            f"Set it to at least {needed_bytes}."
        )
    return problems
