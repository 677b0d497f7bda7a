"""The zygote: a process without secrets that loads the rewards once and forks the scoring processes.

`titanrl.processes.sandbox` starts it as a new Python process that calls `main` and is connected by a socket. The zygote reads a
`ZygoteConfig`, loads the rewards and sends READY. Each message that it then receives requests a number of processes. For each
process, the zygote sends a message with two file descriptors: a socket to the process, and a pidfd to kill it. When its own
socket is closed, the zygote kills and reaps its processes.

A scoring process confines itself and sends READY. For each group it reads a pickled `Request`, sends STARTED, and writes one
line with the JSON result of each answer. It exits after `groups_per_process` groups.

Every process inherits what this module imports, so it imports little besides the standard library.
"""

import ast
import gc
import importlib
import io
import json
import linecache
import os
import pickle
import resource
import selectors
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanrl.base.errors import describe_user_error
from titanrl.base.plugins import import_object
from titanrl.carriers.rewards import DENIED, SEPARATOR, Answers, BoundReward, RewardSpec, encoded_score
from titanrl.processes.confine import Confinement, end_with_parent, leaks, python_paths

READY = b"+"
"""First byte that a scoring process sends after confining itself, and a zygote after loading its rewards. The zygote's message
continues with one byte per reward: `GROUP` if the reward scores all completions of a prompt in one call, plus `TOKENS` if it
takes token ids, plus `RAW` if it takes the text with special tokens."""
GROUP, TOKENS, RAW = 1, 2, 4
STARTED = b"!"
"""First byte of a reply, sent when a request arrives. If a process dies without sending it, the answers were not the cause."""
END = b"\n"
"""Last byte of the reply."""
COUNT = struct.Struct("I")
"""Number of processes to fork."""

_MAX_DETAIL_CHARS = 200
_MIN_HEADROOM_BYTES = 64 << 20
_FILE = "<code>"
_MAX_TRACEBACK_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ZygoteConfig:
    """The rewards to load, and the limits of the scoring processes."""

    rewards: tuple[RewardSpec, ...]
    memory_bytes: int
    """Limit of a process's address space."""
    cpu_s: int
    """Limit of a process's CPU time, in seconds."""
    groups_per_process: int
    """Number of groups that a process scores before it exits."""


Request = tuple[
    int, Mapping[str, Any], tuple[str, ...], tuple[int, ...], tuple[str, ...], tuple[Sequence[int], ...], tuple[str, ...]
]
"""Index of a reward in `ZygoteConfig.rewards`, then the fields of `Answers`. Pickling a tuple is faster than a dataclass."""


def main(control_fd: int, parent_pid: int, config_fd: int) -> None:
    """Load the rewards, then fork on request until the socket `control_fd` closes or the process `parent_pid` exits."""
    end_with_parent(parent_pid)
    control = socket.socket(fileno=control_fd)
    with open(config_fd, "rb") as stream:
        config: ZygoteConfig = pickle.load(stream)
    rewards = [
        _Loaded(spec, BoundReward(spec.name, import_object(spec.factory, key=f"data.rewards.{spec.name}")(**spec.kwargs)))
        for spec in config.rewards
    ]
    if any(spec.is_custom for spec in config.rewards):
        sys.addaudithook(_network.note)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    if config.memory_bytes < used + _MIN_HEADROOM_BYTES:
        raise ValueError(
            f"sandbox.memory_bytes: too small for the loaded rewards, which map {used} bytes (got {config.memory_bytes}). "
            f"Set it to at least {used + _MIN_HEADROOM_BYTES}."
        )
    confinement = Confinement(python_paths(), config.memory_bytes, config.cpu_s)
    gc.collect()
    gc.freeze()  # otherwise garbage collection in a forked process would touch, and thus copy, every memory page
    flags = bytes(
        GROUP * each.reward.is_group + TOKENS * each.reward.takes_token_ids + RAW * each.reward.takes_raw for each in rewards
    )
    control.send(READY + flags)
    _Forker(control, rewards, confinement, config.groups_per_process).run()


@dataclass(frozen=True, slots=True)
class _Loaded:
    spec: RewardSpec
    reward: BoundReward


