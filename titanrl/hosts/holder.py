"""Program that holds a host for a controller: it runs Monarch's host on command, and answers `titanrl doctor`.

All kinds of hosts run it. On Slurm nodes and under a launcher, it connects to the controller and serves it alone; in a pod, it
waits for one controller after another. Monarch's host ignores SIGTERM and outlives its controller, so it is a child of this
program, which must not import Monarch itself: its version may differ between hosts.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import os
import signal
import socket
import sys

from titanrl.hosts.leases import (
    CONTROLLER_LOST_S,
    END,
    ENDING,
    FAILED,
    GREETING_S,
    MAX_GREETING,
    READY,
    START,
    STOP,
    UP,
    Controller,
    Host,
    hold_lease,
    keep_alive,
)
from titanrl.hosts.monarch_host import MONARCH_HOST
from titanrl.hosts.report import reply
from titanrl.processes.temporary import TemporaryFolder
from titanrl.processes.variables import temporary_folder

MODULE = "titanrl.hosts.holder"
"""This program."""
CONNECT, LISTEN = "connect", "listen"
"""First argument of this program. A rank may follow `connect`, except on Slurm nodes. A port follows `listen`."""
CONTROLLER, TOKEN = "TITANRL_CONTROLLER", "TITANRL_TOKEN"
"""Environment variables with the address of the controller's leases, and their secret."""
POD_IP = "TITANRL_POD_IP"
"""Environment variable with the address of the pod."""
FREE_S = 5.0
"""Seconds that a new controller waits for a pod to finish serving the previous one."""
SERVING, BUSY = "serving", "busy"
"""First word of a pod's reply. `serving` is followed by the pod's host name, `busy` by the controller that it serves."""


def main() -> None:
    """Serve the controller, or, in a pod, one controller after another."""
    mode, *values = sys.argv[1:]
    token, name = os.environ.pop(TOKEN), socket.gethostname()  # the variables are not needed by the run's processes
    if mode == LISTEN:
        with temporary_folder():
            asyncio.run(Pod(token, os.environ.pop(POD_IP), int(values[0])).serve())
        return
    rank, node = (values[0], name) if values else (os.environ["SLURM_NODEID"], os.environ["SLURMD_NODENAME"])
    sys.exit(serve(Controller(os.environ.pop(CONTROLLER), token), Host(rank=int(rank), node=node, name=name)))


def serve(controller: Controller, host: Host, problem: str = "") -> int:
    """Serve until the controller releases this host; return the exit code.

    Args:
        controller: address and secret of the controller.
        host: this host.
        problem: reason why this host is unusable, which ends the run; empty if there is none.
    """
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
        if not address and ipaddress.ip_address(self._own_address.partition("%")[0]).is_loopback:
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
        keep_alive(writer.get_extra_info("socket"), CONTROLLER_LOST_S)
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


if __name__ == "__main__":
    main()
