"""The two ends of a transfer: `WeightPublisher` publishes the shards of a trainer rank, and `WeightReader` fetches committed
weights and copies them into the tensors of a generator rank.
"""

import asyncio
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from titanrl.base.choices import TransportName, Verify
from titanrl.weights.copying import Copies, CopyOut, copy_in, pin, unpin
from titanrl.weights.fanout import HostTransport
from titanrl.weights.layout import (
    PackPlan,
    PartOf,
    SliceCopy,
    Target,
    TensorFingerprint,
    digest,
    entry_view,
    held_pieces,
    local_part,
    plan_copies,
    plan_pack,
)
from titanrl.weights.records import VERSIONS_HELD, ByteLayout, Commit, WeightManifest, WeightMismatchError, layout_key
from titanrl.weights.transport import (
    Arena,
    ArenaTransport,
    MappedArena,
    Payload,
    RdmaTransport,
    Source,
    StoreTransport,
    Transport,
)

if TYPE_CHECKING:
    from titanrl.weights.store import WeightStore

Targets = Mapping[str, torch.Tensor | PartOf]
"""Tensors to fill, by the trainer's tensor names."""


class WeightPublisher:
    """Publisher of this rank's shards of each version, cast to the generators' dtype. Its calls must not overlap."""

    def __init__(
        self,
        run: str,
        rank: int,
        store: "WeightStore",
        dtype: torch.dtype,
        transports: Sequence[TransportName],
        verify: Verify = "sampled",
        num_arenas: int = VERSIONS_HELD,
        first: Mapping[str, int] | None = None,
    ) -> None:
        """Prepare to publish parameters, cast to `dtype`, under the name of a run, which is the prefix of the store's keys.

        The manifests offer `transports` in this order. `verify` is the portion of the bytes that the digest covers. Of the
        memory for two publications, `num_arenas` are allocated in advance; the other when it is needed. `first` is that of
        `first_holders`.
        """
        self._first = first
        self._run, self._rank, self._store = run, rank, store
        self._dtype, self._verify = dtype, verify
        known: dict[TransportName, Transport] = {
            "arena": ArenaTransport(),
            "rdma": RdmaTransport(),
            "store": StoreTransport(run, rank, store),
        }
        self._transports = [known[name] for name in transports]
        self._copy_out = CopyOut()
        self._planned: TensorFingerprint | None = None
        self._plan: PackPlan
        self._blocks: list[torch.Tensor]
        self._arenas: list[Arena] = []
        self._num_arenas = num_arenas
        self._copies: list[Copies] = []
        self._num_published = 0

    async def prepare(self, state: Mapping[str, torch.Tensor], keep: Collection[str] = ()) -> None:
        """Plan the layout of a state dict and allocate all memory. Without this call, the first `publish` does so.

        Args:
            state: The model's state dict. The plan is reused as long as the dict holds the same tensors in the same memory.
                Pass the module's own tensors, because `state_dict()` detaches them unless `keep_vars=True`.
            keep: Names of tensors that keep their dtype (buffers); always the same ones.

        Raises:
            ValueError: A tensor cannot be published, or the total size has changed; the message names the cause.
            OSError: Not enough memory.
        """
        if self._planned is not None and self._planned.matches(state):
            return
        planned, plan = TensorFingerprint(state), plan_pack(state, self._rank, self._dtype, keep, self._first)
        for _ in range(0 if self._arenas else self._num_arenas):
            self._allocate(plan.layout.num_bytes, state)
        allocated = self._arenas[0].handle.num_bytes
        if plan.layout.num_bytes != allocated:
            raise ValueError(
                f"weights: the size of trainer rank {self._rank}'s shards must stay {allocated} bytes during a run "
                f"(got {plan.layout.num_bytes}). Start a new run for a model of a different size."
            )
        key = layout_key(self._run, plan.layout.layout_id)
        if not await self._store.exists(key):
            await self._store.put(key, plan.layout)
        self._plan, self._planned, self._blocks = plan, planned, plan.local_blocks(state)
        self._copies = [Copies(plan.targets(arena.data), self._blocks) for arena in self._arenas]

    async def publish(self, version: int, state: Mapping[str, torch.Tensor], keep: Collection[str] = ()) -> WeightManifest:
        """Copy the weights into an arena; the caller may change them afterwards. The last two publications stay readable.

        `WeightSync` publishes only when no replica reads the version to be overwritten; a reader without a lease
        detects by the sequence number that its bytes were overwritten.

        See `prepare` for `state`, `keep`, and the `ValueError` and `OSError` that it raises.
        """
        await self.prepare(state, keep)
        slot = self._num_published % VERSIONS_HELD  # counts publications, because versions may skip numbers
        layout = self._plan.layout
        if slot == len(self._arenas):
            self._allocate(layout.num_bytes, state)
            self._copies.append(Copies(self._plan.targets(self._arenas[slot].data), self._blocks))
        arena = self._arenas[slot]
        with arena.writing() as data:
            await self._copy_out.run(self._copies[slot])
        self._num_published += 1
        return WeightManifest(
            version=version,
            rank=self._rank,
            layout_id=layout.layout_id,
            num_bytes=layout.num_bytes,
            digest=digest(data, self._verify, version),
            sequence=arena.sequence,
            handles=tuple([await transport.offer(version, arena) for transport in self._transports]),
        )

    def close(self) -> None:
        """Release the arenas. The publisher must not be used afterwards."""
        for arena in self._arenas:
            arena.close()

    def _allocate(self, num_bytes: int, state: Mapping[str, torch.Tensor]) -> None:
        """Allocate the memory of one publication, pinned for copies from the device of the state."""
        arena = Arena(num_bytes)
        device = next((local_part(value).device for value in state.values()), torch.device("cpu"))
        pin(arena.storage, device, read_only=False)
        self._arenas.append(arena)


