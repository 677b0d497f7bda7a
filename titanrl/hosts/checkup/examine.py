"""Check the hosts of a run: start a probe on each, in the allocation that a run would get, and query it."""

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from titanrl.base.choices import DeviceKind
from titanrl.base.errors import TitanRLError
from titanrl.config.errors import ConfigError
from titanrl.config.placement import host_counts
from titanrl.config.schema import Config
from titanrl.config.sizes import Sizes
from titanrl.hosts.checkup.probe import RANK, connect, rounds
from titanrl.hosts.checkup.report import HostReport, ReportRequest
from titanrl.hosts.checkup.verdicts import Examined, Link, Needs, Problem, needs_of, problems
from titanrl.hosts.launcher.host import END, FAILED
from titanrl.hosts.launcher.rendezvous import Controller, publish
from titanrl.hosts.launcher.world import World, own_address
from titanrl.hosts.leases import Host, Leases, Say
from titanrl.hosts.slurm.node import CONTROLLER, TOKEN

REPLY_S = 60.0
"""Limit for a probe's reply, in seconds. Listing a large model's files on a slow disk takes longest."""
CLOCK_ROUNDS = 5
END_S = 10.0
"""Seconds that a probe on this machine has to exit."""
PROBE = "titanrl.hosts.checkup.probe"
"""Module of the probe."""


class CheckupError(TitanRLError):
    """The hosts could not be examined."""


