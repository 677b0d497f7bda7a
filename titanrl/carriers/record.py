"""Files of a run's record: lines of JSON, and beside them columns of numbers, one per token. docs/record.md describes both.

A process appends its records of one kind to `record/<kind>-<process>.<part>.jsonl`. Only the process that created a part writes
to it, so a part needs no lock, and a line that a killed process left incomplete is the last of its part. Columns are in the
`.bin` file of the same name. They are written before their line, which has their place and checksum.

Spans are one kind: what a process did and what it waited for. A process opens its timeline once; without it, spans cost nothing
and are not recorded. Spans of the same name, step and version that overlap, or follow within `MERGE_S`, are one line, so that
thousands of short ones per second stay a few lines.
"""

import atexit
import json
import logging
import math
import os
import queue
import socket
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
from pydantic_core import to_json

from titanrl.base.files import naming
from titanrl.base.ownership import open_regular

if TYPE_CHECKING:
    from titanrl.config.schema import Config


FOLDER = "record"
"""Folder of the record in a run directory."""
HOST = socket.gethostname()
"""Name of this host."""
FORMAT = 1
"""Version of the layout, in the first line of each part."""
NUM_PARTS = 8
"""Parts into which the limit of a kind of records of one process is divided."""
BATCH_S = 0.5
"""Seconds for which `BackgroundRecord` collects records before it writes them, and so the most that a killed process loses."""
PENDING_BYTES = 1 << 20
"""Bytes of records from which they are written before more are encoded."""
MAX_QUEUED = 4096
"""Records that may wait for `BackgroundRecord` to write them; more are dropped and counted."""

_encoder = json.JSONEncoder(separators=(",", ":"), allow_nan=False)

Columns = Mapping[str, npt.NDArray[Any]]
"""Arrays of equal length, by name."""
Record = tuple[Mapping[str, Any], Columns]
"""Values of a line, and its columns, which may be empty."""


class Part(NamedTuple):
    """A part of the record, whose file is named after kind, process and number."""

    kind: str
    """Kind of its records, such as `rollouts`."""
    process: str
    """Process that wrote it, such as `rollout_0`."""
    number: int
    path: Path
    """File with the lines."""

    @property
    def columns(self) -> Path:
        """File with the columns."""
        return self.path.with_suffix(".bin")


def parts_of(run_dir: Path, kind: str = "*", process: str = "*") -> list[Part]:
    """Return the parts of a run's record of a kind and of a process, by default all, ordered by process and number.

    Links and other files that are no regular files are left out, because their readers could wait forever.
    """
    parts = []
    for entry in entries_of(run_dir):
        name, _, number = entry.name.removesuffix(".jsonl").rpartition(".")
        its_kind, _, its_process = name.partition("-")
        is_asked = kind in ("*", its_kind) and process in ("*", its_process) and entry.name.endswith(".jsonl")
        if is_asked and number.isdecimal() and entry.is_file(follow_symlinks=False):
            parts.append(Part(its_kind, its_process, int(number), Path(entry.path)))
    return sorted(parts)


def entries_of(run_dir: Path) -> list[os.DirEntry[str]]:
    """Return what is in the folder of a run's record; nothing if there is no folder."""
    try:
        with os.scandir(run_dir / FOLDER) as entries:
            return list(entries)
    except OSError:
        return []


