"""`Prefetch`: draws, copies and pins batches while the learner works on the previous one."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

from titanrl.replay.batches import ReplayBatch
from titanrl.replay.columns import map_tensors


class Samples(Protocol):
    """A buffer to draw from, such as `PrioritizedReplay` or `SharedReplay`."""

    def sample(self, batch_size: int, *, timeout_s: float) -> ReplayBatch:
        """Draw items."""


class Prefetch:
    """Iterator over batches that a thread draws in advance.

    A batch is drawn `depth` batches before it is used. Its items, probabilities and weights reflect the priorities, beta and
    version at that time; later updates affect only later draws. An item may have been overwritten since, and then its priority
    update has no effect. To draw with every update applied, call `sample` instead. With `max_staleness`, items may exceed the
    limit by the number of versions that were set in the meantime.

    Example:
        with Prefetch(replay, 256) as batches:
            for step, batch in zip(range(1000), batches):
                ...
    """

    def __init__(
        self, replay: Samples, batch_size: int, *, depth: int = 1, timeout_s: float = 60.0, pin_memory: bool = False
    ) -> None:
        """Start to draw.

        Args:
            replay: Buffer.
            batch_size: Number of items.
            depth: Batches that are drawn ahead.
            timeout_s: Longest wait of a draw for a first item; `next` then raises the exception of the draw.
            pin_memory: Copy tensors into page-locked memory, from which `.to("cuda", non_blocking=True)` is asynchronous.

        Raises:
            ValueError: `depth` is less than 1, or memory cannot be pinned without CUDA.
        """
        if depth < 1:
            raise ValueError(f"depth: invalid value (got {depth}). Use at least 1.")
        if pin_memory and not _has_cuda():
            raise ValueError("pin_memory: CUDA is not available (got True). Use False on this machine.")
        self._replay, self._batch_size, self._timeout_s, self._pin_memory = replay, batch_size, timeout_s, pin_memory
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._batches: deque[Future[ReplayBatch]] = deque(self._thread.submit(self._draw) for _ in range(depth))

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[ReplayBatch]:
        return self

    def __next__(self) -> ReplayBatch:
        """Return the oldest batch, and start to draw another one."""
        if not self._batches:
            raise StopIteration
        batch = self._batches.popleft()
        self._batches.append(self._thread.submit(self._draw))
        return batch.result()

    def close(self) -> None:
        """Stop to draw; a draw in progress ends first."""
        self._batches.clear()
        self._thread.shutdown(cancel_futures=True)

    def _draw(self) -> ReplayBatch:
        batch = self._replay.sample(self._batch_size, timeout_s=self._timeout_s)
        if not self._pin_memory:
            return batch
        return replace(batch, payload=map_tensors(batch.payload, lambda tensor: tensor.pin_memory()))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
