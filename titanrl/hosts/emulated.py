"""Hosts emulated by processes of this machine (`hosts.kind: process`), which exit with this process."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from titanrl.hosts.holder import MONARCH_HOST
from titanrl.processes.temporary import private_folder


class EmulatedHosts:
    """Monarch's hosts as children of this process."""

    def __init__(self, meshes: Mapping[str, int]) -> None:
        """Start nothing yet.

        Args:
            meshes: number of hosts by mesh name.
        """
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

    def kill(self) -> None:
        """Kill the hosts. The kernel then kills every process on them."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._folder.delete()

    def has_ended(self, rank: int) -> bool:
        """Return True if a host has exited."""
        return self._processes[rank].poll() is not None

    def are_alive(self) -> bool:
        """Return True if no host has exited."""
        return all(process.poll() is None for process in self._processes)
