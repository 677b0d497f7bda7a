"""Template processes, which import the packages of a role once and are forked for each of the role's processes.

Templates form a tree. The template BASE imports what several roles need, such as torch, and is forked for the template of each
role, which imports the rest. The kernel kills a fork when the process that forked it dies.

Most of a generator's startup time is spent importing vLLM. With a template, only the first process of a role waits for the
imports. Later processes start with all packages imported, in shared memory: further workers and ranks, replacements of dead
replicas, and all processes after a restart of the run. A template only forks if it has a single thread. It neither opens a
device nor starts Monarch; its forks do. This module must therefore not import Monarch.

The runs of a machine may share the templates of `titanrl warm`. Each of these has a socket in a folder, named by a digest of
everything that its imports depend on. A run whose environment variable SHARED names the folder uses the templates with the
right digests, and starts its own for the other roles.

A run that starts its own base does so with `start_early` while it is being checked, which hides a second of the imports.
"""

import asyncio
import base64
import contextlib
import ctypes
import gc
import hashlib
import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from titanrl.base.ownership import is_own_peer, is_private
from titanrl.base.plugins import loading
from titanrl.base.terminal import ENDING
from titanrl.processes import bootstrap
from titanrl.processes.bootstrap import (
    FORK_S,
    NUMBER,
    Order,
    confirm,
    is_confirmed,
    receive_number,
    receive_order,
    send_number,
    send_order,
)
from titanrl.processes.confine import allow_tracing, end_with_parent
from titanrl.processes.machine import THREADS, has_exited, process_state
from titanrl.processes.temporary import private_folder

PACKAGE = Path(__file__).parents[1]
"""Folder of TitanRL's source."""
SHARED = "TITANRL_TEMPLATES"
"""Environment variable with the folder of the shared templates."""
BASE = "base"
"""Kind of the template from which the templates of all roles are forked."""

_NOT_READ = {
    *(SHARED, "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_RUNTIME_DIR"),  # of a single run
    *("HYPERACTOR_EXECUTION_ID", "MONARCH_CLIENT_TRACE_ID"),  # set by Monarch when it is imported
    *("_", "COLUMNS", "LINES", "OLDPWD", "PWD", "SHLVL", "TERM"),  # of a shell
    *("PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER"),  # of a test
    "PYTHONPROFILEIMPORTTIME",  # changes what is printed only
}
"""Environment variables that no import reads."""
_PROGRAM = "import sys; from titanrl.processes.templates import main; main(*map(int, sys.argv[1:]))"
_ORDER_S = 10.0
"""Limit in seconds for a connected process to send its order, which it does immediately."""
_STATUS_S = 1.0
"""Limit in seconds for the base to report the wait status of a template that has exited, which it does immediately."""
_MALLOPT = {"MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_TOP_PAD_": -2}
"""Variables that glibc reads when a program starts, and the numbers of the same parameters in `mallopt`."""
logger = logging.getLogger(__name__)


class Template:
    """A template process, which exits with the controller at the latest."""

    def __init__(
        self,
        environment: Mapping[str, str],
        load: Callable[[], None],
        log: Path,
        socket_path: Path | None = None,
        base: str | None = None,
    ) -> None:
        """Start the template from a running event loop. `load` imports packages, which read the environment variables.

        The socket is in `socket_path`, in a folder that only this user can enter; None creates such a folder. `base` is the
        socket of the template to fork, which may still import; None starts a new Python process.
        """
        self.log = log
        """File with the template's output."""
        own = _take_early(environment, load) if base is None and socket_path is None else None
        if own is not None:
            self._own: _Started | _Branch = own
        else:
            sockets, variables = _Sockets(socket_path), _variables(environment)
            self._own = _Started(variables, load, sockets) if base is None else _Branch(base, variables, load, log, sockets)
        if isinstance(self._own, _Started):
            self._own.write_to(log)
        self._sockets = self._own.sockets
        self.path = self._sockets.path
        """Path of the socket to which processes connect."""
        self._sockets.state.setblocking(False)
        self._imported = asyncio.create_task(self._receive(), name="template")

    async def _receive(self) -> bool:
        """Wait until the imports are complete; return False if the process ends before."""
        try:
            return bool(await asyncio.get_running_loop().sock_recv(self._sockets.state, 1))
        except ConnectionResetError:  # it has not read the descriptor of its log
            return False

    @property
    def pid(self) -> int:
        """Process id; 0 if it is not known yet, or if the base could not be forked."""
        return self._own.pid

    async def started(self) -> int:
        """Wait until the process exists, and return its id; 0 if the base could not be forked."""
        if isinstance(self._own, _Branch):
            await asyncio.wait({self._own.forking})
        return self.pid

    @property
    def has_forked(self) -> bool:
        """True if the imports were complete, so that the template may have forks."""
        return self._imported.done() and not self._imported.cancelled() and self._imported.result()

    @property
    def was_killed(self) -> bool:
        """True if a signal ended the template."""
        return (self._own.poll() or 0) < 0

    @property
    def has_ended(self) -> bool:
        """True if the template has exited, because it failed or was killed."""
        return self._own.poll() is not None

    async def is_ready(self) -> bool:
        """Wait for the imports; return False if they failed, or the template is dead or stopped by a signal."""
        await self.started()
        await asyncio.wait({self._imported})  # `close` may cancel it during the wait
        return self.has_forked and process_state(self.pid) not in ("", "Z", "T")

    def close(self) -> None:
        """Kill the template, and with it every running fork."""
        self._imported.cancel()
        self._own.kill()
        self._sockets.close()


