"""The run's weight store: objects and byte tensors by key, in torchstore.

torchstore 0.1.2 cannot start on torchmonarch 0.7.0, because its controller mixes sync and async endpoints. `StoreController`
makes all endpoints async, and `StoreVolume` repeats the endpoints of torchstore's volume; neither changes anything else. This
module uses only put, get, exists and delete of plain keys, which later torchstore versions also have. No other module uses
private parts of torchstore; `tests/weights/test_transport.py` covers them.

Importing this module imports neither torch nor torchstore, because the controller only spawns the store and passes it on. The
processes that use it import the modules of `IMPORTS` when they start.
"""

import secrets
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from monarch.actor import Actor, ProcMesh, endpoint

if TYPE_CHECKING:
    from torchstore.client import LocalClient

    from titanrl.config.sections import Verify

IMPORTS = ("titanrl.weights.store", "torchstore.client")
"""Modules for `set_up_process` in the processes of the store and its clients."""


def _repeated(name: str) -> Any:
    """Return an async endpoint that runs the one of this name of torchstore's actor, which the actor has as `_own`."""

    async def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        value = getattr(type(self._own), name)._method(self._own, *args, **kwargs)
        return await value if isinstance(value, Awaitable) else value

    return endpoint(run)


class StoreController(Actor):
    """torchstore's key index, with async endpoints only."""

    def __init__(self) -> None:
        from torchstore.controller import Controller

        self._own = Controller()

    @endpoint
    async def init(self, volumes: Any) -> None:
        """Register the mesh of the only storage volume."""
        from torchstore.strategy import SingletonStrategy

        await type(self._own).init._method(self._own, SingletonStrategy(), 1, volumes)

    get_controller_strategy = _repeated("get_controller_strategy")
    locate_volumes = _repeated("locate_volumes")
    notify_put = _repeated("notify_put")
    notify_delete = _repeated("notify_delete")


class StoreVolume(Actor):
    """torchstore's storage volume: the values by key."""

    def __init__(self) -> None:
        from torchstore.storage_volume import StorageVolume
        from torchstore.strategy import SingletonStrategy

        self._own = StorageVolume(SingletonStrategy.get_volume_id)

    get_id = _repeated("get_id")
    put = _repeated("put")
    get = _repeated("get")
    get_meta = _repeated("get_meta")
    delete = _repeated("delete")


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
