"""Read the files of a run, also while it runs: `titanrl.open_run(path)`. docs/record.md describes their content.

Files are untrusted: they may come from another machine, and a killed process leaves incomplete lines. A line that is damaged
is left out, and columns are checked against their checksum before they are used.

`RunRecord.search` finds some of 100,000 completions without parsing all again, by an index. It is in memory, because a run
directory may be read-only and its files are untrusted. It has the place of each line and what completions are selected by;
texts stay in the files. A refresh reads only what was appended, so the index can follow a run.

The file has the index, the reader, and the time series of metrics with the formatting of their numbers.
"""

import json
import os
import re
import sys
import threading
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, BinaryIO, Literal, Self, TypedDict, TypeGuard, TypeVar, Unpack, overload

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PrivateAttr, ValidationError

from titanrl.base.errors import TitanRLError
from titanrl.base.files import DamagedError, why_no_folder
from titanrl.base.ownership import open_regular
from titanrl.carriers.record import SPAN_KINDS, Part, SpanKind, decode, parts_of, read_lines

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

    def find(self, text: str = "", **filters: Unpack[Filters]) -> "Hits":
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
            return Hits(self._parts, rows)

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


Rows = Sequence[Mapping[str, float]]
"""Metrics in step order, one mapping per step; each contains `step`."""
Points = list[tuple[float, float]]
"""(step, value) pairs."""

TYPES = ("<i4", "<f4", "<f8", "|b1")
"""Types of columns."""
REPR_BYTES = 1 << 16
"""Last bytes of the metrics that the representation of a run reads."""
TOKEN_COLUMNS = frozenset({"token_ids", "mask", "logprobs", "versions"})
"""Columns that every group has."""


class RunNotFoundError(TitanRLError):
    """The folder is not the directory of a run."""


class _Place(BaseModel):
    """Place of the columns of a record in the `.bin` file of its part."""

    model_config = ConfigDict(frozen=True)

    at: NonNegativeInt
    count: NonNegativeInt
    crc32: NonNegativeInt
    types: dict[str, str]


class _Record(BaseModel):
    """A line of the record, which concerns a group."""

    model_config = ConfigDict(frozen=True)

    time: float = 0.0
    """Time at which the record was written, in Unix seconds."""
    index: int
    """Prompt of the group: its position in the stream, or in the evaluation set."""
    place: _Place | None = Field(default=None, alias="columns", repr=False)
    _part: Part | None = PrivateAttr(None)

    @classmethod
    def of_line(cls, line: bytes, part: Part) -> Self | None:
        """Parse a line; return None if it is no record of this class."""
        try:
            record = cls.model_validate_json(line)
        except ValidationError:
            return None
        record._part = part
        return record

    @property
    def process(self) -> str:
        """Name of the process that wrote the record, such as `rollout_0_0`; empty if it was not read from a file."""
        return "" if self._part is None else self._part.process

    def columns(self) -> Mapping[str, npt.NDArray[Any]]:
        """Read the columns, arrays of equal length by name; without columns, return an empty mapping.

        Raises:
            DamagedError: They are missing, or differ from what was written.
        """
        place, part = self.place, self._part
        if place is None or part is None:
            return {}
        if not set(place.types.values()) <= set(TYPES):
            raise DamagedError(f"{part.path} has a column of an unknown type (got {', '.join(place.types.values())!a:.80})")
        sizes = [place.count * np.dtype(kind).itemsize for kind in place.types.values()]
        if not any(sizes):  # the file may not exist yet
            return {name: np.empty(0, kind) for name, kind in place.types.items()}
        try:
            with open(part.columns, "rb", opener=open_regular) as file:
                num_bytes = file.seek(0, os.SEEK_END)
                file.seek(min(place.at, num_bytes))
                content = file.read(min(sum(sizes), num_bytes))
        except OSError as error:
            raise DamagedError(f"{part.columns} cannot be read: {error}") from error
        if len(content) != sum(sizes) or zlib.crc32(content) != place.crc32:
            raise DamagedError(f"{part.columns} has other bytes at {place.at} than were written")
        ends = np.cumsum(sizes).tolist()
        return {
            name: np.frombuffer(content[end - size : end], kind)
            for (name, kind), size, end in zip(place.types.items(), sizes, ends, strict=True)
        }