class _Sockets:
    """The sockets of a template: one to which processes connect, and one on which it says that its imports are complete."""

    def __init__(self, path: Path | None) -> None:
        self._folder = private_folder() if path is None else None
        self.path = str(path if self._folder is None else self._folder.path / "template")
        self.state, self._state = socket.socketpair()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(128)
        self.numbers = self._listener.fileno(), self._state.fileno()
        """Descriptors for the template."""

    def hand_over(self) -> None:
        """Close the descriptors that the template has received."""
        self._listener.close()
        self._state.close()

    def close(self) -> None:
        self.state.close()
        if self._folder is not None:
            self._folder.delete()


class _Started:
    """The process of a template that is a Python process of its own. Its output is kept in memory until `write_to`."""

    def __init__(self, environment: Mapping[str, str], load: Callable[[], None], sockets: _Sockets) -> None:
        self.sockets, self._log = sockets, Path(os.devnull)
        self._output = os.fdopen(os.memfd_create("output"), "rb+")
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *map(str, sockets.numbers), str(os.getpid())],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._output,
            pass_fds=sockets.numbers,
        )
        sockets.hand_over()
        self.pid = self._process.pid
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as order:
            pickle.dump(load, order)

    def write_to(self, log: Path) -> None:
        """Let the template write its output to a file, which it does after the imports."""
        self._log = log
        with log.open("ab") as file, contextlib.suppress(BrokenPipeError):
            socket.send_fds(self.sockets.state, [b"+"], [file.fileno()])

    def poll(self) -> int | None:
        """Return the exit code, or minus the number of the signal that ended the process; None while it runs."""
        code = self._process.poll()
        if code is not None:
            self._keep_output()
        return code

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._keep_output()

    def _keep_output(self) -> None:
        """Write what an ended process could not, because an import crashed or there was no folder."""
        if not self._output.closed:
            with self._output:
                self._output.seek(0)
                content = self._output.read()
            if content:
                with self._log.open("ab") as log:
                    log.write(content)


class _Branch:
    """The process of a template that is a fork of another template. That template kills it when the connection closes."""

    def __init__(
        self, base: str, environment: Mapping[str, str], load: Callable[[], None], log: Path, sockets: _Sockets
    ) -> None:
        self.sockets, self.pid = sockets, 0
        self._pidfd: int | None = None
        self._code: int | None = None
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.settimeout(FORK_S)
        pickled = base64.b64encode(pickle.dumps(load)).decode()
        order = Order(environment=dict(environment), folder=os.getcwd(), controller=os.getpid(), load=pickled)
        try:
            self._connection.connect(base)
            with open(os.devnull, "rb") as nothing, log.open("ab") as output:
                send_order(self._connection, order, (nothing.fileno(), output.fileno(), output.fileno(), *sockets.numbers))
            confirm(self._connection)  # it is wanted, however late it starts
        except OSError as error:
            logger.warning("no template was forked: %s", error)
        sockets.hand_over()
        self._connection.setblocking(False)
        self.forking = asyncio.create_task(self._fork(), name="fork of a template")

    async def _fork(self) -> None:
        """Wait for the process id, which is sent when the base has finished its imports."""
        with contextlib.suppress(OSError):
            data = await asyncio.get_running_loop().sock_recv(self._connection, NUMBER.size)
            if len(data) == NUMBER.size:
                (pid,) = NUMBER.unpack(data)
                with contextlib.suppress(ProcessLookupError):  # it has already ended
                    self._pidfd = os.pidfd_open(pid)
                self.pid = pid
        if self._pidfd is None:
            self._code = 1

    def poll(self) -> int | None:
        """Return the exit code, or minus the number of the signal that ended the process; None while it runs."""
        if self._code is None and self._pidfd is not None and has_exited(self._pidfd):
            self._code = -signal.SIGKILL  # if it was killed with its base
            self._connection.settimeout(_STATUS_S)
            with contextlib.suppress(OSError):
                if (status := receive_number(self._connection)) is not None:
                    self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def kill(self) -> None:
        self.forking.cancel()
        self._connection.close()
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            os.close(self._pidfd)
            self._pidfd = None
        self._code = self._code or -signal.SIGKILL


