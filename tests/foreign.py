"""Another user of the machine: actions of a process with an unprivileged user id, which only root can start."""

import grp
import os
import pwd
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import pytest

NOBODY = 65534
USER, GROUP = pwd.getpwuid(NOBODY).pw_name, grp.getgrgid(NOBODY).gr_name
"""Names of the other user and its group."""
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")


@contextmanager
def as_nobody(action: Callable[[], bytes]) -> Iterator[BinaryIO]:
    """Run a function in a forked process of the other user; yield a stream with what it returns.

    That user may be unable to execute this Python.
    """
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.umask(0)
            os.write(theirs, action())
        os._exit(0)
    os.close(theirs)
    try:
        with open(ours, "rb") as result:
            yield result
    finally:
        os.waitpid(pid, 0)


def nobody_does(action: Callable[[], object]) -> None:
    """Run a function as the other user, and wait until it is done."""
    with as_nobody(lambda: bytes(action() is None)) as done:
        done.read()


@contextmanager
def nobody_listens(path: Path) -> Iterator[BinaryIO]:
    """Listen on a Unix socket as the other user; the stream yields what the first client sent, once it has disconnected."""
    ready, is_ready = os.pipe()

    def listen() -> bytes:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            os.write(is_ready, b"+")
            listener.settimeout(20)
            client, _ = listener.accept()
            with client:
                client.settimeout(20)
                with suppress(ConnectionResetError):
                    return b"got:" + client.recv(1 << 16)
                return b"got:"

    with as_nobody(listen) as received:
        os.close(is_ready)
        assert os.read(ready, 1) == b"+"
        os.close(ready)
        yield received


def nobody_sends(path: str, message: bytes, kind: socket.SocketKind = socket.SOCK_STREAM) -> bytes:
    """Connect to a Unix socket as the other user and send a message; return the reply, empty if there is none."""

    def send() -> bytes:
        with socket.socket(socket.AF_UNIX, kind) as client:
            client.settimeout(20)
            client.connect(path)
            with suppress(ConnectionError):
                client.sendall(message)
                return b"" if kind == socket.SOCK_DGRAM else client.recv(1 << 16)
            return b""

    with as_nobody(send) as reply:
        return reply.read()


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Yield a folder like /tmp, in which every user can create names. Its path is short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="shared-", dir="/tmp"))
    folder.chmod(0o1777)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
