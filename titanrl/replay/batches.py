"""Batches, options, counters and exceptions of the standalone replay buffers, and `Prefetch`, which draws in advance."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypedDict

import numpy as np
import numpy.typing as npt

from titanrl.base.errors import TitanRLError
from titanrl.replay.columns import map_tensors

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class EmptyReplayError(TitanRLError):
    """No item could be sampled in time; the message gives the reason."""


class ReplayClosedError(TitanRLError):
    """The process that serves a buffer or one of its shards does not respond; the message names it."""


class ReplayFullError(TitanRLError):
    """No row of a shared buffer became free in time; the message says how many rows writers and readers hold."""


class ReplayOptions(TypedDict, total=False):
    """Optional settings of a prioritized buffer."""

    alpha: float
    """Exponent of priorities, 0.6 by default; 0 samples uniformly."""
    beta: float | tuple[float, float]
    """Exponent of importance weights, or its first and last value over `beta_steps` learner steps; (0.4, 1.0) by default."""
    beta_steps: int
    """Learner steps until the last value of beta; 100,000 by default."""
    eps: float
    """Term added to every priority, so that an item with priority 0 can still be sampled; 1e-8 by default."""
    initial_priority: float
    """Priority of new items until a higher priority has been set; 1 by default."""
    max_staleness: int | None
    """Items older than the current version minus this are never sampled; None, the default, samples items of any age."""
    seed: int
    """Seed of the draws; 0 by default."""


@dataclass(frozen=True, slots=True)
class ReplayBatch:
    """Items drawn from a buffer, with replacement.

    Example: `ReplayBatch({"obs": ..., "action": ...}, handles=[17, 4], weights=[1.0, 0.6], probabilities=[0.1, 0.2],
    versions=[3, 2])`
    """

    payload: Any
    """Copies of the items, nested like the written payloads, with `[B]` as the first dimension."""
    handles: Integers
    """Sequence numbers of the items, `[B]`, for `update_priorities`."""
    weights: npt.NDArray[np.float32]
    """Importance weights, `[B]`; the largest possible one is 1."""
    probabilities: Floats
    """Probability of each item when it was drawn, `[B]`."""
    versions: Integers
    """Version of the policy that produced each item, `[B]`; by default the policy version at the time of writing."""


@dataclass(frozen=True, slots=True)
class ReplayStats:
    """Counters of a buffer since it was created."""

    num_items: int
    """Committed items in the buffer, including those that are too old or have a priority of zero."""
    capacity: int
    """Number of slots."""
    num_reserved: int
    """Handles that were reserved, including one for every written item."""
    num_committed: int
    """Items that were written."""
    num_sampled: int
    """Items that were drawn."""
    num_stale_updates: int
    """Priority updates for items that were overwritten or released."""
    num_stale_commits: int
    """Commits of reservations that were overwritten or released, or whose lease expired."""
    num_expired: int
    """Reservations that ended without a commit, because their lease expired or their writer died."""
    num_bytes: int
    """Bytes of the payload columns."""


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
        if pin_memory:
            import torch

            if not torch.cuda.is_available():
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
