"""Spans of a process: what it did and what it waited for, written to `record/spans-<process>.<part>.jsonl`.

A process opens its timeline once; without it, spans cost nothing and are not recorded. Spans of the same name, step and version
that overlap, or follow within `MERGE_S`, are one line, so that thousands of short ones per second stay a few lines.
"""

import atexit
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from titanrl.carriers.record import BATCH_S, MAX_QUEUED, Record, RecordFile, share

if TYPE_CHECKING:
    from titanrl.config.schema import Config

Kind = Literal["work", "wait", "serve", "phase"]
"""`work` of the process, `wait` for another one, `serve`: a request of another process, `phase`: contains work and waits."""
KINDS: Mapping[str, Kind] = {kind: kind for kind in get_args(Kind)}
MERGE_S = 0.01
"""Longest pause between two spans that are merged, in seconds."""
LONGEST_S = 1.0
"""Seconds after which spans that overlap without end are cut into pieces."""
SHARE = 0.05
"""Fraction of `logging.record_bytes` for the spans of all processes."""
IDLE = "idle"
"""Name of the wait of a process in which no other span is open: it waits for a request."""


_Key = tuple[str, Kind, int | None, int | None]
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
            records: list[Record] = [(self._line(*each), {}) for each in written]
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

    def _line(self, key: _Key, start: float, end: float, busy_s: float, count: int) -> dict[str, Any]:
        name, kind, step, version = key
        times = {"start": round(self._epoch + start, 6), "seconds": round(end - start, 6), "busy_s": round(busy_s, 6)}
        line: dict[str, Any] = {"name": name, "kind": kind, **times, "count": count}
        if step is not None:
            line["step"] = step
        if version is not None:
            line["version"] = version
        return line


def span_bytes(config: "Config") -> int:
    """Return the bytes that one process of a run may use for its spans."""
    others = 3  # controller, store, evaluating generator or teacher
    num = config.num_trainer_ranks + config.num_generator_ranks + config.rollout.num_workers + others
    return share(config.logging.record_bytes, SHARE, num)


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

    def __init__(self, name: str, kind: Kind = "work", *, step: int | None = None, version: int | None = None) -> None:
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