class RecordedSegment(BaseModel):
    """A sequence of tokens of a completion, which the trainer sees as one sequence."""

    model_config = ConfigDict(frozen=True)

    num_tokens: NonNegativeInt
    """Number of tokens, including those that were not sampled."""
    parent: NonNegativeInt | None = None
    """Index of the segment of this completion that it branches from; None if it starts by itself."""
    num_shared: NonNegativeInt = 0
    """Number of first tokens that it has in common with its parent."""


class RecordedCompletion(BaseModel):
    """A completion or episode of a group."""

    model_config = ConfigDict(frozen=True)

    text: str = ""
    """Text as rewards receive it."""
    num_tokens: NonNegativeInt = 0
    """Number of sampled tokens."""
    finish_reason: str = ""
    """`stop`, `length` or `abort`."""
    outcome: str = "ok"
    """`ok`, or why there is no reward."""
    reward: float | None = None
    """Weighted sum of the parts; None if the reward failed."""
    reward_parts: dict[str, float | None] = {}
    """Rewards by name, without weights."""
    metrics: dict[str, float | None] = {}
    """Numbers that the environment reported."""
    messages: list[dict[str, Any]] | None = None
    """Messages of the episode; None without an environment."""
    turns: list[tuple[int, int, float | None]] = []
    """Segment, end in it and reward of each turn; empty without an environment."""
    error: str = ""
    """Text of the error, if the outcome is not `ok`."""
    segments: list[RecordedSegment] = []
    """Sequences of tokens, in temporal order."""


class RecordedGroup(_Record):
    """The completions of one prompt, sampled for training or for an evaluation."""

    task: str = ""
    """Name of the task."""
    set: str | None = None
    """Evaluation set; None if the group was sampled for training."""
    version: int
    """Newest policy version that sampled the group."""
    status: str = ""
    """`kept`, or why the group was not trained on; empty in an evaluation."""
    environment: str | None = None
    """Environment of the task."""
    prompt: str = ""
    """Question, without chat template."""
    rendered: str = ""
    """Prompt as the policy received it, with chat template and special tokens."""
    answer: Any = None
    """Reference answer; None if the task has none."""
    generate_s: float | None = None
    """Seconds of generation."""
    score_s: float | None = None
    """Seconds of scoring."""
    counts: dict[str, int] = {}
    """Counters of the episodes, if an environment was used."""
    completions: list[RecordedCompletion]
    """Completions with a reward in the order of training, followed by those without."""

    def place_of(self, segment: int) -> tuple[int, int]:
        """Return the index of the completion, and of the segment in it, of a `TrainedSegment.segment`.

        Raises:
            IndexError: There is no such segment.
        """
        places = [(c, s) for c, completion in enumerate(self.completions) for s in range(len(completion.segments))]
        return places[segment]

    def tokens(self) -> list[list[Mapping[str, npt.NDArray[Any]]]]:
        """Read the tokens of each segment of each completion, as columns: `token_ids`, `mask`, `logprobs`, `versions`.

        With rewards of tokens, `rewards` has them.

        Raises:
            DamagedError: They are missing or damaged.
        """
        columns = self.columns()
        lengths = [[segment.num_tokens for segment in completion.segments] for completion in self.completions]
        total = 0 if self.place is None else self.place.count
        if sum(map(sum, lengths)) != total or (any(lengths) and not columns.keys() >= TOKEN_COLUMNS):
            raise DamagedError(f"the columns of group {self.index} do not match its segments (got {total} tokens)")
        end, tokens = 0, []
        for of_completion in lengths:
            segments: list[Mapping[str, npt.NDArray[Any]]] = []
            for length in of_completion:
                start, end = end, end + length
                segments.append({name: column[start:end] for name, column in columns.items()})
            tokens.append(segments)
        return tokens


