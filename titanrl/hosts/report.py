"""Replies of a host to `titanrl doctor --config`: its versions, devices, memory and files, and its connections to other hosts.

This module must not import torch or Monarch, because their versions may differ between hosts.
"""

import asyncio
import hashlib
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from titanrl.base.choices import DeviceKind
from titanrl.config.device import installed_version, missing_for, packages
from titanrl.config.sizes import host_bytes

MISSING = "missing"
"""State of a path that does not exist on a host."""
_CGROUPS = ("/sys/fs/cgroup", "/sys/fs/cgroup/memory")
_LIMITS = ("memory.max", "memory.limit_in_bytes")
_MAX_FILES = 10_000
"""Number of files per folder whose names and sizes are compared."""
_DIGESTED = (".json", ".jinja", ".txt", ".model", ".yaml")
"""Suffixes of a model's small files, whose contents are also compared."""
_MAX_DIGESTED_BYTES = 20_000_000
CHOSEN = "any port"
"""Name of the port chosen by the kernel; most connections of a run use such ports."""
CONNECT_S = 3.0
"""Limit for connecting to another host, in seconds."""
ROUND_TRIPS = 20
SEND_S = 0.3
"""Seconds of continuous sending for measuring the bandwidth."""
_CHUNK = bytes(1 << 20)
_ECHO, _SINK = b"e", b"s"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRequest:
    """Request for a host's report."""

    device: DeviceKind
    folders: Mapping[str, str]
    """Files and folders that every host must see, by configuration key."""
    token_file: str
    """File that the controller has written into `output_dir`."""
    token: str
    """Content of that file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """State of one host."""

    name: str
    versions: Mapping[str, str]
    device_problem: str | None
    """Missing prerequisite of the device; None if there is none."""
    devices: Sequence[str]
    """Names of the accelerators; empty on CPU."""
    cores: int
    """Number of CPU cores that this process may use."""
    memory: int
    """Bytes of memory that a run may use: the machine's memory, or the lowest limit on this process."""
    limited_by: str
    """Description of that limit; empty if it is the machine's memory."""
    shared_memory: int | None
    """Free bytes of `/dev/shm`; None if it cannot be written."""
    files: Mapping[str, str]
    """Digest, `missing` or an error, by configuration key."""
    shares_runs: bool
    """True if this host sees the file that the controller has written into `output_dir`."""


def report(request: ReportRequest) -> HostReport:
    """Return the report of this host."""
    memory, limited_by = memory_limit()
    folder = Path("/dev/shm")
    return HostReport(
        name=socket.gethostname(),
        versions=versions(request.device),
        device_problem=missing_for(request.device),
        devices=accelerators(request.device),
        cores=len(os.sched_getaffinity(0)),
        memory=memory,
        limited_by=limited_by,
        shared_memory=shutil.disk_usage(folder).free if os.access(folder, os.W_OK) else None,
        files={key: digest_of(Path(path)) for key, path in request.folders.items()},
        shares_runs=_content(Path(request.token_file)) == request.token,
    )


def versions(device: DeviceKind) -> dict[str, str]:
    """Return the versions of Python, TitanRL and the packages for a kind of device. TitanRL's includes a digest of its code."""
    names = [package.name for package in packages(device)]
    found = {name: version for name in names if (version := installed_version(name)) is not None}
    code = _digest_of_files(Path(__file__).parents[1], "*.py", contents=True)
    own = f"{installed_version('titanrl') or 'not installed'} (code {code[:8]})"
    return {"python": platform.python_version(), "titanrl": own} | found


def accelerators(device: DeviceKind) -> list[str]:
    """Return the names of the accelerators of this host."""
    if device == "npu":
        return sorted(entry.name for entry in Path("/dev").glob("davinci[0-9]*"))
    if device != "cuda" or shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return [] if found.returncode else found.stdout.strip().splitlines()


def memory_limit() -> tuple[int, str]:
    """Return the bytes of memory that this host's processes may use, and the limit's name; empty if it is the machine."""
    limits = {host_bytes(): ""}
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits[soft] = "ulimit -v, of each process"
    for line in (_content(Path("/proc/self/cgroup")) or "").splitlines():
        _, kinds, path = line.split(":", 2)
        cgroup = Path(path.lstrip("/"))  # a container sees its own cgroup as the root
        folders = [Path(root, folder) for root in _CGROUPS for folder in (cgroup, *cgroup.parents)]
        for file in (Path(folder, name) for folder in folders for name in _LIMITS if kinds in ("", "memory")):
            text = (_content(file) or "").strip()
            if text.isdecimal():
                limits[int(text)] = "the memory limit of its cgroup"
    lowest = min(limits)
    return lowest, limits[lowest]


