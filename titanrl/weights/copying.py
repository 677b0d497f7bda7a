"""Many tensors copied at once, with the cast in the same pass: on the CPU by one thread, on a device by a stream of its own.

More threads do not help a copy, and OpenMP's barriers make it ten times slower as soon as other processes are busy. On CUDA
the host side is pinned (once for an arena), so that copies run beside the computation; whoever relies on them synchronizes
first. The device part is written for CUDA and NPU and has been run on neither.
"""

import asyncio
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_CUDA_HOST_REGISTER_DEFAULT, _CUDA_HOST_REGISTER_READ_ONLY = 0, 8  # cudaHostRegister's flags


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

    async def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Fill CPU tensors; returns when their bytes are there. Sources must not change until then, but may be read."""
        if not sources or sources[0].device.type == "cpu":
            fill(targets, sources)
            return
        device: Any = torch.get_device_module(sources[0].device)
        if self._stream is None:
            self._stream = device.Stream()
        self._stream.wait_stream(device.current_stream())  # what made the weights comes first
        with device.stream(self._stream):
            fill(targets, sources)
        await asyncio.to_thread(self._stream.synchronize)


def copy_in(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Fill a model's tensors from CPU tensors; returns when they are filled."""
    fill(targets, sources)
    if targets and targets[0].device.type != "cpu":
        torch.get_device_module(targets[0].device).current_stream().synchronize()


def fill(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target; on a device this returns before it is done."""
    if targets:
        with torch.no_grad(), one_thread():
            torch._foreach_copy_(list(targets), list(sources), non_blocking=True)


def pin(data: torch.Tensor, device: torch.device, *, read_only: bool) -> None:
    """Register shared memory with CUDA, so that copies to and from it need no staging; does nothing for other devices."""
    if device.type != "cuda":
        return
    flags = _CUDA_HOST_REGISTER_READ_ONLY if read_only else _CUDA_HOST_REGISTER_DEFAULT
    error = torch.cuda.cudart().cudaHostRegister(data.data_ptr(), data.numel(), flags)
    if int(error) != 0:  # copies are still right, only slower
        warnings.warn(f"cannot pin {data.numel()} bytes of shared memory (CUDA error {int(error)})", stacklevel=2)
