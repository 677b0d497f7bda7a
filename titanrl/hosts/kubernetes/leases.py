"""Pod leases: one TCP connection from the controller to each pod, open as long as both are alive.

Unlike with Slurm nodes (`titanrl.hosts.leases`), the controller opens the connection, because pods can exist before it and
serve several controllers in turn. The kernel on each side reports the death of the other.
"""

import asyncio
import contextlib
import hmac
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from titanrl.base.errors import TitanRLError
from titanrl.hosts.leases import CONTROLLER_LOST_S, ENDING, GREETING_S, LOST_S, MAX_GREETING, keep_alive, lease_closed
from titanrl.hosts.slurm.node import PROGRAM

FREE_S = 5.0
"""Seconds that a new controller waits for a pod to finish serving the previous one."""
CONNECTION = "TITANRL_PROBE_CONNECTION"
"""Environment variable with the file descriptor of the connection on which a probe serves its pod's reports."""
PROBE = "probe"
"""Identity that requests a probe (`titanrl doctor`) instead of Monarch's host."""
SERVING, BUSY = "serving", "busy"
"""First word of a pod's reply. `serving` is followed by the pod's host name, `busy` by the controller that it serves."""


class KubernetesError(TitanRLError):
    """The cluster refused a request or did not respond, or pods do not start."""


class PodBusyError(KubernetesError):
    """A pod serves another run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod that can serve as a host.

    Example: `Pod(rank=1, name="quickstarttrainers-1", ip="10.1.2.3")`
    """

    rank: int
    """Rank among the hosts of the run."""
    name: str
    """Name of the pod."""
    ip: str
    """Address of the pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A pod whose lease was lost."""

    pod: Pod
    """The pod."""
    host: str
    """Host name that the pod and its processes report."""
    was_told: bool
    """True if Kubernetes terminated the pod with SIGTERM."""


def tcp(ip: str, port: int) -> str:
    """Return an address in Monarch's notation."""
    return f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}"


