"""The timeline of a run, from its recorded spans: who worked and who waited, as lanes, states and a Chrome trace.

All times are Unix seconds by the clocks of the hosts. These functions read no files; `RunRecord` reads the spans.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from titanrl.metrics.reading import RecordedProcess, Span

_RANKS = {"work": 0, "wait": 1, "serve": 2, "phase": 3}
"""Order in which the kinds of spans that are open at the same time decide the state of their process."""
_LANES = {"phase": "phases", "work": "work", "wait": "waits", "serve": "requests"}
"""Names of the lanes of each kind, in the order in which they are shown."""
_COLOURS = {"phase": "generic_work", "work": "thread_state_running", "wait": "thread_state_sleeping", "serve": "rail_response"}
"""Names of colours in the trace format."""
_GAP_S = 1e-5
"""Seconds without a span that are not a state of their own. Times are recorded to a microsecond."""


class Window(NamedTuple):
    """A period, in Unix seconds."""

    start: float
    end: float

    def within(self, other: "Window") -> "Window":
        """Return the part of this window within another one; it is empty if they do not overlap."""
        start = max(self.start, other.start)
        return Window(start, max(start, min(self.end, other.end)))


class State(NamedTuple):
    """A period in which a process worked on one thing, waited for one thing, or had no span."""

    start: float
    end: float
    kind: Literal["busy", "wait", "unknown"]
    name: str
    """Name of the span; empty if none was open."""

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end - self.start


class Lane(NamedTuple):
    """Spans of one process and kind of which each two follow one another, or one contains the other."""

    name: str
    """Name within the process, such as `waits` or `waits 2`."""
    spans: list[Span]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Shares of a process's time in a window. `busy`, the values of `waiting` and `unknown` add up to 1."""

    process: str
    seconds: float
    """Seconds of the window in which the process existed."""
    busy: float
    """Share in which it worked."""
    waiting: Mapping[str, float]
    """Share of each wait in which it did not work, by name, the longest first."""
    unknown: float
    """Share without any span."""


def window_of(spans: Iterable[Span], first: int | None = None, last: int | None = None) -> Window:
    """Return the window of some steps, both included, or of all spans without limits; raise `ValueError` if there is none.

    Of a step that was repeated after a restart or a resume, the last attempt counts.
    """
    is_all = first is None and last is None
    found = list(spans)
    chosen = found if is_all else list({span.step: span for span in found if _is_step(span, first or 0, last)}.values())
    if not chosen:
        raise ValueError("there is no span" if is_all else f"no step from {first or 1} to {last or 'the end'} is recorded")
    return Window(min(span.start for span in chosen), max(_end(span) for span in chosen))


def lanes_of(spans: Iterable[Span]) -> list[Lane]:
    """Distribute the spans of one process over as few lanes per kind as are needed, each kind in the order of the starts."""
    by_kind: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        by_kind[span.kind].append(span)
    lanes = []
    for kind in sorted(by_kind, key=list(_LANES).index):
        found: list[tuple[Lane, list[float]]] = []  # with the ends of its open spans
        for span in sorted(by_kind[kind], key=lambda span: (span.start, -span.seconds)):
            for _, ends in found:
                while ends and ends[-1] <= span.start:
                    ends.pop()
            fitting = (each for each in found if not each[1] or each[1][-1] >= _end(span))
            place = next(fitting, None)
            if place is None:
                number = len(found) + 1
                place = Lane(_LANES[kind] if number == 1 else f"{_LANES[kind]} {number}", []), []
                found.append(place)
            lane, ends = place
            lane.spans.append(span)
            ends.append(_end(span))
        lanes += [lane for lane, _ in found]
    return lanes


def states_of(spans: Iterable[Span], window: Window) -> list[State]:
    """Return the states of one process, which fill the window without overlap.

    At each instant, the state is that of one open span, or `unknown` if none is open: a process with a span of kind `work` is
    busy; otherwise one with a `wait` waits; otherwise it is busy with a request or a phase. Of several spans of a kind, the one
    that started last decides, because it is the innermost one.
    """
    states: list[State] = []
    waiting = iter(sorted(spans, key=lambda span: span.start))
    upcoming = next(waiting, None)
    open_: list[tuple[int, float, float, str, str]] = []  # rank, -start, end, name and kind of the state
    now = window.start
    while now < window.end:
        while upcoming is not None and upcoming.start <= now:
            kind = "wait" if upcoming.kind == "wait" else "busy"
            heapq.heappush(open_, (_RANKS[upcoming.kind], -upcoming.start, _end(upcoming), upcoming.name, kind))
            upcoming = next(waiting, None)
        while open_ and open_[0][2] <= now:
            heapq.heappop(open_)
        until = window.end if upcoming is None else min(upcoming.start, window.end)
        kind, name = "unknown", ""
        if open_:
            _, _, end, name, kind = open_[0]
            until = min(until, end)
        state = State(now, until, kind, name)  # type: ignore[arg-type]
        is_short = kind == "unknown" and state.seconds < _GAP_S
        if states and (is_short or states[-1][2:] == state[2:]):
            states[-1] = states[-1]._replace(end=until)
        else:
            states.append(state)
        now = until
    return states


