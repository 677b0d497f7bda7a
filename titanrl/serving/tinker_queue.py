"""Requests of Tinker's clients: their order, and the futures that clients poll for the results.

A client numbers the requests of a model 1, 2, 3, ... and sends them in any order; it repeats a request whose response was lost.
Each number runs once, in order, and a failed request does not stop those after it.
"""

import asyncio
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from titanrl.serving.calls import Refused

T = TypeVar("T")

OVERHEAD = 1024
"""Memory of a future besides its request or result, in bytes."""
MAX_AHEAD = 100_000
"""Largest distance of a sequence id from the next one that runs."""


class Unordered(Exception):
    """A request with a sequence id that has already been used or given up, or that is too far ahead."""


class Order(Generic[T]):
    """Items by sequence id, handed out in their order without gaps."""

    def __init__(self, first: int = 1) -> None:
        self.next = first
        """Sequence id of the item that is handed out next."""
        self._held: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, seq_id: int, item: T) -> None:
        """Add an item; raise `Unordered` if its sequence id is not due any more, has an item, or is too far ahead."""
        if seq_id < self.next or seq_id in self._held:
            raise Unordered(f"seq_id: {seq_id} has already been used (the next one is {self.next}).")
        if seq_id - self.next > MAX_AHEAD:
            raise Unordered(f"seq_id: must be at most {self.next + MAX_AHEAD} now (got {seq_id}).")
        self._held[seq_id] = item

    def take(self) -> T | None:
        """Return the next item; None if it has not arrived."""
        if self.next not in self._held:
            return None
        self.next += 1
        return self._held.pop(self.next - 1)

    @property
    def has_gap(self) -> bool:
        """True if items wait for one that has not arrived."""
        return bool(self._held) and self.next not in self._held

    def skip(self) -> tuple[int, int]:
        """Give up the missing items before the first that has arrived; return the first and last of their sequence ids."""
        first, self.next = self.next, min(self._held)
        return first, self.next - 1

    def drain(self) -> list[T]:
        """Remove and return all items."""
        items = [self._held[seq_id] for seq_id in sorted(self._held)]
        self._held.clear()
        return items


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of a request, as it is sent."""

    body: bytes
    kind: bytes
    """Content type of the body."""
    is_failure: bool = False
    """True if the body is an error."""


@dataclass(eq=False)
class Future:
    """A result that a client polls for. It can be read again and again, because a response can be lost."""

    request_id: str
    owner: str
    """User whose client may read it."""
    group: str
    """Session that it belongs to."""
    size: int
    """Size of the request in bytes; of the result, once there is one."""
    answer: Answer | None = None
    was_read: bool = False
    on_drop: Callable[[], None] | None = None
    """Called when the result is dropped."""
    _done: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self, limit_s: float) -> Answer | None:
        """Return the answer; None if there is none within the time limit, in seconds."""
        if self.answer is None:
            try:
                async with asyncio.timeout(limit_s):
                    await self._done.wait()
            except TimeoutError:
                return None
        return self.answer


class Futures:
    """Futures of all clients, with bounded memory.

    Results that were read are dropped first-in, first-out when memory is needed. Those that were not are never dropped while
    their session lives: further requests are refused instead.
    """

    def __init__(self, max_bytes: int, max_open: int, max_bytes_per_user: int) -> None:
        """Create the futures.

        Args:
            max_bytes: Largest sum of the sizes of requests and results, in bytes.
            max_open: Largest number of futures of one user that have not been read.
            max_bytes_per_user: Largest sum of their sizes, in bytes.
        """
        self._max_bytes, self._max_open, self._max_bytes_per_user = max_bytes, max_open, max_bytes_per_user
        self._futures: dict[str, Future] = {}
        self._read: OrderedDict[str, Future] = OrderedDict()
        self._num_open = Counter[str]()  # futures that have not been read, by user
        self._bytes_open = Counter[str]()
        self.num_bytes = 0
        """Sum of the sizes of all requests and results, in bytes."""

    def __len__(self) -> int:
        return len(self._futures)

    def open(self, owner: str, group: str, size: int, on_drop: Callable[[], None] | None = None) -> Future:
        """Open a future for a request of a size in bytes; raise `Refused` if the user has too many, or memory is short."""
        if self._num_open[owner] >= self._max_open:
            rule = f"at most {self._max_open} requests of a user may wait or have unread results"
            raise Refused(f"{rule}. Await earlier ones, then retry.", status=429)
        size += OVERHEAD
        if self._bytes_open[owner] + size > self._max_bytes_per_user:
            rule = f"requests and unread results of a user may have {self._max_bytes_per_user} bytes"
            raise Refused(f"{rule}. Await earlier ones, then retry.", status=429)
        self._make_room(size)
        if self.num_bytes + size > self._max_bytes:
            rule = f"requests and unread results may have {self._max_bytes} bytes in all"
            raise Refused(f"{rule}. Retry later.", status=429)
        future = Future(f"future_{secrets.token_hex(12)}", owner, group, size, on_drop=on_drop)
        self._futures[future.request_id] = future
        self._num_open[owner] += 1
        self._bytes_open[owner] += size
        self.num_bytes += size
        return future

    def resolve(self, future: Future, answer: Answer) -> None:
        """Set the result of a future. A future that was dropped ignores it."""
        if future.request_id not in self._futures:
            return
        size = len(answer.body) + OVERHEAD
        self.num_bytes += size - future.size
        self._bytes_open[future.owner] += size - future.size
        future.size, future.answer = size, answer
        future._done.set()
        self._make_room(0)

    def find(self, request_id: str, owner: str) -> Future:
        """Return a future of a user; raise `Refused` if there is none."""
        future = self._futures.get(request_id)
        if future is None or future.owner != owner:
            raise Refused(
                "request_id: there is no such request, or its result was read and has been dropped since.", status=404
            )
        return future

    def read(self, future: Future) -> None:
        """Note that the client has been sent the result."""
        if not future.was_read and future.request_id in self._futures:
            future.was_read = True
            self._read[future.request_id] = future
            self._close(future)

    def drop_group(self, group: str) -> None:
        """Drop all futures of a session."""
        for future in [each for each in self._futures.values() if each.group == group]:
            self._drop(future)

    def _make_room(self, size: int) -> None:
        while self._read and self.num_bytes + size > self._max_bytes:
            self._drop(next(iter(self._read.values())))

    def _drop(self, future: Future) -> None:
        if not future.was_read:
            self._close(future)
        del self._futures[future.request_id]
        self._read.pop(future.request_id, None)
        self.num_bytes -= future.size
        future._done.set()
        if future.on_drop is not None:
            future.on_drop()

    def _close(self, future: Future) -> None:
        self._num_open[future.owner] -= 1
        self._bytes_open[future.owner] -= future.size
        if not self._num_open[future.owner]:
            del self._num_open[future.owner], self._bytes_open[future.owner]
