"""Program that holds a host for a controller: it runs Monarch's host on command, and answers `titanrl doctor`.

All kinds of hosts run it. In a pod, it waits for one controller after another; elsewhere, it connects to the controller and
serves it alone. Monarch's host ignores SIGTERM and outlives its controller, so it is a child of this
program, which must import neither Monarch nor torch: their versions may differ between hosts.
"""

import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import platform
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from titanrl.base.choices import DeviceKind
from titanrl.config.device import installed_version, missing_for, packages
from titanrl.config.sizes import host_bytes
from titanrl.hosts.leases import (
    CONTROLLER,
    CONTROLLER_LOST_S,
    END,
    ENDING,
    FAILED,
    GREETING_S,
    LISTEN,
    MAX_GREETING,
    READ,
    READY,
    START,
    STOP,
    TOKEN,
    UP,
    Controller,
    Host,
    hold_lease,
    is_loopback,
    keep_alive,
)
from titanrl.processes.bootstrap import MONARCH_HOST
from titanrl.processes.temporary import TemporaryFolder
from titanrl.processes.variables import temporary_folder

POD_IP = "TITANRL_POD_IP"
"""Environment variable with the address of the pod."""
FREE_S = 5.0
"""Seconds that a new controller waits for a pod to finish serving the previous one."""
SERVING, BUSY = "serving", "busy"
"""First word of a pod's reply. `serving` is followed by the pod's host name, `busy` by the controller that it serves."""

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


def main() -> None:
    """Serve the controller, or, in a pod, one controller after another."""
    mode, *values = sys.argv[1:]
    if mode == READ:
        os.environ[CONTROLLER], os.environ[TOKEN] = sys.stdin.readline().split()
    token, name = os.environ.pop(TOKEN), socket.gethostname()  # the variables are not needed by the run's processes
    if mode == LISTEN:
        with temporary_folder():
            asyncio.run(Pod(token, os.environ.pop(POD_IP), int(values[0])).serve())
        return
    rank, node = (values[0], name) if values else (os.environ["SLURM_NODEID"], os.environ["SLURMD_NODENAME"])
    sys.exit(serve(Controller(os.environ.pop(CONTROLLER), token), Host(rank=int(rank), node=node, name=name)))


def serve(controller: Controller, host: Host, problem: str = "") -> int:
    """Serve until the controller releases this host; return the exit code. A `problem` of this host ends the run."""
    with temporary_folder():
        return asyncio.run(_serve(controller, host, problem))


async def _serve(controller: Controller, host: Host, problem: str) -> int:
    try:
        reader, writer = await hold_lease(controller, host)
    except (OSError, TimeoutError) as error:
        print(f"{host.node}: the controller at {controller.address} cannot be reached: {error!r}", file=sys.stderr)
        return 1
    session, loop = Session(host.node, reader, writer), asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    for number in numbers:  # before the controller knows about this host
        loop.add_signal_handler(number, session.forward, number)
    try:
        writer.write(FAILED + " ".join(problem.split()).encode() + b"\n" if problem else READY)
        await session.serve()
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
    return session.code


