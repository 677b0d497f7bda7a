"""Programs that start one process on each host (torchrun, srun, mpirun, platforms), by the variables that they set.

Nothing here imports Monarch or torch.
"""

import ipaddress
import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from titanrl.config.errors import BrokenRule, BrokenRules
from titanrl.config.places import host_counts
from titanrl.config.schema import Config
from titanrl.device import resolve_device

DEFAULT_PORT = 29500
"""Port of rank 0 that torchrun takes, too, where nothing names another one."""
FIRST_SLURM_PORT = 20_000
NUM_SLURM_PORTS = 10_000
_COUNTS = (
    ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
)
"""Variables with the rank, the number of processes, and their number on this host. The first that are set count: mpirun may run
inside of srun. A batch script of Slurm has a rank, too, but no tasks of a step."""
_OWN = (
    *(name for names in _COUNTS[:3] for name in names),
    *("SLURM_PROCID", "SLURM_LOCALID", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
)
_OWN_PREFIXES = ("TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_")
_FIRST_NODE = re.compile(r"(?P<prefix>[^\[,]*)(\[(?P<first>\d+)[^\]]*\](?P<suffix>[^\[,]*))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The processes that a launcher has started, as one of them sees them.

    Example: `World(rank=1, size=3, local_size=1, address="n1", port=29500)`
    """

    rank: int
    """Number of this process."""
    size: int
    """Number of processes."""
    local_size: int
    """Number of processes that the launcher has started on this host."""
    address: str
    """Name or address of the host of rank 0."""
    port: int
    """Port of the store through which the others find rank 0."""
    agent_has_store: bool = False
    """True if the launcher itself serves that store, as torchrun does."""
    attempt: str = "0"
    """Number of the launcher's attempt, as torchrun may start the processes again."""


def world_of(environment: Mapping[str, str]) -> World | None:
    """Return the processes that a launcher describes in some variables; None if no launcher has started this process.

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
        raise BrokenRules(
            BrokenRule(
                values=given,
                rule="the launcher must set the number of this process and of all processes, from 0 and from 1 on",
                fix=f"set both, or unset {names[0]}",
            )
        )
    # Slurm writes 1(x2),3: the tasks of each node
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
    raise BrokenRules(
        BrokenRule(
            values={**given, "MASTER_ADDR": None},
            rule="this launcher does not tell the address of rank 0",
            fix="pass it, for example with `mpirun -x MASTER_ADDR=<host of rank 0>`",
        )
    )


def _port(environment: Mapping[str, str], *, by_slurm: bool) -> int:
    text = environment.get("MASTER_PORT")
    if text is None and by_slurm:  # steps of a job that share a node must not share the port
        number = 100 * int(environment.get("SLURM_JOB_ID", "0")) + int(environment.get("SLURM_STEP_ID", "0"))
        return FIRST_SLURM_PORT + number % NUM_SLURM_PORTS
    if text is None:
        return DEFAULT_PORT
    if not text.isdecimal() or not 0 < int(text) < 65_536:
        fix = "set it to a free port, the same for all processes"
        raise BrokenRules(BrokenRule(values={"MASTER_PORT": text}, rule="must be a port from 1 to 65535", fix=fix))
    return int(text)


def first_node(nodes: str) -> str:
    """Return the first name of a list of Slurm, such as `gpu[07-09,12],login1`."""
    found = _FIRST_NODE.match(nodes)
    assert found is not None  # every part may be empty
    return found["prefix"] + (found["first"] or "") + (found["suffix"] or "")


def drop_variables() -> None:
    """Delete the launcher's variables from this process.

    The processes of the run inherit the others. With these, torch's process groups would look for the launcher's store.
    """
    for name in list(os.environ):
        if name in _OWN or name.startswith(_OWN_PREFIXES):
            del os.environ[name]


def num_hosts(config: Config) -> int:
    """Return the number of processes that a run with `hosts.kind: launcher` needs, one for each host."""
    return sum(host_counts(config).values())


def broken_by_world(config: Config, world: World | None) -> Iterator[BrokenRule]:
    """Yield the rules that a configuration breaks with these processes."""
    if world is None:
        yield BrokenRule(
            values={"hosts.kind": "launcher"},
            rule="launcher requires a program that starts this command once on each host, and none of "
            f"{', '.join(names[0] for names in _COUNTS)} is set",
            fix="start the command with torchrun, srun or mpirun (docs/howto/launcher.md), or set hosts.kind to local",
        )
        return
    needed, hosts = num_hosts(config), config.hosts
    generators = {"hosts.generator_hosts": hosts.generator_hosts} if "generators" in host_counts(config) else {}
    if world.size != needed:
        yield BrokenRule(
            values={"hosts.trainer_hosts": hosts.trainer_hosts, **generators},
            rule=f"the launcher must start one process for each trainer host and each generator host, {needed} in all, "
            f"and it has started {world.size}",
            fix=f"start {needed}, or change the numbers of hosts",
        )
    if world.local_size > 1 and config.device != "cpu" and resolve_device("auto").kind != "cpu":
        yield BrokenRule(
            values={"hosts.kind": "launcher"},
            rule="a run needs one process on each host, which uses all of its accelerators, and the launcher has started "
            f"{world.local_size} on this one",
            fix="start one on each, for example with `torchrun --nproc-per-node 1` or `srun --ntasks-per-node 1`",
        )


def broken_by_launcher(config: Config) -> Iterator[BrokenRule]:
    """Yield the rules that the hosts of a run break on this machine, whether or not a launcher has started it."""
    hosts = config.hosts
    if hosts.kind == "launcher" and not hosts.trusted_network:
        yield BrokenRule(
            values={"hosts.kind": "launcher", "hosts.trusted_network": False},
            rule="hosts of launcher listen on the network, and a program that can connect to them can execute code as you",
            fix="set hosts.trusted_network to true if you trust everybody who can reach them (docs/security.md)",
        )


def own_address(world: World) -> str:
    """Return the address of this host in the network of rank 0; `""` if rank 0's name is unknown here.

    A datagram socket learns the address of its route without sending anything.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(world.address, world.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def is_loopback(address: str) -> bool:
    """Return True if only this machine reaches an address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
