"""Many tensors copied at once, with the cast in the same pass: on the CPU by one thread, on a device by a stream of its own.

What is larger than the caches goes past them (`_stream.c`), which takes a quarter to a third less time (docs/weights.md). More
threads do not help a copy, and OpenMP's barriers make it ten times slower as soon as other processes are busy. On CUDA the host
side is pinned (once for an arena), so that copies run beside the computation; whoever relies on them synchronizes first. The
device part is written for CUDA and NPU and has been run on neither.
"""

import asyncio
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

try:
    from titanrl.weights import _stream
except ImportError:
    _stream = None  # type: ignore[assignment]
    logging.getLogger(__name__).warning("titanrl.weights._stream is not built: torch copies weights, which takes longer")

_CUDA_HOST_REGISTER_DEFAULT, _CUDA_HOST_REGISTER_READ_ONLY = 0, 8  # cudaHostRegister's flags
_STREAMED_FROM_BYTES = 8 << 20
"""Less may stay in the caches, where the next to read it finds it."""
_SHORTEST_ROW_BYTES = 512
"""The ends of a row, parts of a cache line, are not streamed; a shorter one has little else."""


class Rows(NamedTuple):
    """A copy of rows of equal length, contiguous in themselves, as `_stream.c` has it."""

    target: int
    """Address."""
    source: int
    """Address."""
    num_rows: int
    length: int
    """Elements of a row."""
    target_stride: int
    """Bytes from row to row."""
    source_stride: int
    """Bytes from row to row."""
    item: int
    """Bytes of an element; 0: float32 is cast to bfloat16."""


class Copies:
    """Copies of tensors into others of the same shapes, to be made any number of times."""

    def __init__(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], streamed_from_bytes: int = _STREAMED_FROM_BYTES
    ) -> None:
        """Plan them; tensors must stay in their memory, which is kept for them.

        Args:
            targets: what is filled.
            sources: of the same shapes; types may be others.
            streamed_from_bytes: how large all targets together are at least, if they are filled past the caches.
        """
        self._targets, self._sources = list(targets), list(sources)
        pairs = list(zip(self._targets, self._sources, strict=True))
        is_large = sum(target.nbytes for target in targets) >= streamed_from_bytes
        rows = [as_rows(*pair) if is_large and _stream is not None else None for pair in pairs]
        self._streamed = np.array([row for row in rows if row is not None], dtype=np.int64)
        self._others = [pair for pair, row in zip(pairs, rows, strict=True) if row is None]

    @property
    def device(self) -> torch.device:
        """What is copied from or to, beside this process's memory."""
        tensors = self._targets[:1] + self._sources[:1]
        return next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))

    def run(self) -> None:
        """Copy each source into its target; on a device this returns before it is done."""
        if len(self._streamed):
            _stream.run(self._streamed)
        if self._others:
            targets, sources = map(list, zip(*self._others, strict=True))
            with torch.no_grad(), one_thread():
                torch._foreach_copy_(targets, sources, non_blocking=True)


def as_rows(target: torch.Tensor, source: torch.Tensor) -> Rows | None:
    """A copy as `_stream` makes it; None if that is torch's to make: on a device, with another cast, or of short rows."""
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
    """Size and both strides of each dimension; what is contiguous in both tensors is one. There is at least one."""
    dims: list[tuple[int, int, int]] = []
    for size, to, of in zip(target.shape, target.stride(), source.stride(), strict=True):
        if dims and dims[-1][1:] == (size * to, size * of):
            dims[-1] = (dims[-1][0] * size, to, of)
        elif size != 1:
            dims.append((size, to, of))
    return dims or [(1, 1, 1)]


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use a single CPU thread in the body."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class CopyOut:
    """Copies from a device, or from this process's memory, into shared memory."""

    def __init__(self) -> None:
        """The stream is made when there is a device tensor to copy."""
        self._stream: Any = None

    async def run(self, copies: Copies) -> None:
        """Fill CPU tensors; returns when their bytes are there. Sources must not change until then, but may be read."""
        if copies.device.type == "cpu":
            copies.run()
            return
        device: Any = torch.get_device_module(copies.device)
        if self._stream is None:
            self._stream = device.Stream()
        self._stream.wait_stream(device.current_stream())  # what made the weights comes first
        with device.stream(self._stream):
            copies.run()
        await asyncio.to_thread(self._stream.synchronize)


def copy_in(copies: Copies) -> None:
    """Fill a model's tensors from CPU tensors; returns when they are filled."""
    copies.run()
    if copies.device.type != "cpu":
        torch.get_device_module(copies.device).current_stream().synchronize()


def pin(data: torch.Tensor, device: torch.device, *, read_only: bool) -> None:
    """Register shared memory with CUDA, so that copies to and from it need no staging; does nothing for other devices."""
    if device.type != "cuda":
        return
    flags = _CUDA_HOST_REGISTER_READ_ONLY if read_only else _CUDA_HOST_REGISTER_DEFAULT
    error = torch.cuda.cudart().cudaHostRegister(data.data_ptr(), data.numel(), flags)
    if int(error) != 0:  # copies are still right, only slower
        warnings.warn(f"cannot pin {data.numel()} bytes of shared memory (CUDA error {int(error)})", stacklevel=2)
