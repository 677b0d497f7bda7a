"""Kinds of hosts: built-in ones, those of a function of the user, and hosts emulated on this machine.

A function that returns a command makes a kind (`HostCommand`). One that needs more is a module like `slurm.py`, a section in
`HostsConfig`, and a line in `_KINDS`. This module must not import Monarch.
"""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from titanrl.base.errors import describe_user_error
from titanrl.base.plugins import check_call, import_object
from titanrl.config.errors import BrokenRule, inline, rule_of
from titanrl.config.schema import Config
from titanrl.config.sizes import host_counts
from titanrl.hosts.holder import (
    READ,
    START,
    AcquiredHosts,
    HostsError,
    Order,
    broken_by_name,
    broken_by_remote_hosts,
    holder_command,
)
from titanrl.hosts.kubernetes import KubernetesHosts, broken_by_kubernetes
from titanrl.hosts.launcher import broken_by_launcher
from titanrl.hosts.slurm import SlurmHosts, broken_by_slurm
from titanrl.processes.bootstrap import MONARCH_HOST
from titanrl.processes.temporary import private_folder

END_S = 5.0
"""Seconds in which the command of a released host ends by itself, before it gets SIGTERM."""


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


class HostCommand(Protocol):
    """A function of the user that is named by `hosts.kind`.

    Example: `def ssh(rank, command, *, nodes): return ["ssh", "-o", "BatchMode=yes", nodes[rank], shlex.join(command)]`
    """

    def __call__(self, rank: int, command: Sequence[str], **options: Any) -> Sequence[str]:
        """Return the command, run on this machine, that runs `command` on a host; also called by the checks before a run.

        The host's command must get the standard input of the returned one, and end with it. It starts with this interpreter.

        Args:
            rank: Number of the host, from 0; trainer hosts come first.
            command: Program that holds the host, and its arguments.
            options: `hosts.options`.
        """


_KINDS = {
    "launcher": Kind(broken_by_launcher),
    "slurm": Kind(broken_by_slurm, SlurmHosts, lambda config: config.hosts.slurm.port),
    "kubernetes": Kind(broken_by_kubernetes, KubernetesHosts, lambda config: config.hosts.kubernetes.port, have_names=False),
}
"""Built-in kinds by `hosts.kind`; `local` and `process` use this machine alone."""


def kind_of(config: Config) -> Kind | None:
    """Return the kind of a run's hosts; None if it uses this machine alone."""
    return Kind(broken_by_commands, CommandHosts) if config.hosts.is_custom else _KINDS.get(config.hosts.kind)


def broken_by_hosts(config: Config) -> Iterator[BrokenRule]:
    """Yield the rules about its hosts that a run breaks on this machine."""
    if (kind := kind_of(config)) is not None:
        yield from kind.rules(config)


def commands_of(config: Config) -> list[list[str]]:
    """Return the commands that hold the hosts of a custom kind, by rank; raise `ValueError` if its function does not."""
    name, options = config.hosts.kind, config.hosts.options
    function: HostCommand = import_object(name, key="hosts.kind")
    expected = "def hosts(rank, command, **options) -> list[str]"
    check_call(function, HostCommand.__call__, key="hosts.kind", name=name, expected=expected, options=options)
    commands = []
    for rank in range(sum(host_counts(config).values())):
        try:
            command: object = function(rank, holder_command(rank, READ), **options)
        except Exception as error:  # user code may raise anything
            raised = f"raised {describe_user_error(error)} for host {rank}"
            raise ValueError(f"hosts.kind: {raised} (got {name}). Correct the function or hosts.options.") from error
        if not (isinstance(command, list | tuple) and command and all(isinstance(word, str) for word in command)):
            what = f"must return a list of strings, the command for host {rank}, but returned {inline(command)}"
            raise ValueError(f"hosts.kind: {what} (got {name}). Correct the function.")
        if shutil.which(command[0]) is None:
            raise ValueError(f"hosts.kind: the program {command[0]} is not on PATH (got {name}). Install it.")
        commands.append(list(command))
    return commands


def broken_by_commands(config: Config) -> Iterator[BrokenRule]:
    """Yield the rules that a run with a custom kind of hosts breaks on this machine."""
    try:
        commands_of(config)
    except ValueError as error:
        yield rule_of(str(error), {"hosts.kind": config.hosts.kind})
    yield from broken_by_remote_hosts(config, "hosts")
    yield from broken_by_name(config, "the hosts", "correct /etc/hosts or the name server")


class CommandHosts(AcquiredHosts):
    """Hosts held by commands on this machine, such as ssh, that a function of the user returns.

    Each host connects to the name of this machine. Address and secret reach it over standard input, because other users can
    read the arguments of commands. Its output is in `host_RANK.log` of the run's folder `logs`.
    """

    def __init__(self, order: Order) -> None:
        super().__init__(order)
        self._commands: list[asyncio.subprocess.Process] = []

    async def start(self, identities: Sequence[str]) -> list[str]:
        """Start the commands, and Monarch's hosts. See `Provider`."""
        self._identities = identities
        await self.acquire()
        for rank, identity in enumerate(identities):
            self.leases.send(rank, f"{START} {identity}")
        addresses = await self._chosen_addresses(self._config.timeouts.start_s, self._config.hosts.kind)
        self._say(f"{len(addresses)} hosts ({', '.join(self.leases.hosts[rank].node for rank in range(len(addresses)))})")
        return addresses

    async def acquire(self) -> None:
        """Start the commands, and wait for their hosts at most `timeouts.start_s`; see `AcquiredHosts`."""
        address, limit_s = await self.leases.open(socket.gethostname()), self._config.timeouts.start_s
        self._log_dir.mkdir(parents=True, exist_ok=True)
        for rank, command in enumerate(commands_of(self._config)):
            with (self._log_dir / f"host_{rank}.log").open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    *command, stdin=asyncio.subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
                )
            self._commands.append(process)
            assert process.stdin is not None
            process.stdin.write(f"{address} {self.leases.token}\n".encode())
        self._say(f"waiting for {len(self._commands)} hosts")
        held = asyncio.create_task(self.leases.all_held())
        ended = [asyncio.create_task(command.wait()) for command in self._commands]
        try:
            await asyncio.wait({held, *ended}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if not held.done():
                codes = {rank: task.result() for rank, task in enumerate(ended) if task.done()}
                for rank, code in codes.items():
                    log_file = self._log_dir / f"host_{rank}.log"
                    what = f"the command of host {rank} ended with code {code} before the host was connected"
                    raise HostsError(f"hosts.kind: {what} (got {self._config.hosts.kind}). Read {log_file}.")
                missing = ", ".join(map(str, self.leases.missing))
                raise HostsError(
                    f"timeouts.start_s: hosts {missing} have not connected to {address} (got {limit_s:g}). "
                    f"Read {self._log_dir}/host_RANK.log."
                )
        finally:
            for task in (held, *ended):
                task.cancel()

    async def kill(self) -> None:
        """Kill every process on the hosts, and end their commands. A second call does nothing."""
        self.leases.end(code=0)
        self.close()
        commands, self._commands = self._commands, []
        ending = [asyncio.create_task(command.wait()) for command in commands]
        if ending:
            await asyncio.wait(ending, timeout=END_S)
        for command in commands:
            if command.returncode is None:
                command.terminate()
        await asyncio.gather(*ending)


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
