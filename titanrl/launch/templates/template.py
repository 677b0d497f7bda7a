"""Templates: a process per kind of role that imports the packages of the role once, and is forked for each of its processes.

Importing vLLM takes most of the time in which a generator starts. With a template, only the first process of a role waits for
the imports: a replica that replaces a dead one, the workers and ranks after the first, and all processes after a restart of the
run start with everything imported, and share its memory.

A template has one thread, or it does not fork. It neither opens a device nor starts Monarch; its forks do.
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

from titanrl.private_sockets import private_folder

_PROGRAM = "import sys; from titanrl.launch.templates.forker import main; main(*map(int, sys.argv[1:]))"


class Template:
    """The controller's handle of a template, which ends with the controller at the latest."""

    def __init__(self, environment: Mapping[str, str], load: Callable[[], None], log: Path) -> None:
        """Start the template from a running event loop.

        Args:
            environment: variables of the role, which the packages read when they are imported.
            load: function of the template that imports the packages. It can be pickled.
            log: file of the template's output.
        """
        self._folder = private_folder()
        self.path = str(self._folder.path / "template")
        """Socket at which processes connect."""
        self._state, state = socket.socketpair()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, state, log.open("ab") as output:
            listener.bind(self.path)
            listener.listen(128)
            descriptors = [listener.fileno(), state.fileno()]
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, *map(str, descriptors), str(os.getpid())],
                env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},  # some imports compute something
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
    def has_ended(self) -> bool:
        """True if the template has failed or was killed."""
        return self._process.poll() is not None

    async def is_ready(self) -> bool:
        """Wait for the imports; return False if the template has ended instead."""
        await asyncio.wait({self._is_ready})  # it is cancelled if the template is closed meanwhile
        return not self._is_ready.cancelled() and self._is_ready.result() and not self.has_ended

    def close(self) -> None:
        """Kill the template, and so every fork that has not ended."""
        self._is_ready.cancel()
        self._state.close()
        self._process.kill()
        self._process.wait()
        self._folder.delete()

    async def _receive_state(self) -> bool:
        self._state.setblocking(False)
        return bool(await asyncio.get_running_loop().sock_recv(self._state, 1))
