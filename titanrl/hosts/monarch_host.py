"""Monarch's host, which starts processes for the controller: its program, and hosts emulated on this machine.

Monarch's `ProcessJob` is not used for emulation: it outlives a killed controller, and other users can reach its sockets.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from titanrl.processes.bootstrap import PARENT
from titanrl.processes.confine import end_with_parent
from titanrl.processes.machine import HOST_FOLDER
from titanrl.processes.temporary import private_folder

MONARCH_HOST = "from titanrl.hosts.monarch_host import main; main()"
"""Program of Monarch's host. Its arguments are its address and the process id of its parent."""


def main() -> None:
    """Serve until the parent process exits."""
    address, parent = sys.argv[1:]
    end_with_parent(int(parent))
    from monarch.actor import run_worker_loop_forever  # not at the top: `holder` imports this module, but not Monarch

    from titanrl.processes.private_sockets import private_sockets

    os.environ[PARENT] = str(os.getpid())  # inherited by the processes of this host
    with private_sockets() as folder:
        os.environ[HOST_FOLDER] = str(folder)
        run_worker_loop_forever(address=address, ca="trust_all_connections")


class EmulatedHosts:
    """Hosts emulated by processes of this machine (`hosts.kind: process`), which exit with this process."""

    def __init__(self, meshes: Mapping[str, int]) -> None:
        self._names = [f"{mesh}-{number}" for mesh, count in meshes.items() for number in range(count)]
        self._folder = private_folder()
        self._processes: list[subprocess.Popen[bytes]] = []  # by rank

    async def start(self, identities: Sequence[str]) -> list[str]:
        """Start the hosts. See `Provider`."""
        addresses = [
            f"{identity}@ipc://{self._folder.path / name}" for identity, name in zip(identities, self._names, strict=True)
        ]
        for address in addresses:
            command = [sys.executable, "-c", MONARCH_HOST, address, str(os.getpid())]
            self._processes.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
            )
        return addresses

    async def kill(self) -> None:
        """Kill the hosts. The kernel then kills every process on them."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._folder.delete()

    def has_ended(self, rank: int) -> bool:
        """Return True if a host has exited."""
        return self._processes[rank].poll() is not None
