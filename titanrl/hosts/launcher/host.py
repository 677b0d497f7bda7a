"""Program of each host of a launcher: starts and stops Monarch's host on command, and exits with the controller's exit code.

It forwards the launcher's termination signal to the controller, which shuts the run down in order.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator

from titanrl.hosts.launcher.rendezvous import Controller
from titanrl.hosts.launcher.world import is_loopback
from titanrl.hosts.leases import ENDING, Host, hold_lease
from titanrl.hosts.slurm.node import CONTROLLER, PROGRAM, TOKEN
from titanrl.processes.temporary import TemporaryFolder
from titanrl.processes.variables import temporary_folder

READY = b"ready\n"
"""Message of a host that is ready to start."""
FAILED = b"failed "
"""Prefix of the message of a host that is not; the reason follows."""
START, STOP, END, UP = "start", "stop", "end", "up"
"""Commands to a host: start Monarch's host with an identity, stop it, exit with a code. `up` is the reply to `start`, with
identity and address."""


def main() -> None:
    """Serve as the host of rank 0, on the controller's machine."""
    controller = Controller(os.environ.pop(CONTROLLER), os.environ.pop(TOKEN))
    sys.exit(serve(controller, rank=0))


def serve(controller: Controller, rank: int, problem: str = "") -> int:
    """Serve until the run ends; return its exit code.

    Args:
        controller: address and secret of the controller.
        rank: rank of this host.
        problem: reason why this host is unusable, which ends the run; empty if there is none.
    """
    name = socket.gethostname()
    with temporary_folder():
        return asyncio.run(_serve(controller, Host(rank=rank, node=name, name=name), problem))


async def _serve(controller: Controller, host: Host, problem: str) -> int:
    try:
        reader, writer = await hold_lease(controller.address, controller.token, host)
    except (OSError, TimeoutError) as error:
        print(f"{host.node}: the controller at {controller.address} cannot be reached: {error!r}", file=sys.stderr)
        return 1
    server = _HostServer(reader, writer)
    with server.forwarded_signals():  # before the controller knows about this host
        writer.write(FAILED + " ".join(problem.split()).encode() + b"\n" if problem else READY)
        ends = {asyncio.ensure_future(server.serve()), asyncio.ensure_future(server.worker_exited.wait())}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await server.stop()
    if server.worker_exited.is_set():
        print(f"{host.node}: Monarch's host exited unexpectedly", file=sys.stderr)
    return server.code


class _HostServer:
    """Executes the controller's commands on a host."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Start nothing yet; reader and writer are connected to the controller."""
        self._reader, self._writer = reader, writer
        self._worker: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._folder: TemporaryFolder | None = None
        self.worker_exited = asyncio.Event()
        """Set when Monarch's host exits without having been stopped."""
        self.code = 1
        """Exit code of this process; 1 until the controller sends one or a termination signal arrives."""

    @contextlib.contextmanager
    def forwarded_signals(self) -> Iterator[None]:
        """Forward termination signals to the controller while the body runs."""
        loop, numbers = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._forward, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    async def serve(self) -> None:
        """Execute commands until the controller sends `end` or the connection breaks."""
        with contextlib.suppress(OSError):  # the connection broke
            while line := await self._reader.readline():
                word, _, value = line.decode().strip().partition(" ")
                if word == END:
                    self.code = int(value)
                    return
                await self.stop()
                if word == START:
                    address = await self._start(value)
                    self._writer.write(f"{UP} {value}@{address}\n".encode())

    async def stop(self) -> None:
        """Kill Monarch's host, and with it every process of the run on this host."""
        worker, self._worker = self._worker, None
        if worker is not None and self._watch is not None:
            with contextlib.suppress(ProcessLookupError):
                worker.kill()
            await self._watch
        if self._folder is not None:
            self._folder.delete()

    async def _start(self, identity: str) -> str:
        """Start Monarch's host; return its address.

        If the controller is reached over loopback, all hosts are on this machine and use Unix sockets.
        """
        own = str(self._writer.get_extra_info("sockname")[0])
        if is_loopback(own):
            self._folder = TemporaryFolder("/tmp")  # the path of a socket must be short
            address = f"ipc://{self._folder.path}/host"
        else:
            family = socket.AF_INET6 if ":" in own else socket.AF_INET
            with socket.create_server((own, 0), family=family) as free:
                address = f"tcp://{f'[{own}]' if ':' in own else own}:{free.getsockname()[1]}"
        self._worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", PROGRAM, f"{identity}@{address}", str(os.getpid())),
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # launchers send signals to the process group of this process
        )
        self._watch = asyncio.create_task(self._wait(self._worker))
        return address

    async def _wait(self, worker: asyncio.subprocess.Process) -> None:
        await worker.wait()
        if worker is self._worker:
            self.worker_exited.set()

    def _forward(self, number: int) -> None:
        self.code = 128 + number
        self._writer.write(ENDING)


if __name__ == "__main__":
    main()
