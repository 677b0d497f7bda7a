"""Scoring of answers in confined processes that can be killed. `docs/sandbox.md` says what that protects from.

A zygote (`titanrl.sandbox.zygote`) with the verifier loaded keeps processes forked ahead. By default each serves one group and
is thrown away, so an answer that tampers with Python reaches its own group at most. Nothing a process sends back is unpickled.
"""

import asyncio
import json
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from titanrl.config.sections import DataConfig, SandboxConfig
from titanrl.sandbox.confine import SandboxUnavailable, missing_features
from titanrl.sandbox.zygote import COUNT, END, READY, STARTED, Answer, Order

__all__ = ["Answer", "SandboxDied", "SandboxUnavailable", "Score", "ScorerSpec", "ScoringPool", "scorer_spec"]

MAX_TEXT_CHARS = 1 << 20
"""Longer completions are cut at the front, since the answer stands at the end. A completion of 100 000 tokens is shorter."""

_LOAD_DEADLINE_S = 300.0
_FORK_DEADLINE_S = 60.0
_STOP_DEADLINE_S = 5.0
_MAX_REPLY_BYTES = 4 << 20
_MAX_SHARES = 4
"""A group's time is shared among its answers when each is tried alone, but not into more parts than this."""
_MAX_STILLBORN = 10
_STDERR_TAIL_BYTES = 2000
_INHERITED = {"PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH"}
"""What the zygote inherits besides `_PYCACHE`; tokens and keys stay behind."""
_PYCACHE = {"PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"}

Status = Literal["ok", "error", "timeout", "crash"]


class SandboxDied(RuntimeError):
    """The processes that score are gone. Close the pool; it may be started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerSpec:
    """Which scorer is loaded, and what it may say.

    Example: `ScorerSpec(factory="titanrl.rollout.scorers:imported", kwargs={"path": "my_package.rewards:length"})`
    """

    factory: str
    """`module:function`, called once: it makes the function from (text, entry) to the reward by part."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the factory."""
    parts: tuple[str, ...] = ("answer",)
    """Parts of the reward. A score with other parts is an error."""
    bounds: tuple[float, float] = (-math.inf, math.inf)
    """Least and greatest value of a part. An answer that forges its score stays within them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What one answer is worth.

    Example: `Score(parts={"answer": 1.0}, status="ok")`
    """

    parts: Mapping[str, float]
    """Reward by part, all zero unless the status is `ok`."""
    status: Status
    """`error`: the scorer raised, or gave no valid score; `timeout`: it took too long; `crash`: its process died."""
    detail: str = ""
    """What the scorer raised, in printable ASCII, for the log; the answer may have written it."""


def scorer_spec(data: DataConfig) -> ScorerSpec:
    """The scorer that a configuration asks for."""
    module = "titanrl.rollout.scorers"
    if data.scorer is not None:
        return ScorerSpec(factory=f"{module}:imported", kwargs={"path": data.scorer})
    if data.source == "jsonl":
        return ScorerSpec(factory=f"{module}:exact", bounds=(0.0, 1.0))
    kwargs = {"task": data.task, "config": data.task_config}
    return ScorerSpec(factory=f"{module}:reasoning_gym", kwargs=kwargs, bounds=(0.0, 1.0))


