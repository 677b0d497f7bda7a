"""The controller's handle of a template: a process that imports a role's packages once, and is forked for the role's processes.

Most of a generator's startup time is spent importing vLLM. With a template, only the first process of a role waits for the
imports. Later processes start with all packages imported, in shared memory: further workers and ranks, replacements of dead
replicas, and all processes after a restart of the run.

A template only forks if it has a single thread. It neither opens a device nor starts Monarch; its forks do.
"""

import asyncio
import contextlib
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from titanrl.processes.host import process_state
from titanrl.processes.private_sockets import private_folder

_PROGRAM = "import sys; from titanrl.processes.templates.forker import main; main(*map(int, sys.argv[1:]))"


class Template:
    """A template process, which exits with the controller at the latest."""

    def __init__(
        self, environment: Mapping[str, str], load: Callable[[], None], log: Path, socket_path: Path | None = None
    ) -> None:
        """Start the template from a running event loop.

        Args:
            environment: environment variables of the role, which the packages read when they are imported.
            load: picklable function that imports the packages in the template.
            log: file for the template's output.
            socket_path: path for the socket, in a folder that only this user can enter; None creates such a folder.
        """
        self.log = log
        """File with the template's output."""
        self._folder = private_folder() if socket_path is None else None
        self.path = str(socket_path if self._folder is None else self._folder.path / "template")
        """Path of the socket to which processes connect."""
        self._state, state = socket.socketpair()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, state, log.open("ab") as output:
            listener.bind(self.path)
            listener.listen(128)
            descriptors = [listener.fileno(), state.fileno()]
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, *map(str, descriptors), str(os.getpid())],
                env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},  # some imports run computations
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=descriptors,
            )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as order:
            pickle.dump(load, order)
        self._is_ready = asyncio.create_task(self._receive_state(), name="template")

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def has_forked(self) -> bool:
        """True if the imports were complete, so that the template may have forks."""
        return self._is_ready.done() and not self._is_ready.cancelled() and self._is_ready.result()

    @property
    def can_fork(self) -> bool:
        """True once the packages are imported, while the template is neither dead nor stopped by a signal."""
        return self.has_forked and process_state(self.pid) not in ("", "Z", "T")

    @property
    def was_killed(self) -> bool:
        """True if a signal ended the template."""
        return (self._process.poll() or 0) < 0

    @property
    def has_ended(self) -> bool:
        """True if the template has exited, because it failed or was killed."""
        return self._process.poll() is not None

    async def is_ready(self) -> bool:
        """Wait for the imports; return False if the template cannot fork."""
        await asyncio.wait({self._is_ready})  # `close` may cancel it during the wait
        return self.can_fork

    def close(self) -> None:
        """Kill the template, and with it every running fork."""
        self._is_ready.cancel()
        self._state.close()
        self._process.kill()
        self._process.wait()
        if self._folder is not None:
            self._folder.delete()

    async def _receive_state(self) -> bool:
        self._state.setblocking(False)
        return bool(await asyncio.get_running_loop().sock_recv(self._state, 1))
