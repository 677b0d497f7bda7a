"""Odd but real model directories: the trainer has the logits of transformers, or refuses the directory before a start."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.models.tiny import FAMILIES, LLAMA3_ROPE, add_changed_weights, change_config, change_weights, shard, write_model
from tests.trainer import checks, variants
from tests.trainer.ranks import World
from titanrl.models.directory import open_model

Weights = dict[str, torch.Tensor]
Worlds = Callable[[int], World]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
LEGACY_LLAMA3 = {"type": "llama3"} | {
    key: value for key, value in LLAMA3_ROPE.items() if key not in ("rope_type", "rope_theta")
}


def with_stale_shards(model: Path) -> None:
    add_changed_weights(model, "zz-backup.safetensors")
    shard(model)


def with_dtype(dtype: torch.dtype, only: str = "") -> Callable[[Path], object]:
    def cast(weights: Weights) -> None:
        weights.update({name: value.to(dtype) for name, value in weights.items() if only in name})

    return lambda model: change_weights(model, cast)


def with_unused_tensors(model: Path) -> None:
    more = {"value_head.weight": torch.ones(1, 128), "model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(16)}
    change_weights(model, lambda weights: weights.update(more))


def with_stored_head(model: Path) -> None:
    change_weights(model, lambda weights: weights.update({HEAD: weights[EMBEDDING].clone()}))


def without(*keys: str) -> Callable[[Path], object]:
    return lambda model: change_config(model, **dict.fromkeys(keys))


def with_config(**changes: Any) -> Callable[[Path], object]:
    return lambda model: change_config(model, **changes)


def legacy_rope(**changes: Any) -> Callable[[Path], object]:
    return lambda model: change_config(model, rope_parameters=None, **changes)


def legacy_dtype(model: Path) -> None:
    change_config(with_bfloat16(model), dtype=None, torch_dtype="bfloat16")


def with_bfloat16(model: Path) -> Path:
    with_dtype(torch.bfloat16)(model)
    return model


def other_generation_config(model: Path) -> None:
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], "temperature": 0.6, "do_sample": True}))


def nothing(model: Path) -> None:
    pass


LOADED: dict[str, tuple[str, dict[str, Any], Callable[[Path], object]]] = {
    **{f"{family}, tied": (family, {"tie_word_embeddings": True}, nothing) for family in FAMILIES},
    **{f"{family}, untied": (family, {"tie_word_embeddings": False}, nothing) for family in FAMILIES},
    **{f"{family}, stale shards": (family, {"tie_word_embeddings": False}, with_stale_shards) for family in FAMILIES},
    "two files": ("qwen3", {}, lambda model: add_changed_weights(model, "model-old.safetensors")),
    "shards without numbers": ("qwen2", {}, lambda model: shard(model, ("a.safetensors", "b.safetensors"))),
    "bfloat16": ("qwen3", {}, with_bfloat16),
    "torch_dtype": ("llama", {}, legacy_dtype),
    "float16": ("qwen2", {}, with_dtype(torch.float16)),
    "float64": ("mistral", {}, with_dtype(torch.float64)),
    "bfloat16 with float32 norms": ("llama", {}, with_dtype(torch.bfloat16, "proj")),
    "no head_dim": ("llama", {}, without("head_dim")),
    "default head_dim of qwen3": ("qwen3", {"head_dim": 128}, without("head_dim")),
    "head_dim other than hidden size / heads": ("mistral", {"head_dim": 64}, nothing),
    "one key-value head": ("qwen3", {"num_key_value_heads": 1}, nothing),
    "a key-value head for every head": ("llama", {"num_key_value_heads": 4}, without("num_key_value_heads")),
    "unused tensors": ("llama", {}, with_unused_tensors),
    "stored head of a tied model": ("qwen3", {}, with_stored_head),
    "padded vocabulary": ("qwen2", {"vocab_size": 128}, nothing),
    "rms_norm_eps": ("mistral", {"rms_norm_eps": 1e-5}, nothing),
    "rope_theta": ("qwen3", {}, legacy_rope(rope_theta=1_000_000.0)),
    "rope_theta in rope_parameters": ("qwen2", {}, with_config(rope_parameters={"rope_type": "default", "rope_theta": 5e5})),
    "no rope_theta": ("mistral", {}, legacy_rope()),
    "default rope_scaling": ("qwen2", {}, legacy_rope(rope_theta=2e4, rope_scaling={"type": "default"})),
    "legacy llama3 rope": ("llama", {}, legacy_rope(rope_theta=2e4, rope_scaling=LEGACY_LLAMA3)),
    "original positions outside of the rope": ("llama", {}, with_config(original_max_position_embeddings=32)),
    "original positions by default": (
        "qwen3",
        {},
        legacy_rope(rope_theta=1e4, rope_scaling={k: v for k, v in LEGACY_LLAMA3.items() if not k.startswith("original")}),
    ),
    "unused sliding window": ("qwen2", {}, with_config(sliding_window=8, use_sliding_window=False, max_window_layers=1)),
    "sliding window of all positions": ("mistral", {"sliding_window": 256}, nothing),
    "other generation config": ("qwen3", {}, other_generation_config),
}


@pytest.mark.parametrize("kind", LOADED)
def test_loaded_directory_has_the_logits_of_transformers(kind: str, world: Worlds, tmp_path: Path) -> None:
    family, options, change = LOADED[kind]
    model = write_model(family, tmp_path / "model", **options)
    change(model)
    open_model(model).weight_files()
    token_ids = np.random.default_rng(0).integers(1, checks.VOCAB, 60)
    policy = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        expected = policy(torch.from_numpy(token_ids)[None]).logits[0].numpy()
    (found,) = world(1).run(variants.logits, model, token_ids)
    assert expected.std() > 0.3
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


def with_other_head(model: Path) -> None:
    change_weights(model, lambda weights: weights.update({HEAD: weights[EMBEDDING] + 1}))


def single_file_beside_index(model: Path) -> None:
    content = (model / "model.safetensors").read_bytes()
    (shard(model) / "model.safetensors").write_bytes(content)


REFUSED: dict[str, tuple[str, dict[str, Any], Callable[[Path], object], str]] = {
    "attention bias of llama": ("llama", {"attention_bias": True}, nothing, r"attention_bias: not supported \(got True\)"),
    "biases of the feed-forward": ("llama", {"mlp_bias": True}, nothing, r"mlp_bias: not supported \(got True\)"),
    "sliding window": ("mistral", {"sliding_window": 8}, nothing, "sliding_window: must be null, or at least"),
    "rope for each kind of layer": (
        "llama", {}, with_config(rope_parameters={"full_attention": LLAMA3_ROPE}), "rope_parameters: must be the same for all"
    ),
    "rope_theta as text": ("qwen3", {}, legacy_rope(rope_theta="1e6"), r"rope_theta: must be a number above 0 \(got '1e6'\)"),
    "tie_word_embeddings as text": (
        "qwen3", {}, with_config(tie_word_embeddings="false"), r"tie_word_embeddings: must be true or false \(got 'false'\)"
    ),
    "head of a tied model with other values": ("qwen3", {}, with_other_head, "lm_head.weight must equal model.embed_tokens"),
    "single file beside an index": ("qwen3", {}, single_file_beside_index, "must have one set of weights"),
    "biases in a family without": (
        "qwen2", {}, with_config(model_type="llama"), "6 tensors are not part of the model: .*k_proj.bias"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_directory_that_would_give_other_logits_is_refused(kind: str, tmp_path: Path) -> None:
    family, options, change, problem = REFUSED[kind]
    model = write_model(family, tmp_path / "model", **options)
    change(model)
    with pytest.raises(ValueError, match=problem):
        open_model(model).weight_files()