class CopyPlan:
    """Slice copies from published bytes into tensors, planned once per layout and bound once per address of the bytes."""

    def __init__(self, layouts: Sequence[ByteLayout], targets: Targets) -> None:
        """Plan the copies; raise `WeightMismatchError` or `ValueError` unless they fill every target."""
        self.layout_ids = [layout.layout_id for layout in layouts]
        self._planned = TensorFingerprint(targets)
        wanted = {name: Target(tuple(t.shape), str(t.dtype), held_pieces(name, t)) for name, t in targets.items()}
        self._slices: tuple[SliceCopy, ...] = plan_copies(layouts, wanted)
        self._filled = [local_part(targets[part.name])[part.destination] for part in self._slices]
        self._copies: dict[tuple[int, ...], Copies] = {}

    def fits(self, layout_ids: Sequence[str], targets: Targets) -> bool:
        """Return whether the plan is for these layouts and for these targets at their current addresses."""
        return self.layout_ids == layout_ids and self._planned.matches(targets)

    def run(self, data: Mapping[int, torch.Tensor], *, is_reused: bool) -> None:
        """Copy from the bytes of each trainer rank, given by rank, into the targets. Memory that `is_reused` is kept alive."""
        where = tuple(data[rank].data_ptr() for rank in sorted(data))
        if (copies := self._copies.get(where)) is None:
            copies = Copies(self._filled, [entry_view(data[part.rank], part.entry)[part.source] for part in self._slices])
            if is_reused:
                if len(self._copies) >= VERSIONS_HELD:  # publishers reuse this many arenas
                    self._copies.clear()
                self._copies[where] = copies
        copy_in(copies)


