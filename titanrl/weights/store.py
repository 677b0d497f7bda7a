"""The run's weight store: objects and byte tensors by key, in torchstore.

torchstore 0.1.2 cannot start on torchmonarch 0.7.0, because its controller mixes sync and async endpoints. `StoreController`
makes all endpoints async, and `StoreVolume` repeats the endpoints of torchstore's volume; neither changes anything else. This
module uses only put, get, exists and delete of plain keys, which later torchstore versions also have. No other module uses
private parts of torchstore; `tests/weights/test_transport.py` covers them.

Importing this module imports neither torch nor torchstore, because the controller only spawns the store and passes it on. The
processes that use it import the modules of `IMPORTS` when they start.
"""

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from monarch.actor import Actor, ProcMesh, endpoint

if TYPE_CHECKING:
    from torchstore.client import LocalClient

    from titanrl.config.sections import Verify

IMPORTS = ("titanrl.weights.store", "torchstore.client")
"""Modules for `set_up_process` in the processes of the store and its clients."""


class StoreController(Actor):
    """torchstore's key index, with async endpoints only."""

    def __init__(self) -> None:
        from torchstore.controller import Controller

        self._index, self._class = Controller(), Controller

    @endpoint
    async def init(self, volumes: Any) -> None:
        """Register the mesh of the only storage volume."""
        from torchstore.strategy import SingletonStrategy

        await self._class.init._method(self._index, SingletonStrategy(), 1, volumes)

    @endpoint
    async def get_controller_strategy(self) -> Any:
        """Return what a client needs to find the volume of a key."""
        return self._class.get_controller_strategy._method(self._index)

    @endpoint
    async def locate_volumes(self, key: str) -> Any:
        """Return the volumes that hold a key."""
        return self._class.locate_volumes._method(self._index, key)

    @endpoint
    async def notify_put(self, key: str, request: Any, storage_volume_id: str) -> None:
        """Record that a volume now holds a key."""
        self._class.notify_put._method(self._index, key, request, storage_volume_id)

    @endpoint
    async def notify_delete(self, key: str, storage_volume_id: str) -> None:
        """Record that a volume no longer holds a key."""
        self._class.notify_delete._method(self._index, key, storage_volume_id)


class StoreVolume(Actor):
    """torchstore's storage volume: the values by key."""

    def __init__(self) -> None:
        from torchstore.storage_volume import StorageVolume
        from torchstore.strategy import SingletonStrategy

        self._volume, self._class = StorageVolume(SingletonStrategy.get_volume_id), StorageVolume

    @endpoint
    async def get_id(self) -> str:
        """Return the id of the volume."""
        return str(await self._class.get_id._method(self._volume))

    @endpoint
    async def put(self, key: str, transport_buffer: Any, request: Any) -> None:
        """Store the value that the buffer transports."""
        await self._class.put._method(self._volume, key, transport_buffer, request)

    @endpoint
    async def get(self, key: str, transport_buffer: Any, request: Any) -> Any:
        """Return the buffer with the value."""
        return await self._class.get._method(self._volume, key, transport_buffer, request)

    @endpoint
    async def get_meta(self, key: str, request: Any = None) -> Any:
        """Return the shape and dtype of a tensor."""
        return await self._class.get_meta._method(self._volume, key, request)

    @endpoint
    async def delete(self, key: str) -> None:
        """Delete a value."""
        await self._class.delete._method(self._volume, key)


@dataclass(eq=False)
class WeightStore:
    """Client of the store, whose index is the `StoreController` of an actor mesh. It can be pickled to any process."""

    controller: Any
    _client: "LocalClient | None" = field(default=None, repr=False)

    def __reduce__(self) -> tuple[type["WeightStore"], tuple[Any]]:
        """Pickle without the client, which each process creates."""
        return WeightStore, (self.controller,)

    async def put(self, key: str, value: object) -> None:
        """Store an object or a tensor under a key. Objects replace the previous value; tensors need a new key."""
        await (await self.client()).put(key, value)

    async def get(self, key: str) -> Any:
        """Return the object or tensor under a key; raise `KeyError` if the store does not have it."""
        return await (await self.client()).get(key)

    async def exists(self, key: str) -> bool:
        """Return whether the store has a key."""
        return bool(await (await self.client()).exists(key))

    async def delete(self, key: str) -> None:
        """Delete a key."""
        await (await self.client()).delete(key)

    async def client(self) -> "LocalClient":
        """Return the underlying torchstore client of this process. The first call imports torchstore and connects."""
        if self._client is None:
            from torchstore.client import LocalClient

            self._client = LocalClient(self.controller, await self.controller.get_controller_strategy.call_one())
        return self._client


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Source of the versions of a run for generators. It can be pickled to any process."""

    run: str
    """Prefix of the store's keys."""
    store: WeightStore
    verify: "Verify" = "sampled"
    """`off` ignores the digests of versions."""
    name: str = field(default_factory=lambda: secrets.token_hex(4))
    """Name by which the readers of a host find each other."""


async def spawn_store(procs: ProcMesh) -> WeightStore:
    """Start a store on a mesh with one process."""
    volumes = procs.spawn("store_volume", StoreVolume)
    controller = procs.spawn("store_weights", StoreController)
    await controller.init.call_one(volumes)
    return WeightStore(controller)
