"""Free ports for tests."""

import errno
import random
import socket


def free_port() -> int:
    """Return a free port below those of outgoing connections, one of which could take it before the test listens on it."""
    while True:
        port = random.randrange(20_000, 32_000)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
