"""The run directory: its lock, so that only one process at a time uses it; its files, which are trimmed when a run resumes.

`titanrl.metrics.reading` reads the files.
"""

import contextlib
import errno
import fcntl
import itertools
import math
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from titanrl.base.control import LOCK_FILE
from titanrl.base.files import (
    in_shell,
    naming,
    replace_lines,
    sync_file,
    sync_folder,
    why_no_file,
    why_no_folder,
    why_not_writable,
)
from titanrl.base.ownership import ALLOW, is_only_user, open_regular, own_flaw
from titanrl.carriers.record import FOLDER, encode, encode_line, parts_of, read_lines, write_all
from titanrl.carriers.types import StepMetrics
from titanrl.config.errors import ConfigError

_FILES = ("metrics.jsonl", "events.jsonl", "advantages.jsonl", "config.yaml", "data.json", "changes.json", "report.html")
_FOLDERS = ("logs", "checkpoints", FOLDER)
_NOT_A_FILE = (errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class RunLock:
    """Lock on a run directory. The kernel releases it when the process exits for any reason."""

    def __init__(self, path: Path) -> None:
        """Lock an existing directory. Raise `BlockingIOError` if another process holds the lock."""
        self.path = path
        self._file = os.fdopen(_open_lock(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:  # some network file systems cannot lock; runs with different names are still safe
                self._file.close()
                raise
        with naming(path):
            self._file.truncate(0)
            self._file.write(f"{os.getpid()} {socket.gethostname()}\n")
            self._file.flush()

    def release(self) -> None:
        """Release the lock. A second call does nothing."""
        self._file.close()

    def abandon(self) -> None:
        """Release the lock on a new directory without a run. Delete the directory, and its parent if that is then empty."""
        (self.path / LOCK_FILE).unlink(missing_ok=True)
        self.release()
        with contextlib.suppress(OSError):  # not empty
            self.path.rmdir()
            self.path.parent.rmdir()


def claim_new_run(wanted: Path) -> RunLock:
    """Create and lock `wanted`; if it contains a run or is locked, use `wanted-<n>` with the next free number.

    Raise `ConfigError` if the directory exists and another user could change it, or it cannot be locked.
    """
    path = wanted
    while True:
        if not _is_taken(path):
            if path.is_dir():
                _check_reused(path)
            path.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(BlockingIOError):
                lock = RunLock(path)
                if not holds_run(path):  # a run may have started and finished in the meantime
                    return lock
                lock.release()
        taken = [re.fullmatch(re.escape(wanted.name) + r"-(\d+)", path.name) for path in wanted.parent.iterdir()]
        path = wanted.with_name(f"{wanted.name}-{max([1, *(int(match[1]) for match in taken if match)]) + 1}")


def claim_run(run_dir: Path) -> RunLock:
    """Lock the directory of a run that is to be resumed. Raise `ConfigError` if it is still active or cannot be used."""
    _check_folder(run_dir)
    try:
        return RunLock(run_dir)
    except BlockingIOError:
        raise _still_active(run_dir) from None


def check_idle(run_dir: Path) -> None:
    """Raise `ConfigError` if a process holds the lock of a run directory, as `claim_run` does, but without writing to it."""
    _check_folder(run_dir)
    with contextlib.suppress(FileNotFoundError):
        descriptor = _open_lock(run_dir, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _still_active(run_dir) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        finally:
            os.close(descriptor)


def check_new_run(wanted: Path) -> None:
    """Raise `ConfigError` if `claim_new_run` could not lock a directory, without creating or writing anything."""
    if not _is_taken(wanted) and wanted.is_dir():
        _check_reused(wanted)
        with contextlib.suppress(FileNotFoundError):
            os.close(_open_lock(wanted, os.O_RDONLY))


def _open_lock(run_dir: Path, flags: int) -> int:
    """Open the lock file; it must be a regular file."""
    try:
        return open_regular(run_dir / LOCK_FILE, flags)
    except OSError as error:
        if error.errno not in _NOT_A_FILE:
            raise
        raise ConfigError(
            f"output_dir: {LOCK_FILE} in the directory of a run must be a regular file (got {run_dir / LOCK_FILE}). "
            "Delete it, or choose another output_dir or name."
        ) from None


def _is_taken(path: Path) -> bool:
    """Return True if a path holds a run, or is no directory."""
    return holds_run(path) or (os.path.lexists(path) and not path.is_dir())


def _check_reused(run_dir: Path) -> None:
    """Check an existing directory without a run, in which a new run is to start."""
    if not is_only_user() and (found := own_flaw(run_dir)):
        raise ConfigError(
            f"output_dir: other users must not be able to replace the files of a run ({found}). Choose another output_dir or "
            f"name, or set {ALLOW}=1 if you are the only user of this machine or container."
        )
    if why := why_not_writable(run_dir):
        raise ConfigError(f"output_dir: the directory of a run must be writable, but {why} (got {run_dir}). Correct it.")
    _check_entries(run_dir)


def _check_entries(run_dir: Path) -> None:
    """Check that nothing else has the name of a file or folder that a run writes to, and that existing ones can be written."""
    for name in (*_FILES, *_FOLDERS):
        path = run_dir / name
        why = why_no_folder(path) if name in _FOLDERS else why_no_file(path)
        if why is None and not name.endswith((".yaml", ".json", ".html")) and not os.access(path, os.W_OK):
            why = "cannot be written"  # the others are replaced
        if why is not None and os.path.lexists(path):
            kind = "directory" if name in _FOLDERS else "regular file"
            raise ConfigError(
                f"output_dir: {name} in the directory of a run must be a {kind} that can be written, but it {why} "
                f"(got {path}). Correct or remove it, or choose another output_dir or name."
            )


def _check_folder(run_dir: Path) -> None:
    if why := why_no_folder(run_dir):
        raise ConfigError(f"--resume: the run directory {why} (got {run_dir}). Give the directory of an earlier run.")
    if why := why_not_writable(run_dir):
        raise ConfigError(
            f"--resume: a run continues in its directory, which must be writable, but {why} (got {run_dir}). "
            "Correct the permissions, or copy the directory."
        )
    _check_entries(run_dir)


def _still_active(run_dir: Path) -> ConfigError:
    owner = (run_dir / LOCK_FILE).read_text(encoding="utf-8", errors="replace").split()
    who = f"process {owner[0]} on {owner[1]}" if len(owner) == 2 else "another process"
    return ConfigError(
        f"--resume: the run is still active in {who} (got {run_dir}). Wait until it has finished, or interrupt it."
    )


def holds_run(path: Path) -> bool:
    """Return True if a run was started in a directory."""
    return any((path / name).exists() for name in ("metrics.jsonl", "config.yaml"))


JOB_SCRIPT = "job.sh"
"""Script of `titanrl submit` in a run directory. Its job resumes the run, even if there is no checkpoint yet."""


class RunDirectory:
    """The folder of one run, `runs/<name>/`.

    The controller writes `config.yaml`, `metrics.jsonl`, `advantages.jsonl` and `events.jsonl` through this class. Every
    process writes to `record/` (`titanrl.carriers.record`) and to `logs/`, and the trainer to `checkpoints/`.
    """

    def __init__(
        self,
        path: Path,
        *,
        resume_step: int | None = None,
        resume_version: int = 0,
        resume_index: int = 0,
        resume_in_flight: Collection[int] = (),
        resume_published: int = 0,
        resume_rates: int = 0,
        warn: Callable[[str], None] = print,
    ) -> None:
        """Create the folders and open `metrics.jsonl`. If the run resumes, drop the lines that it will write again.

        Args:
            path: Run directory.
            resume_step: Step to resume from; lines of later steps are dropped, so that no step is recorded twice. None starts a
                new run.
            resume_version: Policy version to resume from; evaluation samples of later versions are dropped.
            resume_index: Index of the first prompt that the resumed run samples; groups from this index on are dropped.
            resume_in_flight: Earlier prompts that are also sampled again; their groups are dropped.
            resume_published: First version that the resumed run publishes; publication events from this version on are dropped.
            resume_rates: Number of learning-rate changes in the checkpoint; events of later changes are dropped.
            warn: Called with a message about unreadable lines, which are also dropped.

        Raises:
            ValueError: A new run would write to the folder of another run, or the folder to resume does not exist.
        """
        self.path = path
        self.config = path / "config.yaml"
        """File with the resolved configuration."""
        self.metrics = path / "metrics.jsonl"
        """File with the metrics, one JSON object per step and one per evaluation."""
        self.events = path / "events.jsonl"
        """File with faults, drops, publications, checkpoints and other events, one JSON object per event."""
        self.advantages = path / "advantages.jsonl"
        """File with the advantages of the groups trained on, one JSON object per group."""
        self.logs = path / "logs"
        """Folder for the output of processes and libraries, `<role>_<rank>.log`."""
        self.checkpoints = path / "checkpoints"
        """Folder for checkpoints and the exported model."""
        if resume_step is None:
            if self.metrics.exists() and self.metrics.stat().st_size > 0:
                raise ValueError(
                    f"name: {path} already contains a run (got {path.name}). "
                    f"Choose another name, remove the folder, or continue the run with --resume {in_shell(path)}."
                )
        elif not path.is_dir():
            raise ValueError(f"--resume: {path} does not exist. Pass the directory of an earlier run.")
        for folder in (self.logs, self.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        if resume_step is None:
            for file in (self.events, self.advantages):
                file.unlink(missing_ok=True)  # an earlier run that ended before its first step can have left it
            shutil.rmtree(path / FOLDER, ignore_errors=True)
        else:
            rules: dict[Path, Callable[[_Head], bool | None]] = {
                self.metrics: partial(_is_of_step, resume_step),
                self.advantages: partial(_is_of_step, resume_step),
                self.events: partial(_is_event_before, resume_step, resume_published, resume_rates),
            }
            for file, keeps in rules.items():
                if num_odd := _keep_rows(file, keeps):
                    warn(f"{file}: dropped {num_odd} unreadable lines")
            in_flight = frozenset(resume_in_flight)
            self._keep_records("rollouts", lambda head: _number(head.index) < resume_index and head.index not in in_flight)
            self._keep_records("evaluations", lambda head: _number(head.version) <= resume_version)
            self._keep_records("trained", lambda head: _number(head.step) <= resume_step)
        self._metrics_file = self.metrics.open("a", encoding="utf-8", buffering=1)
        self._advantages_file: FileIO | None = None  # not of a run without groups

    def has_event(self, kind: str, **fields: Any) -> bool:
        """Return True if an event of this kind with these fields has been recorded."""
        wanted = {"kind": kind, **fields}
        rows = read_lines(self.events) if self.events.exists() else ()
        return any(all(row.get(key) == value for key, value in wanted.items()) for row in rows)

    def drop_rollouts(self, indices: Collection[int]) -> None:
        """Drop the groups of these prompts from the record. Call this before the rollout workers write to it."""
        if indices:
            self._keep_records("rollouts", lambda head: _number(head.index) not in indices)

    def flush_to_disk(self) -> None:
        """Flush all lines written so far to disk, so that they survive a power failure, as the next checkpoint does."""
        for file in (self.metrics, self.advantages, self.events):
            sync_file(file)
        newest = {(part.kind, part.process): part for part in parts_of(self.path)}
        for part in newest.values():
            sync_file(part.columns)
            sync_file(part.path)
        if newest:
            sync_folder(self.path / FOLDER)

    def log(self, metrics: StepMetrics) -> None:
        """Append one line to `metrics.jsonl`: `step`, `version`, `time` (Unix seconds), then the values."""
        head = {"step": metrics.step, "version": metrics.version, "time": time.time()}
        with naming(self.metrics):
            self._metrics_file.write(encode({**head, **metrics.values}) + "\n")
        if os.fstat(self._metrics_file.fileno()).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "deleted while the run was writing to it", str(self.metrics))

    def log_advantages(self, step: int, groups: Iterable[tuple[int, int, Sequence[float]]]) -> None:
        """Append one line per group to `advantages.jsonl`: `step`, `index`, `version` and `advantages`.

        A group has the index and version of its record, and no advantage of completions whose reward failed.
        """
        lines = [
            encode_line({"step": step, "index": index, "version": version, "advantages": advantages})
            for index, version, advantages in groups
        ]
        if self._advantages_file is None:
            self._advantages_file = self.advantages.open("ab", buffering=0)
        write_all(self._advantages_file, b"".join(lines))

    def event(self, kind: str, **fields: Any) -> None:
        """Append one line to `events.jsonl`: `time` (Unix seconds), `kind`, then the fields."""
        append_line(self.events, {"time": time.time(), "kind": kind, **fields})

    def _keep_records(self, kind: str, keeps: Callable[["_Head"], bool]) -> None:
        """Drop the records of a kind for which `keeps` returns False. The first line of a part, which is no record, stays."""
        for part in parts_of(self.path, kind):
            _keep_rows(part.path, lambda head: head.format is not None or keeps(head))

    def close(self) -> None:
        """Close `metrics.jsonl` and `advantages.jsonl`."""
        with naming(self.metrics):
            self._metrics_file.close()
        if self._advantages_file is not None:
            self._advantages_file.close()


def append_line(path: Path, obj: Mapping[str, Any]) -> None:
    """Append `obj` as one JSON line. Several processes can append to the same file. An `OSError` names the file."""
    line = (encode(obj) + "\n").encode()
    with naming(path):
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            # A single write to an O_APPEND file is atomic, so lines from several processes do not interleave.
            written = os.write(file, line)
        finally:
            os.close(file)
    if written != len(line):
        raise OSError(errno.ENOSPC, f"only {written} of {len(line)} bytes were appended", str(path))


class _Head(BaseModel):
    """The fields of a line that decide whether it is kept. The other fields are parsed but not stored, to save memory."""

    format: Any = None
    index: Any = None
    kind: Any = None
    number: Any = None
    step: Any = None
    version: Any = None


def _number(value: object) -> float:
    """Return an integer of a line; infinity for anything else, so that a comparison drops the line."""
    return value if isinstance(value, int) else math.inf


def _is_of_step(last: int, head: _Head) -> bool | None:
    """Return True for a line of a step up to the last one; None if it has no step."""
    return head.step <= last if isinstance(head.step, int) else None


def _is_event_before(resume_step: int, resume_published: int, resume_rates: int, head: _Head) -> bool | None:
    """Return True for an event that the resumed run does not repeat, such as a start or a fault; None for anything else."""
    match head:
        case _Head(kind="start" | "resume" | "restart"):
            return True
        case _Head(kind="publication", version=int(version)):
            return version < resume_published
        case _Head(kind="learning_rate", number=int(number)):  # may be newer than the checkpoint of its step
            return number <= resume_rates
        case _Head(kind=str(), step=int(step)):
            return step <= resume_step
        case _Head(kind=str()):
            return True
    return None


def _keep_rows(path: Path, keeps: Callable[[_Head], bool | None]) -> int:
    """Drop the lines for which `keeps` returns False, and unreadable lines; return the number of unreadable ones.

    Other lines stay unchanged. If all lines stay, the file is not rewritten. The file may be larger than memory.
    """
    if not path.exists():
        return 0
    marks: list[bool | None] = []
    with open(path, "rb", opener=open_regular) as file:
        for line in file:
            try:
                marks.append(keeps(_Head.model_validate_json(line)) if line.strip() else False)
            except ValidationError:  # an incomplete line
                marks.append(None)
        file.seek(max(file.tell() - 1, 0))
        ends_in_mid_line = file.read() not in (b"", b"\n")
    if ends_in_mid_line or not all(marks):
        with open(path, "rb", opener=open_regular) as file:
            replace_lines(path, (line.decode().rstrip("\n") + "\n" for line in itertools.compress(file, marks)))
    return marks.count(None)


def run_of(policy: Path) -> Path | None:
    """Return the directory of the run that a policy belongs to, given as an absolute path; None for a model of no run."""
    if policy.parent.name == "checkpoints" and not why_no_file(policy.parents[1] / "config.yaml"):
        return policy.parents[1]
    is_run = not why_no_folder(policy / "checkpoints") and not why_no_file(policy / "config.yaml")
    return policy if is_run else None