def digest_of(path: Path) -> str:
    """Return a digest of a file or folder, `missing` if it does not exist, or the error if it cannot be read."""
    try:
        if path.is_file():
            return hashlib.sha256(f"{path.stat().st_size}".encode()).hexdigest()
        if not path.is_dir():
            return MISSING
        return _digest_of_files(path, "*", contents=False)
    except OSError as error:
        return f"{error.strerror}"


def _digest_of_files(folder: Path, pattern: str, *, contents: bool) -> str:
    """Return a digest of file names and sizes, and of contents: of all files, or only of a model's small files."""
    found = hashlib.sha256()
    files = sorted(file for file in folder.rglob(pattern) if file.is_file())[:_MAX_FILES]
    for file in files:
        size = file.stat().st_size
        found.update(f"{file.relative_to(folder)} {size}\n".encode())
        if contents or (file.suffix in _DIGESTED and size < _MAX_DIGESTED_BYTES):
            found.update(file.read_bytes())
    return found.hexdigest()


def _content(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


async def reply(line: bytes, address: str, servers: list[asyncio.Server]) -> bytes:
    """Return the reply to a request of the controller.

    Args:
        line: request as JSON.
        address: address of this host.
        servers: list to which servers for measurements are added; the caller closes them.
    """
    message = json.loads(line)
    request = message.pop("request")
    if request == "report":
        found: Any = asdict(await asyncio.to_thread(report, ReportRequest(**message)))
    elif request == "listen":
        found = await listen(address, message["ports"], servers)
    elif request == "connect":
        found = await connect(message["address"], message["ports"])
    else:
        found = time.time()
    return json.dumps(found).encode() + b"\n"


async def listen(address: str, ports: Mapping[str, int], servers: list[asyncio.Server]) -> dict[str, Any]:
    """Listen on a port that the kernel chooses, and on some named ports.

    Args:
        address: address of this host.
        ports: port numbers by name.
        servers: list to which the servers are added, which keeps them alive.

    Returns:
        `address`, `ports` (open ports by name), and `taken` (by name, reasons why the other ports cannot be opened).
    """
    open_ports, taken = {}, {}
    for name, port in ({CHOSEN: 0} | dict(ports)).items():
        try:
            server = await asyncio.start_server(_serve_connection, address, port, limit=1 << 22)
        except OSError as error:
            taken[name] = f"{os.strerror(error.errno)}" if error.errno else str(error)
            continue
        servers.append(server)
        open_ports[name] = server.sockets[0].getsockname()[1]
    return {"address": address, "ports": open_ports, "taken": taken}


async def connect(address: str, ports: Mapping[str, int]) -> dict[str, Any]:
    """Connect to the ports of another host, and measure the connection to the port `CHOSEN`.

    Returns:
        `closed` (errors of the unreachable ports, by name), and if `CHOSEN` is reachable, `latency_s` (shortest round trip) and
        `bytes_per_s`.
    """
    closed, measured = {}, {}
    for name, port in ports.items():
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(address, port)
        except (OSError, TimeoutError) as error:
            closed[name] = "no answer" if isinstance(error, TimeoutError) else _reason(error)
            continue
        try:
            if name == CHOSEN:
                measured = await _measure(reader, writer, address, port)
        except (OSError, TimeoutError) as error:
            closed[name] = f"the connection broke: {_reason(error)}"
        finally:
            writer.close()
    return {"closed": closed, **measured}


async def _measure(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str, port: int) -> dict[str, float]:
    trips: list[float] = []
    async with asyncio.timeout(CONNECT_S):
        writer.write(_ECHO)
        for _ in range(ROUND_TRIPS):
            started = time.perf_counter()
            writer.write(b".")
            await reader.readexactly(1)
            trips.append(time.perf_counter() - started)
    async with asyncio.timeout(CONNECT_S + SEND_S):
        _, sink = second = await asyncio.open_connection(address, port)
        sink.write(_SINK)
        num_sent, started = 0, time.perf_counter()
        while time.perf_counter() < started + SEND_S:
            sink.write(_CHUNK)
            await sink.drain()
            num_sent += len(_CHUNK)
        sink.write_eof()
        await second[0].read()  # returns when the peer has received everything
        sink.close()
        return {"latency_s": min(trips), "bytes_per_s": num_sent / (time.perf_counter() - started)}


async def _serve_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Return the received data to the sender, or discard it, as requested by the first byte."""
    try:
        kind = await reader.read(1)
        while data := await reader.read(1 << 20):
            if kind == _ECHO:
                writer.write(data)
    except ConnectionError:
        pass
    finally:
        writer.close()


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)