class WeightReader:
    """Reader of committed versions into tensors of this process. It can be pickled before its first use.

    Fetch and copy one version after the other. A copy may run in another thread than the event loop of the fetches.
    """

    def __init__(self, run: str, store: "WeightStore", verify: Verify = "sampled", name: str | None = None) -> None:
        """Prepare to read the versions published under the name of a run. `verify="off"` ignores their digests; otherwise the
        publisher has chosen what they cover. Readers of one `name` share what they receive from other hosts.
        """
        self._run, self._store, self._verify = run, store, verify
        # Tried in this order for each offered handle. Over several hosts, `HostTransport` maps what RDMA would copy per rank.
        self._sources: list[Source] = [
            ArenaTransport(),
            HostTransport(name=name),
            RdmaTransport(),
            StoreTransport(run, 0, store),
        ]
        self._bytes_reported = 0
        self._layouts: dict[str, ByteLayout] = {}
        self._pinned: dict[int, weakref.finalize[..., MappedArena]] = {}
        self.plan: CopyPlan | None = None
        """Plan of the last copy, which is reused while layouts and targets stay the same."""

    async def fetch(self, commit: Commit) -> "FetchedWeights":
        """Make all bytes of a version accessible. Bytes in arenas on this host are mapped instead of copied."""
        stale = [manifest.rank for manifest in commit.manifests if manifest.version != commit.version]
        if stale:
            raise WeightMismatchError(f"version {commit.version}: the manifests of ranks {stale} are of another version")
        layouts = [await self._layout(manifest.layout_id) for manifest in commit.manifests]
        payloads = await asyncio.gather(*(self._payload(manifest) for manifest in commit.manifests))
        return FetchedWeights(self, commit, layouts, payloads)

    def take_received(self) -> int:
        """Return the bytes that this process has received since the previous call, not counting shared memory."""
        total = sum(source.num_received for source in self._sources)
        received, self._bytes_reported = total - self._bytes_reported, total
        return received

    def verify(self, manifest: WeightManifest, payload: Payload) -> None:
        """Raise `WeightMismatchError` if the length or digest of one rank's bytes differs from what the rank published."""
        bytes_of = f"version {manifest.version} of rank {manifest.rank}"
        if payload.data.numel() != manifest.num_bytes:
            raise WeightMismatchError(f"{bytes_of} must have {manifest.num_bytes} bytes (got {payload.data.numel()})")
        if self._verify == "off" or manifest.digest is None:
            return
        kind: Verify = "full" if manifest.digest.kind == "full" else "sampled"
        found = digest(payload.data, kind, manifest.version)
        payload.check(manifest)  # report overwritten bytes as overwritten, not as corrupt
        if found != manifest.digest:
            raise WeightMismatchError(f"{bytes_of} does not match its published digest ({manifest.digest.kind})")

    def pin(self, payload: Payload, device: torch.device) -> None:
        """Pin a mapping for fast copies to a device, unless it is already pinned."""
        address = payload.data.data_ptr()
        if payload.mapped is not None and (address not in self._pinned or not self._pinned[address].alive):
            pin(payload.data, device, read_only=True)
            self._pinned[address] = weakref.finalize(payload.mapped, unpin, address)

    def close(self) -> None:
        """Release the pinned mappings and stop receiving. The reader must not be used afterwards."""
        for release in self._pinned.values():
            release()
        self._pinned.clear()
        for source in self._sources:
            if isinstance(source, HostTransport):
                source.close()

    async def _layout(self, layout_id: str) -> ByteLayout:
        """Return a layout. It is read from the store once."""
        if layout_id not in self._layouts:
            try:
                self._layouts[layout_id] = await self._store.get(layout_key(self._run, layout_id))
            except KeyError:
                raise WeightMismatchError(f"layout {layout_id} of the weights is not in the store") from None
        return self._layouts[layout_id]

    async def _payload(self, manifest: WeightManifest) -> Payload:
        """Fetch a rank's bytes through the first offered transport that is reachable from this process."""
        for handle in manifest.handles:
            for source in self._sources:
                if source.reaches(handle):
                    payload = await source.fetch(manifest, handle)
                    payload.check(manifest)
                    return payload
        raise WeightMismatchError(
            f"weights.transport: no offered transport reaches this host from trainer rank {manifest.rank} "
            f"(got {[type(handle).__name__ for handle in manifest.handles]}). Set it to auto."
        )


@dataclass(frozen=True, slots=True)
class FetchedWeights:
    """A complete version that is accessible in this process but not yet copied into a model."""

    reader: WeightReader
    commit: Commit
    layouts: Sequence[ByteLayout] = field(repr=False)
    payloads: Sequence[Payload] = field(repr=False)

    def copy_into(self, targets: Targets) -> None:
        """Fill every target. All checks that are possible in advance run before the first write.

        The plan is reused as long as the targets are the same objects in the same memory.

        Raises:
            WeightMismatchError: A tensor is missing, unexpected, or has another shape or dtype; the bytes do not match their
                digest; or the writer overwrote them during the copy, and the targets now hold a mixture of versions.
            ValueError: A target has an unsupported placement.
        """
        reader, ranks = self.reader, list(zip(self.commit.manifests, self.payloads, strict=True))
        if reader.plan is None or not reader.plan.fits([layout.layout_id for layout in self.layouts], targets):
            reader.plan = CopyPlan(self.layouts, targets)
        for manifest, payload in ranks:
            reader.verify(manifest, payload)
        device = next((local_part(target).device for target in targets.values()), torch.device("cpu"))
        for payload in self.payloads:
            reader.pin(payload, device)
        is_reused = all(payload.is_reused for payload in self.payloads)
        reader.plan.run({manifest.rank: payload.data for manifest, payload in ranks}, is_reused=is_reused)
        for manifest, payload in ranks:
            payload.check(manifest)
