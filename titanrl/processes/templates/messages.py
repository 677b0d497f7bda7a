"""Messages between a stand-in and its template: the order for a fork, then the fork's process id and wait status."""

import json
import os
import socket
import struct
from dataclasses import asdict, dataclass

_NUMBER = struct.Struct("=i")
_CONFIRMATION = b"+"
_STREAMS = (0, 1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Properties that a fork takes over from its stand-in."""

    environment: dict[str, str]
    """All environment variables."""
    folder: str
    """Working directory."""
    controller: int
    """Id of the controller's process, which may inspect the fork."""


def send_order(connection: socket.socket, order: Order) -> None:
    """Send an order, with the standard streams of this process."""
    data = os.fsencode(json.dumps(asdict(order), ensure_ascii=False))
    socket.send_fds(connection, [_NUMBER.pack(len(data))], _STREAMS)
    connection.sendall(data)


def receive_order(connection: socket.socket) -> tuple[Order, list[int]]:
    """Receive an order and the descriptors of the standard streams.

    Raises:
        ConnectionError: The sender exited.
    """
    header, streams, _, _ = socket.recv_fds(connection, _NUMBER.size, len(_STREAMS))
    if len(header) < _NUMBER.size:
        raise ConnectionError("the process exited before its order was complete")
    (size,) = _NUMBER.unpack(header)
    data = connection.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        raise ConnectionError("the process exited before its order was complete")
    return Order(**json.loads(os.fsdecode(data))), list(streams)


def confirm(connection: socket.socket) -> None:
    """Let the fork run."""
    connection.sendall(_CONFIRMATION)


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
        connection.sendall(_NUMBER.pack(number))
    except OSError:
        return


def receive_number(connection: socket.socket) -> int | None:
    """Receive a number; return None if the sender has exited."""
    data = connection.recv(_NUMBER.size, socket.MSG_WAITALL)
    return _NUMBER.unpack(data)[0] if len(data) == _NUMBER.size else None