class RecordFile:
    """Appends records of one kind to new parts. When their size reaches the limit, the oldest part except the first is deleted.

    So the start and the end of a run remain. The first line of a part counts the records that were deleted so far.
    """

    def __init__(self, run_dir: Path, kind: str, process: str, limit_bytes: int) -> None:
        """Write nothing yet. Parts of earlier processes of this name stay, and count towards the limit."""
        self._run_dir, self._kind, self._process, self._limit_bytes = run_dir, kind, process, limit_bytes
        self._lock = threading.Lock()
        self._lines: BinaryIO | None = None
        self._columns: BinaryIO | None = None
        self._pending: tuple[list[bytes], list[bytes]] = [], []  # columns, lines
        self._num_pending = self._num_bytes = self._end = 0  # bytes; of the current part; of its columns

    def append(self, *records: Record) -> None:
        """Append records. Any thread may call this. An `OSError` names the file; a later record then begins another part."""
        with self._lock:
            try:
                for values, columns in records:
                    if self._lines is None or self._num_bytes >= self._limit_bytes // NUM_PARTS:
                        self._close()
                        self._begin_part()
                    if columns:
                        (count,) = {len(column) for column in columns.values()}
                        content = b"".join([column.tobytes() for column in columns.values()])
                        types = _types(tuple((name, column.dtype) for name, column in columns.items()))
                        place = {"at": self._end, "count": count, "crc32": zlib.crc32(content), "types": types}
                        values = {**values, "columns": place}
                        self._end += len(content)
                        self._add(0, content)
                    self._add_line(values)
                    if self._num_pending >= PENDING_BYTES:
                        self._flush()
            finally:
                self._flush()

    def close(self) -> None:
        """Close the current part; a later record begins another one."""
        with self._lock:
            self._close()

    def _add_line(self, values: Mapping[str, Any]) -> None:
        self._add(1, encode_line(values))

    def _add(self, file: int, content: bytes) -> None:
        self._pending[file].append(content)
        self._num_pending += len(content)
        self._num_bytes += len(content)

    def _flush(self) -> None:
        """Write what is pending, columns first."""
        columns, lines = (b"".join(pending) for pending in self._pending)
        self._pending, self._num_pending = ([], []), 0
        try:
            if columns:
                if self._columns is None:
                    assert self._lines is not None, "the part has begun"
                    self._columns = Path(self._lines.name).with_suffix(".bin").open("xb", buffering=0)
                write_all(self._columns, columns)
            if lines:
                assert self._lines is not None, "the part has begun"
                write_all(self._lines, lines)
        except OSError:  # the ends of the files are not known any more
            self._close()
            raise

    def _close(self) -> None:
        self._flush()
        for file in (self._lines, self._columns):
            if file is not None:
                file.close()
        self._lines = self._columns = None

    def _begin_part(self) -> None:
        parts = parts_of(self._run_dir, self._kind, self._process)
        earlier = next(read_lines(parts[-1].path), {}).get("dropped") if parts else 0
        num_dropped = earlier if isinstance(earlier, int) else 0  # of a damaged line
        sizes = [sum(path.stat().st_size for path in (part.path, part.columns) if path.exists()) for part in parts]
        while len(parts) > 1 and sum(sizes) + self._limit_bytes // NUM_PARTS > self._limit_bytes:
            oldest, _ = parts.pop(1), sizes.pop(1)
            num_dropped += max(oldest.path.read_bytes().count(b"\n") - 1, 0)
            oldest.columns.unlink(missing_ok=True)
            oldest.path.unlink()
        number = parts[-1].number + 1 if parts else 0
        path = self._run_dir / FOLDER / f"{self._kind}-{self._process}.{number:06d}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lines, self._num_bytes, self._end = path.open("xb", buffering=0), 0, 0
        self._add_line({"format": FORMAT, "time": time.time(), "host": HOST, "pid": os.getpid(), "dropped": num_dropped})


@lru_cache
def _types(dtypes: tuple[tuple[str, np.dtype[Any]], ...]) -> Mapping[str, str]:
    """Return the types of columns by name, as lines contain them."""
    return {name: dtype.newbyteorder("<").str for name, dtype in dtypes}


def write_all(file: BinaryIO, content: bytes) -> None:
    """Write to an unbuffered file. The `OSError` of an incomplete write names the file."""
    with naming(file.name):
        written = file.write(content)
        if written != len(content):
            raise OSError(f"only {written} of {len(content)} bytes were appended to {file.name}")


