"""Program of Monarch's host, which starts processes for the controller. On one machine, several of these emulate hosts.

Monarch's `ProcessJob` is not used for emulation: it outlives a killed controller, and other users can reach its sockets.
"""

import os
import sys

from monarch.actor import run_worker_loop_forever

from titanrl.processes.bootstrap import PARENT
from titanrl.processes.confine import end_with_parent
from titanrl.processes.machine import HOST_FOLDER
from titanrl.processes.private_sockets import private_sockets


def main() -> None:
    """Serve until the parent process exits; the command-line arguments are the address and the parent's process id."""
    address, parent = sys.argv[1:]
    end_with_parent(int(parent))
    os.environ[PARENT] = str(os.getpid())  # inherited by the processes of this host
    with private_sockets() as folder:
        os.environ[HOST_FOLDER] = str(folder)
        run_worker_loop_forever(address=address, ca="trust_all_connections")
