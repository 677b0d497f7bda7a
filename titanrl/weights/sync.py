"""WeightSync: the order in which a new version reaches the generators."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from titanrl.weights.manifest import Commit, StoreHandle, WeightManifest, commits_key
from titanrl.weights.store import WeightStore

T = TypeVar("T")

VERSIONS_HELD = 2

Pull = Callable[[Commit], Awaitable[None]]
"""Bring a version into one generator replica."""


class Leases:
    """Who reads which version: what a reader holds is neither overwritten nor deleted."""

    def __init__(self) -> None:
        """Start without readers."""
        self._held: Counter[int] = Counter()
        self._returned = asyncio.Condition()

    @asynccontextmanager
    async def lease(self, version: int) -> AsyncIterator[None]:
        """Hold a version for the body."""
        self._held[version] += 1
        try:
            yield
        finally:
            async with self._returned:
                self._held[version] -= 1
                self._returned.notify_all()

    async def free(self, version: int) -> None:
        """Wait until nobody reads a version; each reader has a deadline of its own."""
        async with self._returned:
            await self._returned.wait_for(lambda: not self._held[version])


@dataclass(frozen=True, slots=True)
class _Pushed:
    """A version that has left the trainer, on its way into every replica."""

    commit: Commit
    overwritten: Sequence[Commit]
    """What was held in its place, and is read by nobody any more."""
    pulls: Sequence["asyncio.Task[None]"]
    """One for each replica, begun."""
    started: float
    ended: float
    """Of the push, by the clock of `time.perf_counter`."""


class WeightSync:
    """Publishes versions one after another.

    1. When nobody reads what the new version will overwrite, every trainer rank pushes its share; 2. the controller makes the
    commit record; 3. each replica is sent it, pulls, and goes on by itself; 4. `then` runs (slots are freed) as soon as one
    replica has pulled and the others let new requests wait until they have: what is generated from here on is fresh, and a
    slow replica holds nobody up but itself; 5. the records of the versions held go into the store, for readers that come
    later, in the place of those before, and bytes that the store has of an older version are deleted.

    `pushed()` returns after 2.: weights may change. The next version can then be published while replicas still pull this one,
    or drain before they do; it goes into other memory. `ready()` returns when all is done with every version. Both raise what
    went wrong with any; after that nothing is published any more.
    """

    def __init__(
        self,
        run: str,
        store: WeightStore,
        *,
        push: Callable[[int], Awaitable[Sequence[WeightManifest]]],
        expect: Callable[[int], Awaitable[None]],
        pulls: Sequence[Pull],
    ) -> None:
        """Publish under the name of the run.

        Args:
            run: prefix of the store's keys.
            store: where records are kept.
            push: push a version on every trainer rank.
            expect: let every generator hold new requests until it has pulled a version.
            pulls: one for each generator replica.
        """
        self._run, self._store = run, store
        self._push, self._expect, self._pulls = push, expect, pulls
        self._leases = Leases()
        self._turns = [asyncio.Lock() for _ in pulls]
        self._recording = asyncio.Lock()
        self._pushing: asyncio.Task[_Pushed] | None = None
        self._publishing: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._failed = asyncio.Event()
        self._held: list[Commit] = []
        self._metrics: dict[str, float] = {}

    def publish(self, version: int, then: Callable[[], Awaitable[None]]) -> None:
        """Start publishing a version; the caller has awaited `pushed()` for the one before."""
        assert self._pushing is None or self._pushing.done(), "publish() before the last version was pushed()"
        self._pushing = asyncio.create_task(self._push_out(version), name=f"push v{version}")
        publishing = asyncio.create_task(self._bring(self._pushing, then), name=f"publish v{version}")
        self._publishing.add(publishing)
        publishing.add_done_callback(self._note_end)

    async def pushed(self) -> None:
        """Wait until the last version has left the trainer. Any number may wait; who gives up does not end it."""
        if self._pushing is not None:
            await asyncio.wait({self._pushing})
            self._pushing.result()
        self._raise_failure()

    async def ready(self) -> None:
        """Wait until every version published is in use everywhere. Any number may wait; who gives up does not end it."""
        while self._publishing:
            await asyncio.wait(self._publishing, return_when=asyncio.FIRST_COMPLETED)
            self._raise_failure()
        self._raise_failure()

    async def unless_failed(self, awaited: Coroutine[Any, Any, T]) -> T:
        """What a coroutine returns; a version that goes wrong ends it, as slots stay taken then, and it may wait in vain."""
        waiting, failed = asyncio.create_task(awaited), asyncio.create_task(self._failed.wait())
        try:
            await asyncio.wait({waiting, failed}, return_when=asyncio.FIRST_COMPLETED)
            self._raise_failure()
            return waiting.result()
        finally:
            waiting.cancel()
            failed.cancel()

    def take_metrics(self) -> Mapping[str, float]:
        """`sync/*` of the last version that has reached every replica since the last call: seconds, bytes and speed."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    async def _push_out(self, version: int) -> _Pushed:
        """Push and commit, and let the replicas begin to pull."""
        overwritten, self._held = self._held[: 1 - VERSIONS_HELD], self._held[1 - VERSIONS_HELD :]
        for commit in overwritten:
            await self._leases.free(commit.version)
        started = time.perf_counter()
        commit = Commit(version, tuple(await self._push(version)))
        self._held.append(commit)
        # Begun before anybody learns that the push has ended, so that their leases are there when it is published over.
        pulls = [asyncio.create_task(self._pull(replica, commit)) for replica in range(len(self._pulls))]
        return _Pushed(commit, overwritten, pulls, started, time.perf_counter())

    async def _bring(self, pushing: "asyncio.Task[_Pushed]", then: Callable[[], Awaitable[None]]) -> None:
        """All that comes after the push."""
        pushed = await pushing
        await asyncio.gather(self._measure(pushed), self._free(pushed, then))
        # On a small machine what the store does would slow the copies down, so it comes last, in one message to each of its two
        # actors. A reader that finds the record of a version already overwritten learns so from the arena's header.
        async with self._recording:  # in their order
            await self._store.put(commits_key(self._run), tuple(self._held))
        await asyncio.gather(*map(self._delete, pushed.overwritten))

    async def _pull(self, replica: int, commit: Commit) -> None:
        """Bring a version into a replica, after those before it."""
        async with self._leases.lease(commit.version), self._turns[replica]:
            await self._pulls[replica](commit)

    async def _free(self, pushed: _Pushed, then: Callable[[], Awaitable[None]]) -> None:
        """Run `then` as soon as no request can be answered with an older version any more."""
        if len(pushed.pulls) > 1:
            await self._expect(pushed.commit.version)
        done, _ = await asyncio.wait(pushed.pulls, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(*done)
        await then()

    async def _measure(self, pushed: _Pushed) -> None:
        await asyncio.gather(*pushed.pulls)
        pulled = time.perf_counter()
        self._metrics = {
            "sync/push_s": pushed.ended - pushed.started,
            "sync/pull_s": pulled - pushed.ended,
            "sync/bytes": float(pushed.commit.num_bytes),
            "sync/gb_per_s": pushed.commit.num_bytes / (pulled - pushed.started) / 1e9,
        }

    async def _delete(self, commit: Commit) -> None:
        """Delete what the store holds of a version; its commit record is gone, so nobody starts to read it."""
        for handle in (handle for manifest in commit.manifests for handle in manifest.handles):
            if isinstance(handle, StoreHandle):
                await self._store.delete(handle.key)

    def _note_end(self, publishing: "asyncio.Task[None]") -> None:
        self._publishing.discard(publishing)
        error = None if publishing.cancelled() else publishing.exception()
        if error is not None and self._failure is None:
            self._failure = error
            self._failed.set()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