class TrainedSegment(_Record):
    """A sequence that the trainer computed a loss on.

    Its columns have one value per loss token: `positions` (index of the token in its segment), `logprobs` of the policy being
    trained, `generator_logprobs`, `versions` (of the generator), `advantages`, `weights`, and where the trainer computed them
    `proximal_logprobs` and `reference_logprobs`.
    """

    step: int
    """Step, from 1."""
    update: int = 0
    """Optimizer step on the batch, from 0."""
    version: int
    """Policy version that computed `logprobs`; with several optimizer steps on a batch the version before the first."""
    segment: NonNegativeInt
    """Index of the segment among those of all completions of the group with a reward."""
    mean_weight: float = 1.0
    """Mean correction weight of the step, by which the loss was divided, if `algorithm.correction` needs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A period in which a process worked or waited. Overlapping and directly following spans of the same name are merged."""

    process: str
    """Process, such as `trainer_0`."""
    name: str
    """Work, such as `forward_backward`, or wait, such as `wait for a slot`."""
    kind: SpanKind
    """`work`, `wait`, `serve` (a request of another process) or `phase`, which contains work and waits."""
    start: float
    """Start, in Unix seconds by the clock of the process's host."""
    seconds: float
    """Seconds from start to end."""
    busy_s: float
    """Seconds without the pauses between merged spans, which are at most 10 ms each."""
    count: int
    """Number of merged spans."""
    step: int | None = None
    """Step, if known."""
    version: int | None = None
    """Policy version, if it has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedProcess:
    """A process of the run. A replaced process has the same name."""

    name: str
    pid: int
    host: str
    start: float
    """Start of its first recorded span, in Unix seconds; except for the controller, this is the start of the process."""
    end: float
    """End of its last recorded span."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A completion that `RunRecord.search` found."""

    group: RecordedGroup
    """Its group."""
    number: int
    """Its position in the group."""

    @property
    def completion(self) -> RecordedCompletion:
        """The completion."""
        return self.group.completions[self.number]


class Hits(Sequence[Hit]):
    """The completions that `RunRecord.search` found. Each is read from its file when it is used."""

    def __init__(self, parts: Sequence[Part], rows: npt.NDArray[Any]) -> None:
        """Keep the places of completions.

        Args:
            parts: Parts of the record.
            rows: For each completion: `part` (index in `parts`); `at`, `size` and `crc32` of the line of its group; `number` in
                the group.
        """
        self._parts, self._rows = parts, rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Hit: ...
    @overload
    def __getitem__(self, index: slice) -> "Hits": ...
    def __getitem__(self, index: int | slice) -> "Hit | Hits":
        """Read a completion; a slice reads none.

        Raises:
            DamagedError: Its line is damaged, or the run has deleted or replaced it since the search.
        """
        if isinstance(index, slice):
            return Hits(self._parts, self._rows[index])
        part_number, at, size, crc32, number = self._rows[index].tolist()
        part = self._parts[part_number]
        try:
            with open(part.path, "rb", opener=open_regular) as file:
                file.seek(at)
                line = file.read(size)
        except OSError as error:
            raise DamagedError(f"{part.path} cannot be read: {error}. Search again.") from error
        if zlib.crc32(line) != crc32:
            raise DamagedError(f"{part.path} has other bytes at {at} than when it was searched. Search again.")
        group = RecordedGroup.of_line(line, part)
        if group is None:
            raise DamagedError(f"{part.path} has a damaged line at {at}")
        return Hit(group, number)

    def of_groups(self) -> "Hits":
        """Return the first one of each group."""
        return Hits(self._parts, self._rows[self._is_first()])

    def numbers(self) -> list[list[int]]:
        """Return the positions of the completions in their group, for each group of `of_groups()`."""
        starts = np.flatnonzero(self._is_first())
        return [part.tolist() for part in np.split(self._rows["number"], starts[1:])] if len(starts) else []

    def _is_first(self) -> npt.NDArray[np.bool_]:
        """Return whether each is the first one of its group."""
        lines = self._rows[["part", "at"]]
        return np.append(True, lines[1:] != lines[:-1]) if len(lines) else np.zeros(0, np.bool_)