class Probes:
    """Connections to the probes on the hosts."""

    def __init__(self, num_hosts: int) -> None:
        """Start without connections."""
        self.leases = Leases(num_hosts, self._on_lost, self._on_lost, self._on_line)
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._problems: dict[int, str] = {}  # configuration errors of hosts that a launcher started, by rank

    @property
    def hosts(self) -> list[Host]:
        """Hosts, by rank."""
        return [host for _, host in sorted(self.leases.hosts.items())]

    async def connected(self, timeout_s: float) -> None:
        """Wait until every probe has connected.

        Raises:
            CheckupError: A probe did not connect in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self.leases.all_held()
        except TimeoutError:
            missing = ", ".join(map(str, self.leases.missing))
            raise CheckupError(
                f"timeouts.start_s: the probe of host {missing} has not connected to {socket.gethostname()} "
                f"(got {timeout_s:g}). Read the output of the hosts, and allow all ports between them."
            ) from None

    async def query(self, rank: int, request: str, **fields: Any) -> Any:
        """Send a request to a host's probe; return its reply.

        Raises:
            CheckupError: The probe exited or did not reply.
            ConfigError: The host's configuration is invalid.
        """
        reply = self._replies[rank] = asyncio.get_running_loop().create_future()
        if rank in self._problems:
            raise ConfigError(self._problems[rank])
        if rank in self.leases.lost:
            self._on_lost(self.leases.hosts[rank])
        self.leases.send(rank, json.dumps({"request": request, **fields}).encode() + b"\n")
        try:
            return await asyncio.wait_for(reply, REPLY_S)
        except TimeoutError:
            node = self.leases.hosts[rank].node
            raise CheckupError(f"{node}: no reply to '{request}' within {REPLY_S:g} s. Check this host.") from None

    async def query_all(self, request: str, **fields: Any) -> list[Any]:
        """Send a request to all hosts; return their replies by rank."""
        return await asyncio.gather(*(self.query(host.rank, request, **fields) for host in self.hosts))

    def end(self, code: int) -> None:
        """Make the probes exit with a code."""
        for host in self.hosts:
            if host.rank not in self.leases.lost:
                self.leases.send(host.rank, f"{END} {code}\n".encode())

    def _on_line(self, host: Host, line: bytes) -> None:
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
    """Hosts, by rank."""
    links: Sequence[Link]
    """Connections between them."""
    problems: Sequence[Problem]
    """Problems, errors first."""

    @property
    def code(self) -> int:
        """Exit code: 1 if a run would not start or would fail, else 0."""
        return int(any(problem.level == "error" for problem in self.problems))


async def examine(config: Config, sizes: Sizes, device: DeviceKind, world: World | None, say: Say) -> Checkup:
    """Check the hosts of a configuration. This starts probes on them, unless a launcher has already done so.

    Args:
        config: configuration of the run.
        sizes: sizes of the run.
        device: kind of the hosts' devices.
        world: processes of a launcher; None without a launcher.
        say: called with a message for the user about what startup is waiting for.

    Raises:
        CheckupError: A probe does not reply.
        TitanRLError: The hosts cannot be acquired.
    """
    needs, token = needs_of(config, sizes, device), secrets.token_hex(8)
    folder = config.output_dir.absolute() / f".doctor-{token}"
    folder.mkdir(parents=True)
    (folder / "token").write_text(token, encoding="utf-8")
    request = ReportRequest(device=device, folders=_folders(config), token_file=str(folder / "token"), token=token)
    keeps_folder = config.hosts.kind == "slurm"  # after an error, the folder contains the hosts' output
    try:
        async with _started(config, device, world, len(needs), folder, say) as probes:
            try:
                checkup = await _query_hosts(config, probes, request, needs)
            except ConfigError:
                probes.end(2)
                raise
            probes.end(checkup.code)
            keeps_folder = False
        return checkup
    finally:
        if not keeps_folder:
            shutil.rmtree(folder)


async def _query_hosts(config: Config, probes: Probes, request: ReportRequest, needs: Sequence[Needs]) -> Checkup:
    texts = await probes.query_all("report", **asdict(request))
    listening = [await probes.query(host.rank, "listen", ports=_named_ports(config)) for host in probes.hosts]
    clocks = [await _clock(probes, host.rank) for host in probes.hosts]
    names = names_of(probes.hosts)
    links = await _links(probes, names, listening)
    if config.hosts.kind in ("slurm", "kubernetes"):
        links += await _links_from_here(probes, listening)
    hosts = [
        Examined(node=name, report=HostReport.parse(text), needs=need, clock_s=clock, taken=reply["taken"])
        for name, text, need, clock, reply in zip(names, texts, needs, clocks, listening, strict=True)
    ]
    return Checkup(hosts=hosts, links=links, problems=problems(hosts, links))


def names_of(hosts: Sequence[Host]) -> list[str]:
    """Return unique display names of the hosts: the node, with the rank if several hosts are on one machine."""
    names = [host.node for host in hosts]
    return [name if names.count(name) == 1 else f"{name}:{host.rank}" for name, host in zip(names, hosts, strict=True)]


def _named_ports(config: Config) -> dict[str, int]:
    if config.hosts.kind not in ("slurm", "kubernetes"):
        return {}
    port = config.hosts.slurm.port if config.hosts.kind == "slurm" else config.hosts.kubernetes.port
    return {f"port {port} (hosts.{config.hosts.kind}.port)": port}


def _folders(config: Config) -> dict[str, str]:
    """Return the files and folders that every host must see, by key."""
    found = {"model.path": config.model.path}
    if config.distill is not None:
        found["distill.teacher.path"] = config.distill.teacher.path
    return {key: str(path.absolute()) for key, path in found.items() if path is not None}


@contextlib.asynccontextmanager
async def _started(
    config: Config, device: DeviceKind, world: World | None, num_hosts: int, folder: Path, say: Say
) -> AsyncIterator[Probes]:
    """Start the probes on the hosts that a run would get; release the hosts afterwards."""
    probes, start_s = Probes(num_hosts), config.timeouts.start_s
    if config.hosts.kind == "slurm":
        from titanrl.hosts.slurm.hosts import SlurmHosts  # imports Monarch

        slurm = SlurmHosts(config, device, {"hosts": num_hosts}, folder, say, leases=probes.leases, program=PROBE)
        try:
            await slurm.acquire({})
            yield probes
        finally:
            slurm.kill()
        return
    if config.hosts.kind == "kubernetes":
        from titanrl.hosts.kubernetes.hosts import KubernetesHosts  # imports Monarch

        pods = KubernetesHosts(config, device, host_counts(config), say, keep=True)
        try:
            await pods.examine(probes.leases)
            yield probes
        finally:
            probes.leases.close()
            pods.kill()
        return
    address = "127.0.0.1" if world is None else own_address(world)
    if world is not None and not address:
        raise CheckupError(
            f"MASTER_ADDR: must be the host of rank 0 (got {world.address!r}, which is unknown here). Correct it."
        )
    listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    await probes.leases.serve(listener)
    controller = Controller(f"{address}:{listener.getsockname()[1]}", probes.leases.token)
    store = None if world is None else publish(world, controller, address, start_s)
    children = [_start_probe(controller, rank) for rank in range(num_hosts if world is None else 1)]
    try:
        await probes.connected(start_s)
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


def _start_probe(controller: Controller, rank: int) -> "subprocess.Popen[bytes]":
    environment = os.environ | {CONTROLLER: controller.address, TOKEN: controller.token, RANK: str(rank)}
    return subprocess.Popen([sys.executable, "-m", PROBE], stdin=subprocess.DEVNULL, env=environment)


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


async def _links(probes: Probes, names: Sequence[str], listening: Sequence[Mapping[str, Any]]) -> list[Link]:
    """Measure the connection from every host to every other one. No host takes part in two measurements at the same time."""
    found = list[Link]()
    for pairs in rounds(len(names)):
        replies = await asyncio.gather(
            *(
                probes.query(source, "connect", address=listening[target]["address"], ports=listening[target]["ports"])
                for source, target in pairs
            )
        )
        found += [
            Link(source=names[source], target=names[target], **reply)
            for (source, target), reply in zip(pairs, replies, strict=True)
        ]
    return found


async def _links_from_here(probes: Probes, listening: Sequence[Mapping[str, Any]]) -> list[Link]:
    """Measure the connections from the controller to the hosts on other machines."""
    here, found = socket.gethostname(), list[Link]()
    for host, reply in zip(probes.hosts, listening, strict=True):
        if host.name != here:
            link = await connect(reply["address"], reply["ports"])
            found.append(Link(source=f"{here} (controller)", target=host.node, **link))
    return found
