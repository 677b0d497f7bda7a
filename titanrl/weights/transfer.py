"""The two ends of a transfer: `WeightPublisher` publishes the shards of a trainer rank, and `WeightReader` fetches committed
weights and copies them into the tensors of a generator rank.

Both copy with `Copies`, batched tensor copies that cast in the same pass, on a device stream or on a CPU. There, several
threads copy long rows, as many as the variable `THREADS` says, and one thread copies the rest. Large copies bypass the CPU
caches (`_stream.c`); docs/weights.md describes the effect. Threads take the next part when they have finished one, so that a
thread whose core is busy delays a copy by at most one part; OpenMP's barriers make a copy ten times slower then. On CUDA, host
memory is pinned once per arena, so that copies overlap with computation. The device code is written for CUDA and NPU, but has
not been run on either.
"""

import asyncio
import logging
import os
import threading
import warnings
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from titanrl.processes.machine import THREADS
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
    HostTransport,
    MappedArena,
    Payload,
    RdmaTransport,
    Source,
    StoreTransport,
    Transport,
)

if TYPE_CHECKING:
    from titanrl.config.sections import TransportName, Verify
    from titanrl.weights.store import WeightStore

try:
    from titanrl.weights import _stream
except ImportError:
    _stream = None  # type: ignore[assignment]
    logging.getLogger(__name__).warning("titanrl.weights._stream is not built; using torch's slower weight copies")

_CUDA_HOST_REGISTER_DEFAULT, _CUDA_HOST_REGISTER_READ_ONLY = 0, 8  # cudaHostRegister's flags
_STREAMED_FROM_BYTES = 8 << 20
"""Minimum total size of copies that bypass the caches. Smaller copies stay cached for the process that reads them next."""
_SHORTEST_ROW_BYTES = 512
"""Minimum length of streamed rows. The partial cache lines at the ends of a row are always stored normally."""
PIECE_BYTES = 1 << 20
"""Size of the pieces into which copies are split."""
PART_PIECES = 4
"""Pieces of the parts that threads take: at most 4 MB, under a millisecond."""
_pinned: set[int] = set()
"""Addresses that `pin` registered."""


class Rows(NamedTuple):
    """A copy of equally long, contiguous rows, from address to address. The fields match `Copy` in `_stream.c`."""

    target: int
    source: int
    num_rows: int
    length: int
    """Elements per row."""
    target_stride: int
    """Bytes between the starts of target rows."""
    source_stride: int
    """Bytes between the starts of source rows."""
    item: int
    """Bytes per element; 0 casts float32 to bfloat16."""


class Copies:
    """Copies between pairs of tensors with equal shapes, planned once and run any number of times."""

    def __init__(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], streamed_from_bytes: int = _STREAMED_FROM_BYTES
    ) -> None:
        """Plan the copies. The plan keeps the tensors alive; their memory must not be reallocated."""
        self._targets, self._sources = list(targets), list(sources)
        pairs = list(zip(self._targets, self._sources, strict=True))
        is_large = sum(target.nbytes for target in targets) >= streamed_from_bytes
        rows = [as_rows(*pair) if is_large and _stream is not None else None for pair in pairs]
        pieces = [piece for row in rows if row is not None for piece in split(row, PIECE_BYTES)]
        self._parts = [np.array(pieces[i : i + PART_PIECES], np.int64) for i in range(0, len(pieces), PART_PIECES)]
        self._others = [pair for pair, row in zip(pairs, rows, strict=True) if row is None]

    @property
    def device(self) -> torch.device:
        """Device of the first target or first source, whichever is not the CPU; otherwise the CPU."""
        tensors = self._targets[:1] + self._sources[:1]
        return next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))

    def run(self) -> None:
        """Copy each source into its target, in any thread. Copies on a device are only queued."""
        if self._parts:
            TEAM.run(self._parts)
        if self._others:
            targets, sources = map(list, zip(*self._others, strict=True))
            with torch.no_grad(), one_thread():
                torch._foreach_copy_(targets, sources, non_blocking=True)


def as_rows(target: torch.Tensor, source: torch.Tensor) -> Rows | None:
    """Describe a copy for `_stream`; return None for copies left to torch: on a device, with other casts, of short
    rows, of rows that are not contiguous, or of more than two dimensions after `merged_dims`."""
    is_cast = (target.dtype, source.dtype) == (torch.bfloat16, torch.float32)
    if not (target.is_cpu and source.is_cpu and (is_cast or target.dtype == source.dtype)):
        return None
    *outer, (length, *strides) = merged_dims(target, source)
    if len(outer) > 1 or strides != [1, 1] or length * target.itemsize < _SHORTEST_ROW_BYTES:
        return None
    num_rows, target_stride, source_stride = outer[0] if outer else (1, 0, 0)
    return Rows(
        target=target.data_ptr(),
        source=source.data_ptr(),
        num_rows=num_rows,
        length=length,
        target_stride=target_stride * target.itemsize,
        source_stride=source_stride * source.itemsize,
        item=0 if is_cast else target.itemsize,
    )


def merged_dims(target: torch.Tensor, source: torch.Tensor) -> list[tuple[int, int, int]]:
    """Merge the dimensions that are contiguous in both tensors; return (size, target stride, source stride) of each
    result, with strides in elements."""
    dims: list[tuple[int, int, int]] = []
    for size, to, of in zip(target.shape, target.stride(), source.stride(), strict=True):
        if dims and dims[-1][1:] == (size * to, size * of):
            dims[-1] = (dims[-1][0] * size, to, of)
        elif size != 1:
            dims.append((size, to, of))
    return dims or [(1, 1, 1)]


