"""Measure the peak memory of tensors, on any device."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Storages(TorchDispatchMode):
    """Counts the bytes of every live storage that an operation has allocated."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen: set[int] = set()
        self._bytes = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._follow(leaf.untyped_storage())
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self._bytes += size
        self.peak = max(self.peak, self._bytes)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self._bytes -= size


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Return the peak bytes of the tensors that `work` allocates, excluding earlier allocations.

    On CUDA, the allocator reports the peak. On other devices, it is computed by tracking storages, which covers every torch
    operation.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = int(torch.cuda.memory_allocated())
        work()
        return int(torch.cuda.max_memory_allocated()) - before
    with _Storages() as storages:
        work()
    peak: int = storages.peak
    return peak
