"""Publishing on a trainer rank."""

from collections.abc import Collection, Mapping, Sequence

import torch

from titanrl.weights.arena import Arena
from titanrl.weights.copying import Copies, CopyOut, pin
from titanrl.weights.digest import Verify, digest
from titanrl.weights.layout import local_parts, plan_pack
from titanrl.weights.manifest import ByteLayout, WeightManifest, layout_key
from titanrl.weights.state import Whereabouts
from titanrl.weights.store import WeightStore
from titanrl.weights.transport import TransportName, make_transports

NUM_ARENAS = 2
"""Versions that stay readable: while one is written, the one before is read."""


class WeightPublisher:
    """Publishes this rank's share of each version, in the generators' dtype."""

    def __init__(
        self,
        run: str,
        rank: int,
        store: WeightStore,
        dtype: torch.dtype,
        transports: Sequence[TransportName],
        verify: Verify = "sampled",
    ) -> None:
        """Publish under the name of the run.

        Args:
            run: prefix of the store's keys.
            rank: this trainer rank.
            store: where layouts go, and bytes with the transport `store`.
            dtype: what parameters are cast to.
            transports: ways that readers may take, the best first.
            verify: what the digest covers.
        """
        self._run, self._rank, self._store = run, rank, store
        self._dtype, self._verify = dtype, verify
        self._transports = make_transports(transports, run, rank, store)
        self._copy_out = CopyOut()
        self._planned: Whereabouts | None = None
        self._layout: ByteLayout
        self._arenas: list[Arena] = []
        self._copies: list[Copies] = []

    async def prepare(self, state: Mapping[str, torch.Tensor], keep: Collection[str] = ()) -> None:
        """Work out the layout of a state dict and allocate all memory; without it the first `publish` does so.

        Args:
            state: the model's state dict; the plan is kept while it holds the same tensors (`state_dict` detaches them
                unless it is told `keep_vars=True`) in the same memory.
            keep: names of tensors that keep their type (buffers).

        Raises:
            ValueError: a tensor that cannot be published; its name is in the text.
            OSError: not enough memory.
        """
        if self._planned is not None and self._planned.are_those_of(state):
            return
        parts = local_parts(state)
        plan = plan_pack(state, self._rank, self._dtype, keep)
        self._layout, blocks = plan.layout, plan.local_blocks(parts)
        self._allocate(next((part.device for part in parts.values()), torch.device("cpu")))
        self._copies = [Copies(plan.targets(arena.data), blocks) for arena in self._arenas]
        key = layout_key(self._run, plan.layout.layout_id)
        if not await self._store.exists(key):
            await self._store.put(key, plan.layout)
        self._planned = Whereabouts(state)

    def _allocate(self, device: torch.device) -> None:
        """Make the arenas, once; pinned if the weights are on a device."""
        if not self._arenas:
            self._arenas = [Arena(self._layout.num_bytes) for _ in range(NUM_ARENAS)]
            for arena in self._arenas:
                pin(arena.storage, device, read_only=False)
        assert self._arenas[0].handle.num_bytes == self._layout.num_bytes, "the weights changed their size within a run"

    async def publish(self, version: int, state: Mapping[str, torch.Tensor], keep: Collection[str] = ()) -> WeightManifest:
        """Copy the weights out; they may change as soon as this returns. The last two versions stay readable.

        Raises:
            ValueError, OSError: as `prepare`.
        """
        await self.prepare(state, keep)
        place = version % NUM_ARENAS
        arena, layout = self._arenas[place], self._layout
        with arena.writing() as data:
            await self._copy_out.run(self._copies[place])
        return WeightManifest(
            version=version,
            rank=self._rank,
            layout_id=layout.layout_id,
            num_bytes=layout.num_bytes,
            digest=digest(data, self._verify, version),
            sequence=arena.sequence,
            handles=tuple([await transport.offer(version, arena) for transport in self._transports]),
        )