class _Forker:
    """Forks scoring processes on request and reaps them."""

    def __init__(
        self, control: socket.socket, rewards: Sequence[_Loaded], confinement: Confinement, groups_per_process: int
    ) -> None:
        self._control = control
        self._rewards = rewards
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
                    for pidfd in list(self._pids):
                        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                        self._reap(pidfd)
                    return
                else:
                    for _ in range(COUNT.unpack(request)[0]):
                        self._fork()

    def _fork(self) -> None:
        sandbox_end, process_end = socket.socketpair()
        zygote = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                end_with_parent(zygote)
                _serve(process_end.fileno(), self._rewards, self._confinement, self._groups_per_process)
            finally:
                os._exit(1)
        pidfd = os.pidfd_open(pid)
        self._pids[pidfd] = pid
        self._selector.register(pidfd, selectors.EVENT_READ)
        socket.send_fds(self._control, [READY], [sandbox_end.fileno(), pidfd])
        sandbox_end.close()
        process_end.close()

    def _reap(self, pidfd: int) -> None:
        os.waitpid(self._pids.pop(pidfd), 0)
        self._selector.unregister(pidfd)
        os.close(pidfd)


def _serve(channel: int, rewards: Sequence[_Loaded], confinement: Confinement, num_groups: int) -> None:
    """Confine this process, then score groups. Once it scores, model-written code may control the process."""
    try:
        os.setsid()
        os.dup2(1, 2)  # stdout is already /dev/null
        with suppress(PermissionError):  # optional: if memory runs out, the kernel should kill a reward, not the trainer
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
        request: Request = pickle.load(stream)
        index, entry, completions, num_tokens, finish_reasons, token_ids, raw = request
        answers = Answers(
            entry=entry,
            completions=completions,
            num_tokens=num_tokens,
            finish_reasons=finish_reasons,
            token_ids=token_ids,
            raw_completions=raw,
        )
        loaded = rewards[index]
        if loaded.reward.is_group:
            results = _score_group(loaded, answers)
        else:
            results = [_score(loaded, answers, index) for index in range(len(answers.completions))]
        with open(channel, "wb", closefd=False) as reply:
            reply.write(SEPARATOR.join(json.dumps(result).encode() for result in results) + END)


def _score(loaded: _Loaded, answers: Answers, index: int) -> dict[str, Any]:
    """Score one answer; if the reward raises, return the type and message of the exception."""
    reward = loaded.reward
    if loaded.spec.returns_text:
        return _attempt(loaded, lambda: {"text": reward.call_one(answers, index)})
    return _attempt(loaded, lambda: encoded_score(reward.parts(_awaited(reward.call_one(answers, index)))))


def _score_group(loaded: _Loaded, answers: Answers) -> list[dict[str, Any]]:
    """Score all answers in one call. If the call raises, all answers fail; an invalid value fails only its answer."""
    reward, num = loaded.reward, len(answers.completions)
    if num == 0:
        return []
    returned = _attempt(loaded, lambda: {"values": reward.values(_awaited(reward.call_group(answers)), num)})
    if "error" in returned:
        return [returned] * num
    values = returned.pop("values")  # what was denied to the call concerns each of them
    return [_attempt(loaded, lambda value=value: encoded_score(reward.parts(value))) | returned for value in values]  # type: ignore[misc]


