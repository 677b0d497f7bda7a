"""Program of a template: import the packages of a role, then fork for each process that connects.

Nothing here may import Monarch, whose threads a fork would lack.
"""

import contextlib
import logging
import os
import pickle
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from titanrl.launch.templates import bootstrap
from titanrl.launch.templates.messages import Order, receive_order, send_number
from titanrl.loading import loading
from titanrl.sandbox.confine import allow_tracing, end_with_parent
from titanrl.terminal import ENDING

_ORDER_S = 10.0
"""Limit for a process to send its order, which it does at once."""
logger = logging.getLogger(__name__)


def main(listener_fd: int, state_fd: int, controller: int) -> None:
    """Import the packages of a role, then fork for each process that connects, until the controller ends."""
    end_with_parent(controller)
    # A terminal or a job scheduler sends these to the whole process group; the controller decides.
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    listener = socket.socket(fileno=listener_fd)
    with loading():
        load: Callable[[], None] = pickle.load(sys.stdin.buffer)
        load()
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        logger.warning("the imports have started %d threads, which a fork would lack: no forks", len(threads) - 1)
        return
    with socket.socket(fileno=state_fd) as state:
        state.send(b"+")
    order = _Forker(listener).run()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if "numpy" in sys.modules:  # the random numbers of `random` differ after a fork, those of numpy do not
        sys.modules["numpy"].random.seed()
    os.environ.clear()
    os.environ.update(order.environment)
    allow_tracing(controller)
    bootstrap.run(os.environ.pop(bootstrap.NAME), os.environ.pop(bootstrap.BIRTHS))


@dataclass(frozen=True, slots=True)
class _Fork:
    """A fork, and the process in whose place it runs."""

    pid: int
    pidfd: int
    connection: socket.socket


class _Forker:
    """Forks on request, kills a fork when its stand-in ends, and tells the stand-in how its fork has ended."""

    def __init__(self, listener: socket.socket) -> None:
        """Wait for connections at a socket that listens."""
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def run(self) -> Order:
        """Fork on request until the controller ends. In each fork, return the order that it has to carry out."""
        while True:
            key, _ = self._selector.select()[0]  # one at a time, because the next may belong to the same fork
            if key.data is None:
                order = self._accept()
                if order is not None:
                    return order
            elif key.fd == key.data.pidfd:
                self._reap(key.data)
            else:  # the stand-in has ended; it never sends anything
                self._selector.unregister(key.fileobj)
                signal.pidfd_send_signal(key.data.pidfd, signal.SIGKILL)

    def _accept(self) -> Order | None:
        """Fork for the next process; return its order in the fork, and None here."""
        connection, _ = self._listener.accept()
        connection.settimeout(_ORDER_S)
        try:
            order, streams = receive_order(connection)
        except (OSError, ValueError) as error:
            logger.warning("no order from a process: %s", error)
            connection.close()
            return None
        template = os.getpid()
        pid = os.fork()
        if pid == 0:
            end_with_parent(template)
            self._leave(connection, streams)
            os.chdir(order.folder)
            return order
        fork = _Fork(pid, os.pidfd_open(pid), connection)
        for stream in streams:
            os.close(stream)
        self._selector.register(fork.pidfd, selectors.EVENT_READ, fork)
        self._selector.register(connection, selectors.EVENT_READ, fork)
        send_number(connection, pid)
        return None

    def _reap(self, fork: _Fork) -> None:
        """Send the wait status of a fork that has ended to its stand-in."""
        self._selector.unregister(fork.pidfd)
        os.close(fork.pidfd)
        _, status = os.waitpid(fork.pid, 0)
        with contextlib.suppress(KeyError):  # the stand-in has ended before
            self._selector.unregister(fork.connection)
        send_number(fork.connection, status)
        fork.connection.close()

    def _leave(self, connection: socket.socket, streams: Sequence[int]) -> None:
        """Close the template's descriptors in a fork, and use the streams of the process in whose place it runs."""
        for key in list(self._selector.get_map().values()):
            if key.data is None:
                self._listener.close()
            elif key.fd == key.data.pidfd:
                os.close(key.fd)
                key.data.connection.close()
        self._selector.close()
        connection.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
