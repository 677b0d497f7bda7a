"""WeightSync: the order in which a new version reaches the generators."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from titanrl.weights.manifest import Commit, StoreHandle, WeightManifest, commits_key
from titanrl.weights.store import WeightStore

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


class WeightSync:
    """Publishes versions one after another.

    1. When nobody reads what the new version will overwrite, every trainer rank pushes its share; 2. the controller makes the
    commit record; 3. each replica is sent it, pulls, and goes on by itself; 4. `then` runs (slots are freed) as soon as one
    replica has pulled and the others let new requests wait until they have: what is generated from here on is fresh, and a
    slow replica holds nobody up but itself; 5. the records of the versions held go into the store, for readers that come
    later, in the place of those before, and bytes that the store has of an older version are deleted.
    `ready()` returns when all that is done, and raises what went wrong in it; weights may change only after it.
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
        self._task: asyncio.Task[None] | None = None
        self._held: list[Commit] = []
        self._metrics: dict[str, float] = {}

    def publish(self, version: int, then: Callable[[], Awaitable[None]]) -> None:
        """Start publishing a version; the caller has awaited `ready()` for the one before."""
        assert self._task is None, "publish() before the last version was ready()"
        self._task = asyncio.create_task(self._publish(version, then), name=f"publish v{version}")

    async def ready(self) -> None:
        """Wait until the last published version is in use everywhere. Any number may wait; who gives up does not end it."""
        task = self._task
        if task is None:
            return
        try:
            await asyncio.shield(task)
        finally:
            if task.done() and self._task is task:
                self._task = None

    async def catch_up(self, pull: Pull) -> int:
        """Bring the newest version into a generator that came late, or whose pull failed; returns the version."""
        commit = self._held[-1]
        await self._pull(pull, commit)
        return commit.version

    def take_metrics(self) -> Mapping[str, float]:
        """`sync/*` of the last version: seconds, bytes and speed."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    async def _publish(self, version: int, then: Callable[[], Awaitable[None]]) -> None:
        old, self._held = self._held[: 1 - VERSIONS_HELD], self._held[1 - VERSIONS_HELD :]
        for commit in old:
            await self._leases.free(commit.version)
        started = time.perf_counter()
        commit = Commit(version, tuple(await self._push(version)))
        self._held.append(commit)
        pushed = time.perf_counter()
        pulls = [asyncio.create_task(self._pull(pull, commit)) for pull in self._pulls]
        await asyncio.gather(self._measure(commit, started, pushed, pulls), self._free(version, pulls, then))
        # On a small machine what the store does would slow the copies down, so it comes last, in one message to each of its two
        # actors. A reader that finds the record of a version already overwritten learns so from the arena's header.
        await self._store.put(commits_key(self._run), tuple(self._held))
        await asyncio.gather(*map(self._delete, old))

    async def _pull(self, pull: Pull, commit: Commit) -> None:
        async with self._leases.lease(commit.version):
            await pull(commit)

    async def _free(self, version: int, pulls: Sequence["asyncio.Task[None]"], then: Callable[[], Awaitable[None]]) -> None:
        """Run `then` as soon as no request can be answered with an older version any more."""
        if len(pulls) > 1:
            await self._expect(version)
        done, _ = await asyncio.wait(pulls, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(*done)
        await then()

    async def _measure(self, commit: Commit, started: float, pushed: float, pulls: Sequence["asyncio.Task[None]"]) -> None:
        await asyncio.gather(*pulls)
        pulled = time.perf_counter()
        self._metrics = {
            "sync/push_s": pushed - started,
            "sync/pull_s": pulled - pushed,
            "sync/bytes": float(commit.num_bytes),
            "sync/gb_per_s": commit.num_bytes / (pulled - started) / 1e9,
        }

    async def _delete(self, commit: Commit) -> None:
        """Delete what the store holds of a version; its commit record is gone, so nobody starts to read it."""
        for handle in (handle for manifest in commit.manifests for handle in manifest.handles):
            if isinstance(handle, StoreHandle):
                await self._store.delete(handle.key)
