"""Weights for the weight sync benchmark: shapes, values and sharding."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

Shapes = Mapping[str, tuple[int, ...]]


def small_shapes() -> Shapes:
    """Return the shapes of 300 tensors, 49 MB in bf16."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(150):
        shapes |= {f"layers.{layer}.w1": (512, 320), f"layers.{layer}.norm": (512,)}
    return shapes


def large_shapes() -> Shapes:
    """Return the shapes of Qwen3-0.6B's 310 tensors with a tied head, 1.19 GB in bf16."""
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings": (151_936, 1024), "norm": (1024,)}
    layer_shapes = {
        "wq": (2048, 1024),
        "wk": (1024, 1024),
        "wv": (1024, 1024),
        "wo": (1024, 2048),
        "w1": (3072, 1024),
        "w3": (3072, 1024),
        "w2": (1024, 3072),
        "q_norm": (128,),
        "k_norm": (128,),
        "attention_norm": (1024,),
        "ffn_norm": (1024,),
    }
    for layer in range(28):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in layer_shapes.items()}
    return shapes


def adapter_shapes() -> Shapes:
    """Return the shapes of LoRA adapters of rank 32 on all projections of Qwen3-0.6B, 392 tensors, 40 MB in bf16."""
    projections = {name: shape for name, shape in large_shapes().items() if len(shape) == 2 and name.startswith("layers.")}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (outputs, inputs) in projections.items():
        shapes |= {f"{name}.lora_a": (32, inputs), f"{name}.lora_b": (outputs, 32)}
    return shapes


PAYLOADS = {"small": small_shapes, "large": large_shapes, "adapters": adapter_shapes}


def constant(name: str) -> float:
    """Return the value that fills a tensor; bf16 represents it exactly."""
    return (sum(name.encode()) % 127 + 1) / 128


def tp_placement(name: str) -> Replicate | Shard:
    """Return the placement of a tensor under tensor parallelism."""
    last = name.rpartition(".")[2]
    if last in ("lora_a", "lora_b"):
        dim = 1 if name.split(".")[-2] in ("wo", "w2") else 0
        return Shard(dim) if (last == "lora_a") == (dim == 1) else Replicate()
    if last.endswith("norm"):
        return Replicate()
    return Shard(1) if last in ("wo", "w2") else Shard(0)


def build_module(shapes: Shapes, dtype: torch.dtype, mesh: Any) -> nn.Module:
    """Build a module with these parameters, sharded by TP and then by FSDP2 if the mesh has more than one such rank."""
    root = nn.Module()
    for name, shape in shapes.items():
        *path, last = name.split(".")
        owner = root
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        value = torch.full(shape, constant(name), dtype=dtype)
        if mesh is not None and mesh["tp"].size() > 1:
            value = distribute_tensor(value, mesh["tp"], [tp_placement(name)], src_data_rank=None)
        owner.register_parameter(last, nn.Parameter(value))
    if mesh is not None and mesh["fsdp"].size() > 1:
        fully_shard(root, mesh=mesh["fsdp"])
    return root
