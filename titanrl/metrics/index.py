"""An index of the completions in a run's record, by which `RunRecord.search` finds some of 100,000 without parsing all again.

It is in memory, because a run directory may be read-only and its files are untrusted. It has the place of each line and what
completions are selected by; texts stay in the files. A refresh reads only what was appended, so the index can follow a run.
"""

import json
import os
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple, TypedDict, Unpack

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field, ValidationError

from titanrl.base.ownership import open_regular
from titanrl.carriers.record import Part, decode, parts_of

TAIL_BYTES = 4096
"""Bytes before the end of what was read that are compared, to detect that a file was replaced."""
SCAN_BYTES = 1 << 22
"""Bytes of lines that are searched for a text at once."""

Kind = Literal["rollouts", "evaluations"]
Range = tuple[float | None, float | None]
"""Smallest and largest value; None means no limit."""


class Filters(TypedDict, total=False):
    """Conditions that a completion must meet."""

    reward: Range
    """Weighted reward. A completion whose reward failed has none."""
    parts: Mapping[str, Range]
    """Rewards by name, without weights."""
    outcome: str
    """`ok`, or why there is no reward."""
    status: str
    """Status of the group, such as `kept`."""
    task: str
    """Name of the task."""
    environment: str
    """Environment of the task."""
    set: str
    """Evaluation set."""
    index: Range
    """Position of the prompt."""
    version: Range
    """Newest policy version that sampled the group."""
    step: Range
    """Step that trained on the group; an evaluation sample has none."""


class Found(NamedTuple):
    """Places of completions in the record."""

    parts: Sequence[Part]
    rows: npt.NDArray[Any]
    """For each completion: `part` (index in `parts`); `at`, `size` and `crc32` of the line of its group; `number` in it."""


_Int = Annotated[int, Field(ge=-(2**62), le=2**62)]


class _Completion(BaseModel):
    reward: float | None = None
    outcome: str = "ok"
    reward_parts: dict[str, float | None] = {}


class _Group(BaseModel):
    """The fields of a line that the index has. The others are parsed but not stored."""

    time: float = 0.0
    index: _Int
    version: _Int
    set: str | None = None
    status: str = ""
    task: str = ""
    environment: str | None = None
    completions: list[_Completion]


class _Text(BaseModel):
    text: str = ""
    error: str = ""
    messages: Any = None


class _Texts(BaseModel):
    """The fields of a line that a text is searched in."""

    prompt: str = ""
    completions: list[_Text]


_Table = npt.NDArray[Any]
_Numbers = npt.NDArray[np.int64]
_NAMES: tuple[Literal["set", "status", "task", "environment"], ...] = ("set", "status", "task", "environment")
_NUMBERS: tuple[Literal["index", "version"], ...] = ("index", "version")
_LINE = np.dtype([(name, "i8") for name in ("part", "at", "size", "crc32", *_NUMBERS, *_NAMES)] + [("time", "f8")])
_COMPLETION = np.dtype([("line", "i8"), ("number", "i8"), ("outcome", "i8"), ("reward", "f8")])
_VALUE = np.dtype([("completion", "i8"), ("value", "f8")])
_PLACE = np.dtype([(name, "i8") for name in ("part", "at", "size", "crc32", "number")])
_STEP = np.dtype([("index", "i8"), ("step", "i8")])
_KEYS: dict[Kind, list[str]] = {"rollouts": ["index"], "evaluations": ["set", "version", "index"]}
"""Columns that groups have in common if one of them was sampled again."""


