"""An emulated host: a process that starts other processes for the controller, as Monarch's program on a machine of a cluster.

Monarch's own emulation (`ProcessJob`) outlives a controller that is killed, and its sockets can be reached by other users.
"""

import os
import sys

from monarch.actor import run_worker_loop_forever

from titanrl.host import HOST_FOLDER
from titanrl.launch.templates.bootstrap import PARENT
from titanrl.private_sockets import private_sockets
from titanrl.sandbox.confine import end_with_parent


def main() -> None:
    """Serve until the parent process ends; the arguments are the address and the parent."""
    address, parent = sys.argv[1:]
    end_with_parent(int(parent))
    os.environ[PARENT] = str(os.getpid())  # inherited by the processes of this host
    with private_sockets() as folder:
        os.environ[HOST_FOLDER] = str(folder)
        run_worker_loop_forever(address=address, ca="trust_all_connections")
