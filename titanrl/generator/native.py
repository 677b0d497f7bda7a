"""vLLM's own models: views into their fused, possibly sharded parameters, and a loader of a directory's weights.

The loader reads the files that the trainer would read. vLLM's own merges all safetensors files of a directory without an index,
and prefers `consolidated*.safetensors`.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from titanrl.config.sizes import ModelShape
from titanrl.models.directory import ModelDirectory
from titanrl.models.family import LOAD_FORMAT, VllmName
from titanrl.weights.layout import PartOf, local_part


def weight_targets(
    model: torch.nn.Module, source: ModelDirectory, rank: int = 0, tp: int = 1, plain: Mapping[str, Tensor] | None = None
) -> dict[str, torch.Tensor | PartOf]:
    """Map the names of the trainer's state dict to vLLM's tensors, as views of fused parameters where needed.

    `plain` replaces parameters by tensors from which `PackedExperts.pack` fills them.

    Raises:
        ValueError: The family's names do not fill a parameter completely. It would keep its initial zeros.
    """
    # vLLM moves the parameters of a layer with adapters to a module of this name.
    parameters = {name.replace(".base_layer.", "."): parameter.data for name, parameter in model.named_parameters()}
    parameters |= plain or {}
    layers = sorted({int(match[1]) for name in parameters if (match := re.match(r"model\.layers\.(\d+)\.", name))})
    shape, names = source.shape, source.family.vllm_names
    targets: dict[str, torch.Tensor | PartOf] = {}
    num_filled: Counter[str] = Counter()
    for ours, name in names.items():
        if shape.tied_embeddings and ours == "lm_head.weight":
            continue
        for layer in layers if "{}" in ours else [0]:
            parameter = name.parameter.format(layer)
            held = targets[ours.format(layer)] = held_part(parameters[parameter], name, shape, rank, tp)
            # Pulls do not fill the padding of the vocabulary, so count it as filled.
            num_filled[parameter] += (parameters[parameter] if name.part == "vocab" else local_part(held)).numel()
    if left := [name for name, value in parameters.items() if num_filled[name] < value.numel()]:
        raise ValueError(
            f"model.family: vllm_names must name all of vLLM's parameters, and {len(left)} would not be filled (got no name "
            f"or not all parts for {left[0]}). Add the names, or set generator.model_impl to titan."
        )
    return targets


def held_part(parameter: torch.Tensor, name: VllmName, shape: ModelShape, rank: int, tp: int) -> torch.Tensor | PartOf:
    """Return the rows of vLLM's parameter that belong to one of the trainer's tensors, with their position if sharded."""
    if name.part == "vocab":
        return vocab_rows(parameter, shape.vocab_size, rank)
    held = parameter
    if name.part is not None:
        held = parameter[(*[slice(None)] * name.axis, part_rows(shape, tp)[name.part])]
    return held if name.dim is None else share_of(held, name.dim, rank, tp)


def vocab_rows(held: torch.Tensor, vocab_size: int, rank: int) -> PartOf:
    """Return a rank's rows of an embedding, without the padding that vLLM adds to the vocabulary before sharding it."""
    start = min(rank * len(held), vocab_size)
    return PartOf(held[: vocab_size - start], (vocab_size, held.shape[1]), (start, 0))


def share_of(held: torch.Tensor, dim: int, rank: int, tp: int) -> PartOf:
    """Describe `held` as the shard of a tensor that is split evenly over `tp` ranks along one dimension."""
    size = held.shape[dim]
    shape, offset = list(held.shape), [0] * held.ndim
    shape[dim], offset[dim] = tp * size, rank * size
    return PartOf(held, tuple(shape), tuple(offset))


def part_rows(shape: ModelShape, tp: int = 1) -> dict[str, slice]:
    """Return the rows of each projection in `qkv_proj` and `gate_up_proj` on one of `tp` ranks."""
    hidden = shape.intermediate_size // tp
    q, kv = (heads * shape.head_dim // tp for heads in (shape.num_heads, shape.num_kv_heads))
    return {
        "q": slice(0, q),
        "k": slice(q, q + kv),
        "v": slice(q + kv, q + 2 * kv),
        "gate": slice(0, hidden),
        "up": slice(hidden, 2 * hidden),
    }


def register_loader(source: ModelDirectory) -> None:
    """Register a loader of the directory's weights with vLLM, as `load_format` `LOAD_FORMAT`."""

    class Loader(BaseModelLoader):
        def download_model(self, model_config: ModelConfig) -> None:
            """Do nothing, because the directory is on this machine."""

        def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
            """Load all weights.

            Raises:
                ValueError: The weight files cannot be read, or do not fit the model.
            """
            native: Any = model
            loaded: set[str] = native.load_weights(weights_of(source))
            if left := sorted({name for name, _ in model.named_parameters()} - loaded):
                raise ValueError(
                    f"model.path: {len(left)} parameters of vLLM's model have no weights, such as {left[0]} "
                    f"(got {source.path}). Give a directory whose config.json and weights belong together."
                )

    register_model_loader(LOAD_FORMAT)(Loader)


def weights_of(source: ModelDirectory) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model directory that the model uses, by name."""
    found = source.weight_files()
    wanted = found.tensors.keys() if source.tensors is None else source.tensors.keys()
    for file in found.files:
        with safe_open(file, framework="pt") as tensors:
            yield from ((name, tensors.get_tensor(name)) for name in sorted(wanted & set(tensors.keys())))
