"""Checks before a run with `hosts.kind: slurm`. This module must not import Monarch."""

import shutil
from collections.abc import Iterator

from titanrl.config.errors import BrokenRule
from titanrl.config.schema import Config
from titanrl.hosts.remote_rules import broken_by_name, broken_by_remote_hosts


def broken_by_slurm(config: Config) -> Iterator[BrokenRule]:
    """Yield the rules that a run breaks on this machine."""
    if config.hosts.kind != "slurm":
        return
    yield from broken_by_remote_hosts(config, "nodes")
    if missing := [command for command in ("sbatch", "squeue", "scancel", "srun") if shutil.which(command) is None]:
        rule = f"slurm requires the command {missing[0]}, which is not on PATH"
        yield BrokenRule({"hosts.kind": "slurm"}, rule, "start the run on a Slurm login node")
    fix = "correct /etc/hosts or the name server, or start the run with titanrl submit on a node of the cluster"
    yield from broken_by_name(config, "nodes", fix)
