"""The tiny Qwen3 of the quick start, as a Hugging Face directory: 102 tokens, 408 320 parameters by default.

The vocabulary contains the 95 printable ASCII characters and, as single tokens, five phrases of the chain_sum task. A question
is thus 12 to 16 tokens long.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from titanrl.config.sections import RecipeConfig
from titanrl.types import FloatArray

PAD_TOKEN, PAD_ID = "<pad>", 0
EOS_TOKEN, EOS_ID = "<eos>", 1
ALPHABET = "".join(map(chr, range(0x20, 0x7F)))
PHRASES = (
    "State the final answer to the following arithmetic problem: ",
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
)
VOCAB_SIZE = 112
"""Rows of the embedding: 102 tokens, padded to a multiple of 16."""

_SPECIAL_IDS = {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
_STAMP = "recipe.json"


def write_tokenizer(directory: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`: `<pad>` 0, `<eos>` 1, the alphabet 2 to 96, the phrases 97 to 101."""
    vocab = {token: index for index, token in enumerate((PAD_TOKEN, EOS_TOKEN, *ALPHABET))}
    # Characters outside the alphabet become <pad>, which titanrl's Tokenizer.encode rejects, so no text changes silently.
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=PAD_TOKEN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD_TOKEN, EOS_TOKEN])
    tokenizer.add_tokens([AddedToken(phrase, normalized=False, special=False) for phrase in PHRASES])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD_TOKEN,
        "eos_token": EOS_TOKEN,
        "unk_token": PAD_TOKEN,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(directory / "tokenizer_config.json", config)


def write_model_config(directory: Path, recipe: RecipeConfig) -> None:
    """Write `config.json` and `generation_config.json`."""
    _write_json(directory / "config.json", model_config(recipe))
    _write_json(directory / "generation_config.json", _SPECIAL_IDS)


def model_config(recipe: RecipeConfig) -> dict[str, Any]:
    """Return the contents of `config.json`, with the keys of the published Qwen3 checkpoints."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.intermediate_size,
        "num_hidden_layers": recipe.num_layers,
        "num_attention_heads": recipe.num_heads,
        "num_key_value_heads": recipe.num_kv_heads,
        "head_dim": recipe.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": recipe.max_positions,
        "initializer_range": recipe.init_std,
        "rms_norm_eps": 1e-6,
        # transformers 5 writes rope_parameters instead, but reads this key too.
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        "dtype": "float32",
        **_SPECIAL_IDS,
    }


def create_model(directory: Path, recipe: RecipeConfig, seed: int) -> None:
    """Write the model directory with random weights; keep an existing one of the same recipe and seed.

    The directory appears atomically, also if several processes create it concurrently.

    Raises:
        ValueError: The directory exists and contains something else.
    """
    stamp = json.dumps({"recipe": recipe.model_dump(), "seed": seed}, indent=2)
    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as scratch:
            made = Path(scratch) / directory.name
            made.mkdir()
            write_tokenizer(made)
            write_model_config(made, recipe)
            save_file(_random_weights(recipe, seed), made / "model.safetensors", metadata={"format": "pt"})
            (made / _STAMP).write_text(stamp, encoding="utf-8")
            _move(made, directory)
    if not (directory / _STAMP).is_file() or (directory / _STAMP).read_text(encoding="utf-8") != stamp:
        raise ValueError(f"{directory}: not the model of this recipe and seed {seed}. Move the directory away.")


def _move(source: Path, target: Path) -> None:
    """Rename a directory; keep the target if another process created it first."""
    try:
        os.replace(source, target)
    except OSError:
        if not target.is_dir():
            raise


def _random_weights(recipe: RecipeConfig, seed: int) -> dict[str, FloatArray]:
    """Return weights by name: ones for norms, N(0, init_std^2) for matrices, and none for the tied output layer."""
    rng = np.random.default_rng(seed)
    return {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else np.float32(recipe.init_std) * rng.standard_normal(shape, dtype=np.float32)
        for name, shape in _weight_shapes(recipe).items()
    }


def _weight_shapes(recipe: RecipeConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights by Hugging Face name."""
    hidden, head_dim = recipe.hidden_size, recipe.head_dim
    query, key_value = recipe.num_heads * head_dim, recipe.num_kv_heads * head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key_value, hidden),
        "self_attn.v_proj": (key_value, hidden),
        "self_attn.o_proj": (hidden, query),
        "self_attn.q_norm": (head_dim,),
        "self_attn.k_norm": (head_dim,),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (recipe.intermediate_size, hidden),
        "mlp.up_proj": (recipe.intermediate_size, hidden),
        "mlp.down_proj": (hidden, recipe.intermediate_size),
    }
    return {
        "model.embed_tokens.weight": (VOCAB_SIZE, hidden),
        **{f"model.layers.{i}.{name}.weight": shape for i in range(recipe.num_layers) for name, shape in layer.items()},
        "model.norm.weight": (hidden,),
    }


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
