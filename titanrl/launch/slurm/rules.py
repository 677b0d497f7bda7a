"""Checks before a run with `hosts.kind: slurm`. This module must not import Monarch."""

import ipaddress
import shutil
import socket
from collections.abc import Iterator

from titanrl.config.errors import BrokenRule
from titanrl.config.schema import Config


def broken_by_slurm(config: Config) -> Iterator[BrokenRule]:
    """Yield the rules that a run breaks on this machine."""
    hosts = config.hosts
    if hosts.kind != "slurm":
        return
    if config.device == "auto":
        yield BrokenRule(
            values={"hosts.kind": "slurm", "device": "auto"},
            rule="auto selects the device of this machine, but the nodes may have a different one",
            fix="set device to that of the nodes",
        )
    if missing := [command for command in ("sbatch", "squeue", "scancel", "srun") if shutil.which(command) is None]:
        rule = f"slurm requires the command {missing[0]}, which is not on PATH"
        yield BrokenRule(values={"hosts.kind": "slurm"}, rule=rule, fix="start the run on a Slurm login node")
    if not hosts.trusted_network:
        yield BrokenRule(
            values={"hosts.kind": "slurm", "hosts.trusted_network": False},
            rule="Slurm hosts listen on the network, and a program that can connect to them can execute code as you",
            fix="set hosts.trusted_network to true if you trust everyone who can reach them (docs/security.md)",
        )
    name = socket.gethostname()
    addresses = addresses_of(name)
    if not any(not ipaddress.ip_address(address).is_loopback for address in addresses):
        found = f"it resolves to {', '.join(addresses)}" if addresses else "it does not resolve"
        yield BrokenRule(
            values={"hosts.kind": "slurm"},
            rule=f"the name of this machine, {name}, must resolve to an address that other hosts can reach, but {found}",
            fix="correct /etc/hosts or the name server, or start the run with titanrl submit on a node of the cluster",
        )


def addresses_of(name: str) -> list[str]:
    """Return the addresses to which a host name resolves; empty if it does not resolve."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({str(address[0]).partition("%")[0] for *_, address in found})