def split(row: Rows, most_bytes: int) -> Iterator[Rows]:
    """Split a copy into copies of at most `most_bytes` written bytes."""
    written, read = (row.item, row.item) if row.item else (torch.bfloat16.itemsize, torch.float32.itemsize)
    length = min(row.length, most_bytes // written)
    num_rows = max(1, most_bytes // (length * written))
    for first_row in range(0, row.num_rows, num_rows):
        for first in range(0, row.length, length):
            yield row._replace(
                target=row.target + first_row * row.target_stride + first * written,
                source=row.source + first_row * row.source_stride + first * read,
                num_rows=min(num_rows, row.num_rows - first_row),
                length=min(length, row.length - first),
            )


Table = np.ndarray[Any, np.dtype[np.int64]]
"""Part of a copy, int64 `[rows, fields of Rows]`, for `_stream`."""


class Team:
    """The threads that run the copies of this process, one copy at a time."""

    def __init__(self) -> None:
        """Start no thread yet, because the process may still fork."""
        self._running = threading.Lock()

    @cached_property
    def num_threads(self) -> int:
        """Number of cores that the run leaves to this process while it copies, from the variable `THREADS`; 1 without it."""
        return min(int(os.environ.get(THREADS, "1")), len(os.sched_getaffinity(0)))

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.num_threads - 1, thread_name_prefix="copy")

    def run(self, parts: Sequence[Table]) -> None:
        """Let each thread, one of them the caller's, take the next part until none is left. Calls wait for each other."""
        left = iter(parts)

        def run_parts() -> None:
            for part in left:
                _stream.run(part)

        with self._running:
            helpers = [self._pool.submit(run_parts) for _ in range(min(self.num_threads, len(parts)) - 1)]
            run_parts()
            for helper in helpers:
                helper.result()


TEAM = Team()


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one CPU thread within the body, in the calling thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class CopyOut:
    """Runner of copies from a device or from this process's memory into shared memory."""

    def __init__(self) -> None:
        self._stream: Any = None

    async def run(self, copies: Copies) -> None:
        """Fill CPU tensors and return when they are complete. Do not write to the sources before that."""
        if copies.device.type == "cpu":
            copies.run()
            return
        device: Any = torch.get_device_module(copies.device)
        if self._stream is None:
            self._stream = device.Stream()
        self._stream.wait_stream(device.current_stream())  # wait for the kernels that write the weights
        with device.stream(self._stream):
            copies.run()
        await asyncio.to_thread(self._stream.synchronize)


def copy_in(copies: Copies) -> None:
    """Fill a model's tensors from CPU tensors; return when they are complete."""
    copies.run()
    if copies.device.type != "cpu":
        torch.get_device_module(copies.device).current_stream().synchronize()


def pin(data: torch.Tensor, device: torch.device, *, read_only: bool) -> None:
    """Pin shared memory with CUDA, so that copies need no staging buffer. Do nothing for other devices."""
    if device.type != "cuda":
        return
    flags = _CUDA_HOST_REGISTER_READ_ONLY if read_only else _CUDA_HOST_REGISTER_DEFAULT
    error = int(torch.cuda.cudart().cudaHostRegister(data.data_ptr(), data.numel(), flags))
    if error == 0:
        _pinned.add(data.data_ptr())
        return
    warnings.warn(
        f"cannot pin {data.numel()} bytes of shared memory, so copies are slower (got CUDA error {error})", stacklevel=2
    )
    with suppress(RuntimeError):  # CUDA keeps the error until the next kernel starts, which then fails
        torch.zeros(1, device=device)


def unpin(address: int) -> None:
    """Release what `pin` registered, if anything, before the memory at an address is unmapped."""
    if address in _pinned:
        _pinned.discard(address)
        torch.cuda.cudart().cudaHostUnregister(address)


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
        transports: "Sequence[TransportName]",
        verify: "Verify" = "sampled",
        num_arenas: int = VERSIONS_HELD,
        first: Mapping[str, int] | None = None,
    ) -> None:
        """Prepare to publish parameters, cast to `dtype`, under the name of a run, which is the prefix of the store's keys.

        The manifests offer `transports` in this order. `verify` is the portion of the bytes that the digest covers. Of the
        memory for two publications, `num_arenas` are allocated in advance; the other when it is needed. `first` is the
        publishing rank of each tensor that rank 0 does not have (`weights.layout.first_holders`).
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
        """Plan the layout of a state dict and allocate `num_arenas`. Without this call, the first `publish` does so.

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

        `launch.generators.WeightSync` publishes only when no replica reads the version to be overwritten; a reader without a
        lease detects by the sequence number that its bytes were overwritten.

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
        """Copy from the bytes of each trainer rank, given by rank, into the targets. The copies from
        memory that `is_reused`, at the same address for later versions, are kept for them."""
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

    def __init__(self, run: str, store: "WeightStore", verify: "Verify" = "sampled", name: str | None = None) -> None:
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
        for layout_id in (manifest.layout_id for manifest in commit.manifests):
            if layout_id not in self._layouts:  # read from the store once
                try:
                    self._layouts[layout_id] = await self._store.get(layout_key(self._run, layout_id))
                except KeyError:
                    raise WeightMismatchError(f"layout {layout_id} of the weights is not in the store") from None
        layouts = [self._layouts[manifest.layout_id] for manifest in commit.manifests]
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
