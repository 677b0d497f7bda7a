"""Checks of the machines of a run that all kinds of hosts share. This module must not import Monarch."""

import ipaddress
import os
import socket
from collections.abc import Iterator

from titanrl.config.errors import BrokenRule
from titanrl.config.schema import Config
from titanrl.processes.machine import numbers


def broken_by_remote_hosts(config: Config, hosts: str) -> Iterator[BrokenRule]:
    """Yield the rules for hosts on other machines that a configuration breaks; `hosts` names them in the messages."""
    kind = config.hosts.kind
    if config.device == "auto":
        rule = f"auto selects the device of this machine, but the {hosts} may have a different one"
        yield BrokenRule({"hosts.kind": kind, "device": "auto"}, rule, f"set device to that of the {hosts}")
    yield from broken_by_trust(config, f"the {hosts}")


def broken_by_trust(config: Config, hosts: str) -> Iterator[BrokenRule]:
    """Yield a rule if hosts would listen on a network that the configuration does not declare as trusted."""
    if not config.hosts.trusted_network:
        rule = f"{hosts} listen on the network, and a program that can connect to them can execute code as you"
        fix = "set hosts.trusted_network to true if you trust everyone who can reach them (docs/security.md)"
        yield BrokenRule({"hosts.kind": config.hosts.kind, "hosts.trusted_network": False}, rule, fix)


def broken_by_name(config: Config, hosts: str, fix: str) -> Iterator[BrokenRule]:
    """Yield a rule if the name of this machine does not resolve to an address that other machines can reach."""
    name = socket.gethostname()
    addresses = addresses_of(name)
    if all(ipaddress.ip_address(address).is_loopback for address in addresses):
        found = f"it resolves to {', '.join(addresses)}" if addresses else "it does not resolve"
        rule = f"the name of this machine, {name}, must resolve to an address that {hosts} can reach, but {found}"
        yield config.broken("hosts.kind", rule, fix)


def addresses_of(name: str) -> list[str]:
    """Return the addresses to which a host name resolves; empty if it does not resolve."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({str(address[0]).partition("%")[0] for *_, address in found})


def broken_by_cores(config: Config) -> Iterator[BrokenRule]:
    """Yield a rule for each role that is bound to cores this machine does not have. Other machines are not checked."""
    if config.hosts.across_machines:
        return
    usable = os.sched_getaffinity(0)
    for role, choice in config.placement.cpus:
        if choice is None or choice in ("split", "numa") or numbers(choice) & usable:
            continue
        rule = f"the run may use none of these cores on this machine; it may use {_text(usable)}"
        yield BrokenRule({f"placement.cpus.{role}": choice}, rule, "choose from these cores, or set it to split or null")


def _text(cores: set[int]) -> str:
    """Return core numbers as a Linux CPU list, such as `0-3,8`."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], core]
        else:
            parts.append([core])
    return ",".join("-".join(map(str, part)) for part in parts)