class ScoringPool:
    """Scores groups of answers, several at once.

    It belongs to the event loop that starts it, in any thread; its processes end at the latest with that thread.
    """

    def __init__(self, spec: ScorerSpec, config: SandboxConfig) -> None:
        """Nothing is started yet."""
        self._spec = spec
        self._config = config
        self._zygote: _Zygote | None = None

    async def start(self) -> None:
        """Load the scorer and show, on one process, that confinement holds.

        Raises SandboxUnavailable if this machine cannot confine, ValueError if the scorer does not load.
        """
        assert self._zygote is None, "the pool is started"
        if missing := missing_features():
            raise SandboxUnavailable(
                "answers are scored in confined processes only, since scorers may eval() what a model wrote, and this machine "
                f"lacks {'; and '.join(missing)}. Use a machine that has it: there is no unconfined mode."
            )
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.close)
            self._zygote = _Zygote(self._spec, self._config)
            await self._zygote.load()
            if isinstance(failure := await self._attempt([], _FORK_DEADLINE_S), str):
                raise SandboxDied(f"the first scoring process could not reply: {failure}")
            stack.pop_all()

    async def score(self, answers: Sequence[Answer]) -> list[Score]:
        """Score the answers to one prompt, in order; waits for its turn if `num_processes` groups are under way.

        If the group takes too long or kills its process, each answer is tried alone, so that one of them costs only itself.
        Raises SandboxDied if the scoring processes are gone.
        """
        if not answers:
            return []
        scores = await self._attempt(answers, self._config.timeout_s)
        if not isinstance(scores, str):
            return scores
        if scores == "timeout" and len(answers) == 1:
            return [self._zero(scores)]
        share_s = self._config.timeout_s / min(len(answers), _MAX_SHARES)
        return list(await asyncio.gather(*(self._score_alone(answer, share_s) for answer in answers)))

    async def close(self) -> None:
        """Kill every process and wait for its end; a group under way gets SandboxDied. The pool may be started again."""
        if self._zygote is not None:
            zygote, self._zygote = self._zygote, None
            await zygote.stop()

    async def _score_alone(self, answer: Answer, timeout_s: float) -> Score:
        scores = await self._attempt([answer], timeout_s)
        return self._zero(scores) if isinstance(scores, str) else scores[0]

    async def _attempt(self, answers: Sequence[Answer], timeout_s: float) -> list[Score] | Literal["timeout", "crash"]:
        """Score the answers in one process, which is killed afterwards unless it may serve another group."""
        request = pickle.dumps([(text[-MAX_TEXT_CHARS:], entry) for text, entry in answers])
        zygote = self._zygote
        if zygote is None:
            raise SandboxDied("the scoring pool is closed, or was never started")
        async with zygote.slots:
            reply: bytes | None = b""
            while reply == b"":  # something else killed the process before it saw the answers
                process = await zygote.take()
                try:
                    reply = await process.ask(request, timeout_s)
                finally:
                    zygote.give_back(process)
            if reply is None:
                return "timeout"
            scores = self._parse(reply.removeprefix(STARTED).removesuffix(END), len(answers))
            if scores is None:
                await zygote.check()
                return "crash"
            return scores

    def _parse(self, reply: bytes, num_answers: int) -> list[Score] | None:
        """Scores from what a process sent, which may be anything; None if it is no list of results."""
        try:
            results = json.loads(reply)
        except (ValueError, RecursionError):
            return None
        if not isinstance(results, list) or len(results) != num_answers:
            return None
        return [self._parse_result(result) for result in results]

    def _parse_result(self, result: object) -> Score:
        match result:
            case {"parts": dict(parts)} if parts.keys() == set(self._spec.parts) and all(map(self._is_valid, parts.values())):
                return Score(parts=parts, status="ok")
            case {"error": str(detail)}:
                return self._zero("error", ascii(detail)[1:-1])
        return self._zero("error", f"no valid score: {result!a:.200}")

    def _is_valid(self, value: object) -> bool:
        low, high = self._spec.bounds
        return isinstance(value, float) and math.isfinite(value) and low <= value <= high

    def _zero(self, status: Status, detail: str = "") -> Score:
        return Score(parts=dict.fromkeys(self._spec.parts, 0.0), status=status, detail=detail)


