"""Checks before a run with `hosts.kind: kubernetes`. This module must not import Monarch."""

import ipaddress
import socket
from collections.abc import Iterator

from titanrl.config.errors import BrokenRule
from titanrl.config.schema import Config
from titanrl.launch.kubernetes.api import missing_package
from titanrl.launch.slurm.rules import addresses_of


def broken_by_kubernetes(config: Config) -> Iterator[BrokenRule]:
    """Yield the rules that a run breaks on this machine or in this pod, which will run its controller."""
    if config.hosts.kind != "kubernetes":
        return
    yield from broken_by_pods(config)
    if missing_package():
        rule = "kubernetes needs the package kubernetes, which is not installed"
        yield BrokenRule(values={"hosts.kind": "kubernetes"}, rule=rule, fix="pip install kubernetes")
    name = socket.gethostname()
    addresses = addresses_of(name)
    if not any(not ipaddress.ip_address(address).is_loopback for address in addresses):
        found = f"it resolves to {', '.join(addresses)}" if addresses else "it does not resolve"
        yield BrokenRule(
            values={"hosts.kind": "kubernetes"},
            rule=f"the name of this machine, {name}, must resolve to an address that pods can reach, but {found}",
            fix="correct /etc/hosts, or start the controller in a pod of the cluster, with titanrl manifest",
        )


def broken_by_pods(config: Config) -> Iterator[BrokenRule]:
    """Yield the rules that a run breaks on any machine."""
    hosts, kubernetes = config.hosts, config.hosts.kubernetes
    if config.device == "auto":
        yield BrokenRule(
            values={"hosts.kind": "kubernetes", "device": "auto"},
            rule="auto selects the device of this machine, but the pods may have a different one",
            fix="set device to that of the pods",
        )
    if not hosts.trusted_network:
        yield BrokenRule(
            values={"hosts.kind": "kubernetes", "hosts.trusted_network": False},
            rule="pods listen on the network, and a program that can connect to them can execute code as you",
            fix="set hosts.trusted_network to true if you trust everyone who can reach them (docs/security.md)",
        )
    if kubernetes.image is None:
        yield BrokenRule(
            values={"hosts.kubernetes.image": None},
            rule="pods need an image that contains TitanRL and its dependencies",
            fix="set hosts.kubernetes.image",
        )
    if not kubernetes.volumes:
        yield BrokenRule(
            values={"hosts.kubernetes.volumes": []},
            rule="pods need a volume to share the run directory, model and data",
            fix="set it to a persistent volume claim with the access mode ReadWriteMany",
        )
