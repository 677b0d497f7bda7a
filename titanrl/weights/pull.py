"""Pulling on a generator rank."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from titanrl.weights.copying import Copies, copy_in, pin
from titanrl.weights.digest import Verify, digest
from titanrl.weights.layout import PartOf, entry_view, held_pieces, local_part
from titanrl.weights.manifest import ByteLayout, Commit, WeightManifest, WeightMismatchError, commits_key, layout_key
from titanrl.weights.slice_copies import SliceCopy, Target, plan_copies
from titanrl.weights.store import WeightStore
from titanrl.weights.transport import Payload, Transport, make_transports

Targets = Mapping[str, torch.Tensor | PartOf]
"""Where each tensor of the trainer goes, by its name there."""


class CopyPlan:
    """The slice copies from some layouts into some tensors, worked out once for each place of the bytes."""

    def __init__(self, layouts: Sequence[ByteLayout], targets: Targets) -> None:
        """Plan once; it is proved here that the layouts fill every target.

        Raises:
            WeightMismatchError: they do not; the text names the tensor.
            ValueError: a target whose placement is not understood.
        """
        self.layout_ids = [layout.layout_id for layout in layouts]
        self.targets = targets
        self._slices: tuple[SliceCopy, ...] = plan_copies(layouts, {name: as_target(name, t) for name, t in targets.items()})
        self._filled = [local_part(targets[part.name])[part.destination] for part in self._slices]
        self._copies: dict[tuple[int, ...], Copies] = {}

    def fits(self, layout_ids: Sequence[str], targets: Targets) -> bool:
        """Whether this is the plan for these layouts and this very mapping."""
        return self.targets is targets and self.layout_ids == layout_ids

    def run(self, data: Mapping[int, torch.Tensor]) -> None:
        """Copy from the bytes of each rank."""
        where = tuple(data[rank].data_ptr() for rank in sorted(data))
        if where not in self._copies:
            if len(self._copies) > 1:  # writers have two arenas by turns; other bytes do not come back
                self._copies.clear()
            sources = [entry_view(data[part.rank], part.entry)[part.source] for part in self._slices]
            self._copies[where] = Copies(self._filled, sources)
        copy_in(self._copies[where])


def as_target(name: str, value: torch.Tensor | PartOf) -> Target:
    """What a tensor of the reader needs."""
    return Target(tuple(value.shape), str(value.dtype), held_pieces(name, value))


class WeightReader:
    """Brings committed versions into tensors of this process. It can be sent to another process before its first use."""

    def __init__(self, run: str, store: WeightStore, verify: Verify = "sampled") -> None:
        """Read what is published under the name of a run.

        Args:
            run: prefix of the store's keys.
            store: where layouts and records are.
            verify: `off` leaves digests unread; otherwise those that were published are checked.
        """
        self._run, self._store, self._verify = run, store, verify
        self._transports: list[Transport] = make_transports(("arena", "rdma", "store"), run, 0, store)
        self._layouts: dict[str, ByteLayout] = {}
        self._pinned: set[int] = set()
        self.plan: CopyPlan | None = None

    async def committed(self, version: int) -> Commit:
        """The record of a version.

        Raises:
            WeightMismatchError: there is none, or no longer.
        """
        try:
            commits: tuple[Commit, ...] = await self._store.get(commits_key(self._run))
        except KeyError:
            commits = ()
        for commit in commits:
            if commit.version == version:
                return commit
        held = f"the store has versions {[commit.version for commit in commits]}" if commits else "none is"
        raise WeightMismatchError(f"version {version} of the weights is not committed; {held}")

    async def fetch(self, commit: Commit) -> "FetchedWeights":
        """Get at all bytes of a version; those in arenas of this host are not copied.

        Raises:
            WeightMismatchError: they cannot be reached, are gone, or are of another version.
        """
        stale = [manifest.rank for manifest in commit.manifests if manifest.version != commit.version]
        if stale:
            raise WeightMismatchError(f"version {commit.version}: the manifests of ranks {stale} are of another version")
        layouts = [await self._layout(manifest.layout_id) for manifest in commit.manifests]
        payloads = await asyncio.gather(*(self._payload(manifest) for manifest in commit.manifests))
        return FetchedWeights(self, commit, layouts, payloads)

    def plan_for(self, layouts: Sequence[ByteLayout], targets: Targets) -> CopyPlan:
        """The plan for some layouts and targets; kept until one of them is another."""
        if self.plan is None or not self.plan.fits([layout.layout_id for layout in layouts], targets):
            self.plan = CopyPlan(layouts, targets)
        return self.plan

    def verify(self, manifest: WeightManifest, payload: Payload) -> None:
        """Check length and digest of one rank's bytes.

        Raises:
            WeightMismatchError: they are not what was published.
        """
        what = f"the bytes of rank {manifest.rank}, version {manifest.version},"
        if payload.data.numel() != manifest.num_bytes:
            raise WeightMismatchError(f"{what} are {payload.data.numel()}, not {manifest.num_bytes}")
        if self._verify == "off" or manifest.digest is None:
            return
        kind: Verify = "full" if manifest.digest.kind == "full" else "sampled"
        found = digest(payload.data, kind, manifest.version)
        payload.check(manifest)  # overwritten bytes are not damaged ones
        if found != manifest.digest:
            raise WeightMismatchError(f"{what} are not what it published (digest {manifest.digest.kind})")

    def pin(self, payload: Payload, device: torch.device) -> None:
        """Make copies from shared memory to a device fast; once for each mapping."""
        if payload.mapped is not None and payload.data.data_ptr() not in self._pinned:
            self._pinned.add(payload.data.data_ptr())
            pin(payload.data, device, read_only=True)

    async def _layout(self, layout_id: str) -> ByteLayout:
        """A layout is asked for once; versions repeat its id only."""
        if layout_id not in self._layouts:
            try:
                self._layouts[layout_id] = await self._store.get(layout_key(self._run, layout_id))
            except KeyError:
                raise WeightMismatchError(f"layout {layout_id} of the weights is not in the store") from None
        return self._layouts[layout_id]

    async def _payload(self, manifest: WeightManifest) -> Payload:
        """The bytes by the first way that leads here."""
        for handle in manifest.handles:
            for transport in self._transports:
                if transport.reaches(handle):
                    payload = await transport.fetch(manifest, handle)
                    payload.check(manifest)
                    return payload
        raise WeightMismatchError(
            f"no way leads from trainer rank {manifest.rank} to this host: the weights were offered through "
            f"{[type(handle).__name__ for handle in manifest.handles]}; set weights.transport to auto"
        )


@dataclass(frozen=True, slots=True)
class FetchedWeights:
    """A whole version at hand, not yet copied."""

    reader: WeightReader
    commit: Commit
    layouts: Sequence[ByteLayout] = field(repr=False)
    payloads: Sequence[Payload] = field(repr=False)

    def copy_into(self, targets: Targets) -> None:
        """Fill every target; all that can be checked before the first byte is written is.

        Args:
            targets: tensors, DTensors or parts by the trainer's names; pass the same mapping each time, and the plan is kept.

        Raises:
            WeightMismatchError: a tensor is missing, extra, or of another shape or type; the bytes are not those that were
                published; or they changed while they were copied, and the targets hold a mixture.
        """
        plan = self.reader.plan_for(self.layouts, targets)
        for manifest, payload in self._ranks():
            self.reader.verify(manifest, payload)
        where = next((local_part(target).device for target in targets.values()), torch.device("cpu"))
        for _, payload in self._ranks():
            self.reader.pin(payload, where)
        plan.run({manifest.rank: payload.data for manifest, payload in self._ranks()})
        for manifest, payload in self._ranks():
            payload.check(manifest)

    def _ranks(self) -> list[tuple[WeightManifest, Payload]]:
        return list(zip(self.commit.manifests, self.payloads, strict=True))