class _Process:
    """The client's end of one scoring process."""

    def __init__(self, channel: socket.socket, pidfd: int, on_ready: "Callable[[_Process, bytes], None]") -> None:
        """Listen on the channel. `on_ready` is called once, with the first message, empty if the process died before."""
        self._loop = asyncio.get_running_loop()
        self._channel = channel
        self._pidfd = pidfd
        self._on_ready: Callable[[_Process, bytes], None] | None = on_ready
        self._received = bytearray()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._replied: asyncio.Future[None] = self._loop.create_future()
        self.num_served = 0
        channel.setblocking(False)
        self._loop.add_reader(channel, self._on_readable)

    @property
    def ended(self) -> bool:
        """Whether it has closed its end: it has served its last group, or died."""
        return self._ended.done()

    @property
    def is_idle(self) -> bool:
        """Whether it has replied to what it was asked, and lives on."""
        return self._replied.done() and not self.ended

    async def ask(self, request: bytes, timeout_s: float) -> bytes | None:
        """Send the answers, give the reply, without its end or empty if the process died; None if it took too long.

        The future outlives the wait: a reply that came in while this event loop was busy elsewhere counts as in time.
        """
        self._received.clear()
        self._replied = self._loop.create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await self._loop.sock_sendall(self._channel, request)
        except TimeoutError:
            return None
        except ConnectionError:  # it died; what it said before is still to be read
            pass
        await asyncio.wait([self._ended, self._replied], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self._replied.done():
            self.num_served += 1
        return bytes(self._received) if self.ended or self._replied.done() else None

    def kill(self) -> None:
        """Kill the process, if it still runs, and forget it."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._end()
        os.close(self._pidfd)
        self._channel.close()

    def _on_readable(self) -> None:
        try:
            chunk = self._channel.recv(1 << 16)
        except ConnectionResetError:  # it died with a request unread
            chunk = b""
        if not chunk or len(self._received) + len(chunk) > _MAX_REPLY_BYTES:
            self._end()
        if self._on_ready is not None:
            on_ready, self._on_ready = self._on_ready, None
            on_ready(self, chunk)
        else:
            self._received += chunk
            if chunk.endswith(END) and not self._replied.done():
                self._replied.set_result(None)

    def _end(self) -> None:
        self._loop.remove_reader(self._channel)
        if not self._ended.done():
            self._ended.set_result(None)


class _Zygote:
    """The client's end of the process that forks, and the processes it has forked ahead."""

    def __init__(self, spec: ScorerSpec, config: SandboxConfig) -> None:
        """Start the zygote; it begins to load the scorer."""
        self.slots = asyncio.Semaphore(config.num_processes)
        """Held by those who have a process at work."""
        self._spec = spec
        self._num_ahead = config.num_processes
        self._groups_per_process = config.groups_per_process
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[None] = self._loop.create_future()
        self._exited: asyncio.Future[None] = self._loop.create_future()
        self._hung_up = False
        self._failure: Exception | None = None
        self._num_stillborn = 0
        self._ahead: set[_Process] = set()
        # Those of them that are confined. None: no more will come.
        self._ready: asyncio.Queue[_Process | None] = asyncio.Queue()
        self._stderr = os.memfd_create("zygote-stderr")
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-c", _call(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=[theirs.fileno()],
                env=_environment(),
                start_new_session=True,
            )
        self._pidfd = os.pidfd_open(self._popen.pid)
        self._control.send(pickle.dumps(_order(spec, config)))
        self._control.setblocking(False)
        self._loop.add_reader(self._control, self._on_control)
        self._loop.add_reader(self._pidfd, self._on_exit)

    async def load(self) -> None:
        """Wait for the scorer, then have processes forked ahead.

        Raises ValueError if it does not load.
        """
        await asyncio.wait([self._loaded, self._exited], timeout=_LOAD_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
        if self._loaded.done():
            return self._fork(self._num_ahead)
        what = f"the scorer {self._spec.factory} with {dict(self._spec.kwargs)}"
        if self._failure is None:
            raise SandboxDied(f"{what} has not loaded within {_LOAD_DEADLINE_S:g} s")
        if self._popen.returncode > 0:  # by itself, with a traceback
            raise ValueError(f"{what} does not load: {self._stderr_tail()}")
        raise self._failure

    async def take(self) -> _Process:
        """A confined process that waits for answers. Give it to `replace` in any case."""
        try:
            async with asyncio.timeout(_FORK_DEADLINE_S):
                while (process := await self._ready.get()) is not None:
                    self._ahead.remove(process)
                    if not process.ended:
                        return process
                    self.replace(process)  # something killed it while it waited
        except TimeoutError:
            raise SandboxDied(f"no scoring process was ready within {_FORK_DEADLINE_S:g} s") from None
        self._ready.put_nowait(None)  # for whoever asks next
        assert self._failure is not None
        raise self._failure

    def give_back(self, process: _Process) -> None:
        """Keep a process that was taken for another group if it has replied and may serve one; else replace it."""
        if self._failure is None and process.is_idle and process.num_served < self._groups_per_process:
            self._ahead.add(process)
            self._ready.put_nowait(process)
        else:
            self.replace(process)

    def replace(self, process: _Process) -> None:
        """Kill a process that was taken, and have another forked."""
        process.kill()
        if not self._hung_up:
            self._fork(1)

    async def check(self) -> None:
        """Raise if the zygote is dead; to be called when a process has died, before its answers are blamed.

        The kernel closes a zygote's files before it kills what must end with it, so the socket has the news already.
        """
        if not self._hung_up:
            self._on_control()
        if self._hung_up:
            await asyncio.wait([self._exited], timeout=_STOP_DEADLINE_S)
        if self._failure is not None:
            raise self._failure

    async def stop(self) -> None:
        """End the zygote and everything it forked, and wait for it."""
        self._fail(SandboxDied("the scoring pool was closed"))
        if self._loaded.done() and not self._exited.done():
            self._control.shutdown(socket.SHUT_WR)  # it kills and reaps its processes, then ends
            await asyncio.wait([self._exited], timeout=_STOP_DEADLINE_S)
        self._popen.kill()
        await self._exited
        if not self._hung_up:
            self._hang_up()
        self._control.close()
        os.close(self._stderr)
        for process in self._ahead:
            process.kill()

    def _fork(self, count: int) -> None:
        with suppress(BrokenPipeError):  # whoever waits for the process learns that the zygote is dead
            self._control.send(COUNT.pack(count))

    def _on_control(self) -> None:
        """Take in what the zygote has said so far."""
        with suppress(BlockingIOError):
            while not self._hung_up:
                self._receive()

    def _receive(self) -> None:
        try:
            message, descriptors, flags, _ = socket.recv_fds(self._control, len(READY), 2, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:  # it died with a request unread
            message, descriptors, flags = b"", [], 0
        if not message:
            self._hang_up()
        elif flags & socket.MSG_CTRUNC:
            self._fail(SandboxDied("this process cannot open more files: raise its limit (ulimit -n)"))
            self._hang_up()
        elif descriptors:
            self._ahead.add(_Process(socket.socket(fileno=descriptors[0]), descriptors[1], self._on_ready))
        else:
            self._loaded.set_result(None)

    def _on_ready(self, process: _Process, message: bytes) -> None:
        if self._failure is not None:  # `stop` will deal with it
            return
        if message == READY:
            self._num_stillborn = 0
            return self._ready.put_nowait(process)
        self._ahead.remove(process)
        self.replace(process)
        self._num_stillborn += 1
        if message:
            self._fail(SandboxUnavailable(message.decode()))
        elif self._num_stillborn > _MAX_STILLBORN:
            self._fail(SandboxDied(f"{self._num_stillborn} scoring processes in a row died before they were confined"))

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._fail(SandboxDied(f"the zygote ended with status {self._popen.wait()}. {self._stderr_tail()}"))
        self._exited.set_result(None)

    def _hang_up(self) -> None:
        self._loop.remove_reader(self._control)
        self._hung_up = True

    def _fail(self, error: Exception) -> None:
        if self._failure is not None:
            return
        self._failure = error
        while not self._ready.empty():
            self._ready.get_nowait()
        self._ready.put_nowait(None)

    def _stderr_tail(self) -> str:
        """The last line the zygote wrote, and some before it."""
        size = os.fstat(self._stderr).st_size
        tail = os.pread(self._stderr, _STDERR_TAIL_BYTES, max(0, size - _STDERR_TAIL_BYTES)).decode(errors="replace").strip()
        return f"{tail.splitlines()[-1]}\n{tail}" if tail else ""


def _call(control_fd: int) -> str:
    return f"from titanrl.sandbox.zygote import main; main({control_fd}, {os.getpid()})"


def _order(spec: ScorerSpec, config: SandboxConfig) -> Order:
    cpu_s = (
        math.ceil(config.timeout_s) + 1
    ) * config.groups_per_process  # a second line of defence: the wall clock comes first
    return Order(
        factory=spec.factory,
        kwargs=spec.kwargs,
        memory_bytes=config.memory_bytes,
        cpu_s=cpu_s,
        groups_per_process=config.groups_per_process,
    )


def _environment() -> dict[str, str]:
    """What imports here imports there. Fixed hashes, since reasoning-gym's word_ladder depends on them; no threads."""
    inherited = {name: value for name, value in os.environ.items() if name in _INHERITED | _PYCACHE}
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    return {**inherited, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
