"""Sizes of Qwen3 models: parameters, activations and cache bytes, derived without loading a model."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from titanrl.config.choices import Dtype
from titanrl.config.errors import BrokenRule
from titanrl.config.schema import Config
from titanrl.config.sections import RecipeConfig

DTYPE_BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}

RECIPE_VOCAB_SIZE = 112
"""Rows of the recipe model's embedding: 95 characters, 5 phrases, 2 special tokens, padded to a multiple of 16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a dense Qwen3, named like the fields of `RecipeConfig`.

    Example: Qwen3-8B is `ModelShape(hidden_size=4096, num_layers=36, num_heads=32, intermediate_size=12288)`.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    num_kv_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 151_936
    tied_embeddings: bool = False
    max_positions: int = 40_960

    @property
    def num_parameters(self) -> int:
        """Number of parameters: embedding, blocks, last norm, and the output layer unless it is tied."""
        return self.embedding_parameters + self.num_layers * self.layer_parameters + self.hidden_size

    @property
    def layer_parameters(self) -> int:
        """Number of parameters of one block."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)  # q and o, k and v
        norms = 2 * self.hidden_size + 2 * self.head_dim  # before attention and feed-forward; of queries and keys
        feed_forward = 3 * self.hidden_size * self.intermediate_size  # gate, up, down
        return attention + norms + feed_forward

    @property
    def embedding_parameters(self) -> int:
        """Number of parameters of embedding and output layer."""
        return self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)

    def rank_parameters(self, tp: int) -> int:
        """Return the parameters held by one of `tp` tensor-parallel ranks: its share of each matrix, and every norm."""
        norms = self.num_layers * (2 * self.hidden_size + 2 * self.head_dim) + self.hidden_size
        return (self.num_parameters - norms) // tp + norms

    @property
    def layer_activations(self) -> int:
        """Activation values that one block stores per token for its backward pass, assuming attention stores no scores."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        # Two norms and two residuals; queries and keys before and after norm and rotation, values, the attention's output;
        # gate, its activation, up, their product.
        return 4 * self.hidden_size + 4 * queries + 4 * keys + 4 * self.intermediate_size

    def adapter_width(self, targets: Collection[str]) -> int:
        """Return the parameters of all LoRA adapters per unit of rank: the input and output sizes of their projections."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        width = 0
        if "attention" in targets:
            width += 2 * (self.hidden_size + queries) + 2 * (self.hidden_size + keys)
        if "mlp" in targets:
            width += 3 * (self.hidden_size + self.intermediate_size)
        return self.num_layers * width

    def kv_token_bytes(self, dtype: Dtype) -> int:
        """Return the KV-cache bytes of one token, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]


PUBLISHED: dict[str, ModelShape] = {
    "Qwen3-0.6B": ModelShape(hidden_size=1024, num_layers=28, num_heads=16, intermediate_size=3072, tied_embeddings=True),
    "Qwen3-1.7B": ModelShape(hidden_size=2048, num_layers=28, num_heads=16, intermediate_size=6144, tied_embeddings=True),
    "Qwen3-4B": ModelShape(hidden_size=2560, num_layers=36, num_heads=32, intermediate_size=9728, tied_embeddings=True),
    "Qwen3-8B": ModelShape(hidden_size=4096, num_layers=36, num_heads=32, intermediate_size=12288),
    "Qwen3-14B": ModelShape(hidden_size=5120, num_layers=40, num_heads=40, intermediate_size=17408),
    "Qwen3-32B": ModelShape(hidden_size=5120, num_layers=64, num_heads=64, intermediate_size=25600),
}
"""Sizes of the published dense Qwen3 models, used for a dry run before the download."""


def model_shape(config: Config) -> ModelShape | None:
    """Return the sizes of the policy: from the recipe, from the checkpoint, or from a published model of the same name.

    Return None if the checkpoint cannot be read and its directory is not named after a published model.
    """
    if config.model.path is None:
        return recipe_shape(config.model.recipe)
    shape = checkpoint_shape(config.model.path)
    return shape if isinstance(shape, ModelShape) else PUBLISHED.get(config.model.path.name.removesuffix("-Base"))


def recipe_shape(recipe: RecipeConfig) -> ModelShape:
    """Return the sizes of a recipe's model; its embeddings are tied."""
    return ModelShape(
        hidden_size=recipe.hidden_size,
        num_layers=recipe.num_layers,
        num_heads=recipe.num_heads,
        intermediate_size=recipe.intermediate_size,
        num_kv_heads=recipe.num_kv_heads,
        head_dim=recipe.head_dim,
        vocab_size=RECIPE_VOCAB_SIZE,
        tied_embeddings=True,
        max_positions=recipe.max_positions,
    )


def checkpoint_shape(path: Path) -> ModelShape | BrokenRule:
    """Return the sizes given by config.json of a Hugging Face directory, or the rule that the directory breaks."""
    values = {"model.path": str(path)}
    name = path.name if path.name in PUBLISHED else "Qwen3-0.6B"
    fix = f"correct the path, or download a model: `hf download Qwen/{name} --local-dir {path}`"
    if not path.is_dir():
        return BrokenRule(values=values, rule="must be a directory, but it does not exist", fix=fix)
    file = path / "config.json"
    if not file.is_file():
        return BrokenRule(values=values, rule="must be a Hugging Face model directory, but it has no config.json", fix=fix)
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return BrokenRule(values=values, rule=f"its config.json must be JSON: {error}", fix=fix)
    model_type = raw.get("model_type") if isinstance(raw, dict) else None
    if model_type != "qwen3":
        rule = f"its config.json must have model_type qwen3, not {model_type}"
        return BrokenRule(values=values, rule=rule, fix="use a dense Qwen3 model")
    # Defaults of transformers' Qwen3Config.
    raw = {"head_dim": 128, "tie_word_embeddings": False} | raw
    fields = {ours: raw.get(theirs) for ours, theirs in _HF_NAMES.items()}
    missing = [
        _HF_NAMES[name] for name, value in fields.items() if not isinstance(value, int) or (value < 1 and value is not False)
    ]
    if missing:
        return BrokenRule(
            values=values, rule=f"its config.json must contain the positive numbers {', '.join(missing)}", fix=fix
        )
    return ModelShape(**fields)


_HF_NAMES = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "tied_embeddings": "tie_word_embeddings",
    "max_positions": "max_position_embeddings",
}