RecordT = TypeVar("RecordT", bound=_Record)


class RunRecord:
    """The files of a run. Each method reads the files again, so a running run can be opened, too."""

    def __init__(self, path: Path) -> None:
        """Open a run directory; see `open_run`."""
        self.path = path
        self._indices: dict[Kind, CompletionIndex] = {}

    def __repr__(self) -> str:
        lines = _lines_of(self.path / "metrics.jsonl", REPR_BYTES)
        steps = [line["step"] for line in lines if is_step(line.get("step"))]
        return f"<RunRecord of {self.path}, {f'step {steps[-1]}' if steps else 'no step yet'}>"

    @property
    def config(self) -> str:
        """Text of `config.yaml`; empty if it cannot be read, or is a FIFO or link, which could block forever."""
        try:
            with open(self.path / "config.yaml", encoding="utf-8", errors="replace", opener=open_regular) as file:
                return file.read()
        except OSError:
            return ""

    def metrics(self) -> Rows:
        """Return the metrics, one row per step.

        Raises:
            ValueError: A line is damaged.
        """
        file = self.path / "metrics.jsonl"
        return by_step(read_metrics(file)) if file.exists() else []

    def events(self) -> list[dict[str, Any]]:
        """Return the events, in order."""
        return _lines_of(self.path / "events.jsonl")

    def starts(self) -> list[dict[str, Any]]:
        """Return one entry per start and resume: time, command, host, processor, commit, packages."""
        lines = [line for part in parts_of(self.path, "starts") for line in _lines_of(part.path)]
        return sorted((line for line in lines if "kind" in line), key=lambda line: number_of(line.get("time")))

    def advantages(self) -> dict[int, list[float | None]]:
        """Return the newest advantages of each group by its index: one value per completion that was trained on, in order.

        A value is None if it was not finite.
        """
        lines = _lines_of(self.path / "advantages.jsonl")
        found = (line for line in lines if isinstance(line.get("index"), int) and isinstance(line.get("advantages"), list))
        return {line["index"]: line["advantages"] for line in found}

    def groups(self, index: int | None = None) -> list[RecordedGroup]:
        """Return the recorded groups by index, or one of them. Of a group that was sampled again, return the newest samples."""
        return _newest(self._records("rollouts", RecordedGroup, index), lambda group: (group.index,))

    def first_group(self) -> RecordedGroup | None:
        """Return one of the first recorded groups without reading the others; None if there is none."""
        return next(self._records("rollouts", RecordedGroup), None)

    def evaluations(self, name: str | None = None) -> list[RecordedGroup]:
        """Return the recorded samples of evaluations, by set, version and index; `name` selects a set."""
        samples = _newest(
            self._records("evaluations", RecordedGroup), lambda group: (group.set or "", group.version, group.index)
        )
        return [sample for sample in samples if name is None or sample.set == name]

    def search(self, text: str = "", *, kind: Kind = "rollouts", **filters: Unpack[Filters]) -> Hits:
        """Find completions that have a text and meet conditions, ordered by prompt; those of evaluations by set and version.

        The first search reads all lines; a later one reads those that were appended since.

        Example: `run.search("therefore", reward=(None, 0.5), status="kept", step=(10, 20))[:5]`

        Args:
            text: Text in the prompt, the completion, its messages or its error. The case of ASCII letters is ignored.
            kind: `rollouts` that were sampled for training, or samples of `evaluations`.
            filters: Conditions, which all must be met.
        """
        return self._index(kind).find(text, **filters)

    def values_of(self, kind: Kind = "rollouts") -> dict[str, list[str]]:
        """Return the values by which a search can select: `set`, `status`, `task`, `environment`, `outcome` and `parts`."""
        return self._index(kind).values()

    def _index(self, kind: Kind) -> CompletionIndex:
        index = self._indices.get(kind)
        if index is None:
            index = self._indices[kind] = CompletionIndex(self.path, kind)
        return index

    def trained(self, index: int | None = None) -> list[TrainedSegment]:
        """Return the sequences trained on, of one group or of all recorded ones, by step."""
        records = self._records("trained", TrainedSegment, index)
        return _newest(records, lambda record: (record.step, record.update, record.index, record.segment))

    def spans(self, process: str = "*", *, tail_bytes: int | None = None) -> list[Span]:
        """Return the spans of a process, or of all processes, by start.

        Args:
            process: Name of the process.
            tail_bytes: Read only about so many bytes from the end of each process's parts, which have the newest spans; None
                reads all.
        """
        parts = parts_of(self.path, "spans", process)
        if tail_bytes is not None:
            kept, num_newer = list[Part](), Counter[str]()  # bytes in the newer parts of each process
            for part in reversed(parts):
                if num_newer[part.process] < tail_bytes:
                    kept.append(part)
                num_newer[part.process] += part.path.stat().st_size if part.path.exists() else 0
            parts = kept[::-1]
        lines = ((part, line) for part in parts for line in _lines_of(part.path, tail_bytes))
        spans = (span_of(part.process, line) for part, line in lines)
        return sorted((span for span in spans if span is not None), key=lambda span: span.start)

    def processes(self) -> list[RecordedProcess]:
        """Return the processes, in the order of their starts."""
        found: dict[tuple[str, int], dict[str, Any]] = {}
        times: dict[tuple[str, int], list[float]] = defaultdict(list)
        for part in parts_of(self.path, "spans"):
            key = part.process, -1
            for line in _lines_of(part.path):
                if "format" in line:
                    key = part.process, line["pid"] if isinstance(line.get("pid"), int) else -1
                    found.setdefault(key, line)
                elif (span := span_of(part.process, line)) is not None:
                    times[key] += [span.start, span.start + span.seconds]
        processes = [
            RecordedProcess(
                name=name,
                pid=pid,
                host=str(line.get("host", "")),
                start=min(times[name, pid], default=number_of(line.get("time"))),
                end=max(times[name, pid], default=number_of(line.get("time"))),
            )
            for (name, pid), line in found.items()
        ]
        return sorted(processes, key=lambda process: process.start)

    @cached_property
    def vocabulary(self) -> Mapping[int, str]:
        """Text of each token that was recorded until the first use of this property."""
        texts: dict[int, str] = {}
        for part in parts_of(self.path, "vocabulary"):
            for line in _lines_of(part.path):
                for token, text in line["texts"].items() if isinstance(line.get("texts"), dict) else ():
                    if token.isdecimal() and len(token) < 20:
                        texts[int(token)] = str(text)
        return texts

    def token_texts(self, token_ids: Sequence[int] | npt.NDArray[Any]) -> list[str]:
        """Return the text of each token; `<id 105>` for a token whose text is not recorded."""
        return [self.vocabulary.get(token, f"<id {token}>") for token in np.asarray(token_ids, np.int64).tolist()]

    def dropped(self) -> dict[str, int]:
        """Return the number of records by kind that were deleted to keep the size limit, or that a full queue dropped."""
        dropped: dict[str, int] = defaultdict(int)
        newest: dict[tuple[str, str], int] = {}
        for part in parts_of(self.path):
            for line in _lines_of(part.path):
                if isinstance(line.get("dropped"), int):
                    newest[part.kind, part.process] = line["dropped"]
                elif isinstance(line.get("lost"), int):
                    dropped[part.kind] += line["lost"]
        for (kind, _), number in newest.items():
            dropped[kind] += number
        return {kind: number for kind, number in dropped.items() if number}

    def _records(self, kind: str, cls: type[RecordT], index: int | None = None) -> Iterator[RecordT]:
        """Yield the records of a kind, of all prompts or of one. To look for its index in a line is faster than to parse it."""
        text = b"" if index is None else f'"index":{index}'.encode()
        for part in parts_of(self.path, kind):
            # A part is deleted to keep the size limit.
            with suppress(FileNotFoundError), open(part.path, "rb", opener=open_regular) as file:
                for line in file:
                    record = cls.of_line(line, part) if text in line else None
                    if record is not None and index in (None, record.index):
                        yield record


