"""Template processes, which import the packages of a role once and are forked for each of the role's processes.

Most of a generator's startup time is spent importing vLLM. With a template, only the first process of a role waits for the
imports. Later processes start with all packages imported, in shared memory: further workers and ranks, replacements of dead
replicas, and all processes after a restart of the run. A template only forks if it has a single thread. It neither opens a
device nor starts Monarch; its forks do.

The runs of a machine may share the templates of `titanrl warm`. Each of these has a socket in a folder, named by a digest of
everything that its imports depend on. A run whose environment variable SHARED names the folder uses the templates with the
right digests, and starts its own for the other roles.
"""

import asyncio
import contextlib
import hashlib
import os
import pickle
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from titanrl.base.ownership import is_private
from titanrl.config.errors import BrokenRule
from titanrl.processes.machine import process_state
from titanrl.processes.temporary import private_folder

PACKAGE = Path(__file__).parents[1]
"""Folder of TitanRL's source."""
SHARED = "TITANRL_TEMPLATES"
"""Environment variable with the folder of the shared templates."""

_NOT_READ = {
    *(SHARED, "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_RUNTIME_DIR"),  # of a single run
    *("HYPERACTOR_EXECUTION_ID", "MONARCH_CLIENT_TRACE_ID"),  # set by Monarch when it is imported
    *("_", "COLUMNS", "LINES", "OLDPWD", "PWD", "SHLVL", "TERM"),  # of a shell
    *("PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER"),  # of a test
}
"""Environment variables that no import reads."""
_PROGRAM = "import sys; from titanrl.processes.forker import main; main(*map(int, sys.argv[1:]))"


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
        self._state.setblocking(False)
        self._imported = asyncio.create_task(asyncio.get_running_loop().sock_recv(self._state, 1), name="template")

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def has_forked(self) -> bool:
        """True if the imports were complete, so that the template may have forks."""
        return self._imported.done() and not self._imported.cancelled() and bool(self._imported.result())

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
        await asyncio.wait({self._imported})  # `close` may cancel it during the wait
        return self.can_fork

    def close(self) -> None:
        """Kill the template, and with it every running fork."""
        self._imported.cancel()
        self._state.close()
        self._process.kill()
        self._process.wait()
        if self._folder is not None:
            self._folder.delete()


def shared_template(environment: Mapping[str, str], load: Callable[[], None]) -> str | None:
    """Return the socket path of the shared template for a role; None if there is none.

    Args:
        environment: variables that the packages read when they are imported, in addition to those of this process.
        load: function that imports the packages.
    """
    folder = os.environ.get(SHARED)
    if not folder or any(broken_by_templates()):
        return None
    path = Path(folder) / digest_of_imports(environment, load)
    return str(path) if path.is_socket() else None


def broken_by_templates() -> Iterator[BrokenRule]:
    """Check that no other user has created the folder of the shared templates, for example after they ended.

    Templates receive the environment of a run, with its keys, and its output.
    """
    folder = os.environ.get(SHARED)
    if folder and os.path.lexists(folder) and not is_private(Path(folder)):
        rule = "must be a folder of mode 0700 that belongs to you, and no link, because templates in it receive your keys"
        yield BrokenRule({SHARED: folder}, rule, "unset the variable, or start `titanrl warm` and export what it prints")


def digest_of_imports(environment: Mapping[str, str], load: Callable[[], None]) -> str:
    """Return a digest of what a template's imports depend on. It changes when TitanRL is edited or a package is installed."""
    inherited = {name: value for name, value in os.environ.items() if name not in _NOT_READ}
    variables = {**inherited, **environment, "OMP_NUM_THREADS": "1"}  # a template imports with one thread
    sources = [(str(file), file.stat().st_mtime_ns) for file in sorted(PACKAGE.rglob("*.py"))]
    packages = Path(sysconfig.get_path("purelib")).stat().st_mtime_ns
    place = (sys.executable, os.getcwd(), sorted(os.sched_getaffinity(0)))
    parts = (place, packages, sources, sorted(variables.items()), pickle.dumps(load))
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()
