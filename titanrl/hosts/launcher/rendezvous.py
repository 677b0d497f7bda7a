"""Rendezvous of a launcher's processes: rank 0 publishes its address in a `TCPStore`, where the other ranks look it up.

The store is at the master address and port that the launcher gives every process. With torchrun it is the agent's store, which
already occupies the port.
"""

import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from titanrl.base.errors import TitanRLError
from titanrl.hosts.launcher.world import World

if TYPE_CHECKING:
    from torch.distributed import TCPStore

T = TypeVar("T")


class LauncherError(TitanRLError):
    """The processes of a launcher cannot find each other, or one of them exited."""


@dataclass(frozen=True, slots=True)
class Controller:
    """Address of rank 0's leases, and their secret.

    Example: `Controller("10.0.0.1:40123", "6f1c...")`
    """

    address: str
    """Address and port."""
    token: str
    """Secret that hosts must send."""


def publish(world: World, controller: Controller, own_address: str, timeout_s: float) -> "TCPStore":
    """Publish the address of rank 0; return the store, which must exist until all processes have connected.

    Raises:
        LauncherError: The port is in use, or the launcher's store does not respond.
    """
    store = _in_thread(lambda: _store(world, timeout_s) if world.agent_has_store else _own_store(world, own_address))
    _in_thread(lambda: store.set(_key(world), f"{controller.address} {controller.token}"))
    return store


def find(world: World, timeout_s: float) -> Controller:
    """Wait until rank 0 has published its address; return it.

    Raises:
        LauncherError: Rank 0 did not publish it in time.
    """
    address, token = _in_thread(lambda: _store(world, timeout_s).get(_key(world)).decode()).split()
    return Controller(address, token)


def _key(world: World) -> str:
    return f"titanrl/{world.attempt}/controller"  # torchrun's store outlives an attempt


def _store(world: World, timeout_s: float) -> "TCPStore":
    from torch.distributed import TCPStore

    limit = timedelta(seconds=timeout_s)
    try:
        return TCPStore(world.address, world.port, is_master=False, timeout=limit, wait_for_workers=False)
    except RuntimeError as error:  # torch's own exceptions derive from it
        raise LauncherError(
            f"MASTER_ADDR, MASTER_PORT: rank 0 has not opened a store at {world.address}:{world.port} within {timeout_s:g} s "
            f"(got {_first_line(error)}). Correct the address, or allow this port in the network."
        ) from None


def _own_store(world: World, own_address: str) -> "TCPStore":
    """Start a store on the interface of rank 0's address. By default, torch's stores listen on all interfaces."""
    from torch.distributed import TCPStore

    family = socket.AF_INET6 if ":" in own_address else socket.AF_INET
    try:
        listener = socket.create_server((own_address, world.port), family=family)
    except OSError as error:
        raise LauncherError(
            f"MASTER_ADDR, MASTER_PORT: rank 0 cannot listen at {own_address}:{world.port} (got {error.strerror}). "
            "Set MASTER_ADDR to the host of rank 0, and MASTER_PORT to a free port."
        ) from None
    return TCPStore(own_address, world.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _in_thread(call: Callable[[], T]) -> T:
    """Call a function in another thread, so that signals can end this process while the library blocks.

    The thread is a daemon, so the process can exit before the call returns.
    """
    results: queue.SimpleQueue[T | Exception] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put(call())
        except Exception as error:  # raised again below
            results.put(error)

    threading.Thread(target=run, name="rendezvous", daemon=True).start()
    result = results.get()
    if isinstance(result, LauncherError):
        raise result
    if isinstance(result, Exception):
        raise LauncherError(f"MASTER_ADDR: the launcher's store failed (got {_first_line(result)}). Read its output.")
    return result


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
