"""Publishing on a trainer rank, pulling on a generator rank."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from titanrl.weights.arena import Arena, MappedArena
from titanrl.weights.layout import digest, entry_view, local_shards, num_packed_bytes, pack
from titanrl.weights.manifest import ArenaHandle, Box, Commit, WeightManifest, WeightMismatchError, commit_key, rank_key
from titanrl.weights.plan import Target, plan_copies
from titanrl.weights.store import WeightStore, as_bytes

Transport = Literal["arena", "store"]
"""How bytes reach the readers: shared memory of one host, or torchstore's own tensors."""


class WeightPublisher:
    """Publishes this rank's share of each version, in the generators' dtype."""

    def __init__(self, run: str, rank: int, store: WeightStore, dtype: torch.dtype, transport: Transport) -> None:
        """Publish under the name of the run.

        Args:
            run: prefix of the store's keys.
            rank: this trainer rank.
            store: where bytes go with the transport `store`.
            dtype: what parameters are cast to.
            transport: `arena` for readers on this host, `store` for readers anywhere.
        """
        self._run, self._rank, self._store = run, rank, store
        self._dtype, self._transport = dtype, transport
        self._arenas: dict[int, Arena] = {}

    async def publish(self, version: int, state: Mapping[str, torch.Tensor]) -> WeightManifest:
        """Copy the parameters out; they may change as soon as this returns. The last two versions stay readable."""
        shards = list(local_shards(state, self._rank))
        num_bytes = num_packed_bytes(shards, self._dtype)
        if self._transport == "store":
            data = torch.empty(num_bytes, dtype=torch.uint8)
            entries = pack(shards, data, self._dtype)
            await self._store.put(rank_key(self._run, version, self._rank), data)
            return WeightManifest(version, self._rank, entries, num_bytes, digest(data), None, 0)
        arena = self._arena(version, num_bytes)
        with arena.writing() as data:
            entries = pack(shards, data, self._dtype)
        return WeightManifest(version, self._rank, entries, num_bytes, digest(data), arena.handle, arena.sequence)

    def _arena(self, version: int, num_bytes: int) -> Arena:
        """The older of the two arenas: whoever reads the newer one goes on undisturbed."""
        place = version % 2
        if place not in self._arenas:
            self._arenas[place] = Arena(num_bytes)
        assert self._arenas[place].handle.num_bytes == num_bytes, "the shape of the weights changed within a run"
        return self._arenas[place]


@dataclass(frozen=True, slots=True)
class PulledWeights:
    """A whole version's bytes, verified, not yet copied."""

    commit: Commit
    data: Mapping[int, torch.Tensor]
    mapped: Mapping[int, MappedArena]

    def copy_into(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Fill every target; it is checked before the first byte is written that the version fills them all.

        Raises:
            WeightMismatchError: a tensor is missing, extra, or of another shape or type; or the bytes changed while they were
                copied, and the targets hold a mixture.
        """
        wanted = {
            name: Target(tuple(tensor.shape), str(tensor.dtype), Box((0,) * tensor.ndim, tuple(tensor.shape)))
            for name, tensor in targets.items()
        }
        with torch.no_grad():
            for copy in plan_copies(self.commit.manifests, wanted):
                target = targets[copy.name]
                source = entry_view(self.data[copy.rank], copy.entry.byte_offset, copy.entry.box.shape, target.dtype)
                target[copy.destination].copy_(source[copy.source])
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """Make sure that no arena has been written since it was published.

        Raises:
            WeightMismatchError: one has.
        """
        for manifest in self.commit.manifests:
            if manifest.arena is not None:
                what = f"version {manifest.version} of rank {manifest.rank}"
                self.mapped[manifest.rank].check(manifest.sequence, what)


class WeightReader:
    """Fetches committed versions."""

    def __init__(self, run: str, store: WeightStore) -> None:
        """Read what is published under the name of a run."""
        self._run, self._store = run, store
        self._mapped: dict[ArenaHandle, MappedArena] = {}

    async def fetch(self, version: int) -> PulledWeights:
        """All bytes of a version, checked against its manifests; those in arenas are not copied.

        Raises:
            WeightMismatchError: the version was never committed, or its bytes are not those that were published.
        """
        try:
            commit: Commit = await self._store.get(commit_key(self._run, version))
        except KeyError:
            raise WeightMismatchError(f"version {version} of the weights was not committed") from None
        mapped = {manifest.rank: self._map(manifest.arena) for manifest in commit.manifests if manifest.arena is not None}
        stored = [manifest.rank for manifest in commit.manifests if manifest.arena is None]
        values = await asyncio.gather(*(self._store.get(rank_key(self._run, version, rank)) for rank in stored))
        data = {rank: arena.data for rank, arena in mapped.items()}
        data |= {rank: as_bytes(value) for rank, value in zip(stored, values, strict=True)}
        pulled = PulledWeights(commit, data, mapped)
        pulled.check_unchanged()
        for manifest in commit.manifests:
            found = (manifest.version, data[manifest.rank].numel(), digest(data[manifest.rank]))
            if found != (version, manifest.num_bytes, manifest.digest):
                raise WeightMismatchError(f"the bytes of rank {manifest.rank}, version {version}, are not what it published")
        return pulled

    def _map(self, handle: ArenaHandle) -> MappedArena:
        """A mapping is kept: its first pages cost more than all copies after."""
        if handle not in self._mapped:
            self._mapped[handle] = MappedArena(handle)
        return self._mapped[handle]
