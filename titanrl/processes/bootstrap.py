"""Entry points of the processes that run Monarch: those of a run, and a host, which starts them for a controller elsewhere.

A process of a run ties itself to its parent, announces itself to the controller, and runs Monarch's program. The first two
happen before Monarch is imported, which can take seconds on a busy machine. Otherwise, if the parent were killed during the
import, the process would remain for most of a minute until Monarch gives up. And if the process itself were killed, the
controller would not detect it.

If the process has a template (`titanrl.processes.templates`), a fork of the template does all this instead. The
original process remains as a stand-in, because Monarch watches the process that it started. When either of the two exits, so
does the other; the stand-in exits with the status of its fork.
"""

import contextlib
import json
import os
import pickle
import runpy
import signal
import socket
import struct
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from titanrl.base.ownership import is_own_peer
from titanrl.processes.confine import allow_tracing, end_with_parent
from titanrl.processes.machine import CORES, HOST_FOLDER, bind

PARENT = "TITANRL_PARENT_PID"
"""Environment variable with the id of the process that the new process must not outlive; unset if another machine starts it."""
NAME = "TITANRL_PROCESS"
"""Environment variable with the role and rank of the process."""
ANNOUNCEMENTS = "TITANRL_ANNOUNCEMENTS"
"""Environment variable with the path of the controller's socket for announcements."""
TEMPLATE = "TITANRL_TEMPLATE"
"""Environment variable with the socket path of the template that forks the process; unset if there is none."""
FORK_S = 10.0
"""Limit in seconds for a fork, which takes milliseconds unless the template was stopped by a signal."""
MONARCH_HOST = "from titanrl.processes.bootstrap import monarch_host; monarch_host()"
"""Program of Monarch's host. Its arguments are its address and the process id of its parent."""
MONARCH = "monarch._src.actor.bootstrap_main"
"""Module that Monarch runs by default in a new process."""
EVENT_LOOP = "monarch-actor-event-loop"
"""Name of the thread in which Monarch runs the event loop of a process's actors."""

NUMBER = struct.Struct("=i")
"""Format of a process id or wait status in a message."""
_CONFIRMATION = b"+"
_STREAMS = (0, 1, 2)


def main() -> None:
    """Run as the process, or as the stand-in of a fork."""
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal sends them to the whole process group; the controller decides
        signal.signal(number, signal.SIG_IGN)
    parent = os.environ.pop(PARENT, None)
    if parent is not None:
        end_with_parent(int(parent))
        allow_tracing(int(parent))
    template = os.environ.pop(TEMPLATE, None)
    if template is not None and parent is not None:
        stand_in(template, int(parent))
    run(os.environ.pop(NAME), os.environ.pop(ANNOUNCEMENTS))


def monarch_host() -> None:
    """Serve as Monarch's host until the parent process exits."""
    address, parent = sys.argv[1:]
    end_with_parent(int(parent))
    from monarch.actor import run_worker_loop_forever

    from titanrl.processes.temporary import private_sockets

    os.environ[PARENT] = str(os.getpid())  # inherited by the processes of this host
    with private_sockets() as folder:
        os.environ[HOST_FOLDER] = str(folder)
        run_worker_loop_forever(address=address, ca="trust_all_connections")


def run(name: str, announcements: str) -> None:
    """Bind this process to its cores, send its id, host and name to the controller, and run Monarch's program."""
    cores = os.environ.pop(CORES, None)
    if cores is not None:
        bind(cores)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as messages, contextlib.suppress(OSError):
        # Another machine usually cannot reach the socket.
        messages.sendto(f"{os.getpid()} {socket.gethostname()} {name}".encode(), announcements)
    # In a process that has imported torch, as all forks of templates have, Monarch suspends torch's dispatch modes for every
    # message. None is active where messages arrive, and this takes ten times as long as unpickling a small message.
    from monarch._src.actor import pickle as monarch_pickle

    assert callable(monarch_pickle.torch_loads), "torchmonarch moved its function for messages in processes with torch"
    monarch_pickle.torch_loads = pickle.loads
    threading.excepthook = _end_with_event_loop
    runpy.run_module(MONARCH, run_name="__main__", alter_sys=True)