class Followed:
    """The lines of a file that another process appends to, replaces or deletes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._id = (-1, -1)
        self._end = self._tail = 0

    def read(self, reset: Callable[[], object]) -> Iterator[tuple[int, bytes]]:
        """Yield the complete lines since the last call with their places; after `reset()`, all if the file was replaced."""
        with open(self.path, "rb", opener=open_regular) as file:
            if _id(file) != self._id or _tail(file, self._end) != self._tail:
                self._id, self._end, self._tail = _id(file), 0, _tail(file, 0)
                reset()
            end = file.seek(self._end)
            for line in file:
                if line.endswith(b"\n"):  # else its process is writing it, or was killed
                    yield end, line
                    end += len(line)
            self._end, self._tail = end, _tail(file, end)  # after an interrupt, the lines are read again

    def objects(self, reset: Callable[[], object]) -> Iterator[dict[str, Any]]:
        """Yield the JSON objects of the lines of `read`; after `reset()` none if there is no such regular file."""
        try:
            yield from (row for _, line in self.read(reset) if (row := decode(line)) is not None)
        except OSError:
            reset()


def _id(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino


def _tail(file: BinaryIO, end: int) -> int:
    """Return the checksum of the bytes before `end`."""
    start = max(end - TAIL_BYTES, 0)
    file.seek(start)
    return zlib.crc32(file.read(end - start))


class _PartTable:
    """The index of one part."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self._file = Followed(part.path)
        self._reset()

    def _reset(self) -> None:
        self.lines, self.completions = np.zeros(0, _LINE), np.zeros(0, _COMPLETION)
        self.values: dict[str, _Table] = {}

    def refresh(self, code: Callable[[str | None], int]) -> bool:
        """Read the lines since the last call; return True if the index changed. `code` returns a number for a name."""
        before = self.lines
        lines: list[tuple[Any, ...]] = []
        completions: list[tuple[Any, ...]] = []
        values: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for at, line in self._file.read(self._reset):
            try:
                group = _Group.model_validate_json(line)
            except ValidationError:  # the first line, or a damaged one
                continue
            for number, completion in enumerate(group.completions):
                for name, value in completion.reward_parts.items():
                    if value is not None:
                        values[name].append((len(self.completions) + len(completions), value))
                reward = np.nan if completion.reward is None else completion.reward
                completions.append((len(self.lines) + len(lines), number, code(completion.outcome), reward))
            names = (code(group.set), code(group.status), code(group.task), code(group.environment))
            lines.append((0, at, len(line), zlib.crc32(line), group.index, group.version, *names, group.time))
        if lines:
            self.lines = np.concatenate([self.lines, np.array(lines, _LINE)])
            self.completions = np.concatenate([self.completions, np.array(completions, _COMPLETION)])
            for name, pairs in values.items():
                self.values[name] = np.concatenate([self.values.get(name, np.zeros(0, _VALUE)), np.array(pairs, _VALUE)])
        return self.lines is not before


