"""Kinds of hosts on other machines.

A new kind is a module like `slurm.py`, a section in `HostsConfig`, and a line in `KINDS`. This module must not import Monarch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from titanrl.base.choices import DeviceKind
from titanrl.config.errors import BrokenRule
from titanrl.config.schema import Config
from titanrl.config.sizes import host_counts
from titanrl.hosts.kubernetes import KubernetesHosts, broken_by_kubernetes
from titanrl.hosts.launcher import broken_by_launcher
from titanrl.hosts.leases import AcquiredHosts, Leases, Say
from titanrl.hosts.slurm import SlurmHosts, broken_by_slurm


@dataclass(frozen=True, slots=True)
class Order:
    """The hosts that a run, or a check before it, needs."""

    config: Config
    device: DeviceKind
    log_dir: Path
    """Folder to which hosts may write their output."""
    say: Say
    """Called with what startup is waiting for."""
    leases: Leases | None = None
    """Leases of a check; None makes those of a run, which report lost hosts to it."""


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


def _slurm(order: Order) -> SlurmHosts:
    num_hosts = sum(host_counts(order.config).values())
    return SlurmHosts(order.config, order.device, num_hosts, order.log_dir, order.say, order.leases)


def _kubernetes(order: Order) -> KubernetesHosts:
    keep = None if order.leases is None else True  # a check leaves existing resources as they are
    return KubernetesHosts(order.config, order.device, host_counts(order.config), order.say, order.leases, keep=keep)


KINDS = {
    "launcher": Kind(broken_by_launcher),
    "slurm": Kind(broken_by_slurm, _slurm, lambda config: config.hosts.slurm.port),
    "kubernetes": Kind(broken_by_kubernetes, _kubernetes, lambda config: config.hosts.kubernetes.port, have_names=False),
}
"""Kinds by `hosts.kind`; `local` and `process` use this machine alone."""


def broken_by_hosts(config: Config) -> Iterator[BrokenRule]:
    """Yield the rules about its hosts that a run breaks on this machine."""
    if config.hosts.kind in KINDS:
        yield from KINDS[config.hosts.kind].rules(config)
