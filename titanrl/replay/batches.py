"""The data of the standalone replay buffers: options, batches, counters and exceptions; `Prefetch`; the columns of payloads.

Columns store payloads, which are nested dictionaries, with one column per leaf, in memory or in mapped files. A leaf is a numpy
array, a torch tensor or a list of arbitrary objects. Torch is used only if the caller's payload has tensors.
"""

import mmap
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any, Protocol, TypedDict

import numpy as np
import numpy.typing as npt

from titanrl.base.errors import TitanRLError

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


Index = slice | npt.NDArray[np.int64]
Path = tuple[str, ...]


class Columns:
    """Columns of a fixed number of slots. The first write creates the columns."""

    def __init__(self, capacity: int, columns: dict[Path, Any] | None = None) -> None:
        self._capacity = capacity
        self._columns: dict[Path, Any] = columns or {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the columns. For objects, only the references are counted."""
        return sum(int(column.nbytes) for column in self._columns.values())

    def check(self, payload: Any) -> int:
        """Return the number of items. Raise `ValueError` if the leaves differ in length or do not match the columns."""
        leaves = dict(leaves_of(payload))
        lengths = {path: len(leaf) for path, leaf in leaves.items()}
        if len(set(lengths.values())) != 1:
            shown = ", ".join(f"{leaf_name(path)}: {length}" for path, length in lengths.items())
            raise ValueError(f"payload: leaves must have equal lengths (got {shown or 'no leaves'}). Use one row per item.")
        if self._columns and leaves.keys() != self._columns.keys():
            got, expected = (", ".join(map(leaf_name, paths)) for paths in (leaves, self._columns))
            raise ValueError(f"payload: the keys changed (got {got}). Use those of the first write: {expected}.")
        for path, column in self._columns.items():
            if _kind(leaves[path]) != _kind(column):
                raise ValueError(
                    f"{leaf_name(path)}: the type of an item changed (got {_text(leaves[path])}). "
                    f"Use that of the first write: {_text(column)}."
                )
        return next(iter(lengths.values()))

    def write(self, index: Index, payload: Any, part: Index) -> None:
        """Write the items `part` of a payload into the slots `index`. `check` must have accepted the payload."""
        for path, leaf in leaves_of(payload):
            if path not in self._columns:
                self._columns[path] = _new_column(self._capacity, leaf)
            if isinstance(leaf, list | tuple):
                items = leaf[part] if isinstance(part, slice) else [leaf[i] for i in part]
                # Assigning the list would turn nested lists into rows.
                self._columns[path][index] = np.fromiter(items, dtype=object, count=len(items))
            else:
                self._columns[path][_indexer(leaf, index)] = leaf[_indexer(leaf, part)]

    def read(self, index: npt.NDArray[np.int64]) -> Any:
        """Return copies of the items in these slots, nested like the payload of the first write."""
        torch = sys.modules.get("torch")
        tensor_index = None
        found: dict[Path, Any] = {}
        for path, column in self._columns.items():
            if torch is not None and isinstance(column, torch.Tensor):
                tensor_index = torch.from_numpy(index) if tensor_index is None else tensor_index
                found[path] = column.index_select(0, tensor_index)
            else:
                rows = column.take(index, axis=0)
                found[path] = rows.tolist() if column.dtype == object else rows
        return _nested(found)

    def all(self) -> Any:
        """Return all slots without copying, nested like the payload of the first write."""
        return _nested(self._columns)

    def state(self, num_slots: int) -> dict[Path, Any]:
        """Return copies of the first slots of every column."""
        columns = {path: column[:num_slots] for path, column in self._columns.items()}
        return {path: rows.clone() if is_tensor(rows) else rows.copy() for path, rows in columns.items()}

    def load(self, state: Mapping[Path, Any]) -> None:
        """Replace all contents with a result of `state`."""
        self._columns = {}
        for path, rows in state.items():
            self._columns[path] = _new_column(self._capacity, rows)
            self._columns[path][: len(rows)] = rows


def single(item: Any) -> Any:
    """Convert one item to a payload. Numbers become arrays; values other than arrays and tensors become objects."""
    if isinstance(item, Mapping):
        return {key: single(value) for key, value in item.items()}
    if isinstance(item, np.ndarray | np.generic | int | float):
        return np.asarray(item)[None]
    return item[None] if is_tensor(item) else [item]


def map_tensors(payload: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to every tensor of a payload."""
    if isinstance(payload, dict):
        return {key: map_tensors(value, function) for key, value in payload.items()}
    return function(payload) if is_tensor(payload) else payload


def leaves_of(payload: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the arrays, tensors and lists of a payload with their key paths. Raise `ValueError` if a leaf has no rows."""
    if isinstance(payload, Mapping):
        for key, value in payload.items():
            yield from leaves_of(value, (*path, key))
    elif is_tensor(payload) and payload.ndim:
        yield path, payload.detach()
    elif isinstance(payload, list | tuple) or (isinstance(payload, np.ndarray) and payload.ndim):
        yield path, payload
    else:
        raise ValueError(
            f"{leaf_name(path)}: must hold one row per item (got {type(payload).__name__}). Use an array, a tensor or a list."
        )


def _nested(leaves: Mapping[Path, Any]) -> Any:
    if () in leaves:
        return leaves[()]
    payload: dict[str, Any] = {}
    for path, leaf in leaves.items():
        parent = payload
        for key in path[:-1]:
            parent = parent.setdefault(key, {})
        parent[path[-1]] = leaf
    return payload


def is_tensor(leaf: Any) -> bool:
    """Return True for a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(leaf, torch.Tensor)


def _kind(leaf: Any) -> object:
    """Return the properties that all rows of a column must share."""
    if isinstance(leaf, list | tuple) or leaf.dtype == object:
        return "objects"
    return (is_tensor(leaf), leaf.dtype, tuple(leaf.shape[1:]))


def _text(leaf: Any) -> str:
    return "objects" if _kind(leaf) == "objects" else f"{leaf.dtype} {list(leaf.shape[1:])}"


def leaf_name(path: Path) -> str:
    """Return the name of a leaf for error messages."""
    return ".".join(("payload", *path))


def _new_column(capacity: int, leaf: Any) -> Any:
    if is_tensor(leaf):
        return leaf.new_empty((capacity, *leaf.shape[1:]), device="cpu")
    if _kind(leaf) == "objects":
        return np.empty(capacity, object)
    return np.empty((capacity, *leaf.shape[1:]), leaf.dtype)


def _indexer(leaf: Any, index: Index) -> Any:
    if isinstance(index, slice) or not is_tensor(leaf):
        return index
    return sys.modules["torch"].from_numpy(index)


@dataclass(frozen=True, slots=True)
class Field:
    """One column.

    Example: `Field(path=("obs", "image"), dtype=np.dtype("uint8"), shape=(84, 84), row_bytes=7056, is_tensor=False)`
    """

    path: Path
    """Nested keys of the column."""
    dtype: Any
    """Element type, from numpy or torch."""
    shape: tuple[int, ...]
    """Shape of an item."""
    row_bytes: int
    """Bytes of an item."""
    is_tensor: bool


Layout = tuple[Field, ...]
ALIGNMENT = 64


def layout_of(example: Any) -> Layout:
    """Derive the layout from one example item, whose leaves must be arrays, tensors or numbers, and not empty."""
    fields = []
    for path, leaf in leaves_of(single(example)):
        if isinstance(leaf, list) or (not is_tensor(leaf) and leaf.dtype == object):
            raise ValueError(
                f"{leaf_name(path)}: a shared buffer stores arrays, tensors and numbers (got {type(leaf[0]).__name__}). "
                "Convert it, or use PrioritizedReplay in one process."
            )
        row_bytes = int(leaf.nbytes)
        if not row_bytes:
            raise ValueError(f"{leaf_name(path)}: an item has no elements (got shape {list(leaf.shape[1:])}). Remove it.")
        fields.append(Field(path, leaf.dtype, tuple(leaf.shape[1:]), row_bytes, is_tensor(leaf)))
    return tuple(fields)


def file_size(layout: Layout, num_rows: int) -> int:
    """Return the size in bytes of a file with `num_rows` rows."""
    return sum(-(-field.row_bytes * num_rows // ALIGNMENT) * ALIGNMENT for field in layout)


def template(layout: Layout) -> Columns:
    """Return columns without rows, for validating payloads."""
    return Columns(0, {field.path: _column(field, bytearray(field.row_bytes), 1, 0)[:0] for field in layout})


def map_file(path: FilePath, layout: Layout, num_rows: int) -> Columns:
    """Map a file into memory. All processes that map it share the rows."""
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), file_size(layout, num_rows))
    columns, offset = {}, 0
    for field in layout:
        columns[field.path] = _column(field, memory, num_rows, offset)
        offset += file_size((field,), num_rows)
    return Columns(num_rows, columns)


def create_file(path: FilePath, size: int) -> None:
    """Create a file and allocate its disk space, so that writes to the mapped memory never fail."""
    with path.open("xb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise ValueError(
                f"folder: no room for a shard of {size:,} bytes (got {path.parent}: {error.strerror}). "
                "Use a folder on another disk, a smaller capacity, or smaller items."
            ) from None


def _column(field: Field, memory: Any, num_rows: int, offset: int) -> Any:
    count = num_rows * int(np.prod(field.shape, dtype=np.int64))
    if field.is_tensor:
        import torch

        return torch.frombuffer(memory, dtype=field.dtype, count=count, offset=offset).reshape(num_rows, *field.shape)
    return np.frombuffer(memory, field.dtype, count, offset).reshape(num_rows, *field.shape)
