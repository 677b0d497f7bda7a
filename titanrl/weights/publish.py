"""`WeightPublisher`: publishes a trainer rank's shards of each version of the weights."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from titanrl.base.choices import TransportName, Verify
from titanrl.weights.arena import Arena
from titanrl.weights.copying import Copies, CopyOut, pin
from titanrl.weights.layout import TensorFingerprint, digest, local_parts, plan_pack
from titanrl.weights.records import VERSIONS_HELD, ByteLayout, WeightManifest, layout_key
from titanrl.weights.transport import make_transports

if TYPE_CHECKING:
    from titanrl.weights.store import WeightStore


class WeightPublisher:
    """Publisher of this rank's shards of each version, cast to the generators' dtype."""

    def __init__(
        self,
        run: str,
        rank: int,
        store: "WeightStore",
        dtype: torch.dtype,
        transports: Sequence[TransportName],
        verify: Verify = "sampled",
    ) -> None:
        """Prepare to publish under the name of a run.

        Args:
            run: Prefix of the store's keys.
            rank: This trainer rank.
            store: Store for layouts, and for the bytes with the `store` transport.
            dtype: Dtype to cast parameters to.
            transports: Transports to offer, in order of preference.
            verify: Portion of the bytes that the digest covers.
        """
        self._run, self._rank, self._store = run, rank, store
        self._dtype, self._verify = dtype, verify
        self._transports = make_transports(transports, run, rank, store)
        self._copy_out = CopyOut()
        self._planned: TensorFingerprint | None = None
        self._layout: ByteLayout
        self._arenas: list[Arena] = []
        self._copies: list[Copies] = []
        self._num_published = 0

    async def prepare(self, state: Mapping[str, torch.Tensor], keep: Collection[str] = ()) -> None:
        """Plan the layout of a state dict and allocate all memory. Without this call, the first `publish` does so.

        Args:
            state: The model's state dict. The plan is reused as long as the dict holds the same tensors in the same memory.
                Pass the module's own tensors, because `state_dict()` detaches them unless `keep_vars=True`.
            keep: Names of tensors that keep their dtype (buffers).

        Raises:
            ValueError: A tensor cannot be published, or the total size has changed; the message names the cause.
            OSError: Not enough memory.
        """
        if self._planned is not None and self._planned.matches(state):
            return
        planned, parts = TensorFingerprint(state), local_parts(state)
        plan = plan_pack(state, self._rank, self._dtype, keep)
        if not self._arenas:
            self._arenas = [Arena(plan.layout.num_bytes) for _ in range(VERSIONS_HELD)]
            device = next((part.device for part in parts.values()), torch.device("cpu"))
            for arena in self._arenas:
                pin(arena.storage, device, read_only=False)
        allocated = self._arenas[0].handle.num_bytes
        if plan.layout.num_bytes != allocated:
            raise ValueError(
                f"weights: the size of trainer rank {self._rank}'s shards must stay {allocated} bytes during a run "
                f"(got {plan.layout.num_bytes}). Start a new run for a model of a different size."
            )
        blocks = plan.local_blocks(parts)
        copies = [Copies(plan.targets(arena.data), blocks) for arena in self._arenas]
        key = layout_key(self._run, plan.layout.layout_id)
        if not await self._store.exists(key):
            await self._store.put(key, plan.layout)
        self._layout, self._copies, self._planned = plan.layout, copies, planned

    async def publish(self, version: int, state: Mapping[str, torch.Tensor], keep: Collection[str] = ()) -> WeightManifest:
        """Copy the weights into an arena; the caller may change them afterwards. The last two publications stay readable.

        Raises:
            ValueError, OSError: See `prepare`.
        """
        await self.prepare(state, keep)
        slot = self._num_published % VERSIONS_HELD  # counts publications, because versions may skip numbers
        arena, layout = self._arenas[slot], self._layout
        with arena.writing() as data:
            await self._copy_out.run(self._copies[slot])
        self._num_published += 1
        return WeightManifest(
            version=version,
            rank=self._rank,
            layout_id=layout.layout_id,
            num_bytes=layout.num_bytes,
            digest=digest(data, self._verify, version),
            sequence=arena.sequence,
            handles=tuple([await transport.offer(version, arena) for transport in self._transports]),
        )
