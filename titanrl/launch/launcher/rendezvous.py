"""Rendezvous of the processes of a launcher: a store of torch, at the address that the launcher gives to all, names rank 0.

With torchrun the store is that of its agent, which holds the port already.
"""

import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from titanrl.errors import TitanRLError
from titanrl.launch.launcher.world import World

if TYPE_CHECKING:
    from torch.distributed import TCPStore

T = TypeVar("T")


class LauncherError(TitanRLError):
    """The processes that a launcher has started do not find each other, or one of them has ended."""


@dataclass(frozen=True, slots=True)
class Controller:
    """Address of rank 0's leases, and their secret.

    Example: `Controller("10.0.0.1:40123", "6f1c...")`
    """

    address: str
    """Address and port."""
    token: str
    """Secret that the hosts present."""


def publish(world: World, controller: Controller, own_address: str, timeout_s: float) -> "TCPStore":
    """Publish the address of rank 0; return the store, which must live until all have connected.

    Raises:
        LauncherError: The port is taken, or the launcher's store does not answer.
    """
    store = _in_thread(lambda: _store(world, timeout_s) if world.agent_has_store else _own_store(world, own_address))
    _in_thread(lambda: store.set(_key(world), f"{controller.address} {controller.token}"))
    return store


def find(world: World, timeout_s: float) -> Controller:
    """Wait until rank 0 has told where it is.

    Raises:
        LauncherError: It has not in time.
    """

    def ask() -> str:
        return _store(world, timeout_s).get(_key(world)).decode()

    address, token = _in_thread(ask).split()
    return Controller(address, token)


def _key(world: World) -> str:
    return f"titanrl/{world.attempt}/controller"  # the store of torchrun outlives an attempt


def _store(world: World, timeout_s: float) -> "TCPStore":
    from torch.distributed import TCPStore

    limit = timedelta(seconds=timeout_s)
    try:
        return TCPStore(world.address, world.port, is_master=False, timeout=limit, wait_for_workers=False)
    except RuntimeError as error:  # torch's own exceptions derive from it
        raise LauncherError(
            f"MASTER_ADDR, MASTER_PORT: rank 0 has not opened a store at {world.address}:{world.port} within {timeout_s:g} s "
            f"(got {_first_line(error)}). Correct the address, or let the network pass this port."
        ) from None


def _own_store(world: World, own_address: str) -> "TCPStore":
    """Start a store on the interface of rank 0's address. By default torch's stores listen on all."""
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
    """Call in another thread, so that signals end this process while the library waits.

    The thread is a daemon: the process may end before the call returns.
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
        raise LauncherError(f"MASTER_ADDR: the store of the launcher has failed (got {_first_line(result)}). Read its output.")
    return result


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