class BackgroundRecord:
    """Appends records from a thread, so that the caller never waits for a file. Records in excess of a queue are dropped.

    If one cannot be written, for example because the disk is full, the record ends there with a message in the process's log.
    """

    def __init__(self, file: RecordFile) -> None:
        """Start no thread before the first record."""
        self._file = file
        self._queue: queue.Queue[Record] = queue.Queue(MAX_QUEUED)
        self._hurry = threading.Event()
        self._thread: threading.Thread | None = None
        self._num_lost = 0

    def put(self, values: Mapping[str, Any], columns: Columns | None = None) -> None:
        """Queue a record. Only one thread may call this and `flush`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="record", daemon=True)
            self._thread.start()
        try:
            if self._num_lost:
                self._queue.put_nowait(({"lost": self._num_lost}, {}))
                self._num_lost = 0
            self._queue.put_nowait((values, columns or {}))
        except queue.Full:
            self._num_lost += 1

    def flush(self) -> None:
        """Wait until all records are written."""
        self._hurry.set()
        if self._num_lost:
            self._queue.put(({"lost": self._num_lost}, {}))
            self._num_lost = 0
        self._queue.join()
        self._hurry.clear()

    def _run(self) -> None:
        failed = False
        while True:
            self._hurry.wait(BATCH_S)
            records = [self._queue.get()]
            with suppress(queue.Empty):
                while True:
                    records.append(self._queue.get_nowait())
            try:
                if not failed:
                    self._file.append(*records)
            except Exception as error:  # `flush` would wait forever for a thread that has ended
                failed = True
                logging.getLogger(__name__).warning("nothing more is recorded: %s", error)
            for _ in records:
                self._queue.task_done()


def encode(value: Any) -> str:
    """Return a value as JSON in one line. Infinities and NaN, which JSON cannot express, become null."""
    try:
        return _encoder.encode(value)
    except (TypeError, ValueError):  # rare, and to look for them takes longer than to encode
        return _encoder.encode(_finite(value))


def encode_line(values: Mapping[str, Any]) -> bytes:
    """Encode values as `encode` does, but as a line in UTF-8 instead of ASCII, in a quarter of its time."""
    try:
        return to_json(values, inf_nan_mode="null") + b"\n"
    except ValueError:  # such as half of a surrogate pair, which UTF-8 cannot express
        return (encode(values) + "\n").encode()


def _finite(value: Any) -> Any:
    """Replace infinities and NaN with None; convert containers to dicts and lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def read_lines(path: Path, tail_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file, or those in its last bytes, except lines that a killed process left incomplete."""
    with open(path, "rb", opener=open_regular) as file:
        if tail_bytes is not None and (size := file.seek(0, os.SEEK_END)) > tail_bytes:
            file.seek(size - tail_bytes - 1)
            file.readline()
        elif tail_bytes is not None:
            file.seek(0)
        for line in file:
            row = decode(line)
            if row is not None:
                yield row


def decode(line: bytes) -> dict[str, Any] | None:
    """Decode the JSON object of a line; return None for an incomplete line."""
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def share(limit_bytes: int, fraction: float, num_processes: int) -> int:
    """Return the bytes that one of several processes may use for its records of a kind, which get a fraction of the limit."""
    return int(limit_bytes * fraction / max(num_processes, 1))


def joined(arrays: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return arrays, maybe none, joined to one of a type."""
    return np.concatenate([np.zeros(0, dtype), *arrays], dtype=dtype, casting="unsafe")


SpanKind = Literal["work", "wait", "serve", "phase"]
"""`work` of the process, `wait` for another one, `serve`: a request of another process, `phase`: contains work and waits."""
SPAN_KINDS: Mapping[str, SpanKind] = {kind: kind for kind in get_args(SpanKind)}
MERGE_S = 0.01
"""Longest pause between two spans that are merged, in seconds."""
LONGEST_S = 1.0
"""Seconds after which spans that overlap without end are cut into pieces."""
SPAN_SHARE = 0.05
"""Fraction of `logging.record_bytes` for the spans of all processes."""
IDLE = "idle"
"""Name of the wait of a process in which no other span is open: it waits for a request."""


_Key = tuple[str, SpanKind, int | None, int | None]
"""Name, kind, step and version of spans that are merged."""


@dataclass(slots=True)
class _Lane:
    """Spans of one key since they were last written, and the open ones."""

    start: float
    """Start of the first one."""
    since: float
    """Start of the oldest open one, if any is open."""
    end: float
    """End of the last one that ended."""
    busy_s: float = 0.0
    count: int = 0
    num_open: int = 0


class Timeline:
    """The spans of a process. Any thread may add some; another one writes them, at most every `BATCH_S`."""

    def __init__(self, file: RecordFile, *, is_server: bool) -> None:
        """Start the thread. A server, which waits for requests whenever no span is open, is idle from now on."""
        self._file, self._is_server = file, is_server
        self._lock = threading.RLock()  # a collected coroutine ends its span at any allocation, also in these methods
        self._lanes: dict[_Key, _Lane] = {}
        self._written: list[tuple[_Key, float, float, float, int]] = []  # since the thread wrote: start, end, busy_s and count
        self._num_lost = 0
        self._num_open = 0
        self._epoch = time.time() - time.perf_counter()
        self._due, self._closing = threading.Event(), threading.Event()
        self._idle_since = time.perf_counter()
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def begin(self, key: _Key) -> None:
        """Open a span."""
        now = time.perf_counter()
        with self._lock:
            self._num_open += 1
            if self._num_open == 1 and self._is_server:
                self._end_idle(now)
            self._open(key, now)

    def end(self, key: _Key) -> None:
        """Close a span that `begin` opened."""
        now = time.perf_counter()
        with self._lock:
            lane = self._lanes[key]
            lane.num_open -= 1
            lane.count += 1
            if lane.num_open == 0:
                lane.busy_s += now - lane.since
                lane.end = now
            elif now - lane.start > LONGEST_S:
                self._write(key, lane, now)
            self._num_open -= 1
            if self._num_open == 0:
                self._idle_since = now
        if not self._due.is_set():
            self._due.set()

    def add(self, name: str, start: float) -> None:
        """Add a span from a past time in Unix seconds until now."""
        with self._lock:
            self._add((name, "work", None, None), start - self._epoch, time.perf_counter())

    def close(self) -> None:
        """Write all spans, the open ones until now."""
        self._closing.set()
        self._due.set()
        self._thread.join()

    def _run(self) -> None:
        is_closed = False
        while not is_closed:
            self._closing.wait(BATCH_S)
            self._due.wait()  # afterwards, so that a busy process wakes this thread once per batch, not twice
            self._due.clear()
            is_closed = self._closing.is_set()  # after `clear`, which may undo the `set` of a `close`
            now = time.perf_counter()
            with self._lock:
                if is_closed and self._num_open == 0 and self._is_server:
                    self._end_idle(now)
                for key, lane in list(self._lanes.items()):
                    if lane.num_open == 0 or is_closed:
                        self._write(key, lane, now if lane.num_open else lane.end)
                written, self._written = self._written, []
                num_lost, self._num_lost = self._num_lost, 0
            records: list[Record] = []
            for (name, kind, step, version), start, end, busy_s, count in written:
                times = {"start": round(self._epoch + start, 6), "seconds": round(end - start, 6), "busy_s": round(busy_s, 6)}
                known = {key: value for key, value in (("step", step), ("version", version)) if value is not None}
                records.append(({"name": name, "kind": kind, **times, "count": count, **known}, {}))
            if num_lost:
                records.append(({"lost": num_lost}, {}))
            try:
                self._file.append(*records)
            except OSError as error:
                logging.getLogger(__name__).warning("no more spans are recorded: %s", error)
                return
        self._file.close()

    def _end_idle(self, now: float) -> None:
        self._add((IDLE, "wait", None, None), self._idle_since, now)

    def _add(self, key: _Key, start: float, end: float) -> None:
        """Add a span that has ended, of a key without an open one."""
        lane = self._open(key, start)
        lane.num_open = 0
        lane.busy_s += end - start
        lane.count += 1
        lane.end = end

    def _open(self, key: _Key, now: float) -> _Lane:
        lane = self._lanes.get(key)
        if lane is not None and lane.num_open == 0 and (now - lane.end > MERGE_S or now - lane.start > LONGEST_S):
            self._write(key, lane, lane.end)
            lane = None
        if lane is None:
            lane = self._lanes[key] = _Lane(start=now, since=now, end=now)
        if lane.num_open == 0:
            lane.since = now
        lane.num_open += 1
        return lane

    def _write(self, key: _Key, lane: _Lane, end: float) -> None:
        """Pass the line of a lane until `end` to the thread. A lane with open spans continues from there."""
        busy_s = lane.busy_s + (end - lane.since if lane.num_open else 0.0)
        if len(self._written) < MAX_QUEUED:
            self._written.append((key, lane.start, end, busy_s, lane.count))
        else:
            self._num_lost += 1
        if lane.num_open:
            lane.start = lane.since = lane.end = end
            lane.busy_s, lane.count = 0.0, 0
        else:
            del self._lanes[key]


def span_bytes(config: "Config") -> int:
    """Return the bytes that one process of a run may use for its spans."""
    others = 3  # controller, store, evaluating generator or teacher
    num = config.num_trainer_ranks + config.num_generator_ranks + config.rollout.num_workers + others
    return share(config.logging.record_bytes, SPAN_SHARE, num)


_timeline: Timeline | None = None  # of this process


def open_timeline(run_dir: Path, process: str, limit_bytes: int, *, is_server: bool, since: float | None = None) -> None:
    """Record the spans of this process from now on, in a run directory. A timeline that is open ends.

    Args:
        run_dir: Run directory.
        process: Name of the process.
        limit_bytes: Size limit of its spans.
        is_server: True if the process waits for requests whenever no span is open.
        since: Time at which the process began to start, in Unix seconds; a span covers the time from there until now.
    """
    global _timeline
    close_timeline()
    timeline = Timeline(RecordFile(run_dir, "spans", process, limit_bytes), is_server=is_server)
    if since is not None:
        timeline.add("start the process" if is_server else "prepare the run", since)
    _timeline = timeline
    atexit.register(close_timeline)


def close_timeline() -> None:
    """Write the spans of this process, and record no more."""
    global _timeline
    timeline, _timeline = _timeline, None
    if timeline is not None:
        timeline.close()


def _forget_timeline() -> None:
    global _timeline
    _timeline = None


os.register_at_fork(after_in_child=_forget_timeline)  # the thread that writes does not exist in a fork


class span:
    """Record the duration of the body, which may be asynchronous. A class is faster to enter and to leave than a generator."""

    __slots__ = ("_key", "_timeline")

    def __init__(self, name: str, kind: SpanKind = "work", *, step: int | None = None, version: int | None = None) -> None:
        """Name the span; the timeline that is open now gets it."""
        self._timeline, self._key = _timeline, (name, kind, step, version)

    def __enter__(self) -> None:
        if self._timeline is not None:
            self._timeline.begin(self._key)

    def __exit__(self, *error: object) -> None:
        if self._timeline is not None:
            self._timeline.end(self._key)


def process_start() -> float:
    """Return the time at which this process was started or forked, in Unix seconds, to 10 ms."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)
