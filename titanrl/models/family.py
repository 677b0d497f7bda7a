"""`ModelFamily`: the properties of an architecture that training, serving and preflight checks need.

This module imports neither torch nor torchtitan, because the dry run uses it. The functions of a family import them when they
are called.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from titanrl.config.sections import RecipeConfig
from titanrl.config.sizes import ModelShape

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec
    from torchtitan.protocols.module import Module

HFConfig = Mapping[str, Any]
"""Contents of a `config.json`, completed with the family's defaults."""
Projections = Literal["attention", "mlp"]


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
    tensors: Callable[[HFConfig], Mapping[str, tuple[int, ...]]] | None = None
    """Function that returns the shapes of all tensors of a checkpoint by Hugging Face name, so that the dry run can compare
    them with the weight files. With None, they are first compared when the trainer loads them."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of transformers for keys that config.json may omit."""
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
        hidden, heads = hf.get("hidden_size"), hf.get("num_attention_heads")
        if hf.get("num_key_value_heads") is None:
            hf["num_key_value_heads"] = heads
        if hf.get("head_dim") is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
            hf["head_dim"] = hidden // heads
        return hf
