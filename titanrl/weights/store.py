"""The run's weight store: objects and byte tensors by key, in torchstore.

torchstore 0.1.2 cannot start on torchmonarch 0.7.0, because its controller mixes sync and async endpoints. `StoreController`
makes all endpoints async and changes nothing else. This module uses only put, get, exists and delete of plain keys, which later
torchstore versions also have. No other module uses private parts of torchstore; `tests/weights/test_transport.py` covers them.
"""

from dataclasses import dataclass
from typing import Any

from monarch.actor import Actor, ProcMesh, endpoint
from torchstore.client import LocalClient
from torchstore.controller import Controller
from torchstore.storage_volume import StorageVolume
from torchstore.strategy import SingletonStrategy, TorchStoreStrategy


class StoreController(Actor):
    """torchstore's key index, with async endpoints only."""

    def __init__(self) -> None:
        self._index = Controller()

    @endpoint
    async def init(self, strategy: TorchStoreStrategy, num_storage_volumes: int, storage_volumes: Any) -> None:
        """Register the storage volumes."""
        await Controller.init._method(self._index, strategy, num_storage_volumes, storage_volumes)

    @endpoint
    async def locate_volumes(self, key: str) -> Any:
        """Return the volumes that hold a key."""
        return Controller.locate_volumes._method(self._index, key)

    @endpoint
    async def notify_put(self, key: str, request: Any, storage_volume_id: str) -> None:
        """Record that a volume now holds a key."""
        Controller.notify_put._method(self._index, key, request, storage_volume_id)

    @endpoint
    async def notify_delete(self, key: str, storage_volume_id: str) -> None:
        """Record that a volume no longer holds a key."""
        Controller.notify_delete._method(self._index, key, storage_volume_id)


@dataclass(frozen=True)
class WeightStore:
    """Client of the store, whose index is the `StoreController` of an actor mesh. It can be pickled to any process."""

    controller: Any
    strategy: TorchStoreStrategy

    async def put(self, key: str, value: object) -> None:
        """Store an object or a tensor under a key. Objects replace the previous value; tensors need a new key."""
        await self.client.put(key, value)

    async def get(self, key: str) -> Any:
        """Return the object or tensor under a key.

        Raises:
            KeyError: The store does not have the key.
        """
        return await self.client.get(key)

    async def exists(self, key: str) -> bool:
        """Return whether the store has a key."""
        return bool(await self.client.exists(key))

    async def delete(self, key: str) -> None:
        """Delete a key."""
        await self.client.delete(key)

    @property
    def client(self) -> LocalClient:
        """The underlying torchstore client."""
        return LocalClient(self.controller, self.strategy)


async def spawn_store(procs: ProcMesh) -> WeightStore:
    """Start a store on a mesh with one process."""
    strategy = SingletonStrategy()
    volumes = await StorageVolume.spawn(1, procs, id_func=strategy.get_volume_id)
    controller = procs.spawn("store_weights", StoreController)
    await controller.init.call_one(strategy, 1, volumes)
    await strategy.set_storage_volumes(volumes)
    return WeightStore(controller, strategy)
