"""Program of a template process: import the packages of a role, then fork for each process that connects.

This module must not import Monarch, because a fork would lack Monarch's threads.
"""

import logging
import os
import pickle
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from titanrl.base.loading import loading
from titanrl.base.ownership import is_own_peer
from titanrl.base.terminal import ENDING
from titanrl.processes import bootstrap
from titanrl.processes.bootstrap import Order, is_confirmed, receive_order, send_number
from titanrl.processes.confine import allow_tracing, end_with_parent

_ORDER_S = 10.0
"""Limit in seconds for a connected process to send its order, which it does immediately."""
logger = logging.getLogger(__name__)


def main(listener_fd: int, state_fd: int, parent: int) -> None:
    """Import the packages of a role, then fork for each process that connects, until the parent exits."""
    end_with_parent(parent)
    # A terminal or a job scheduler sends these to the whole process group; the controller decides.
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    listener = socket.socket(fileno=listener_fd)
    with loading():
        load: Callable[[], None] = pickle.load(sys.stdin.buffer)
        load()
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        logger.warning("template disabled: the imports started %d threads, which a fork would lack", len(threads) - 1)
        return
    with socket.socket(fileno=state_fd) as state:
        state.send(b"+")
    order = _Forker(listener).run()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # forwarded by the stand-in; a fork keeps ignoring the others
    if "numpy" in sys.modules:  # unlike `random`, numpy does not reseed its generator after a fork
        sys.modules["numpy"].random.seed()
    os.environ.clear()
    os.environ.update(order.environment)
    tempfile.tempdir = None  # an import may have read the template's TMPDIR
    allow_tracing(order.controller)
    bootstrap.run(os.environ.pop(bootstrap.NAME), os.environ.pop(bootstrap.ANNOUNCEMENTS))


@dataclass(frozen=True, slots=True)
class _Fork:
    """A fork, and the connection to its stand-in."""

    pid: int
    pidfd: int
    connection: socket.socket


class _Forker:
    """Forks on request, kills a fork when its stand-in exits, and sends a fork's exit status to its stand-in."""

    def __init__(self, listener: socket.socket) -> None:
        """Accept connections on a listening socket."""
        self._listener = listener
        self._epoll = select.epoll()
        self._epoll.register(listener, select.EPOLLIN)
        self._forks: dict[int, _Fork] = {}  # by pidfd, and by the descriptor of the connection until the stand-in exits

    def run(self) -> Order:
        """Fork on request until the parent exits. Only forks return, each with its order."""
        while True:
            descriptor, _ = self._epoll.poll(maxevents=1)[0]  # one at a time: the next event may belong to the same fork
            fork = self._forks.get(descriptor)
            if fork is None:
                order = self._accept()
                if order is not None:
                    return order
            elif descriptor == fork.pidfd:
                self._reap(fork)
            else:  # the stand-in has exited, or runs itself
                self._forget(descriptor)
                signal.pidfd_send_signal(fork.pidfd, signal.SIGKILL)

    def _accept(self) -> Order | None:
        """Fork for the next process. Return its order in the fork, and None in the template."""
        connection, _ = self._listener.accept()
        if not is_own_peer(connection):
            logger.warning("a process of another user connected, which was refused")
            connection.close()
            return None
        connection.settimeout(_ORDER_S)
        try:
            order, streams = receive_order(connection)
        except (OSError, ValueError) as error:
            logger.warning("received no order from a process: %s", error)
            connection.close()
            return None
        template = os.getpid()
        pid = os.fork()
        if pid == 0:
            end_with_parent(template)
            if not is_confirmed(connection):
                os._exit(0)
            self._leave(connection, streams)
            os.chdir(order.folder)
            return order
        fork = _Fork(pid, os.pidfd_open(pid), connection)
        for stream in streams:
            os.close(stream)
        self._forks |= {fork.pidfd: fork, connection.fileno(): fork}
        self._epoll.register(fork.pidfd, select.EPOLLIN)
        self._epoll.register(connection, select.EPOLLRDHUP)  # the fork reads the confirmation
        send_number(connection, pid)
        return None

    def _reap(self, fork: _Fork) -> None:
        """Collect a fork that has exited, and send its wait status to its stand-in."""
        self._forget(fork.pidfd)
        os.close(fork.pidfd)
        _, status = os.waitpid(fork.pid, 0)
        if fork.connection.fileno() in self._forks:
            self._forget(fork.connection.fileno())
        send_number(fork.connection, status)
        fork.connection.close()

    def _forget(self, descriptor: int) -> None:
        self._epoll.unregister(descriptor)
        del self._forks[descriptor]

    def _leave(self, connection: socket.socket, streams: Sequence[int]) -> None:
        """Close the template's descriptors in a fork, and replace its standard streams with the stand-in's."""
        self._listener.close()
        for fork in {fork.pid: fork for fork in self._forks.values()}.values():
            os.close(fork.pidfd)
            fork.connection.close()
        self._epoll.close()
        connection.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
