"""Checks before a run with `hosts.kind: kubernetes`. This module must not import Monarch."""

from collections.abc import Iterator

from titanrl.config.errors import BrokenRule
from titanrl.config.schema import Config
from titanrl.hosts.kubernetes.api import missing_package
from titanrl.hosts.remote_rules import broken_by_name, broken_by_remote_hosts


def broken_by_kubernetes(config: Config) -> Iterator[BrokenRule]:
    """Yield the rules that a run breaks on this machine or in this pod, which will run its controller."""
    if config.hosts.kind != "kubernetes":
        return
    yield from broken_by_pods(config)
    if missing_package():
        rule = "kubernetes needs the package kubernetes, which is not installed"
        yield BrokenRule({"hosts.kind": "kubernetes"}, rule, "pip install kubernetes")
    fix = "correct /etc/hosts, or start the controller in a pod of the cluster, with titanrl manifest"
    yield from broken_by_name(config, "pods", fix)


def broken_by_pods(config: Config) -> Iterator[BrokenRule]:
    """Yield the rules that a run breaks on any machine."""
    kubernetes = config.hosts.kubernetes
    yield from broken_by_remote_hosts(config, "pods")
    if kubernetes.image is None:
        rule = "pods need an image that contains TitanRL and its dependencies"
        yield BrokenRule({"hosts.kubernetes.image": None}, rule, "set hosts.kubernetes.image")
    if not kubernetes.volumes:
        rule = "pods need a volume to share the run directory, model and data"
        fix = "set it to a persistent volume claim with the access mode ReadWriteMany"
        yield BrokenRule({"hosts.kubernetes.volumes": []}, rule, fix)
