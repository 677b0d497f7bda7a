"""Publishing on a trainer rank, pulling on a generator rank."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from titanrl.weights.layout import digest, entry_view, local_shards, pack
from titanrl.weights.manifest import Box, Commit, WeightManifest, WeightMismatchError, commit_key, rank_key
from titanrl.weights.plan import Target, plan_copies
from titanrl.weights.store import WeightStore, as_bytes


@dataclass(frozen=True, slots=True)
class WeightPublisher:
    """Publishes this rank's share of each version, in the generators' dtype."""

    run: str
    rank: int
    store: WeightStore
    dtype: torch.dtype

    async def publish(self, version: int, state: Mapping[str, torch.Tensor]) -> WeightManifest:
        """Copy the parameters out and put them under the version's key; they may change as soon as this returns."""
        manifest, arena = pack(local_shards(state, self.rank), version, self.rank, self.dtype)
        await self.store.put(rank_key(self.run, version, self.rank), arena)
        return manifest


@dataclass(frozen=True, slots=True)
class PulledWeights:
    """A whole version's bytes, verified, not yet copied."""

    commit: Commit
    arenas: Mapping[int, torch.Tensor]

    def copy_into(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Fill every target; it is checked before the first byte is written that the version fills them all.

        Raises:
            WeightMismatchError: a tensor is missing, extra, or of another shape or type.
        """
        wanted = {
            name: Target(tuple(tensor.shape), str(tensor.dtype), Box((0,) * tensor.ndim, tuple(tensor.shape)))
            for name, tensor in targets.items()
        }
        with torch.no_grad():
            for copy in plan_copies(self.commit.manifests, wanted):
                target = targets[copy.name]
                source = entry_view(self.arenas[copy.rank], copy.entry.byte_offset, copy.entry.box.shape, target.dtype)
                target[copy.destination].copy_(source[copy.source])


@dataclass(frozen=True, slots=True)
class WeightReader:
    """Fetches committed versions."""

    run: str
    store: WeightStore

    async def fetch(self, version: int) -> PulledWeights:
        """All bytes of a version, checked against its manifests.

        Raises:
            WeightMismatchError: the version was never committed, or its bytes are not those that were published.
        """
        try:
            commit: Commit = await self.store.get(commit_key(self.run, version))
        except KeyError:
            raise WeightMismatchError(f"version {version} of the weights was not committed") from None
        keys = [rank_key(self.run, version, manifest.rank) for manifest in commit.manifests]
        arenas = [as_bytes(value) for value in await asyncio.gather(*map(self.store.get, keys))]
        for manifest, arena in zip(commit.manifests, arenas, strict=True):
            if (manifest.version, manifest.num_bytes, manifest.digest) != (version, arena.numel(), digest(arena)):
                raise WeightMismatchError(f"the bytes of rank {manifest.rank}, version {version}, are not what it published")
        return PulledWeights(commit, {manifest.rank: arena for manifest, arena in zip(commit.manifests, arenas, strict=True)})
