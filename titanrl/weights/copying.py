"""Batched tensor copies that cast in the same pass, on `THREADS` CPU threads or on a device stream.

Large copies bypass the CPU caches (`_stream.c`); docs/weights.md describes the effect. Threads take the next part when they
have finished one, so that a thread whose core is busy delays a copy by at most one part; OpenMP's barriers make a copy ten
times slower then. On CUDA, host memory is pinned once per arena, so that copies overlap with computation. The device code is
written for CUDA and NPU, but has not been run on either.
"""

import asyncio
import logging
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from titanrl.processes.machine import THREADS

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
    """Describe a copy for `_stream`; return None for copies left to torch: on a device, with other casts, or of short rows."""
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
    """Merge the dimensions that are contiguous in both tensors; return (size, target stride, source stride) of each result."""
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
"""Part of a copy: `Rows` for `_stream`."""


class Team:
    """The threads that run the copies of this process, one copy at a time."""

    def __init__(self) -> None:
        """Start no thread yet, because the process may still fork."""
        self._running = threading.Lock()

    @cached_property
    def num_threads(self) -> int:
        """Number of cores that no other process of the run needs then."""
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
