"""WeightSync: the order in which a new version reaches the generators."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from titanrl.weights.manifest import Commit, WeightManifest, commit_key, rank_key
from titanrl.weights.store import WeightStore

VERSIONS_HELD = 2


@dataclass
class WeightSync:
    """Publishes versions one after another.

    1. every trainer rank pushes its share; 2. the controller writes the commit record; 3. the generators pull;
    4. `then` runs (slots are freed: what is generated from here on is fresh); 5. versions beyond the last two are deleted.
    `ready()` returns when all that is done, and raises what went wrong in it; weights may change only after it.
    """

    run: str
    store: WeightStore
    push: Callable[[int], Awaitable[Sequence[WeightManifest]]]
    """Push a version on every trainer rank."""
    pull: Callable[[int], Awaitable[None]]
    """Pull a version into every generator."""
    _task: asyncio.Task[None] | None = None
    _held: list[Commit] = field(default_factory=list)
    _metrics: dict[str, float] = field(default_factory=dict)

    def publish(self, version: int, then: Callable[[], Awaitable[None]]) -> None:
        """Start publishing a version; the caller has awaited `ready()` for the one before."""
        assert self._task is None, "publish() before the last version was ready()"
        self._task = asyncio.create_task(self._publish(version, then), name=f"publish v{version}")

    async def ready(self) -> None:
        """Wait until the last published version is in use everywhere."""
        if self._task is not None:
            task, self._task = self._task, None
            await task

    def take_metrics(self) -> Mapping[str, float]:
        """`sync/*` of the last version: seconds, bytes and speed."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    async def _publish(self, version: int, then: Callable[[], Awaitable[None]]) -> None:
        started = time.perf_counter()
        commit = Commit(version, tuple(await self.push(version)))
        await self.store.put(commit_key(self.run, version), commit)
        pushed = time.perf_counter()
        await self.pull(version)
        pulled = time.perf_counter()
        await then()
        self._metrics = {
            "sync/push_s": pushed - started,
            "sync/pull_s": pulled - pushed,
            "sync/bytes": float(commit.num_bytes),
            "sync/gb_per_s": commit.num_bytes / (pulled - started) / 1e9,
        }
        self._held.append(commit)
        while len(self._held) > VERSIONS_HELD:
            await self._delete(self._held.pop(0))

    async def _delete(self, commit: Commit) -> None:
        """Delete a version, its commit record first, so that nobody starts to read it."""
        await self.store.delete(commit_key(self.run, commit.version))
        for manifest in commit.manifests:
            if manifest.arena is None:
                await self.store.delete(rank_key(self.run, commit.version, manifest.rank))