class CompletionIndex:
    """The index of the completions of a kind. Any thread may call `find`."""

    def __init__(self, run_dir: Path, kind: Kind) -> None:
        self._run_dir, self._kind = run_dir, kind
        self._lock = threading.Lock()
        self._codes: dict[str | None, int] = {}
        self._tables: dict[Part, _PartTable] = {}
        self._advantages = Followed(run_dir / "advantages.jsonl")
        self._steps = np.zeros(0, _STEP)
        self._is_joined = False

    def find(self, text: str = "", **filters: Unpack[Filters]) -> Found:
        """Refresh the index, and find completions for `RunRecord.search`; those of a group follow one another."""
        with self._lock:
            self._refresh()
            found = self._selected(filters)
            if text:
                found = self._with_text(text, found)
            lines, rows = self._lines[self._completions["line"][found]], np.zeros(len(found), _PLACE)
            for name in ("part", "at", "size", "crc32"):
                rows[name] = lines[name]
            rows["number"] = self._completions["number"][found]
            return Found(self._parts, rows)

    def values(self) -> dict[str, list[str]]:
        """Refresh the index; return the values that completions have, by condition, and the names of their rewards."""
        with self._lock:
            self._refresh()
            names = {code: name for name, code in self._codes.items()}
            columns: dict[str, _Table] = {name: self._lines[name] for name in _NAMES}
            columns["outcome"] = self._completions["outcome"]
            found = {column: [names[code] for code in np.unique(codes).tolist()] for column, codes in columns.items()}
            values = {column: sorted(name for name in listed if name) for column, listed in found.items()}
            return {**values, "parts": sorted(self._values)}

    def _refresh(self) -> None:
        parts = parts_of(self._run_dir, self._kind)
        self._is_joined &= parts == list(self._tables)
        self._tables = {part: self._tables.get(part) or _PartTable(part) for part in parts}
        for part, table in list(self._tables.items()):
            try:
                self._is_joined &= not table.refresh(lambda name: self._codes.setdefault(name, len(self._codes)))
            except FileNotFoundError:  # deleted to keep the size limit
                del self._tables[part]
                self._is_joined = False
        if not self._is_joined:
            self._join()

    def _join(self) -> None:
        self._parts = list(self._tables)
        tables = list(self._tables.values())
        lines, completions = [np.zeros(0, _LINE)], [np.zeros(0, _COMPLETION)]
        values: dict[str, list[_Table]] = defaultdict(list)
        num_lines = num_completions = 0
        for number, table in enumerate(tables):
            lines.append(table.lines.copy())
            lines[-1]["part"] = number
            completions.append(table.completions.copy())
            completions[-1]["line"] += num_lines
            for name, column in table.values.items():
                values[name].append(column.copy())
                values[name][-1]["completion"] += num_completions
            num_lines, num_completions = num_lines + len(table.lines), num_completions + len(table.completions)
        self._lines, self._completions = np.concatenate(lines), np.concatenate(completions)
        self._values = {name: np.concatenate(columns) for name, columns in values.items()}
        keys = _KEYS[self._kind]
        order = np.lexsort([self._lines["time"], *(self._lines[key] for key in reversed(keys))])  # stable: the newest is last
        names = self._lines[keys][order]
        newest = order[np.append(names[1:] != names[:-1], True)] if len(order) else order
        self._ranks = np.full(len(self._lines), -1)  # of groups by key; -1 for a group that was sampled again
        self._ranks[newest] = np.arange(len(newest))
        self._is_joined = True

    def _selected(self, filters: Filters) -> _Numbers:
        """Return the completions that meet the conditions, by group and number."""
        of_line = self._completions["line"]
        meets = (self._ranks >= 0)[of_line]
        for column in _NAMES:
            if column in filters:
                meets &= (self._lines[column] == self._codes.get(filters[column], -1))[of_line]
        for name in _NUMBERS:
            if name in filters:
                meets &= _is_within(self._lines[name], filters[name])[of_line]
        if "step" in filters:
            meets &= self._is_trained(filters["step"])[of_line]
        if "outcome" in filters:
            meets &= self._completions["outcome"] == self._codes.get(filters["outcome"], -1)
        if "reward" in filters:
            meets &= _is_within(self._completions["reward"], filters["reward"])
        for part, limits in filters.get("parts", {}).items():
            values = self._values.get(part, np.zeros(0, _VALUE))
            has_value = np.zeros(len(meets), np.bool_)
            has_value[values["completion"][_is_within(values["value"], limits)]] = True
            meets &= has_value
        found: _Numbers = np.flatnonzero(meets)
        return found[np.argsort(self._ranks[of_line[found]], kind="stable")]

    def _is_trained(self, limits: Range) -> npt.NDArray[np.bool_]:
        """Return True for each line of a group on which a step within the limits trained."""
        if self._kind != "rollouts":
            return np.zeros(len(self._lines), np.bool_)
        pairs: list[tuple[int, int]] = []

        def reset() -> None:
            self._steps = np.zeros(0, _STEP)

        try:
            for _, line in self._advantages.read(reset):
                row = decode(line) or {}
                index, step = row.get("index"), row.get("step")
                if isinstance(index, int) and isinstance(step, int) and max(abs(index), abs(step)) < 2**62:
                    pairs.append((index, step))
        except FileNotFoundError:
            reset()
        self._steps = np.concatenate([self._steps, np.array(pairs, _STEP)])
        return np.isin(self._lines["index"], self._steps["index"][_is_within(self._steps["step"], limits)])

    def _with_text(self, text: str, found: _Numbers) -> _Numbers:
        """Return those of the completions that have a text."""
        has_text = np.zeros(len(self._completions), np.bool_)
        of_line = self._completions["line"]
        needle = text.encode("utf-8", "surrogatepass").lower()
        encoded = {json.dumps(text).encode()}  # the form of earlier versions, and of lines that UTF-8 cannot express
        with suppress(UnicodeEncodeError):
            encoded.add(json.dumps(text, ensure_ascii=False).encode())
        lines = (line for each in encoded for line in self._containing(each[1:-1].lower(), np.unique(of_line[found])))
        for number, line in lines:
            try:
                group = _Texts.model_validate_json(line)
            except ValidationError:
                continue
            is_in_prompt = _contains(needle, group.prompt)
            first = int(np.searchsorted(of_line, number))
            for place, completion in enumerate(group.completions):
                if is_in_prompt or _contains(needle, [completion.text, completion.error, completion.messages]):
                    has_text[first + place] = True
        return found[has_text[found]]

    def _containing(self, needle: bytes, numbers: _Numbers) -> Iterator[tuple[int, bytes]]:
        """Yield the lines that contain a text in lower case, out of those with ascending `numbers`."""
        for chunk in _chunks(self._lines, numbers):
            lines = self._lines[chunk]
            start, end = int(lines["at"][0]), int(lines["at"][-1] + lines["size"][-1])
            try:
                with open(self._parts[lines["part"][0]].path, "rb", opener=open_regular) as file:
                    file.seek(start)
                    content = file.read(end - start)
            except FileNotFoundError:  # deleted to keep the size limit
                continue
            lowered, at = content.lower(), 0
            starts = lines["at"] - start
            ends = starts + lines["size"]
            while (at := lowered.find(needle, at)) >= 0:
                place = int(np.searchsorted(starts, at, "right")) - 1
                if at < ends[place]:  # else it is in a line between them
                    line = content[starts[place] : ends[place]]
                    if zlib.crc32(line) == lines["crc32"][place]:  # else the file was replaced
                        yield int(chunk[place]), line
                if place + 1 == len(starts):
                    break
                at = int(starts[place + 1])


