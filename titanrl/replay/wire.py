"""Remote calls between processes over sockets, with pickled messages and authentication by a shared key.

Each client process is a *session*. It has one connection that stays open and carries no calls, its anchor, and one connection
for every call in progress. A session ends when its anchor closes, and therefore immediately when its process dies. It does not
end when a call fails, because the caller may still be reading or writing rows. For the same reason there is no keep-alive.
"""

import errno
import os
import pickle
import socket
import struct
import threading
import uuid
import weakref
from collections.abc import Callable, Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from titanrl.base.ownership import is_own_peer
from titanrl.replay.batches import ReplayClosedError

Address = str | tuple[str, int]
"""Path of a Unix socket, or interface and port."""
Verb = Callable[..., Any]
"""Function that takes a session number and the arguments of a call."""


class Server:
    """Server for remote calls, with one thread per connection."""

    def __init__(
        self,
        address: Address,
        key: bytes,
        verbs: Mapping[str, Verb],
        *,
        on_end: Callable[[int], None] = lambda session: None,
        on_lost: Callable[[int, str, Any], None] = lambda session, verb, reply: None,
    ) -> None:
        """Start listening. Port 0 selects a free port. Clients must know the key.

        `on_end` is called with the number of a session that ended. `on_lost` is called with session, verb and reply if the
        client closed the connection without reading the reply, and also for the last reply on every connection of a session
        that ends.

        Raises:
            ValueError: The address is not available.
        """
        self._key, self._verbs, self._on_end, self._on_lost = key, verbs, on_end, on_lost
        self._sessions: dict[str, int] = {}
        self._num_sessions = 0
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
        try:
            if isinstance(address, tuple):
                self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind(address)
        except OSError as error:
            raise ValueError(f"address: cannot listen (got {address}: {error.strerror}). Use another one.") from None
        self._listener.listen(128)
        self.address: Address = self._listener.getsockname()
        """Address with the actual port."""
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            if client.family == socket.AF_UNIX and not is_own_peer(client):
                client.close()
                continue
            threading.Thread(target=self._serve, args=(_connection(client),), name="client", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            kind, name = pickle.loads(connection.recv_bytes())
            if kind == "anchor":
                self._serve_anchor(connection, name)
            elif name in self._sessions:
                self._serve_calls(connection, self._sessions[name])
        except (EOFError, OSError, AuthenticationError):  # the client has exited, or does not know the key
            pass
        finally:
            connection.close()

    def _serve_anchor(self, connection: Connection, name: str) -> None:
        """Keep a session open until its anchor closes."""
        with self._lock:
            session = self._sessions[name] = self._num_sessions
            self._num_sessions += 1
        try:
            connection.send_bytes(b"")
            connection.recv_bytes()  # returns when the connection closes: clients send nothing here
        finally:
            del self._sessions[name]
            self._on_end(session)

    def _serve_calls(self, connection: Connection, session: int) -> None:
        """Serve the calls on a connection. The next call shows that the client has read the previous reply."""
        last: tuple[str, Any] | None = None
        try:
            while True:
                verb, arguments, has_reply = pickle.loads(connection.recv_bytes())
                last = None
                reply: tuple[bool, Any]
                try:
                    reply = True, self._verbs[verb](session, *arguments)
                    last = (verb, reply[1])
                except Exception as error:  # the client raises it
                    reply = False, error
                if has_reply:
                    connection.send_bytes(pickle.dumps(reply, pickle.HIGHEST_PROTOCOL))
        finally:
            if last is not None:
                self._on_lost(session, *last)


class Link:
    """Connections of this process to a server. Several threads may call concurrently."""

    def __init__(self, address: Address, key: bytes, name: str, reply_s: float) -> None:
        """Store the address; the first call connects. Messages contain `name`. A reply may take `reply_s` seconds in addition
        to the time that its call may wait.
        """
        self._address, self._key, self._name, self._reply_s = address, key, name, reply_s
        self._start()
        LINKS.add(self)

    def _start(self) -> None:
        self.session = ""
        """Name of the session, once it has started. A forked process has its own."""
        self._anchor: Connection | None = None
        self._idle: list[Connection] = []
        self._broken: list[Connection] = []
        self._is_closed = False
        self._lock = threading.Lock()

    def call(self, verb: str, *arguments: Any, wait_s: float = 0.0) -> Any:
        """Call a function of the server, which may wait for `wait_s` seconds; return its result or raise its exception.

        Raise `ReplayClosedError` if the server has exited, or does not respond.
        """
        return self._exchange((verb, arguments, True), wait_s)

    def send(self, verb: str, *arguments: Any) -> None:
        """Call a function of the server without waiting for a reply. Raise `ReplayClosedError` if the server has exited."""
        self._exchange((verb, arguments, False), None)

    def wait_until_closed(self) -> None:
        """Wait until the server exits."""
        self._open_anchor().poll(None)

    def close(self) -> None:
        """End the session."""
        with self._lock:
            self._is_closed = True
            for connection in (self._anchor, *self._idle, *self._broken):
                if connection is not None:
                    connection.close()
            self._anchor, self._idle, self._broken = None, [], []

    def after_fork(self) -> None:
        """Start a separate session in a forked process; the parent keeps its connections."""
        self._lock = threading.Lock()
        self.close()
        self._start()

    def _exchange(self, request: tuple[str, tuple[Any, ...], bool], wait_s: float | None) -> Any:
        try:
            connection = self._take()
            try:
                connection.send_bytes(pickle.dumps(request, pickle.HIGHEST_PROTOCOL))
            except BaseException:  # even for an interrupt, keep it open: closing it would signal that the last reply was lost
                self._broken.append(connection)
                raise
            try:
                is_value, reply = (True, None) if wait_s is None else pickle.loads(self._receive(connection, wait_s))
            except BaseException:  # even for an interrupt, do not reuse it: the reply may still arrive
                connection.close()
                raise
        except (EOFError, OSError, AuthenticationError) as error:
            raise self._closed(error) from None
        with self._lock:
            if self._is_closed:
                connection.close()
            else:
                self._idle.append(connection)
        if not is_value:
            assert isinstance(reply, Exception)
            raise reply
        return reply

    def _take(self) -> Connection:
        self._open_anchor()
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self._connect("join")

    def _open_anchor(self) -> Connection:
        with self._lock:
            if self._is_closed:
                raise self._closed("this client was closed")
            if self._anchor is None:
                self.session = uuid.uuid4().hex
                anchor = self._connect("anchor")
                try:
                    self._receive(anchor, 0.0)
                except BaseException:  # including interrupts
                    anchor.close()
                    raise
                self._anchor = anchor
            return self._anchor

    def _connect(self, kind: str) -> Connection:
        with socket.socket(socket.AF_UNIX if isinstance(self._address, str) else socket.AF_INET) as client:
            client.settimeout(self._reply_s)
            client.connect(self._address)
            if client.family == socket.AF_UNIX and not is_own_peer(client):
                raise PermissionError(errno.EACCES, "a process of another user listens there")
            client.setblocking(True)
            # A peer that hangs in the middle of a message must not block this process forever.
            limit = struct.pack("ll", int(self._reply_s), int(self._reply_s % 1 * 1e6))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            connection = _connection(client)
        try:
            answer_challenge(connection, self._key)
            deliver_challenge(connection, self._key)
            connection.send_bytes(pickle.dumps((kind, self.session)))
        except BaseException:  # including interrupts
            connection.close()
            raise
        return connection

    def _receive(self, connection: Connection, wait_s: float) -> bytes:
        if not connection.poll(wait_s + self._reply_s):
            raise TimeoutError(f"no reply after {wait_s + self._reply_s:g} s")
        return connection.recv_bytes()

    def _closed(self, error: Exception | str) -> ReplayClosedError:
        if isinstance(error, AuthenticationError):
            why = "it uses a different key"
        elif isinstance(error, BlockingIOError):
            why = f"no reply after {self._reply_s:g} s"
        else:
            why = str(error) or "it closed the connection"
        return ReplayClosedError(f"{self._name} does not respond: {why}. Check whether its process has exited, and restart it.")


LINKS: "weakref.WeakSet[Link]" = weakref.WeakSet()


def _reset_links() -> None:
    for link in LINKS:
        link.after_fork()


os.register_at_fork(after_in_child=_reset_links)


def _connection(client: socket.socket) -> Connection:
    if client.family == socket.AF_INET:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(client.detach())
