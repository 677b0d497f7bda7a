"""Model families: the facts about an architecture that training, serving and the checks before a start need.

This module imports neither torch nor torchtitan: the dry run uses it. Functions of a family import them when they are called.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from titanrl.config.sections import RecipeConfig
from titanrl.config.shapes import ModelShape

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec
    from torchtitan.protocols.module import Module

HFConfig = Mapping[str, Any]
"""Contents of a `config.json`, completed with the family's defaults."""
Projections = Literal["attention", "mlp"]


@dataclass(frozen=True, slots=True)
class VllmName:
    """Place of a trainer's tensor in vLLM's own model, used by `generator.model_impl: native`.

    Example: the keys' projection is `VllmName("model.layers.{}.self_attn.qkv_proj.weight", part="k", dim=0)`
    """

    parameter: str
    """Name of vLLM's parameter, with `{}` for the index of the layer."""
    part: Literal["q", "k", "v", "gate", "up", "vocab"] | None = None
    """Rows of the parameter: those of a projection that vLLM fuses with others, or those of an embedding without its padding.
    None takes all of it."""
    dim: int | None = None
    """Dimension that tensor parallelism shards; None if every rank holds the whole tensor, or for the part `vocab`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """All that TitanRL knows about one `model_type` of Hugging Face. `docs/howto/model_families.md` shows how to add one.

    Families built from torchtitan's dense decoder block come from `titanrl.models.dense.dense_family`.
    """

    model_type: str
    """Value of `model_type` in config.json."""
    problems: Callable[[HFConfig], list[str]]
    """Function that returns a message `key: what is wrong (got value). Fix.` for each option that is not implemented."""
    shape: Callable[[HFConfig], ModelShape]
    """Function that returns the sizes."""
    spec: Callable[[HFConfig, "Module.Config", int], "ModelSpec"]
    """Function that returns torchtitan's model, parallel plan and state-dict adapter. It gets the config, the inner attention
    and the number of positions that the run uses, which may be lower than the model's."""
    vllm_names: Mapping[str, VllmName]
    """Places in vLLM's own model by the trainer's names, with `{}` for the index of the layer."""
    lora_targets: Mapping[Projections, tuple[str, ...]]
    """torchtitan's names of the projections that `trainer.lora.targets` selects."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that config.json may omit, as in transformers."""
    renderer: str | None = None
    """Renderer of its chat template in the package `renderers`, for `data.environment.renderer: auto`; None if unknown."""
    recipe: Callable[[RecipeConfig], dict[str, Any]] | None = None
    """Function that returns the config.json of a tiny model; None if `model.recipe` cannot build this family."""
    published: Mapping[str, ModelShape] = field(default_factory=dict)
    """Sizes of published models by their id on the Hugging Face hub, for a dry run before the download."""

    def completed(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return the contents of a config.json with transformers' defaults for keys that it omits."""
        hf: dict[str, Any] = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, **self.defaults, **raw}
        hidden, heads = hf.get("hidden_size"), hf.get("num_attention_heads")
        if hf.get("num_key_value_heads") is None:
            hf["num_key_value_heads"] = heads
        if hf.get("head_dim") is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
            hf["head_dim"] = hidden // heads
        return hf
