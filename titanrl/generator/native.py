"""vLLM's own models: views into their fused, possibly sharded parameters, a loader of a directory's weights, and adapters.

The loader reads the files that the trainer would read. vLLM's own merges all safetensors files of a directory without an index,
and prefers `consolidated*.safetensors`.

vLLM keeps all LoRA adapters in host memory and copies those of a batch into *slots*: rows of stacked tensors of each adapted
layer. `Adapters` names their tensors as the trainer does. It uses private parts of vLLM 0.32.0; `tests/generator/test_lora.py`
checks them. vLLM 0.32.0 computes adapters on a CPU with one copy of both matrices per token. A token without an adapter gets
the last slot, because its index is -1. `add_products` replaces these functions; it multiplies all tokens of an adapter at once.

Shapes: S slots, N tokens of a batch, R rank of an adapter, I input and O output features of a linear layer.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.utils.torch_utils import PIN_MEMORY

from titanrl.config.sections import LoraConfig
from titanrl.config.sizes import ModelShape
from titanrl.models.directory import ModelDirectory
from titanrl.models.family import LOAD_FORMAT, VllmName
from titanrl.weights.layout import TORCH_DTYPES, PartOf, local_part
from titanrl.weights.records import ByteLayout, WeightMismatchError

A, B = ".lora_a.weight", ".lora_b.weight"
"""Ends of the trainer's names of an adapter's tensors, A of `[R, I]` and B of `[O, R]`."""
POLICY = 1
"""Number of the adapter that every publication of a run replaces; the others never change."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM has slots; adapters of lower ranks are padded."""
MAX_SLOTS = 4
"""Most adapters of a batch. Each slot takes as much memory as an adapter of the largest rank."""
PARTS = {None: 0, "q": 0, "k": 1, "v": 2, "gate": 0, "up": 1}
"""Index of each projection in its fused layer."""

update_metadata = PunicaWrapperCPU.update_metadata


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


def adapter_args(source: ModelDirectory, lora: LoraConfig, num_held: int) -> dict[str, Any]:
    """Return vLLM's options for `num_held` adapters. A request waits while a batch uses other adapters in all slots."""
    return {
        "enable_lora": True,
        "max_loras": min(num_held, MAX_SLOTS),
        "max_cpu_loras": num_held,
        "max_lora_rank": next(rank for rank in RANKS if rank >= lora.rank),
        "lora_target_modules": [name for target in lora.targets for name in source.family.vllm_lora_modules[target]],
    }


def prepare_adapters() -> None:
    """Patch how vLLM computes adapters on a CPU. Call this before building an engine."""
    assert callable(PunicaWrapperCPU.add_lora_linear), "vLLM moved its products of adapters on a CPU"
    PunicaWrapperCPU.update_metadata = update_groups  # type: ignore[method-assign, assignment]
    PunicaWrapperCPU.add_lora_linear = add_products  # type: ignore[method-assign, assignment]


def update_groups(wrapper: PunicaWrapperCPU, *args: Any, **kwargs: Any) -> None:
    """Replace vLLM's update before a batch: also find the tokens of each slot."""
    update_metadata(wrapper, *args, **kwargs)
    vars(wrapper)["groups"] = tokens_by_slot(wrapper.token_lora_indices)


def tokens_by_slot(slots_N: Tensor) -> list[tuple[int, Tensor | None]]:
    """Return each adapter slot of a batch and the indices of its tokens, None for all tokens. -1 is no slot."""
    slots: list[int] = slots_N.unique().tolist()
    if len(slots) == 1:
        return [(slots[0], None)] if slots[0] >= 0 else []
    return [(slot, (slots_N == slot).nonzero()[:, 0]) for slot in slots if slot >= 0]


def add_products(
    wrapper: PunicaWrapperCPU,
    y: Tensor,
    x: Tensor,
    lora_a_stacked: Sequence[Tensor],
    lora_b_stacked: Sequence[Tensor],
    scale: float,
    output_slices: Sequence[int],
    **kwargs: Any,
) -> None:
    """Replace vLLM's addition of x A^T B^T to each projection of a layer's outputs, `[N, O]`, for inputs `[N, I]`."""
    for slot, tokens in vars(wrapper)["groups"]:
        inputs, start = x if tokens is None else x[tokens], 0
        for a_S1RI, b_S1OR, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            outputs, inner = y[:, start : start + width], inputs @ a_S1RI[slot, 0].t()
            if tokens is None:
                outputs.addmm_(inner, b_S1OR[slot, 0].t(), alpha=scale)
            else:
                outputs.index_add_(0, tokens, inner @ b_S1OR[slot, 0].t(), alpha=scale)
            start += width