class Session:
    """Service of this host for one controller, on an open connection."""

    def __init__(self, node: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._node, self._reader, self._writer = node, reader, writer
        self._own_address = str(writer.get_extra_info("sockname")[0])
        self._worker: asyncio.subprocess.Process | None = None  # Monarch's host
        self._watch: asyncio.Task[None] | None = None
        self._worker_exited = asyncio.Event()
        self._folder: TemporaryFolder | None = None
        self._servers: list[asyncio.Server] = []  # of `titanrl doctor`
        self.code = 1
        """Exit code of this process; 1 until the controller sends one or a termination signal arrives."""

    async def serve(self) -> None:
        """Serve until the controller sends `end`, the connection breaks, or Monarch's host exits. Leave no process behind."""
        ends = [asyncio.ensure_future(end) for end in (self._execute(), self._worker_exited.wait())]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
            for server in self._servers:
                server.close()
            await self._stop()

    def forward(self, number: int) -> None:
        """Report a termination signal of the scheduler to the controller, which shuts the run down in order."""
        self.code = 128 + number
        self._writer.write(ENDING)

    async def _execute(self) -> None:
        with contextlib.suppress(OSError):  # the connection broke
            while line := await self._reader.readline():
                word, _, value = line.decode().strip().partition(" ")
                if word == END:
                    self.code = int(value)
                    return
                if word == START:
                    self._writer.write(f"{UP} {await self._start(value)}\n".encode())
                elif word == STOP:
                    await self._stop()
                else:
                    self._writer.write(await reply(line, self._own_address, self._servers))

    async def _start(self, value: str) -> str:
        """Start Monarch's host; return its identity and address, `identity@address`.

        Without an address, choose one. If the controller is reached over loopback, all hosts are on this machine and use Unix
        sockets.
        """
        await self._stop()
        identity, _, address = value.partition("@")
        if not address and is_loopback(self._own_address):
            self._folder = TemporaryFolder("/tmp")  # the path of a socket must be short
            address = f"ipc://{self._folder.path}/host"
        elif not address:
            family = socket.AF_INET6 if ":" in self._own_address else socket.AF_INET
            with socket.create_server((self._own_address, 0), family=family) as free:
                address = tcp(self._own_address, free.getsockname()[1])
        self._worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", MONARCH_HOST, f"{identity}@{address}", str(os.getpid())),
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # launchers send signals to the process group of this process
        )
        self._watch = asyncio.create_task(self._wait(self._worker))
        return f"{identity}@{address}"

    async def _wait(self, worker: asyncio.subprocess.Process) -> None:
        code = await worker.wait()
        if worker is self._worker:
            print(f"{self._node}: Monarch's host exited with code {code}", file=sys.stderr, flush=True)
            self._worker_exited.set()

    async def _stop(self) -> None:
        """Kill Monarch's host, and with it every process of the run on this host."""
        worker, self._worker = self._worker, None
        if worker is not None and self._watch is not None:
            with contextlib.suppress(ProcessLookupError):
                worker.kill()
            await self._watch
        if self._folder is not None:
            self._folder.delete()


class Pod:
    """Server in a pod, which serves one controller after another.

    The controller connects, because pods can exist before it. Its first line has the secret and its name.
    """

    def __init__(self, token: str, ip: str, port: int) -> None:
        self._token, self._ip, self._port = token, ip, port
        self._holder, self._is_serving = "", asyncio.Lock()
        self._is_told = asyncio.Event()
        self._served: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Serve until SIGTERM or SIGINT. A pod has nothing to save, so it does not wait for its controller then."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._is_told.set)
        server = await asyncio.start_server(self._accept, self._ip, self._port)
        print(f"{socket.gethostname()} waits for a controller on port {self._port}", flush=True)
        await self._is_told.wait()
        server.close()
        await asyncio.gather(*self._served, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve_connection(reader, writer))
        self._served.add(task)
        try:
            await task
        finally:
            self._served.discard(task)
            writer.close()

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection. Kubernetes' readiness probe connects and disconnects without a message."""
        try:
            async with asyncio.timeout(GREETING_S):
                line = await reader.readuntil(b"\n")
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return
        words = line[:MAX_GREETING].decode(errors="replace").split()
        if len(words) != 2 or not hmac.compare_digest(words[0].encode(), self._token.encode()):
            return
        try:
            async with asyncio.timeout(FREE_S):
                await self._is_serving.acquire()
        except TimeoutError:
            writer.write(f"{BUSY} {self._holder}\n".encode())
            return
        self._holder = words[1]
        try:
            await self._serve_controller(reader, writer)
        finally:
            self._is_serving.release()

    async def _serve_controller(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        keep_alive(writer, CONTROLLER_LOST_S)
        name = socket.gethostname()
        writer.write(f"{SERVING} {name}\n".encode())
        print(f"serving {self._holder}", flush=True)
        ends = [asyncio.ensure_future(end) for end in (Session(name, reader, writer).serve(), self._is_told.wait())]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._is_told.is_set():
                writer.write(ENDING)
        finally:
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
            print(f"ended serving {self._holder}", flush=True)


def tcp(ip: str, port: int) -> str:
    """Return an address in Monarch's notation."""
    return f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}"


# Replies to `titanrl doctor --config`: versions, devices, memory and files of this host, and its connections to other hosts


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
    """Return the reply to a request of the controller, as JSON. Servers for measurements are added to `servers`."""
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
    """Listen on a port that the kernel chooses, and on some named ports. The list `servers` keeps the servers alive.

    Returns:
        `address`, `ports` (open ports by name), and `taken` (by name, reasons why the other ports cannot be opened).
    """
    open_ports, taken = {}, {}
    for name, port in ({CHOSEN: 0} | dict(ports)).items():
        try:
            server = await asyncio.start_server(_serve_measurement, address, port, limit=1 << 22)
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


async def _serve_measurement(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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


if __name__ == "__main__":
    main()
