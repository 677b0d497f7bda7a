"""Slices of vLLM's fused parameters against hand-computed rows."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from titanrl.config.sections import ModelConfig, RecipeConfig
from titanrl.config.sizes import ModelShape
from titanrl.generator.native import held_part, part_rows, share_of, vocab_rows, weight_targets
from titanrl.models.directory import ModelDirectory, recipe_model
from titanrl.models.family import VllmName
from titanrl.weights.layout import PartOf

SHAPE = ModelShape(
    hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=384, vocab_size=112,
    max_positions=512,
)  # fmt: skip


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("part", "start", "stop"), [("q", 0, 128), ("k", 128, 192), ("v", 192, 256), ("up", 384, 768)])
def test_projection_rows_in_a_fused_parameter(part: str, start: int, stop: int, tp: int) -> None:
    assert part_rows(SHAPE, tp)[part] == slice(start // tp, stop // tp)


def test_shard_is_a_slice_of_one_dimension() -> None:
    part = share_of(torch.zeros(6, 4), dim=1, rank=2, tp=3)
    assert (part.shape, part.offset) == ((6, 12), (0, 8))


# vLLM pads 112 tokens to 128: the first of two ranks has 64 of them, the second 48 and the padding.
@pytest.mark.parametrize(
    ("num_rows", "rank", "num_real", "start"), [(128, 0, 112, 0), (64, 0, 64, 0), (64, 1, 48, 64), (16, 7, 0, 112)]
)
def test_embedding_rows_exclude_the_padding(num_rows: int, rank: int, num_real: int, start: int) -> None:
    part = vocab_rows(torch.zeros(num_rows, 8), 112, rank)
    assert (part.shape, part.offset, len(part.local)) == ((112, 8), (start, 0), num_real)


def vllm_parameters(shape: ModelShape) -> nn.Module:
    """Return a module with the parameters of vLLM's model of a tied recipe, whose embedding is padded."""
    width, heads = shape.hidden_size, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    layer = {
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
        "self_attn.q_norm": (shape.head_dim,),
        "self_attn.k_norm": (shape.head_dim,),
        "self_attn.qkv_proj": (heads, width),
        "self_attn.o_proj": (width, shape.num_heads * shape.head_dim),
        "mlp.gate_up_proj": (2 * shape.intermediate_size, width),
        "mlp.down_proj": (width, shape.intermediate_size),
    }
    sizes = {f"model.layers.{index}.{name}": size for index in range(shape.num_layers) for name, size in layer.items()}
    root = nn.Module()
    for name, size in {**sizes, "model.norm": (width,), "model.embed_tokens": (128, width)}.items():
        place = root
        for part in name.split("."):
            if part not in dict(place.named_children()):
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        place.register_parameter("weight", nn.Parameter(torch.zeros(size)))
    return root


def test_parts_of_experts_are_rows_of_their_second_dimension() -> None:
    shape = replace(SHAPE, intermediate_size=6, num_experts=2, experts_per_token=1)
    name = VllmName("w13", part="up", dim=1, axis=1)
    for tp, rank in ((1, 0), (2, 1)):
        weight_EFD = torch.zeros(2, 12 // tp, 4)
        part = held_part(weight_EFD, name, shape, rank, tp)
        assert isinstance(part, PartOf)
        assert (part.shape, part.offset) == ((2, 6, 4), (0, 3 * rank, 0))
        part.local.fill_(1.0)
        assert weight_EFD[:, 6 // tp :].all()
        assert not weight_EFD[:, : 6 // tp].any()


def recipe() -> ModelDirectory:
    found = recipe_model(ModelConfig(recipe=RecipeConfig()), Path())
    assert isinstance(found, ModelDirectory)
    return found


def test_recipe_targets_fill_all_parameters_except_padding() -> None:
    source = recipe()
    model = vllm_parameters(source.shape)
    for target in weight_targets(model, source).values():
        (target if isinstance(target, torch.Tensor) else target.local).fill_(1.0)
    for name, parameter in model.named_parameters():
        held = parameter[: source.shape.vocab_size] if name == "model.embed_tokens.weight" else parameter
        assert held.all(), name


@pytest.mark.parametrize("without", ["layers.{}.attention.qkv_linear.wk.weight", "norm.weight"])
def test_error_names_a_parameter_that_the_family_does_not_fill(without: str) -> None:
    source = recipe()
    names = {ours: name for ours, name in source.family.vllm_names.items() if ours != without}
    parameter = source.family.vllm_names[without].parameter.format(0)
    incomplete = replace(source, family=replace(source.family, vllm_names=names))
    with pytest.raises(ValueError, match=rf"model\.family: .*for {parameter}"):
        weight_targets(vllm_parameters(source.shape), incomplete)
