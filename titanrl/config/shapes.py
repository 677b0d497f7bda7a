"""Sizes of dense decoder models: parameters, activations and KV cache, computed without loading a model."""

from collections.abc import Collection
from dataclasses import dataclass

from titanrl.base.choices import Dtype

DTYPE_BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}

RECIPE_VOCAB_SIZE = 112
"""Rows of the recipe model's embedding: 95 characters, 9 phrases, 2 special tokens, padded to a multiple of 16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Dimensions of a dense decoder model, named like the fields of `RecipeConfig`.

    Example: the model of width 128 with 4 query heads is
    `ModelShape(hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=384, vocab_size=112,
    max_positions=512, tied_embeddings=True, qk_norm=True)`.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    tied_embeddings: bool = False
    qk_norm: bool = False
    """True if queries and keys are normalized per head."""
    qkv_bias: bool = False
    """True if the query, key and value projections have biases."""

    @property
    def num_parameters(self) -> int:
        """Number of parameters: embedding, layers, final norm, and the output layer unless it is tied."""
        return self.embedding_parameters + self.num_layers * self.layer_parameters + self.hidden_size

    @property
    def layer_parameters(self) -> int:
        """Number of parameters of one layer."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)  # q and o, k and v
        feed_forward = 3 * self.hidden_size * self.intermediate_size  # gate, up, down
        biases = self.head_dim * (self.num_heads + 2 * self.num_kv_heads) if self.qkv_bias else 0
        return attention + self.layer_norms + feed_forward + biases

    @property
    def layer_norms(self) -> int:
        """Number of norm parameters of one layer: before attention and feed-forward, and of queries and keys."""
        return 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def embedding_parameters(self) -> int:
        """Number of parameters of embedding and output layer."""
        return self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)

    def rank_parameters(self, tp: int) -> int:
        """Return the parameters held by one of `tp` tensor-parallel ranks: its share of each matrix, and every norm."""
        norms = self.num_layers * self.layer_norms + self.hidden_size
        return (self.num_parameters - norms) // tp + norms

    @property
    def layer_activations(self) -> int:
        """Number of activation values per token that one layer stores for its backward pass, assuming that attention stores no
        scores."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        # Two norms and two residuals; queries and keys before and after norm and rotation, values, the attention's output;
        # gate, its activation, up, their product.
        return 4 * self.hidden_size + 4 * queries + 4 * keys + 4 * self.intermediate_size

    def adapter_width(self, targets: Collection[str]) -> int:
        """Return the number of LoRA parameters per unit of rank: the input and output sizes of all adapted projections."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        width = 0
        if "attention" in targets:
            width += 2 * (self.hidden_size + queries) + 2 * (self.hidden_size + keys)
        if "mlp" in targets:
            width += 3 * (self.hidden_size + self.intermediate_size)
        return self.num_layers * width

    def kv_token_bytes(self, dtype: Dtype) -> int:
        """Return the KV-cache bytes of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]