class PodLeases:
    """Leases that the controller holds on the pods of a mesh."""

    def __init__(self, token: str, port: int, holder: str, on_lost: Callable[[Lost], None]) -> None:
        """Open no connection yet.

        Args:
            token: secret of the pods.
            port: port for leases.
            holder: name of this controller, without spaces.
            on_lost: called when a pod exited or became unreachable.
        """
        self._token, self._port, self._holder, self._on_lost = token, port, holder, on_lost
        self.lost: set[int] = set()
        """Ranks of the pods that were lost."""
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def hold(self, pod: Pod, identity: str) -> None:
        """Acquire the lease of a pod, which makes it run Monarch's host until the lease closes.

        Args:
            pod: the pod.
            identity: Monarch identity of the host.

        Raises:
            PodBusyError: The pod serves another run.
            KubernetesError: The pod cannot be reached, or refused the connection.
        """
        name, reader, _ = await self._connected(pod, identity)
        task = asyncio.create_task(self._watch(reader, pod, name))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def probed(self, pod: Pod) -> tuple[str, asyncio.StreamReader, asyncio.StreamWriter]:
        """Acquire the lease of a pod and start a probe in it (`titanrl doctor`); return its host name and the connection.

        Raises:
            PodBusyError: The pod serves a run.
            KubernetesError: The pod cannot be reached, or refused the connection.
        """
        return await self._connected(pod, PROBE)

    async def _connected(self, pod: Pod, identity: str) -> tuple[str, asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            async with asyncio.timeout(GREETING_S):
                reader, writer = await asyncio.open_connection(pod.ip, self._port)
                self._writers.append(writer)
                if self._is_closed:
                    writer.transport.abort()
                keep_alive(writer.get_extra_info("socket"), LOST_S)
                writer.write(f"{self._token} {identity} {self._holder}\n".encode())
                word, _, name = (await reader.readline()).decode(errors="replace").strip().partition(" ")
        except (OSError, TimeoutError, ValueError) as error:
            raise KubernetesError(
                f"hosts.kubernetes.port: the controller cannot reach port {self._port} of pod {pod.name} at {pod.ip} "
                f"(got {error!r}). Allow all TCP between the pods of the run in network policies and firewalls."
            ) from None
        if word == BUSY:
            raise PodBusyError(f"name: pod {pod.name} serves another run (got {name}). End that run, or change name.")
        if word != SERVING:
            raise KubernetesError(
                f"hosts.kubernetes: pod {pod.name} refused this run, which has the wrong secret. Delete its MonarchMesh."
            )
        return name, reader, writer

    def close(self) -> None:
        """Close every lease, so that the pods stop serving. `on_lost` is not called for them."""
        self._is_closed = True
        for writer in self._writers:
            writer.transport.abort()

    async def _watch(self, reader: asyncio.StreamReader, pod: Pod, host: str) -> None:
        was_told = False
        with contextlib.suppress(OSError, ValueError):  # the connection broke, or a line is too long
            while line := await reader.readline():
                was_told = was_told or line == ENDING
        if not self._is_closed:
            self.lost.add(pod.rank)
            self._on_lost(Lost(pod=pod, host=host, was_told=was_told))


class PodHost:
    """Server in a pod, which runs Monarch's host for one controller after another."""

    def __init__(self, token: str, ip: str, port: int) -> None:
        """Listen on no socket yet.

        Args:
            token: secret that controllers must send.
            ip: address of this pod.
            port: port of Monarch; leases use the next port.
        """
        self._token, self._ip, self._port = token, ip, port
        self._holder, self._is_serving = "", asyncio.Lock()
        self._is_told = asyncio.Event()
        self._served: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Serve until SIGTERM or SIGINT."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._is_told.set)
        server = await asyncio.start_server(self._accept, self._ip, self._port + 1)
        print(f"{socket.gethostname()} waits for a controller on port {self._port + 1}", flush=True)
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
        if len(words) != 3 or not hmac.compare_digest(words[0].encode(), self._token.encode()):
            return
        try:
            async with asyncio.timeout(FREE_S):
                await self._is_serving.acquire()
        except TimeoutError:
            writer.write(f"{BUSY} {self._holder}\n".encode())
            return
        _, identity, self._holder = words
        keep_alive(writer.get_extra_info("socket"), CONTROLLER_LOST_S)
        try:
            if identity == PROBE:
                await self._probe(writer)
            else:
                await self._host(identity, reader, writer)
        finally:
            self._is_serving.release()

    async def _host(self, identity: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Run Monarch's host while the controller holds the lease, then kill it, because it would outlive its controller."""
        command = [sys.executable, "-c", PROGRAM, f"{identity}@{tcp(self._ip, self._port)}", str(os.getpid())]
        worker = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL)
        await self._attend(worker, writer, lease_closed(reader))

    async def _probe(self, writer: asyncio.StreamWriter) -> None:
        """Run a probe that takes over the connection; this process no longer reads from it."""
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        connection = writer.get_extra_info("socket").fileno()
        prober = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "titanrl.hosts.checkup.probe"),
            stdin=asyncio.subprocess.DEVNULL,
            env=os.environ | {CONNECTION: str(connection)},
            pass_fds=(connection,),
        )
        await self._attend(prober, writer)

    async def _attend(
        self, process: asyncio.subprocess.Process, writer: asyncio.StreamWriter, *others: Coroutine[None, None, None]
    ) -> None:
        """Report the lease, wait until the process exits, the pod is terminated or `others` complete; kill the process."""
        try:
            writer.write(f"{SERVING} {socket.gethostname()}\n".encode())
            print(f"serving {self._holder}", flush=True)
            ends = [asyncio.ensure_future(end) for end in (*others, process.wait(), self._is_told.wait())]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if process.returncode:
                print(f"the serving process exited with code {process.returncode}", file=sys.stderr, flush=True)
            if self._is_told.is_set():
                writer.write(ENDING)
            for end in ends:
                end.cancel()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            print(f"ended serving {self._holder}", flush=True)
