"""Kinds of hosts: those on other machines, and hosts emulated on this one.

A new kind is a module like `slurm.py`, a section in `HostsConfig`, and a line in `KINDS`. This module must not import Monarch.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from titanrl.config.errors import BrokenRule
from titanrl.config.schema import Config
from titanrl.hosts.kubernetes import KubernetesHosts, broken_by_kubernetes
from titanrl.hosts.launcher import broken_by_launcher
from titanrl.hosts.leases import AcquiredHosts, Order
from titanrl.hosts.slurm import SlurmHosts, broken_by_slurm
from titanrl.processes.bootstrap import MONARCH_HOST
from titanrl.processes.temporary import private_folder


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of hosts."""

    rules: Callable[[Config], Iterator[BrokenRule]]
    """Yields the rules that a run with these hosts breaks on this machine."""
    make: Callable[[Order], AcquiredHosts] | None = None
    """Makes the hosts, and requests nothing yet. None if the hosts exist before the controller, as under a launcher."""
    port: Callable[[Config], int] | None = None
    """Returns the configured port on which the hosts listen."""
    have_names: bool = True
    """True if the controller can resolve the hosts' names."""


KINDS = {
    "launcher": Kind(broken_by_launcher),
    "slurm": Kind(broken_by_slurm, SlurmHosts, lambda config: config.hosts.slurm.port),
    "kubernetes": Kind(broken_by_kubernetes, KubernetesHosts, lambda config: config.hosts.kubernetes.port, have_names=False),
}
"""Kinds by `hosts.kind`; `local` and `process` use this machine alone."""


def broken_by_hosts(config: Config) -> Iterator[BrokenRule]:
    """Yield the rules about its hosts that a run breaks on this machine."""
    if config.hosts.kind in KINDS:
        yield from KINDS[config.hosts.kind].rules(config)


class EmulatedHosts:
    """Hosts emulated by processes of this machine (`hosts.kind: process`), which exit with this process.

    Monarch's `ProcessJob` is not used: it outlives a killed controller, and other users can reach its sockets.
    """

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
