"""The zygote: a small process without secrets that loads the scorer once and forks the scoring processes.

`titanrl.sandbox.client` starts it as a new Python process that calls `main`, connected by a socket. The zygote reads an
`Order`, builds the scorer and sends READY. Each later message requests a number of processes. For each one the zygote sends a
message with two descriptors: the socket to the process, and a pidfd to kill it. When the socket closes, the zygote kills and
reaps its processes.

A scoring process confines itself and sends READY. For each group it reads a pickled list of answers, sends STARTED, and writes
one line with a JSON list of results. It exits after `groups_per_process` groups.
"""

import gc
import io
import json
import math
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
from typing import Any, SupportsFloat

from titanrl.loading import import_object
from titanrl.sandbox.confine import Confinement, end_with_parent, leaks, python_paths

Answer = tuple[str, Mapping[str, Any]]
"""Text of a completion, and the entry of its prompt: `question`, `answer`, `metadata`."""
Scorer = Callable[[str, Mapping[str, Any]], Mapping[str, SupportsFloat]]
"""Function from an answer to its reward by part."""

READY = b"+"
"""First byte from a confined scoring process, and the whole message of a zygote that has loaded its scorer."""
STARTED = b"!"
"""First byte of the reply, sent when the answers arrive. A process that dies before was not killed by them."""
END = b"\n"
"""Last byte of the reply."""
COUNT = struct.Struct("I")
"""Number of processes to fork."""

_MAX_ORDER_BYTES = 1 << 20
_MAX_DETAIL_CHARS = 200
_MIN_HEADROOM_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The scorer to load, and the limits of the scoring processes."""

    factory: str
    """`module:function` that returns the scorer."""
    kwargs: Mapping[str, Any]
    """Arguments of the factory."""
    memory_bytes: int
    """Address-space limit."""
    cpu_s: int
    """Limit of CPU time."""
    groups_per_process: int
    """Groups that a process scores before it exits."""


def main(control_fd: int, parent_pid: int) -> None:
    """Load the scorer, then fork on request until the socket `control_fd` closes or the process `parent_pid` exits."""
    end_with_parent(parent_pid)
    control = socket.socket(fileno=control_fd)
    order: Order = pickle.loads(control.recv(_MAX_ORDER_BYTES))
    scorer: Scorer = import_object(order.factory, key="scorer")(**order.kwargs)
    _check_memory(order.memory_bytes)
    confinement = Confinement(python_paths(), order.memory_bytes, order.cpu_s)
    gc.collect()
    gc.freeze()  # otherwise the collector of a forked process would touch, and so copy, every page
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
    """Confine this process, then score groups. After `apply`, code that a model wrote may control the process."""
    try:
        os.setsid()
        os.dup2(1, 2)  # both are /dev/null from here on
        with suppress(PermissionError):  # optional: when memory runs out, the kernel should kill a scorer, not the trainer
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
    """Score one answer; return the exception's type and message if the scorer raises."""
    try:
        return {"parts": {name: _finite(value) for name, value in scorer(text, entry).items()}}
    except BaseException as error:  # also SystemExit: an answer may contain exit(), and a scorer may eval it
        return {"error": f"{type(error).__name__}: {error}"[:_MAX_DETAIL_CHARS]}


def _finite(value: object) -> float:
    """Return a reward as a float. A string is not a reward, although `float("1.5")` works.

    Raises:
        TypeError: The value is no number, or not a finite one.
    """
    if isinstance(value, SupportsFloat) and not isinstance(value, str) and math.isfinite(number := float(value)):
        return number
    expected = "a finite number: `def scorer(completion: str, entry: dict) -> float`"
    raise TypeError(f"the scorer returned {value!a:.60}. Expected {expected}.")


def _check_memory(memory_bytes: int) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    if memory_bytes < used + _MIN_HEADROOM_BYTES:
        raise ValueError(
            f"sandbox.memory_bytes: too small for the loaded scorer, which maps {used} bytes (got {memory_bytes}). "
            f"Set it to at least {used + _MIN_HEADROOM_BYTES}."
        )
