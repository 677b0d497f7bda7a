"""Compare runs on one, two and three hosts: `python -m benchmarks.hosts --json FILE`.

The synchronous quick start with two generator replicas runs on one machine, on two hosts (one for the trainer, one for both
replicas) and on three (one for each replica). As root and with Slurm installed, the hosts are nodes of a Slurm cluster in
network namespaces of this machine (`tests/cluster`), and the counters of their network interfaces measure the network traffic.
Otherwise the hosts are emulated by processes, without such counters. A last run on two hosts places the rollout workers on the
controller's host, to show what their default placement saves.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import write_result
from benchmarks.quickstart import median
from tests.cluster.slurm import CONTROLLER, NODES, PREFIX, Cluster, missing
from titanrl.carriers.types import StepMetrics
from titanrl.metrics.reading import read_metrics
from titanrl.metrics.trackers import Hook

REPO = Path(__file__).parents[1]
FIRST = 5
"""First measured step; caches are cold before it."""
TRAFFIC = "traffic.jsonl"
"""File in the run directory with the counters after each step."""
COMMON = ("generator.replicas=2", "rollout.num_workers=2", "evaluation.every_steps=0", "logging.console=off", "device=cpu")


@dataclass(frozen=True, slots=True)
class Case:
    """A run of the benchmark."""

    name: str
    """Name in the result."""
    generator_hosts: int
    """Number of generator hosts, in addition to the trainer's; 0 runs everything on one machine."""
    overrides: tuple[str, ...] = ()
    """Additional overrides of the quick start."""


CASES = (
    Case("1 host", 0),
    Case("2 hosts", 1),
    Case("3 hosts", 2),
    Case("2 hosts, rollout workers with the controller", 1, ("placement.rollout=controller",)),
)


class Traffic(Hook):
    """Records the interface counters of all hosts after each step."""

    def after_step(self, run: Any, metrics: StepMetrics) -> None:
        """Append the bytes that each host has received and sent since it was created."""
        counters = {host: host_bytes(host, os.environ["TITANRL_BENCH_SPACES"]) for host in (CONTROLLER, *NODES)}
        with (run.run_dir / TRAFFIC).open("a") as file:
            file.write(json.dumps({"step": metrics.step, **counters}) + "\n")


def host_bytes(host: str, prefix: str) -> tuple[int, int]:
    """Return the bytes that a host of the cluster has received and sent."""
    command = ["ip", "-n", f"{prefix}-{host}", "-s", "-j", "link", "show", "dev", "eth0"]
    (shown,) = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return shown["stats64"]["rx"]["bytes"], shown["stats64"]["tx"]["bytes"]


def main() -> None:
    """Measure every case and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--steps", type=int, default=30, help="steps of each run; default 30")
    parser.add_argument("--emulation", choices=("namespaces", "processes"), help="default: namespaces if possible")
    parser.add_argument("--set", dest="overrides", nargs="+", default=[], metavar="key.path=value", help="additional overrides")
    arguments = parser.parse_args()
    reason = missing()
    if arguments.emulation == "namespaces" and reason:
        parser.error(f"--emulation: a Slurm cluster on this machine {reason} (got namespaces). Use processes.")
    in_namespaces = not reason and arguments.emulation != "processes"
    with (
        tempfile.TemporaryDirectory(prefix="titanrl-bench-") as folder,
        started_cluster(Path(folder), in_namespaces) as cluster,
    ):
        places = [f"output_dir={folder}/runs", f"cache_dir={folder}/cache", *COMMON, *arguments.overrides]
        run([*places, "name=warm", "num_steps=1"], None)  # caches the base model for the other runs
        cases = {case.name: measure(case, Path(folder), [*places, f"num_steps={arguments.steps}"], cluster) for case in CASES}
    emulation = "network namespaces" if in_namespaces else "processes"
    write_result(arguments.json, "hosts", {"emulation": emulation, "cases": cases})


@contextlib.contextmanager
def started_cluster(folder: Path, in_namespaces: bool) -> Iterator[Cluster | None]:
    """Start a Slurm cluster in network namespaces, and stop it at the end; yield None without namespaces."""
    if not in_namespaces:
        yield None
        return
    cluster = Cluster(folder / "slurm")
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def measure(case: Case, folder: Path, overrides: Sequence[str], cluster: Cluster | None) -> dict[str, Any]:
    """Run a case and return its measurements."""
    name = f"case{CASES.index(case)}"
    changes = [*overrides, f"name={name}", *case.overrides]
    if case.generator_hosts:
        changes += [f"hosts.kind={'process' if cluster is None else 'slurm'}", f"hosts.generator_hosts={case.generator_hosts}"]
        if cluster is not None:
            changes += ["hosts.trusted_network=true", f"hooks=[{REPO}/benchmarks/hosts.py:Traffic]"]
    run(changes, cluster if case.generator_hosts else None)
    run_dir = folder / "runs" / name
    steps = [row for row in read_metrics(run_dir / "metrics.jsonl") if "reward/mean" in row]
    steady = [row for row in steps if row["step"] >= FIRST]
    figures = {
        "step_s": median(steady, "time/step_s"),
        "push_s": median(steady, "sync/push_s"),
        "pull_s": median(steady, "sync/pull_s"),
        "version_bytes": median(steady, "sync/bytes"),
        "network_bytes_per_version": median(steady, "sync/network_bytes"),
        "times_over_the_network": median(steady, "sync/network_bytes") / median(steady, "sync/bytes"),
        "rewards": [row["reward/mean"] for row in steps],
    }
    return figures | traffic(run_dir / TRAFFIC, steps)


def run(changes: Sequence[str], cluster: Cluster | None) -> None:
    """Run the training command to completion, on the cluster's controller host if there is a cluster."""
    command = [sys.executable, "-m", "titanrl.grpo", "--config", "configs/quickstart.yaml", *changes]
    environment = (dict(os.environ) if cluster is None else dict(cluster.environment)) | {"PYTHONPATH": str(REPO)}
    environment["TITANRL_BENCH_SPACES"] = PREFIX
    started = time.monotonic()
    placed = command if cluster is None else cluster.on(CONTROLLER, *command)
    subprocess.run(placed, check=True, cwd=REPO, env=environment)
    print(f"{time.monotonic() - started:.0f} s: {' '.join(changes)}", flush=True)


def traffic(file: Path, steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the network traffic between the first and the last measured step; empty without counters.

    The result has the bytes through the controller's host, in both directions, per trained group, and the bytes into each other
    host per step.
    """
    if not file.exists():
        return {}
    rows = {row["step"]: row for row in map(json.loads, file.read_text().splitlines())}
    first, last = rows[FIRST], rows[max(rows)]
    num_steps = last["step"] - first["step"]
    prompts = {row["step"]: row["count/prompts"] for row in steps}
    groups = prompts[last["step"]] - prompts[first["step"]]

    def moved(host: str) -> int:
        return int(sum(last[host]) - sum(first[host]))

    return {
        "controller_bytes_per_group": moved(CONTROLLER) / groups,
        **{f"{node}_received_bytes_per_step": (last[node][0] - first[node][0]) / num_steps for node in NODES},
    }


if __name__ == "__main__":
    main()