def _attempt(loaded: _Loaded, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of a call, or the message of its exception."""
    _network.was_tried, _network.made_socket, _network.denied = False, False, ""
    try:
        result = call()
    except BaseException as error:  # includes SystemExit: a reward may eval an answer that calls exit()
        text = describe_user_error(error)[:_MAX_DETAIL_CHARS]
        needs = _needs(loaded.reward, error) if loaded.spec.is_custom else ""
        return {"error": f"{text} ({needs})" if needs else text}
    if _network.was_tried and loaded.spec.is_custom:  # the reward caught the exception, so its value would be wrong
        return {"error": _needs(loaded.reward, None)}
    return result | {"denied": _network.denied[:_MAX_DETAIL_CHARS]} if _network.denied and loaded.spec.is_custom else result


def _awaited(value: Any) -> Any:
    """Run an async reward to completion without an event loop; it can await only other coroutines."""
    if isinstance(value, float) or not isinstance(value, Awaitable):
        return value
    steps = value.__await__()
    try:
        while True:
            next(steps)
    except StopIteration as done:
        return done.value


class _Network:
    """Detects attempts to use the network or to read a denied file, even if the reward catches the resulting exception."""

    def __init__(self) -> None:
        self.was_tried = False
        """True after an attempt to resolve a name or to connect."""
        self.made_socket = False
        """True after an attempt to create a socket. Some libraries do this on import without needing the network."""
        self.denied = ""
        """The last file that could not be read for lack of permission. Some libraries try files that they do not need."""
        self._is_probing = False

    def note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.connect", "socket.sendto"):
            self.was_tried = True
        elif event == "socket.__new__":
            self.made_socket = True
        elif event == "open" and isinstance(arguments[0], str) and not (self._is_probing or arguments[2] & os.O_ACCMODE):
            self._is_probing = True  # opening the file is another event
            try:
                os.close(os.open(arguments[0], os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
            except PermissionError:
                self.denied = arguments[0]
            except (OSError, ValueError):  # the reward gets the same error
                pass
            finally:
                self._is_probing = False


_network = _Network()


def _needs(reward: BoundReward, error: BaseException | None) -> str:
    """Explain which resource the sandbox denied to a reward, and how to allow it; return "" if it denied none."""
    if _network.was_tried or _network.made_socket:
        needed = "the network"
    elif any(isinstance(cause, PermissionError) or str(cause) == "can't start new thread" for cause in _causes(error)):
        needed = "a file, a thread or a process"
    elif reward.is_async and any(isinstance(cause, RuntimeError) for cause in _causes(error)):
        needed = "an event loop"
    else:
        return ""
    remedy = f"set data.rewards.{reward.name}.trusted to true if it does not execute model output"
    return f"the reward needs {needed}, {DENIED}; {remedy}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and the chain of exceptions that caused it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


# Code snippets, instead of rewards


def snippet_runner(modules: Sequence[str]) -> Callable[[str, Mapping[str, Any]], dict[str, str]]:
    """Import modules, and return a reward function that runs a snippet and returns its output and error."""
    for module in ("collections", "datetime", "decimal", "fractions", "functools", "itertools", "math", "random", "re",
                   "statistics", "string", *modules):  # fmt: skip
        importlib.import_module(module)

    def run(code: str, entry: Mapping[str, Any]) -> dict[str, str]:
        output = _Bounded(entry["max_output_chars"])
        sys.stdout = sys.stderr = output
        error = ""
        try:
            _execute(code)
        except SystemExit:
            pass
        except BaseException as raised:  # the code may raise anything
            frame = raised.__traceback__
            while frame is not None and frame.tb_frame.f_code.co_filename != _FILE:  # a frame of this module
                frame = frame.tb_next
            lines = "".join(traceback.format_exception(type(raised), raised, frame)).splitlines()
            error = "\n".join(lines[-_MAX_TRACEBACK_LINES:])
        return {"output": output.text(), "error": error[-entry["max_output_chars"] :]}

    return run


def _execute(code: str) -> None:
    """Execute code. If the last statement is an expression, print its value, as the interactive interpreter does."""
    linecache.cache[_FILE] = (len(code), None, code.splitlines(keepends=True), _FILE)
    tree = ast.parse(code, _FILE)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(tree, _FILE, "exec"), scope)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), _FILE, "eval"), scope)
        if value is not None:
            print(repr(value))


class _Bounded(io.TextIOBase):
    """A text stream that keeps at most `max_chars` characters and counts the rest."""

    def __init__(self, max_chars: int) -> None:
        self._parts: list[str] = []
        self._room = max_chars
        self._num_lost = 0

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        kept = text[: self._room]
        self._parts.append(kept)
        self._room -= len(kept)
        self._num_lost += len(text) - len(kept)
        return len(text)

    def text(self) -> str:
        return "".join(self._parts) + (f"... ({self._num_lost} more characters)" if self._num_lost else "")