def _end_with_event_loop(failed: threading.ExceptHookArgs) -> None:
    """Print the exception of a thread, and exit if the thread ran the event loop of an actor, which would never reply again.

    A task of user code ends the event loop if it raises `SystemExit` or `KeyboardInterrupt`.
    """
    threading.__excepthook__(failed)
    if failed.thread is not None and failed.thread.name == EVENT_LOOP:
        print(f"the event loop ended: {failed.exc_type.__name__}; this process exits", file=sys.stderr, flush=True)
        os._exit(1)


def stand_in(template: str, controller: int) -> None:
    """Request a fork from a template, and exit with the fork's status or die by the same signal. Return if there is no fork.

    A fork runs only once this process has confirmed it, so that a late fork does not run beside this process.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(FORK_S)
        try:
            connection.connect(template)
            if not is_own_peer(connection):
                print(f"{template}: another user listens there, so this process imports its packages itself", file=sys.stderr)
                return
            order = Order(environment=dict(os.environ), folder=os.getcwd(), controller=controller)
            send_order(connection, order, _STREAMS)
            fork = receive_number(connection)
            if fork is None:
                return
            signal.signal(signal.SIGTERM, lambda number, frame: os.kill(fork, number))
            confirm(connection)
        except TimeoutError:
            print(f"{template}: no fork within {FORK_S:g} s, so this process imports its packages itself", file=sys.stderr)
            return
        except OSError:
            return
        connection.settimeout(None)
        status = receive_number(connection)  # None if the fork was killed with its template
    if status is not None and os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    number = signal.SIGKILL if status is None else os.WTERMSIG(status)
    with contextlib.suppress(OSError):  # SIGKILL has no handler
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)


# Messages between a template and a stand-in, or the process that starts a template: the order, then process id and wait status


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Properties that a fork takes over from its stand-in or, if it becomes a template, from the process that asks for it."""

    environment: dict[str, str]
    folder: str
    """Working directory."""
    controller: int
    """Id of the controller's process, which may inspect the fork."""
    load: str = ""
    """Pickled function in base64 that imports the packages of a template; empty if the fork is a process of a run."""


def send_order(connection: socket.socket, order: Order, descriptors: Sequence[int]) -> None:
    """Send an order with the standard streams of the fork; for a template, its listener and the socket of its state follow."""
    data = os.fsencode(json.dumps(asdict(order), ensure_ascii=False))
    socket.send_fds(connection, [NUMBER.pack(len(data))], descriptors)
    connection.sendall(data)


def confirm(connection: socket.socket) -> None:
    """Let the fork run."""
    connection.sendall(_CONFIRMATION)


def receive_order(connection: socket.socket) -> tuple[Order, list[int]]:
    """Receive an order and its descriptors; raise `ConnectionError` if the sender has exited."""
    header, descriptors, _, _ = socket.recv_fds(connection, NUMBER.size, len(_STREAMS) + 2)
    if len(header) < NUMBER.size:
        raise ConnectionError("the process exited before its order was complete")
    (size,) = NUMBER.unpack(header)
    data = connection.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        raise ConnectionError("the process exited before its order was complete")
    return Order(**json.loads(os.fsdecode(data))), list(descriptors)


def is_confirmed(connection: socket.socket) -> bool:
    """Wait in a fork for the stand-in's confirmation; return False if the stand-in has exited, or runs itself."""
    connection.settimeout(None)
    try:
        return connection.recv(len(_CONFIRMATION)) == _CONFIRMATION
    except OSError:
        return False


def send_number(connection: socket.socket, number: int) -> None:
    """Send the process id of a fork, or its wait status. Do nothing if the receiver has exited."""
    try:
        connection.sendall(NUMBER.pack(number))
    except OSError:
        return


def receive_number(connection: socket.socket) -> int | None:
    """Receive a number; return None if the sender has exited."""
    data = connection.recv(NUMBER.size, socket.MSG_WAITALL)
    return NUMBER.unpack(data)[0] if len(data) == NUMBER.size else None