def open_run(path: Path | str) -> RunRecord:
    """Open the directory of a run to read its files, also while the run writes them.

    Example: `open_run(run_dir).groups()[0].completions[0].text`

    Raises:
        RunNotFoundError: The path is not the directory of a run.
    """
    folder = Path(path)
    found = why_no_folder(folder) or ("" if is_run(folder) else "is not the directory of a run")
    if found:
        raise RunNotFoundError(f"open_run: {folder} {found}. Give the directory of a run, such as runs/quickstart.")
    return RunRecord(folder)


def is_run(path: Path) -> bool:
    """Return True for the directory of a run."""
    # `Path.exists` raises for a folder of another user that cannot be entered.
    return any(os.path.exists(path / name) for name in ("config.yaml", "metrics.jsonl", "events.jsonl"))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the objects of `metrics.jsonl`. Skip the last line if a killed process left it incomplete."""
    with open(path, "rb", opener=open_regular) as file:
        lines = file.read().splitlines()
    rows = [decode(line) for line in lines]
    for number, row in enumerate(rows, start=1):
        if number < len(rows) if row is None else not is_step(row.get("step")):
            raise ValueError(f"{path}, line {number}: not a JSON object with a step. Remove this line to read the others.")
    return [row for row in rows if row is not None]


def _lines_of(path: Path, tail_bytes: int | None = None) -> list[dict[str, Any]]:
    """Return the objects of a file, or those in its last bytes; none if it does not exist."""
    try:
        return list(read_lines(path, tail_bytes))
    except FileNotFoundError:
        return []


def _newest(records: Iterator[RecordT], key: Any) -> list[RecordT]:
    """Return the newest record of each key, ordered by key."""
    newest: dict[tuple[Any, ...], RecordT] = {}
    for record in records:
        name = key(record)
        other = newest.get(name)
        if other is None or other.time <= record.time:
            newest[name] = record
    return [newest[name] for name in sorted(newest)]


def span_of(process: str, line: Mapping[str, Any]) -> Span | None:
    """Return the span in a line of the record of a process; None if it has none. Damaged values become defaults."""
    name, step, version, count, kind = (line.get(key) for key in ("name", "step", "version", "count", "kind"))
    if not isinstance(name, str):
        return None
    return Span(
        process=process,
        name=name,
        kind=SPAN_KINDS.get(kind, "work") if isinstance(kind, str) else "work",
        start=number_of(line.get("start")),
        seconds=max(0.0, number_of(line.get("seconds"))),
        busy_s=number_of(line.get("busy_s", line.get("seconds"))),
        count=count if isinstance(count, int) else 1,
        step=step if isinstance(step, int) else None,
        version=version if isinstance(version, int) else None,
    )


def number_of(value: object) -> float:
    """Return a number of a file; 0 for any other value."""
    return float(value) if isinstance(value, int | float) and abs(value) < 1e15 else 0.0


def is_finite(value: object) -> TypeGuard[float]:
    """Return True for a number that is neither infinite nor NaN, nor an integer beyond all floats."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def is_step(value: object) -> bool:
    """Return True for an integer that may be a step."""
    return isinstance(value, int) and abs(value) < 2**62


