"""Check that replicated tensors are bitwise equal on all ranks: weights, persistent buffers, optimizer state, moving average.

Ranks that hold the same shard of a tensor must hold equal bytes. These are all ranks along the replicated dimensions of its
device mesh, or all ranks if it is a plain tensor. Ranks exchange only digests.

Shape suffixes: R ranks, T tensors.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn

from titanrl.base.errors import FaultError
from titanrl.trainer.learner import Learner
from titanrl.weights.layout import local_part

_BLOCK = 1 << 13
"""Number of words in a block, whose sum is one term of a digest."""
_WORD = 8
"""Size of a word in bytes."""


class DriftError(FaultError):
    """Replicated weights or optimizer state differ between ranks; the message names the tensor and the ranks."""


@dataclass(frozen=True, slots=True)
class Drift:
    """Tensor that differs between ranks that hold the same shard."""

    tensor: int
    """Index of the tensor."""
    ranks: tuple[int, ...]
    """Ranks that differ from the majority. In a tie, the value of the lowest rank is taken as that of the majority."""
    others: tuple[int, ...]
    """Ranks of the majority."""


def check_replicas(learner: Learner) -> None:
    """Compare all replicated tensors. This is a collective; either all ranks return or all ranks raise.

    Raises:
        DriftError: A tensor differs between two ranks.
    """
    if dist.get_world_size() == 1:
        return
    named = dict(named_tensors(learner))
    shards = torch.tensor([shard_of(tensor) for tensor in named.values()], device=learner.model.device)
    digests = torch.stack([digest(tensor).to(shards.device) for tensor in named.values()])
    local_2T = torch.stack([digests, shards])
    all_R2T = [torch.empty_like(local_2T) for _ in range(dist.get_world_size())]
    dist.all_gather(all_R2T, local_2T)
    digests_RT, shards_RT = torch.stack(all_R2T).unbind(dim=1)
    found = drifted(digests_RT.tolist(), shards_RT.tolist())
    if found:
        raise DriftError(describe(found, list(named), learner.version))


def named_tensors(learner: Learner) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, persistent buffers, optimizer state and moving averages by name, in the same order on all ranks."""
    learner.model.reshard()
    module = learner.model.module
    names = {parameter: canonical_fqn(name) for name, parameter in module.named_parameters()}
    yield from ((name, parameter.detach()) for parameter, name in names.items())
    persistent = module.state_dict().keys()
    buffers = ((canonical_fqn(name), buffer) for name, buffer in module.named_buffers())
    yield from ((name, buffer) for name, buffer in buffers if name in persistent)
    for optimizer in learner.optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    yield f"{names[parameter]} ({key})", value
    if learner.average is not None:
        yield from ((f"{name} (moving average)", value) for name, value in learner.average.tensors.items())


def shard_of(tensor: Tensor) -> int:
    """Return the index of this rank's shard of a tensor; ranks with the same index hold equal bytes."""
    index = 0
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate()
        assert coordinate is not None, "this rank is not part of the tensor's device mesh"
        for i, size, placement in zip(coordinate, tensor.device_mesh.shape, tensor.placements, strict=True):
            index = index if placement.is_replicate() else index * size + i
    return index


def digest(tensor: Tensor) -> Tensor:
    """Return a 64-bit digest of this rank's shard of a tensor, 0-dim, on the device of the tensor.

    The digest is the sum of block sums, each multiplied by a different odd weight. A block sum is the sum of the words of a
    block, so any single changed bit changes the digest.
    """
    data = local_part(tensor).detach().contiguous().flatten().view(torch.uint8)
    if data.storage_offset() % _WORD:
        data = data.clone()
    num_words = data.numel() // _WORD
    num_blocks = num_words // _BLOCK
    words = data[: num_words * _WORD].view(torch.int64)
    sums = torch.cat(
        [
            words[: num_blocks * _BLOCK].view(num_blocks, _BLOCK).sum(dim=1),
            words[num_blocks * _BLOCK :].sum(dim=0, keepdim=True),
            data[num_words * _WORD :].to(torch.int64),
        ]
    )
    return (sums * torch.arange(1, 2 * len(sums), 2, device=sums.device)).sum()


def drifted(digests_RT: Sequence[Sequence[int]], shards_RT: Sequence[Sequence[int]]) -> list[Drift]:
    """Return the tensors whose digests differ between ranks with the same shard."""
    found = []
    for tensor, (digests_R, shards_R) in enumerate(
        zip(zip(*digests_RT, strict=True), zip(*shards_RT, strict=True), strict=True)
    ):
        replicas = defaultdict(list)  # ranks by shard
        for rank, shard in enumerate(shards_R):
            replicas[shard].append(rank)
        for ranks in replicas.values():
            usual = Counter(digests_R[rank] for rank in ranks).most_common(1)[0][0]
            odd = tuple(rank for rank in ranks if digests_R[rank] != usual)
            if odd:
                found.append(Drift(tensor, odd, tuple(rank for rank in ranks if rank not in odd)))
    return found


def describe(found: Sequence[Drift], names: Sequence[str], version: int) -> str:
    """Return an error message with the first tensor, its ranks, and the number of other tensors that differ."""
    first = found[0]
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return (
        f"the trainer's replicas differ at version {version}: {names[first.tensor]} on {_ranks(first.ranks)} differs from "
        f"{_ranks(first.others)}{more}. Look for code that changes weights on one rank; continue from the last checkpoint."
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