class Adapters:
    """The adapters of an engine, by number. Call the methods between two steps."""

    def __init__(self, model: nn.Module, source: ModelDirectory) -> None:
        """Find vLLM's manager of adapters and the fused layer of each of the trainer's projections."""
        self._manager: Any = vars(model)["lora_manager"]
        layers = [int(match[1]) for name, _ in model.named_modules() if (match := re.fullmatch(r"model\.layers\.(\d+)", name))]
        self._layers = {
            ours.format(layer).removesuffix(".weight"): (name.parameter.format(layer).removesuffix(".weight"), PARTS[name.part])
            for ours, name in source.family.vllm_names.items()
            if "{}" in ours and name.part in PARTS and ours.endswith(".weight")
            for layer in layers
        }
        self._held: dict[int, tuple[dict[str, Tensor], LoRAModel]] = {}

    def tensors(self, adapter: int, layouts: Sequence[ByteLayout]) -> Mapping[str, Tensor]:
        """Return the tensors of an adapter that publications with these layouts fill, by the trainer's names; call `use` then.

        The tensors are full, also with tensor parallelism, and stay the same as long as names and shapes do.

        Raises:
            WeightMismatchError: A published tensor belongs to no adapted layer of this engine, or its rank is too large.
        """
        entries = {entry.name: entry for layout in layouts for entry in layout.entries}
        shapes = {name: entry.global_shape for name, entry in entries.items()}
        held = self._held.get(adapter)
        if held is not None and {name: tuple(value.shape) for name, value in held[0].items()} == shapes:
            return held[0]
        largest = self._manager.lora_config.max_lora_rank
        for name, shape in shapes.items():
            layer = self._layers.get(name.removesuffix(A if name.endswith(A) else B), ("", 0))[0]
            if layer not in self._manager.modules or not name.endswith((A, B)):
                raise WeightMismatchError(f"{name}: belongs to no layer that has adapters in the generator")
            if (rank := shape[0 if name.endswith(A) else 1]) > largest:
                raise WeightMismatchError(f"{name}: the rank of an adapter must be at most {largest} (got {rank})")
        tensors = {
            name: torch.zeros(entry.global_shape, dtype=TORCH_DTYPES[entry.dtype], pin_memory=PIN_MEMORY)
            for name, entry in entries.items()
        }
        self.drop(adapter)
        self._held[adapter] = (tensors, self._model(adapter, tensors))
        return tensors

    def use(self, adapter: int, scale: float) -> None:
        """Multiply the filled B matrices by the scale of the adapter, and serve the adapter from the next step on."""
        tensors, model = self._held[adapter]
        torch._foreach_mul_([value for name, value in tensors.items() if name.endswith(B)], scale)
        self._manager.remove_adapter(adapter)  # its slot is filled again when a batch uses the adapter
        self._manager.add_adapter(model)

    def drop(self, adapter: int) -> None:
        """Forget an adapter, if it is held."""
        if self._held.pop(adapter, None) is not None:
            self._manager.remove_adapter(adapter)

    def _model(self, adapter: int, tensors: Mapping[str, Tensor]) -> LoRAModel:
        """Return vLLM's form of an adapter, which shares the tensors."""
        rank = max(value.shape[0] for name, value in tensors.items() if name.endswith(A))
        parts: dict[str, dict[int, tuple[Tensor, Tensor]]] = defaultdict(dict)
        for name, a_RI in tensors.items():
            if name.endswith(A):
                stem = name.removesuffix(A)
                layer, part = self._layers[stem]
                parts[layer][part] = a_RI, tensors[stem + B]
        layers = {}
        for layer, found in parts.items():
            num_parts = self._manager.modules[layer].n_slices
            if num_parts == 1:
                layers[layer] = LoRALayerWeights(layer, rank, rank, *found[0], scaling=1)
            else:
                pairs = [found.get(part, (None, None)) for part in range(num_parts)]
                a, b = ([pair[index] for pair in pairs] for index in (0, 1))
                ones: list[Any] = [1] * num_parts
                layers[layer] = PackedLoRALayerWeights(layer, rank, ones, a, b, scaling=ones)
        return LoRAModel(adapter, rank, layers)