_early: list[tuple[str, _Started]] = []
"""The template that was started early, until it is used, with the digest of its imports."""


def start_early(environment: Mapping[str, str], load: Callable[[], None]) -> int | None:
    """Start a template for the next `Template` with the same arguments, before there is a folder for its output.

    One that is not used ends with `close_early`, with the next call, or with this process. Return its process id; None if there
    is a shared template.
    """
    close_early()
    if shared_template(environment, load) is not None:
        return None
    started = _Started(_variables(environment), load, _Sockets(None))
    _early.append((digest_of_imports(environment, load), started))
    return started.pid


def _take_early(environment: Mapping[str, str], load: Callable[[], None]) -> _Started | None:
    """Return the template that was started early; None if it has ended, imports something else, or does not exist."""
    if _early and _early[0][1].poll() is None and _early[0][0] == digest_of_imports(environment, load):
        return _early.pop()[1]
    close_early()
    return None


def close_early() -> None:
    """End the template that was started early, if it is not used yet."""
    while _early:
        _, started = _early.pop()
        started.kill()
        started.sockets.close()


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a template. Some imports run computations, for which one thread is enough."""
    return {**os.environ, **environment, "OMP_NUM_THREADS": "1"}


def shared_template(environment: Mapping[str, str], load: Callable[[], None]) -> str | None:
    """Return the socket path of the shared template with the same arguments as a `Template`; None if there is none."""
    folder = os.environ.get(SHARED)
    if not folder or not is_private(Path(folder)):
        return None
    path = Path(folder) / digest_of_imports(environment, load)
    return str(path) if path.is_socket() else None


def digest_of_imports(environment: Mapping[str, str], load: Callable[[], None]) -> str:
    """Return a digest of what a template's imports depend on; processes with equal digests can be forked from one template.

    It covers TitanRL's files, the installed packages, the environment, the working directory and the CPU affinity.
    """
    variables = {name: value for name, value in _variables(environment).items() if name not in _NOT_READ or name in environment}
    variables.pop(THREADS, None)  # read when the process starts to work
    sources = [(str(file), file.stat().st_mtime_ns) for file in sorted(PACKAGE.rglob("*.py"))]
    packages = Path(sysconfig.get_path("purelib")).stat().st_mtime_ns
    place = (sys.executable, os.getcwd(), sorted(os.sched_getaffinity(0)))
    parts = (place, packages, sources, sorted(variables.items()), pickle.dumps(load))
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


# The program of a template


def main(listener_fd: int, state_fd: int, parent: int) -> None:
    """Serve as a template until the parent exits. A fork continues here as another template, or as a process of a run."""
    end_with_parent(parent)
    # A terminal or a job scheduler sends these to the whole process group; the controller decides.
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    load, sockets, is_fork = sys.stdin.buffer.read(), (listener_fd, state_fd), False
    while load:
        forked = _serve(load, *sockets, is_fork=is_fork)
        if forked is None:
            return
        order, sockets = forked
        is_fork = True
        os.environ.clear()
        os.environ.update(order.environment)
        tempfile.tempdir = None  # an import may have read the template's TMPDIR
        allow_tracing(order.controller)
        load = base64.b64decode(order.load)
        _adopt(order.environment)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # forwarded by the stand-in; a fork keeps ignoring the others
    if "numpy" in sys.modules:  # unlike `random`, numpy does not reseed its generator after a fork
        sys.modules["numpy"].random.seed()
    bootstrap.run(os.environ.pop(bootstrap.NAME), os.environ.pop(bootstrap.ANNOUNCEMENTS))


def _serve(load: bytes, listener_fd: int, state_fd: int, *, is_fork: bool) -> "tuple[Order, tuple[int, int]] | None":
    """Import packages with a pickled function, then fork on request until the parent exits.

    Only forks return, each with its order and the sockets of a template. None is returned if there can be no forks.
    """
    with socket.socket(fileno=state_fd) as state:
        gc.disable()  # imports create a million objects and hardly any garbage; collections would take a quarter of their time
        try:
            with loading():
                pickle.loads(load)()
        finally:  # the traceback of a failed import is printed later
            if not is_fork:
                _move_output(state)
        gc.freeze()  # otherwise collections in a fork would touch, and thus copy, every page
        gc.enable()
        threads = os.listdir("/proc/self/task")
        if len(threads) > 1:
            logger.warning("template disabled: the imports started %d threads, which a fork would lack", len(threads) - 1)
            return None
        state.send(b"+")
    return _Forker(socket.socket(fileno=listener_fd)).run()


def _move_output(state: socket.socket) -> None:
    """Wait for the file that the parent sends when the run has a folder. Write the output so far to it, and then all output."""
    sys.stdout.flush()
    sys.stderr.flush()
    _, (log,), *_ = socket.recv_fds(state, 1, 1)
    with open(log, "wb") as file:
        with open(1, "rb", closefd=False) as memory:
            memory.seek(0)
            file.write(memory.read())
        file.flush()
        os.ftruncate(1, 0)  # so that the parent does not write it again
        os.dup2(log, 1)
        os.dup2(log, 2)


def _adopt(environment: Mapping[str, str]) -> None:
    """Apply the variables that were read before the fork: by glibc when the program started, by torch when it was imported."""
    for name, parameter in _MALLOPT.items():
        if name in environment:
            ctypes.CDLL(None).mallopt(parameter, int(environment[name]))
    if environment.get("TORCHDYNAMO_DISABLE") == "1" and "torch" in sys.modules:
        sys.modules["torch"].compiler.set_stance("force_eager")


@dataclass(frozen=True, slots=True)
class _Fork:
    pid: int
    pidfd: int
    connection: socket.socket
    """Connection to its stand-in."""


class _Forker:
    """Forks on request, kills a fork when its stand-in exits, and sends a fork's exit status to its stand-in."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._epoll = select.epoll()
        self._epoll.register(listener, select.EPOLLIN)
        self._forks: dict[int, _Fork] = {}  # by pidfd, and by the descriptor of the connection until the stand-in exits

    def run(self) -> tuple[Order, tuple[int, int]]:
        """Fork on request until the parent exits. Only forks return, each with its order and the sockets of a template."""
        while True:
            descriptor, _ = self._epoll.poll(maxevents=1)[0]  # one at a time: the next event may belong to the same fork
            fork = self._forks.get(descriptor)
            if fork is None:
                forked = self._accept()
                if forked is not None:
                    return forked
            elif descriptor == fork.pidfd:
                self._reap(fork)
            else:  # the stand-in has exited, or runs itself
                self._forget(descriptor)
                signal.pidfd_send_signal(fork.pidfd, signal.SIGKILL)

    def _accept(self) -> tuple[Order, tuple[int, int]] | None:
        """Fork for the next process. Return its order and sockets in the fork, and None in the template."""
        connection, _ = self._listener.accept()
        if not is_own_peer(connection):
            logger.warning("a process of another user connected, which was refused")
            connection.close()
            return None
        connection.settimeout(_ORDER_S)
        try:
            order, descriptors = receive_order(connection)
        except (OSError, ValueError) as error:
            logger.warning("received no order from a process: %s", error)
            connection.close()
            return None
        template = os.getpid()
        pid = os.fork()
        if pid == 0:
            end_with_parent(template)
            if not is_confirmed(connection):
                os._exit(0)
            self._listener.close()  # the template's descriptors
            for other in {other.pid: other for other in self._forks.values()}.values():
                os.close(other.pidfd)
                other.connection.close()
            self._epoll.close()
            connection.close()
            for number, stream in enumerate(descriptors[:3]):  # the standard streams are the stand-in's
                os.dup2(stream, number)
                os.close(stream)
            os.chdir(order.folder)
            listener, state = descriptors[3:] or (-1, -1)
            return order, (listener, state)
        fork = _Fork(pid, os.pidfd_open(pid), connection)
        for descriptor in descriptors:
            os.close(descriptor)
        self._forks |= {fork.pidfd: fork, connection.fileno(): fork}
        self._epoll.register(fork.pidfd, select.EPOLLIN)
        self._epoll.register(connection, select.EPOLLRDHUP)  # the fork reads the confirmation
        send_number(connection, pid)
        return None

    def _reap(self, fork: _Fork) -> None:
        """Collect a fork that has exited, and send its wait status to its stand-in."""
        self._forget(fork.pidfd)
        os.close(fork.pidfd)
        _, status = os.waitpid(fork.pid, 0)
        if fork.connection.fileno() in self._forks:
            self._forget(fork.connection.fileno())
        send_number(fork.connection, status)
        fork.connection.close()

    def _forget(self, descriptor: int) -> None:
        self._epoll.unregister(descriptor)
        del self._forks[descriptor]
