"""The process that scoring processes are forked from: small, without secrets, with the verifier loaded.

`titanrl.sandbox.pool` starts it as a new Python that calls `main`, with a socket between them. It reads an `Order`, makes
the scorer, says READY, and then forks as many processes as each message asks for, sending for each a message with two
descriptors: the socket to talk to it, and a pidfd to kill it. At the end of the socket it kills and reaps what it forked.

A scoring process confines itself and says READY. For each group it reads one pickled list of answers, says STARTED, and writes
one line, a JSON list of results. After `groups_per_process` groups it ends.
"""

import gc
import importlib
import io
import json
import os
import pickle
import resource
import selectors
import signal
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanrl.sandbox.confine import Confinement, end_with_parent, leaks, python_paths

Answer = tuple[str, Mapping[str, Any]]
"""Text of a completion, and the entry of its prompt: `question`, `answer`, `metadata`."""
Scorer = Callable[[str, Mapping[str, Any]], Mapping[str, float]]
"""Takes an answer, gives its reward by part."""

READY = b"+"
"""First byte of a scoring process that is confined, and the whole message of a zygote that has loaded its scorer."""
STARTED = b"!"
"""First byte of the reply, sent when the answers arrive: a process that dies before was not killed by them."""
END = b"\n"
"""Last byte of the reply."""
COUNT = struct.Struct("I")
"""How many processes to fork."""

_MAX_ORDER_BYTES = 1 << 20
_MAX_DETAIL_CHARS = 200
_MIN_HEADROOM_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the zygote is to load, and the limits of the processes it forks."""

    factory: str
    """`module:function` that makes the scorer."""
    kwargs: Mapping[str, Any]
    """Its arguments."""
    memory_bytes: int
    """Address-space limit."""
    cpu_s: int
    """Limit of CPU time."""
    groups_per_process: int
    """Groups a process scores before it ends."""


def load(path: str) -> Any:
    """The object that `module:name` names.

    Raises ValueError if there is none.
    """
    module, _, name = path.partition(":")
    if not (module and name):
        raise ValueError(f"{path!r} does not name a function: write it as package.module:function")
    try:
        return vars(importlib.import_module(module))[name]
    except KeyError:
        raise ValueError(f"{path!r}: {module} has no function {name!r}") from None


def main(control_fd: int, parent_pid: int) -> None:
    """Load the scorer, then fork on request until the socket `control_fd` ends, or the process `parent_pid` does."""
    end_with_parent(parent_pid)
    control = socket.socket(fileno=control_fd)
    order: Order = pickle.loads(control.recv(_MAX_ORDER_BYTES))
    scorer: Scorer = load(order.factory)(**order.kwargs)
    _check_memory(order.memory_bytes)
    confinement = Confinement(python_paths(), order.memory_bytes, order.cpu_s)
    gc.collect()
    gc.freeze()  # keeps the collector of a forked process from touching, and so copying, every page
    control.send(READY)
    _Forker(control, scorer, confinement, order.groups_per_process).run()


class _Forker:
    """Forks scoring processes on request and reaps them."""

    def __init__(self, control: socket.socket, scorer: Scorer, confinement: Confinement, groups_per_process: int) -> None:
        self._control = control
        self._scorer = scorer
        self._confinement = confinement
        self._groups_per_process = groups_per_process
        self._selector = selectors.DefaultSelector()
        self._pids: dict[int, int] = {}  # by pidfd

    def run(self) -> None:
        self._selector.register(self._control, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fd in self._pids:
                    self._reap(key.fd)
                elif not (request := self._control.recv(COUNT.size)):
                    return self._end()
                else:
                    for _ in range(COUNT.unpack(request)[0]):
                        self._fork()

    def _fork(self) -> None:
        theirs, ours = socket.socketpair()
        zygote = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                end_with_parent(zygote)
                _serve(ours.fileno(), self._scorer, self._confinement, self._groups_per_process)
            finally:
                os._exit(1)
        pidfd = os.pidfd_open(pid)
        self._pids[pidfd] = pid
        self._selector.register(pidfd, selectors.EVENT_READ)
        socket.send_fds(self._control, [READY], [theirs.fileno(), pidfd])
        theirs.close()
        ours.close()

    def _reap(self, pidfd: int) -> None:
        os.waitpid(self._pids.pop(pidfd), 0)
        self._selector.unregister(pidfd)
        os.close(pidfd)

    def _end(self) -> None:
        for pidfd in list(self._pids):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            self._reap(pidfd)


def _serve(channel: int, scorer: Scorer, confinement: Confinement, num_groups: int) -> None:
    """Be a scoring process: everything after `apply` is open to what a model wrote."""
    try:
        os.setsid()
        os.dup2(1, 2)  # both are /dev/null now
        with suppress(PermissionError):  # only a wish: out of memory, the kernel takes a scorer rather than the trainer
            Path("/proc/self/oom_score_adj").write_text("1000")
        confinement.apply(keep=channel)
        failure = ", ".join(leaks())
    except OSError as error:
        failure = str(error)
    if failure:
        os.write(channel, f"confinement failed: {failure}".encode())
        return
    os.write(channel, READY)
    stream = io.BufferedReader(io.FileIO(channel, closefd=False), 1 << 16)
    for _ in range(num_groups):
        stream.peek(1)
        os.write(channel, STARTED)
        answers: Sequence[Answer] = pickle.load(stream)
        results = [_score(scorer, text, entry) for text, entry in answers]
        with open(channel, "wb", closefd=False) as reply:
            reply.write(json.dumps(results).encode() + END)


def _score(scorer: Scorer, text: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Score one answer. A scorer that raises gives no parts, and says why."""
    try:
        return {"parts": {name: float(value) for name, value in scorer(text, entry).items()}}
    except BaseException as error:  # also SystemExit: an answer may hold exit(), and a scorer may eval it
        return {"error": f"{type(error).__name__}: {error}"[:_MAX_DETAIL_CHARS]}


def _check_memory(memory_bytes: int) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    if memory_bytes < used + _MIN_HEADROOM_BYTES:
        raise ValueError(
            f"sandbox.memory_bytes={memory_bytes} does not hold the loaded scorer, which maps {used} bytes; "
            f"give it at least {used + _MIN_HEADROOM_BYTES}"
        )
