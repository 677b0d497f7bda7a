"""Program of each host of a launcher: runs Monarch's host whenever the controller wants it to, and ends with its exit code.

The launcher's signal to end is passed on to the controller, which closes the run in order.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator

from titanrl.launch.environment import temporary_folder
from titanrl.launch.launcher.rendezvous import Controller
from titanrl.launch.launcher.world import is_loopback
from titanrl.launch.leases import ENDING, Host, hold_lease
from titanrl.launch.slurm.node import CONTROLLER, PROGRAM, TOKEN
from titanrl.temporary import TemporaryFolder

READY = b"ready\n"
"""Message of a host that can start."""
FAILED = b"failed "
"""Start of the message of a host that cannot, before the reason."""
START, STOP, END, UP = "start", "stop", "end", "up"
"""Messages to a host: start Monarch's host with an identity, stop it, end with an exit code. `up` replies with identity and
address."""


def main() -> None:
    """Serve beside the controller, as the host of rank 0."""
    controller = Controller(os.environ.pop(CONTROLLER), os.environ.pop(TOKEN))
    sys.exit(serve(controller, rank=0))


def serve(controller: Controller, rank: int, problem: str = "") -> int:
    """Serve until the run ends; return its exit code.

    Args:
        controller: address of the controller.
        rank: number of this host.
        problem: reason for which this host cannot take part, which ends the run.
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
    member = Member(host, reader, writer)
    with member.passing_signals_on():  # before the controller knows of this host
        writer.write(FAILED + " ".join(problem.split()).encode() + b"\n" if problem else READY)
        ends = {asyncio.ensure_future(member.obey()), asyncio.ensure_future(member.worker_ended.wait())}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await member.stop()
    if member.worker_ended.is_set():
        print(f"{host.node}: Monarch's host has ended by itself", file=sys.stderr)
    return member.code


class Member:
    """A host of a run, as its controller knows it."""

    def __init__(self, host: Host, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Start nothing yet; the connection is that to the controller."""
        self._host, self._reader, self._writer = host, reader, writer
        self._worker: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._folder: TemporaryFolder | None = None
        self.worker_ended = asyncio.Event()
        """Set when Monarch's host has ended by itself."""
        self.code = 1
        """Exit code; 1 unless the controller has told another one, or a signal ends this host."""

    @contextlib.contextmanager
    def passing_signals_on(self) -> Iterator[None]:
        """Pass the signals to end on to the controller in the body."""
        loop, numbers = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._pass_on, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    async def obey(self) -> None:
        """Do what the controller says, until it says the end, or is lost."""
        with contextlib.suppress(OSError):  # the connection was lost
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
        """Kill Monarch's host, and with it every process of the run on this machine."""
        worker, self._worker = self._worker, None
        if worker is not None and self._watch is not None:
            with contextlib.suppress(ProcessLookupError):
                worker.kill()
            await self._watch
        if self._folder is not None:
            self._folder.delete()

    async def _start(self, identity: str) -> str:
        """Start Monarch's host; return its address.

        If the controller is reached by loopback, all hosts are this machine, and use Unix sockets.
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
            start_new_session=True,  # launchers send their signals to the group of this process
        )
        self._watch = asyncio.create_task(self._wait(self._worker))
        return address

    async def _wait(self, worker: asyncio.subprocess.Process) -> None:
        await worker.wait()
        if worker is self._worker:
            self.worker_ended.set()

    def _pass_on(self, number: int) -> None:
        self.code = 128 + number
        self._writer.write(ENDING)


if __name__ == "__main__":
    main()