def flat(config: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return a configuration with dotted keys, such as `algorithm.loss`."""
    values: dict[str, Any] = {}
    for key, value in config.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return values


NUM_ENDS = 5
"""Number of steps at either end of a run whose mean is its first and its last value."""


def by_step(lines: Iterable[Mapping[str, Any]]) -> Rows:
    """Merge the lines of `metrics.jsonl` into one row per step, in step order.

    An evaluation writes a separate line for its step. If lines of the same step share a metric, the last one wins.
    """
    rows: dict[int, dict[str, float]] = {}
    for line in lines:
        rows.setdefault(line["step"], {}).update(line)
    return [rows[step] for step in sorted(rows)]


def series(rows: Rows, name: str) -> Points:
    """Return the values of one metric, without the steps where it is missing or no finite number."""
    return [(row["step"], row[name]) for row in rows if is_finite(row.get(name))]


def awaited_by_both(points: Callable[[str], Points]) -> str:
    """Return what trainer and generators wait for most of the time: the rewards or the environment; empty if neither.

    `points` is a function from the name of a metric to its steps and values, of which the medians decide.
    """

    def usual(name: str) -> float:
        values = [value for _, value in points(name)]
        return median(values) if values else 0.0

    # In synchronous training they alternate, so the fractions add up to 1 plus the share in which neither works.
    if usual("perf/trainer_idle_frac") + usual("perf/generator_idle_frac") < 1.5:
        return ""
    score_s, environment_s = usual("group/score_s_mean"), usual("episode/environment_s_mean")
    if score_s > usual("group/generate_s_mean"):
        return f"the rewards, which take {score_s:.2g} s per group"
    return f"the environment, which takes {environment_s:.2g} s per episode" if environment_s else ""


def ends_of(points: Points) -> tuple[float, float, str]:
    """Return the means of the first and of the last values, and how many steps they cover, as text.

    A mean covers at most `NUM_ENDS` steps, and no step is in both.
    """
    values = [value for _, value in points]
    size = max(1, min(NUM_ENDS, len(values) // 2))
    covered = "the only step" if len(values) == 1 else "first and last step" if size == 1 else f"means of {size} steps"
    return fmean(values[:size]), fmean(values[-size:]), covered


def evaluated_sets(rows: Rows) -> list[str]:
    """Return the names of the evaluation sets, in order of appearance."""
    names = {name: None for row in rows for name in row}
    return [match[1] for name in names if (match := re.fullmatch(r"eval/(.+)/mean", name))]


def without_reward(points: Callable[[str], Points], task: str) -> list[str]:
    """Return how many completions of the first and the last evaluation have no reward, as `2 of 5`; empty if all have one.

    `points` is a function as for `awaited_by_both`.
    """
    failed, total = (points(f"eval/{task}/{name}") for name in ("num_errors", "num_completions"))
    if not any(number for _, number in (*failed[:1], *failed[-1:])):
        return []
    return [f"{failed[at][1]:.0f} of {total[at][1]:.0f}" for at in (0, -1)]


def phase_seconds(values: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each phase of a step, without the total `time/step_s`."""
    names = {name: name.removeprefix("time/").removesuffix("_s") for name in values if name.startswith("time/")}
    return {phase: values[name] for name, phase in names.items() if phase != "step" and values[name] is not None}


_BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_ASCII_BLOCKS = "_.-=+*#@"


def duration(seconds: float) -> str:
    """Format seconds as `12.3 s`, `1:02` or `1:02:03`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def count(number: float) -> str:
    """Format a count with at most three digits and a metric suffix: `950`, `2.1k`, `340k`, `1.2M`."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            scaled = number / limit
            return f"{scaled:.1f}{unit}" if scaled < 10 else f"{scaled:.0f}{unit}"
    return f"{number:.0f}"


def fixed(value: float, spec: str = ".3f") -> str:
    """Format a number with a fixed number of decimals; one that would have many digits with four significant ones."""
    return format(value, ".4g" if abs(value) >= 1e9 and spec.endswith("f") else spec)


def sparkline(values: Sequence[float], *, ascii_only: bool = False) -> str:
    """Return one block character per value, scaled between the lowest and the highest value."""
    blocks = _ASCII_BLOCKS if ascii_only else _BLOCKS
    low, high = min(values, default=0.0), max(values, default=0.0)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((value - low) * scale)] for value in values)
