"""Detection of launchers (torchrun, srun, mpirun, platforms) from the environment variables that they set.

A launcher starts one process on each host. This module must not import Monarch or torch.
"""

import ipaddress
import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from titanrl.config.device import resolve_device
from titanrl.config.errors import BrokenRule, BrokenRules
from titanrl.config.placement import host_counts
from titanrl.config.schema import Config
from titanrl.hosts.remote_rules import broken_by_trust

DEFAULT_PORT = 29500
"""Port of rank 0 if no variable names another one; torchrun has the same default."""
FIRST_SLURM_PORT = 20_000
NUM_SLURM_PORTS = 10_000
_COUNTS = (
    ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
)
"""Variables with the rank, the number of processes, and the number of processes on this host. The first ones that are set are
used, because mpirun may run inside srun. A Slurm batch script also has a rank, but no step tasks."""
_OWN = (
    *(name for names in _COUNTS[:3] for name in names),
    *("SLURM_PROCID", "SLURM_LOCALID", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
)
_OWN_PREFIXES = ("TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_")
_FIRST_NODE = re.compile(r"(?P<prefix>[^\[,]*)(\[(?P<first>\d+)[^\]]*\](?P<suffix>[^\[,]*))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The processes of a launcher, from the point of view of one of them.

    Example: `World(rank=1, size=3, local_size=1, address="n1", port=29500)`
    """

    rank: int
    """Rank of this process."""
    size: int
    """Number of processes."""
    local_size: int
    """Number of processes that the launcher has started on this host."""
    address: str
    """Name or address of the host of rank 0."""
    port: int
    """Port of the store in which the other ranks look up rank 0."""
    agent_has_store: bool = False
    """True if the launcher serves that store, like torchrun."""
    attempt: str = "0"
    """Number of the launcher's attempt, because torchrun may restart the processes."""


def world_of(environment: Mapping[str, str]) -> World | None:
    """Return the processes described by a launcher's environment variables; None if no launcher started this process.

    Raises:
        BrokenRules: The variables are incomplete or wrong.
    """
    for names in _COUNTS:
        rank, size, local_size = (environment.get(name) for name in names)
        if rank is not None and (names[0] == "RANK" or size is not None):
            break
    else:
        return None
    given = {names[0]: rank, names[1]: size}
    if not (rank.isdecimal() and size is not None and size.isdecimal() and int(rank) < int(size)):
        rule = "the launcher must set the rank of this process (from 0) and the number of processes (from 1)"
        raise BrokenRules(BrokenRule(given, rule, f"set both, or unset {names[0]}"))
    # Slurm writes the tasks of each node, such as 1(x2),3.
    on_this_host = max(map(int, re.findall(r"(?<!x)\b\d+", local_size or "")), default=1)
    return World(
        rank=int(rank),
        size=int(size),
        local_size=on_this_host,
        address=_address(environment, given, names[0], are_together=on_this_host == int(size)),
        port=_port(environment, by_slurm=names[0] == "SLURM_PROCID"),
        agent_has_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _address(environment: Mapping[str, str], given: Mapping[str, object], rank_name: str, *, are_together: bool) -> str:
    if "MASTER_ADDR" in environment:
        return environment["MASTER_ADDR"]
    if rank_name == "SLURM_PROCID":
        return first_node(environment.get("SLURM_STEP_NODELIST", ""))
    if are_together:
        return "127.0.0.1"
    rule = "this launcher does not provide the address of rank 0"
    fix = "pass it, for example with `mpirun -x MASTER_ADDR=<host of rank 0>`"
    raise BrokenRules(BrokenRule({**given, "MASTER_ADDR": None}, rule, fix))


def _port(environment: Mapping[str, str], *, by_slurm: bool) -> int:
    text = environment.get("MASTER_PORT")
    if text is None and by_slurm:  # steps of a job that share a node must not share the port
        number = 100 * int(environment.get("SLURM_JOB_ID", "0")) + int(environment.get("SLURM_STEP_ID", "0"))
        return FIRST_SLURM_PORT + number % NUM_SLURM_PORTS
    if text is None:
        return DEFAULT_PORT
    if not text.isdecimal() or not 0 < int(text) < 65_536:
        fix = "set it to a free port, the same for all processes"
        raise BrokenRules(BrokenRule({"MASTER_PORT": text}, "must be a port from 1 to 65535", fix))
    return int(text)


def first_node(nodes: str) -> str:
    """Return the first name of a Slurm node list, such as `gpu[07-09,12],login1`."""
    found = _FIRST_NODE.match(nodes)
    assert found is not None  # every part may be empty
    return found["prefix"] + (found["first"] or "") + (found["suffix"] or "")


def drop_variables() -> None:
    """Delete the launcher's variables from the environment of this process.

    The run's processes inherit the environment; with these variables, torch's process groups would use the launcher's store.
    """
    for name in list(os.environ):
        if name in _OWN or name.startswith(_OWN_PREFIXES):
            del os.environ[name]


def num_hosts(config: Config) -> int:
    """Return the number of processes that a run with `hosts.kind: launcher` needs, one for each host."""
    return sum(host_counts(config).values())


def broken_by_world(config: Config, world: World | None) -> Iterator[BrokenRule]:
    """Yield the rules that a configuration breaks when it runs on these processes."""
    if world is None:
        yield BrokenRule(
            {"hosts.kind": "launcher"},
            "launcher requires a program that starts this command once on each host, and none of "
            f"{', '.join(names[0] for names in _COUNTS)} is set",
            "start the command with torchrun, srun or mpirun (docs/howto/launcher.md), or set hosts.kind to local",
        )
        return
    needed, hosts = num_hosts(config), config.hosts
    generators = {"hosts.generator_hosts": hosts.generator_hosts} if "generators" in host_counts(config) else {}
    if world.size != needed:
        yield BrokenRule(
            {"hosts.trainer_hosts": hosts.trainer_hosts, **generators},
            f"the launcher must start one process for each trainer host and each generator host, {needed} in total, "
            f"but it started {world.size}",
            f"start {needed}, or change the numbers of hosts",
        )
    if world.local_size > 1 and config.device != "cpu" and resolve_device("auto").kind != "cpu":
        yield BrokenRule(
            {"hosts.kind": "launcher"},
            "a run needs one process per host, which uses all of its accelerators, but the launcher started "
            f"{world.local_size} on this host",
            "start one per host, for example with `torchrun --nproc-per-node 1` or `srun --ntasks-per-node 1`",
        )


def broken_by_launcher(config: Config) -> Iterator[BrokenRule]:
    """Yield the rules about launchers that a configuration breaks on any machine."""
    if config.hosts.kind == "launcher":
        yield from broken_by_trust(config, "hosts of a launcher")


def own_address(world: World) -> str:
    """Return this host's address on the route to rank 0; `""` if rank 0's name does not resolve here.

    Connecting a datagram socket determines the route without sending anything.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(world.address, world.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def is_loopback(address: str) -> bool:
    """Return True if an address is only reachable from this machine."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
