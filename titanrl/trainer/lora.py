"""LoRA adapters of a sharded model: initialization that does not depend on the layout, and merged weights for publishing.

Source: LoRA (arXiv:2106.09685).
Shape suffixes: O output features and I input features of a linear layer, R rank of its adapter.
"""

import math
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torchtitan.components.checkpointer.utils import canonical_fqn

A, B = ".lora_a.weight", ".lora_b.weight"


def is_adapter(name: str) -> bool:
    """Return True if a parameter belongs to an adapter."""
    return name.endswith((A, B))


@torch.no_grad()
def init_adapters(module: nn.Module, seed: int) -> None:
    """Draw each A with a generator that is seeded with `seed` and the name of A, and set each B to zero.

    The values depend neither on the layout nor on the number of ranks. With torch's initialization of a sharded tensor they
    would depend on both, because each rank draws its shard separately.
    """
    for wrapped, parameter in module.named_parameters():
        name = canonical_fqn(wrapped)
        if name.endswith(B):
            parameter.zero_()
        elif name.endswith(A):
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            bound = 1 / math.sqrt(parameter.shape[1])  # kaiming_uniform_ with a = sqrt(5), as in torchtitan
            values_RI = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
            rows, columns = local_block(parameter)
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.copy_(values_RI[rows, columns])


@torch.no_grad()
def merged(state: Mapping[str, Tensor], alpha: float, rank: int) -> dict[str, Tensor]:
    """Return the state without adapters, in which each adapted W is replaced by W + (alpha / rank) * B A, as in LoRA.

    W is not modified. This is a collective: it gathers the adapters, which are small, and each rank adds the block of the
    product that belongs to its shard of W.
    """
    plain = {}
    for name, value in state.items():
        stem = name.removesuffix(".weight")
        if is_adapter(name):
            continue
        if stem + A not in state:
            plain[name] = value
            continue
        a_RI, b_OR = full(state[stem + A]), full(state[stem + B])
        rows, columns = local_block(value)
        local_OI = value.to_local() if isinstance(value, DTensor) else value
        sum_OI = torch.addmm(local_OI, b_OR[rows], a_RI[:, columns], alpha=alpha / rank)
        plain[name] = like(sum_OI, value)
    return plain


def full(tensor: Tensor) -> Tensor:
    """Return the full tensor; gather it if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_block(matrix: Tensor) -> tuple[slice, slice]:
    """Return the rows and columns of a matrix that this rank holds."""
    shape: tuple[int, ...] = tuple(matrix.shape)
    offset: tuple[int, ...] = (0, 0)
    if isinstance(matrix, DTensor):
        shape, offset = compute_local_shape_and_global_offset(matrix.shape, matrix.device_mesh, matrix.placements)
    return slice(offset[0], offset[0] + shape[0]), slice(offset[1], offset[1] + shape[1])


def like(local: Tensor, sharded: Tensor) -> Tensor:
    """Build a tensor with the sharding of `sharded` from this rank's shard."""
    if not isinstance(sharded, DTensor):
        return local
    return DTensor.from_local(
        local, sharded.device_mesh, sharded.placements, run_check=False, shape=sharded.shape, stride=sharded.stride()
    )
