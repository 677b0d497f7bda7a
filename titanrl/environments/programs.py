"""Programs that play an episode by calling the policy: the task that they get, how a command is run, and what comes back."""

import asyncio
import inspect
import json
import os
import re
import shutil
import signal
import sys
import sysconfig
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from titanrl.base.ownership import open_regular
from titanrl.base.plugins import import_object, is_async
from titanrl.environments.interface import Done, EnvironmentFailure, checked, parse_object, readable_text, shown
from titanrl.processes import supervisor
from titanrl.processes.children import Child, Output
from titanrl.processes.temporary import TemporaryFolder

Returns = Literal["nothing", "answer", "rewards"]
"""Use of the result of a program."""
KEY = "data.environment.program"
"""Configuration key, for error messages."""
REWARD = "program"
"""Name of the reward of a program that returns a single number."""
MAX_OUTPUT_BYTES = 16 << 20
"""Output of a command on one of its streams at which it is killed."""
_KEPT_BYTES, _LOGGED_BYTES, _MAX_RESULT_BYTES = 64 << 10, 16 << 10, 1 << 20
_END_S = 5.0
_SYSTEM = (
    *("/bin", "/usr", "/lib", "/lib64", "/sbin", "/opt", "/dev/null", "/dev/urandom", "/dev/zero", "/proc/self", "/etc/ssl"),
    *(f"/etc/{name}" for name in ("ld.so.cache", "localtime", "passwd", "group", "hosts", "nsswitch.conf", "mime.types")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramTask:
    """The task of an episode, as a program gets it.

    An async function gets it as its argument. A command gets it as a JSON object on its standard input, and as environment
    variables (docs/howto/agents.md).
    """

    url: str
    """Base URL of the endpoint, such as `http://127.0.0.1:43211/v1`, for OpenAI's clients."""
    key: str
    """API key of this episode."""
    model: str
    """Name of the model in calls."""
    task_id: str
    """Identifier of the task, equal for all episodes of the same prompt."""
    question: str
    """Question from the prompt source."""
    entry: Mapping[str, Any]
    """Data from the prompt source: `question`, `metadata`, and `answer` only with `shows_answer`."""
    seed: int
    """Seed for all randomness in the episode, shared by all episodes of a group."""
    timeout_s: float
    """Time that the program may take, in seconds, without the time in which it waits for the policy."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """`data.environment.options`."""

    def document(self) -> dict[str, Any]:
        """Return the task as a JSON object."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """Result of a program."""

    done: Done
    """Rewards and metrics; empty unless the program returns rewards."""
    answer: str | None = None
    """Answer that the configured rewards score; None for the policy's last message."""


def result_of(returns: Returns, value: object) -> ProgramResult:
    """Check what a program returned: any value with `nothing`, text with `answer`, and with `rewards` a number, or a mapping.

    The keys of the mapping are `reward`, a number, or `rewards`, numbers by name; and `metrics`, numbers by name. Raise
    `EnvironmentFailure` if the value has another form, and `InvalidReward` if a reward is not a finite number.
    """
    if returns == "nothing":
        return ProgramResult(done=Done())
    if returns == "answer":
        if not isinstance(value, str):
            raise EnvironmentFailure(f"{KEY}: its answer must be text (got {shown(value)}). Return a string.")
        return ProgramResult(done=Done(), answer=readable_text(value))
    fields: Mapping[str, Any] = value if isinstance(value, Mapping) else {"reward": value}
    keys = set(fields)
    if not keys <= {"reward", "rewards", "metrics"} or len(keys & {"reward", "rewards"}) != 1:
        rule = "its result must have the key reward or rewards, and may have metrics"
        raise EnvironmentFailure(f"{KEY}: {rule} (got {shown(value)}). Correct it.")
    rewards = {REWARD: fields["reward"]} if "reward" in keys else fields["rewards"]
    done = checked(Done(rewards=rewards, metrics=fields.get("metrics", {})))
    assert isinstance(done, Done)
    return ProgramResult(done=done)


def checked_function(path: str, options: Mapping[str, object]) -> Callable[..., Awaitable[object]]:
    """Import an async function that accepts a task, and options as keyword arguments. Raise `ValueError` if there is none."""
    function: Callable[..., Awaitable[object]] = import_object(path, key=KEY)
    if not is_async(function):
        raise ValueError(f"{KEY}: must be an async function (got {path}). Write it as `async def play(task): ...`.")
    signature = inspect.signature(function)
    try:
        signature.bind(None, **options)
    except TypeError as error:
        expected = f"async def play({', '.join(['task', *options])}): ..."
        rule = f"must accept the task and data.environment.options: {error} (got {path}{signature})"
        raise ValueError(f"{KEY}: {rule}. Write it as `{expected}`, or correct the options.") from error
    return function


def direct_access() -> dict[str, str]:
    """Return the environment variables with which HTTP clients use no proxy for the loopback interface."""
    direct = ",".join(filter(None, (os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), "127.0.0.1")))
    return {"NO_PROXY": direct, "no_proxy": direct}  # clients prefer one or the other


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command that plays episodes, one process each."""

    arguments: tuple[str, ...]
    returns: Returns
    folders: TemporaryFolder
    """Folder for the folders of the episodes."""
    confined_memory_bytes: int | None = None
    """Address space of a confined process; None runs the command unconfined."""
    log: Path | None = None
    """File for what commands print to their standard error stream, at most 16 KiB per episode; None drops it."""

    async def run(self, task: ProgramTask) -> ProgramResult:
        """Run the command on a task, and kill all its processes when it exits or when this call is cancelled.

        Raise `EnvironmentFailure` if it fails, prints too much, or its result is invalid.
        """
        folder = self.folders.path / os.urandom(8).hex()
        folder.mkdir(mode=0o700)
        try:
            (folder / "task.json").write_text(json.dumps(task.document(), default=str), encoding="utf-8")
            return await self._run(task, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def _run(self, task: ProgramTask, folder: Path) -> ProgramResult:
        ended = asyncio.Event()
        output, errors = (Output(_KEPT_BYTES, MAX_OUTPUT_BYTES, ended.set) for _ in range(2))
        settings = {
            "command": self.arguments,
            "parent": os.getpid(),
            "package": str(Path(__file__).resolve().parents[2]),
            "confinement": self._confinement(task, folder),
        }
        try:
            with (folder / "task.json").open("rb") as stdin:
                child = Child(
                    [sys.executable, "-I", "-S", supervisor.__file__, json.dumps(settings)],
                    environment=self._variables(task, folder),
                    descriptors=(),
                    stdin=stdin.fileno(),
                    stdout=output.theirs,
                    stderr=errors.theirs,
                    on_exit=lambda child: ended.set(),
                )
        finally:
            os.close(output.theirs)
            os.close(errors.theirs)
        try:
            await ended.wait()
        finally:
            await asyncio.shield(_end(child))
            for stream in (output, errors):
                stream.close()
            if self.log is not None and errors.kept:
                with self.log.open("ab") as file:
                    file.write(errors.kept[-_LOGGED_BYTES:])
        if max(output.num_bytes, errors.num_bytes) > MAX_OUTPUT_BYTES:
            raise EnvironmentFailure(f"{KEY}: it printed more than {MAX_OUTPUT_BYTES >> 20} MiB, so it was killed. Print less.")
        if code := child.exited.result():
            said = re.findall(r"(?m)^(?!\s*at ).*\S", errors.kept.decode(errors="replace"))[-4:]  # no frames of a stack
            raise EnvironmentFailure(f"{KEY}: it exited with code {code}: {' / '.join(said)}")
        return result_of(self.returns, self._result(folder, output.kept))

    def _result(self, folder: Path, printed: bytes) -> object:
        """Return the content of the result file, or else the last line of the standard output that is not empty.

        An answer may be empty, because the policy wrote it.
        """
        if self.returns == "nothing":
            return None
        file, place, has_written = folder / "result", "the result file", True
        try:
            with open(open_regular(file, os.O_RDONLY), "rb") as opened:
                raw = opened.read(_MAX_RESULT_BYTES + 1)
        except FileNotFoundError:
            place, has_written = "the last line of its standard output", bool(printed)
            raw = next((line for line in reversed(printed.splitlines()) if line.strip()), b"")
        except OSError as error:  # not a file, or one that cannot be read
            raise EnvironmentFailure(f"{KEY}: its result file cannot be read: {error}") from error
        text = raw.decode(errors="replace").strip()
        may_be_empty = self.returns == "answer" and has_written
        if not (text or may_be_empty) or len(raw) > _MAX_RESULT_BYTES:
            raise EnvironmentFailure(f"{KEY}: {place} must have its result (got {len(raw)} bytes). Print it last.")
        if self.returns == "answer":
            return text
        try:
            return parse_object(text) if text.startswith("{") else float(text)
        except ValueError as error:
            rule = f"{place} must be a number or a JSON object ({error})"
            raise EnvironmentFailure(f"{KEY}: {rule} (got {shown(text)}). Print the result last.") from error

    def _variables(self, task: ProgramTask, folder: Path) -> dict[str, str]:
        inherited = dict(os.environ)
        if self.confined_memory_bytes is not None:  # without secrets
            inherited = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL", "TZ") if name in os.environ}
            inherited |= {"HOME": str(folder), "TMPDIR": str(folder)}
        root = task.url.removesuffix("/v1")
        return {
            **inherited,
            "OPENAI_BASE_URL": task.url,
            "OPENAI_API_KEY": task.key,
            "ANTHROPIC_BASE_URL": root,
            "ANTHROPIC_API_KEY": task.key,
            "TITANRL_URL": task.url,
            "TITANRL_KEY": task.key,
            "TITANRL_MODEL": task.model,
            "TITANRL_TASK": str(folder / "task.json"),
            "TITANRL_RESULT": str(folder / "result"),
            "TITANRL_TIMEOUT_S": f"{task.timeout_s:g}",
            "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
            **direct_access(),
        }

    def _confinement(self, task: ProgramTask, folder: Path) -> dict[str, Any] | None:
        if self.confined_memory_bytes is None:
            return None
        own = [sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), os.getcwd()]
        found = shutil.which(self.arguments[0])
        named = [str(Path(part).resolve()) for part in (found or "", *self.arguments) if part and os.path.exists(part)]
        pythons = [Path(found), Path(found).resolve()] if found and (Path(found).parents[1] / "pyvenv.cfg").exists() else []
        return {
            "readable": [*_SYSTEM, *own, *named, *(str(python.parents[1]) for python in pythons)],
            "writable": [str(folder), "/dev/null"],
            "port": urlsplit(task.url).port,
            "memory_bytes": self.confined_memory_bytes,
        }


async def _end(child: Child) -> None:
    """End the supervisor of a command with all processes, and wait until it has exited."""
    if child.has_exited:
        await child.exited
        return
    with suppress(ProcessLookupError):
        os.kill(child.pid, signal.SIGTERM)
    await asyncio.wait([child.exited], timeout=_END_S)
    child.kill()
    await child.exited