def _chunks(lines: _Table, numbers: _Numbers) -> Iterator[Sequence[int]]:
    """Divide lines into some of the same part that lie within `SCAN_BYTES`."""
    chunk: list[int] = []
    part = start = 0
    columns = (lines[name][numbers].tolist() for name in ("part", "at", "size"))
    for number, its_part, at, size in zip(numbers.tolist(), *columns, strict=True):
        if chunk and (its_part != part or at + size > start + SCAN_BYTES):
            yield chunk
            chunk = []
        if not chunk:
            part, start = its_part, at
        chunk.append(number)
    if chunk:
        yield chunk


def _contains(needle: bytes, value: Any) -> bool:
    """Return True if a text, or one in a list or an object, contains the needle, which is in lower case."""
    match value:
        case str():
            return needle in value.encode("utf-8", "surrogatepass").lower()
        case list():
            return any(_contains(needle, item) for item in value)
        case dict():
            return any(_contains(needle, item) for item in value.values())
    return False


def _is_within(values: _Table, limits: Range) -> npt.NDArray[np.bool_]:
    """Return True for each number within the limits; NaN is within none."""
    low, high = limits
    is_within: npt.NDArray[np.bool_] = ~np.isnan(values)
    if low is not None:
        is_within &= values >= low
    if high is not None:
        is_within &= values <= high
    return is_within