def usage_of(process: str, states: Sequence[State]) -> Usage:
    """Return the shares of the states of a process."""
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for state in states:
        seconds[state.kind, state.name] += state.seconds
    total = sum(seconds.values())
    shares = {key: value / total for key, value in seconds.items() if total}
    waits = sorted(((share, name) for (kind, name), share in shares.items() if kind == "wait"), reverse=True)
    return Usage(
        process=process,
        seconds=total,
        busy=sum(share for (kind, _), share in shares.items() if kind == "busy"),
        waiting={name: share for share, name in waits},
        unknown=sum(share for (kind, _), share in shares.items() if kind == "unknown"),
    )


def usages(processes: Iterable[RecordedProcess], spans: Iterable[Span], window: Window) -> list[Usage]:
    """Return the shares of each process in a window, in the order of their starts.

    The time between the end of a process and the start of its replacement, which has the same name, does not count.
    """
    by_process = _by_process(spans)
    states: dict[str, list[State]] = {}
    for process in processes:
        life = Window(process.start, process.end).within(window)
        states.setdefault(process.name, []).extend(states_of(by_process.get(process.name, ()), life))
    return [usage_of(name, found) for name, found in states.items() if found]


def trace_of(
    processes: Iterable[RecordedProcess], spans: Iterable[Span], events: Iterable[Mapping[str, Any]] = (), *, window: Window
) -> dict[str, Any]:
    """Return the spans that overlap a window as a Chrome trace (JSON object format), which Perfetto opens.

    Each process has a track per lane. Steps and the run's events are marked. An arrow leads from the push of each version to
    the pulls of it.

    Args:
        processes: Processes of the run.
        spans: Spans of all processes.
        events: Events of the run (`RunRecord.events`).
        window: Period of the trace; its start is time 0.
    """
    named = {process.name: process for process in processes}  # of a replaced process the newest
    by_process = _by_process(span for span in spans if span.start < window.end and _end(span) > window.start)
    traced: list[dict[str, Any]] = []
    ends: dict[int, dict[str, Any]] = {}  # of pushes, by version
    pulls: list[tuple[int, dict[str, Any]]] = []
    starts = {name: named[name].start if name in named else own[0].start for name, own in by_process.items()}
    in_order = sorted(by_process, key=lambda name: (name != "controller", starts[name]))
    for number, name in enumerate(in_order, start=1):
        own = by_process[name]
        process = named.get(name)
        title = name if process is None else f"{name} (pid {process.pid} on {process.host})"
        traced += [_meta("process_name", number, {"name": title}), _meta("process_sort_index", number, {"sort_index": number})]
        for lane, (lane_name, lane_spans) in enumerate(lanes_of(own), start=1):
            place = {"pid": number, "tid": lane}
            traced += [
                _meta("thread_name", number, {"name": lane_name}, lane),
                _meta("thread_sort_index", number, {"sort_index": lane}, lane),
            ]
            for span in lane_spans:
                traced.append(_complete(span, place, window))
                if span.name.startswith("push") and span.version is not None:
                    ends[span.version] = place | {"ts": _us(span.start + 0.999 * span.seconds, window)}  # within the span
                elif span.name.startswith("pull") and span.version is not None:
                    pulls.append((span.version, place | {"ts": _us(span.start, window)}))
                elif _is_step(span):
                    traced.append(_instant(f"step {span.step}", span.start, place, window, {}))
    for event in events:
        time, kind = event.get("time"), event.get("kind")
        if isinstance(time, int | float) and window.start <= time <= window.end and kind != "drop":
            args = {key: value for key, value in event.items() if key not in {"time", "kind"}}
            traced.append(_instant(str(kind), time, {"pid": 1, "tid": 1}, window, args))
    for number, (version, pull) in enumerate(pulls, start=1):
        if version in ends:
            flow = {"name": "version", "cat": "weights", "id": number, "args": {"version": version}}
            traced += [flow | {"ph": "s"} | ends[version], flow | {"ph": "f", "bp": "e"} | pull]
    return {"traceEvents": traced, "displayTimeUnit": "ms", "otherData": {"start": window.start, "end": window.end}}


def _complete(span: Span, place: Mapping[str, int], window: Window) -> dict[str, Any]:
    more = {"step": span.step, "version": span.version}
    args = {"busy_s": span.busy_s, "count": span.count} | {key: value for key, value in more.items() if value is not None}
    times = {"ts": _us(span.start, window), "dur": round(span.seconds * 1e6, 1)}
    return {"name": span.name, "cat": span.kind, "ph": "X", "cname": _COLOURS[span.kind], **times, **place, "args": args}


def _instant(name: str, time: float, place: Mapping[str, int], window: Window, args: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "cat": "mark", "ph": "i", "s": "g", "ts": _us(time, window), **place, "args": dict(args)}


def _meta(name: str, pid: int, args: Mapping[str, Any], tid: int = 0) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": dict(args)}


def _by_process(spans: Iterable[Span]) -> dict[str, list[Span]]:
    found: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        found[span.process].append(span)
    return found


def _is_step(span: Span, first: int = 0, last: int | None = None) -> bool:
    if span.process != "controller" or span.name != "step" or span.step is None:
        return False
    return span.step >= first and (last is None or span.step <= last)


def _us(time: float, window: Window) -> float:
    return round((time - window.start) * 1e6, 1)


def _end(span: Span) -> float:
    return span.start + span.seconds
