"""Sends the recorded spans, metrics and events of a run to OpenTelemetry, as OTLP over HTTP or to a file.

A thread of the controller follows the files of the run, so processes are not instrumented twice, and what is sent is what was
recorded. docs/howto/telemetry.md lists names and attributes.

Each step is a trace: a span belongs to the first step, or start of the processes, that ends after the span began.
"""

import base64
import hashlib
import json
import math
import re
import threading
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

from titanrl.carriers.record import BATCH_S, parts_of
from titanrl.metrics.reading import Followed, Span, span_of

INTERVAL_S = 5.0
"""Seconds between two exports."""
LATE_S = 4 * BATCH_S
"""Seconds after which every span that has ended is in its file."""
TIMEOUT_S = 5.0
"""Time limit of a request, with its repetitions, in seconds."""
CLOSE_S = 20.0
"""Time limit for the last export, in seconds."""
MAX_SPANS = 2000
"""Spans of one request."""
SCOPE = InstrumentationScope("titanrl")
_HEAD = frozenset({"step", "version", "time"})
_GROUPS: Mapping[str, str] = {"phase": "phase", "work": "work", "wait": "wait", "serve": "request"}


class Placed(NamedTuple):
    """A span in its trace."""

    span: Span
    trace: int
    """Number of the trace, from 0."""
    is_root: bool


class Traces:
    """Assigns spans to traces. Spans may arrive in any order, if each arrives before `take` is called with a later time."""

    def __init__(self, since: float) -> None:
        """Leave out the spans that ended before a time."""
        self._since = since
        self._ends: list[float] = []  # of the roots
        self._pending: list[Span] = []
        self._roots: dict[int, Span] = {}  # that were not returned yet
        self._oldest, self._newest = math.inf, since  # start of the first span, end of the last one
        self._last = -1  # trace of the newest span that was returned

    def add(self, span: Span) -> None:
        """Add a span."""
        if span.start + span.seconds < self._since:
            return
        self._oldest, self._newest = min(self._oldest, span.start), max(self._newest, span.start + span.seconds)
        if span.process == "controller" and span.kind == "phase" and span.name in {"step", "start the processes"}:
            self._roots[len(self._ends)] = span
            self._ends.append(max(span.start + span.seconds, self._ends[-1] if self._ends else 0.0))
        else:
            self._pending.append(span)

    def take(self, until: float = math.inf) -> list[Placed]:
        """Return the spans that started before a time. With infinity, also the root of the spans after the last step."""
        placed = [Placed(span, number, True) for number, span in self._roots.items()]
        self._roots.clear()
        later = []
        for span in self._pending:
            if span.start < until:
                placed.append(Placed(span, bisect_right(self._ends, span.start), False))
            else:
                later.append(span)
        self._pending = later
        self._last = max([self._last, *(each.trace for each in placed)])
        last = len(self._ends)
        if until == math.inf and self._last == last:
            start = self._ends[-1] if self._ends else self._oldest
            seconds = max(0.0, self._newest - start)
            end = Span(process="controller", name="finish", kind="phase", start=start, seconds=seconds, busy_s=seconds, count=1)
            placed.append(Placed(end, last, True))
        return placed

    def window(self, trace: int) -> tuple[float, float]:
        """Return the times between which a trace's spans and events begin."""
        ends = [-math.inf, *self._ends[max(0, trace - 1) : trace + 1], math.inf]
        return (ends[1], ends[2]) if trace else (ends[0], ends[1])


class HttpSink:
    """A collector that takes OTLP over HTTP. The variables `OTEL_EXPORTER_OTLP_*` add headers and certificates."""

    def __init__(self, url: str) -> None:
        base = url.rstrip("/")
        self._spans = OTLPSpanExporter(endpoint=f"{base}/v1/traces", timeout=TIMEOUT_S)
        self._metrics = OTLPMetricExporter(endpoint=f"{base}/v1/metrics", timeout=TIMEOUT_S)

    def spans(self, spans: Sequence[ReadableSpan]) -> bool:
        """Send spans; return False if they were not delivered."""
        return self._spans.export(spans) is SpanExportResult.SUCCESS

    def metrics(self, metrics: MetricsData) -> bool:
        """Send metrics; return False if they were not delivered."""
        return self._metrics.export(metrics) is MetricExportResult.SUCCESS

    def close(self) -> None:
        """End the connections."""
        self._spans.shutdown()
        self._metrics.shutdown()


class FileSink:
    """A file with one request per line, as OpenTelemetry's OTLP file exporter writes them."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def spans(self, spans: Sequence[ReadableSpan]) -> bool:
        """Write spans."""
        return self._write(encode_spans(spans))

    def metrics(self, metrics: MetricsData) -> bool:
        """Write metrics."""
        return self._write(encode_metrics(metrics))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, request: Any) -> bool:
        line = _with_hexadecimal_ids(MessageToDict(request, use_integers_for_enums=True))
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._file.flush()
        return True


Sink = HttpSink | FileSink
"""Destination of spans and metrics."""


def _keep() -> None:
    """Forget nothing when a file is replaced: what was sent stays sent."""


class Exporter:
    """The thread that follows the files of a run and exports what was appended."""

    def __init__(self, run_dir: Path, sink: Sink, *, since: float, warn: Callable[[str], None]) -> None:
        """Start the thread. Lines from before a time are of an earlier process of the run, and are left out."""
        self._run_dir, self._sink, self._since, self._warn = run_dir, sink, since, warn
        self._traces = Traces(since)
        self._spans: dict[Path, Followed] = {}  # by part
        self._resources: dict[str, Resource] = {}  # by process
        self._rows, self._lines = Followed(run_dir / "metrics.jsonl"), Followed(run_dir / "events.jsonl")
        self._newest_row = self._newest_event = since
        self._events: list[Mapping[str, Any]] = []  # that no root has yet
        self._num_events: Counter[str] = Counter()
        self._num_spans = self._num_lost = 0
        self._due, self._done, self._closing = threading.Event(), threading.Event(), threading.Event()
        self._is_late = True  # spans that have ended may still be missing in their files
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
        self._thread.start()

    def flush(self) -> None:
        """Export what is recorded, within `CLOSE_S`. Call this when the other processes have ended."""
        self._is_late = False
        self._done.clear()
        self._due.set()
        self._done.wait(CLOSE_S)

    def close(self) -> None:
        """Export the rest, within `CLOSE_S`. A second call does nothing."""
        self._closing.set()
        self._due.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        is_closing = False
        try:
            while not is_closing:
                self._due.wait(INTERVAL_S)
                self._due.clear()
                is_closing = self._closing.is_set()
                self._export(math.inf if is_closing else time.time() - LATE_S * self._is_late)
                self._done.set()
            self._sink.close()
        except Exception as error:  # edge of the program: telemetry must not end the run
            self._warn(f"logging.otlp_endpoint: nothing more is exported ({type(error).__name__}: {error})")
            self._done.set()
        if self._num_lost > 1:
            self._warn(f"logging.otlp_endpoint: {self._num_lost} requests were not delivered")

    def _export(self, until: float) -> None:
        newest = self._newest_event
        for event in self._lines.objects(_keep):
            moment, kind = event.get("time"), event.get("kind")
            if isinstance(moment, int | float) and isinstance(kind, str) and moment > newest:
                self._newest_event = max(self._newest_event, moment)
                self._num_events[kind] += 1
                self._events.append(event)
        for part in parts_of(self._run_dir, "spans"):
            for line in self._spans.setdefault(part.path, Followed(part.path)).objects(_keep):
                if "format" in line:
                    self._resources[part.process] = self._described(part.process, line)
                elif (span := span_of(part.process, line)) is not None:
                    self._traces.add(span)
        placed = self._traces.take(until)
        for start in range(0, len(placed), MAX_SPANS):
            self._count(self._sink.spans([self._span(each) for each in placed[start : start + MAX_SPANS]]))
        if metrics := list(self._metrics()):
            scope = ScopeMetrics(SCOPE, metrics, "")
            self._count(self._sink.metrics(MetricsData([ResourceMetrics(self._resource("controller"), [scope], "")])))

    def _count(self, is_delivered: bool) -> None:
        if not is_delivered:
            self._num_lost += 1
            if self._num_lost == 1:
                self._warn("logging.otlp_endpoint: a request was not delivered; the log of the controller names the error")

    def _metrics(self) -> Iterator[Metric]:
        """Return the metrics of the rows that were appended, and the number of events so far."""
        points: dict[str, list[NumberDataPoint]] = defaultdict(list)
        newest = self._newest_row
        for row in self._rows.objects(_keep):
            moment = row.get("time")
            if not isinstance(moment, int | float) or moment <= newest:  # repeated, because a restart replaced the file
                continue
            self._newest_row = max(self._newest_row, moment)
            values = {name: value for name, value in row.items() if name not in _HEAD} | {"step": row.get("step")}
            for name, value in values.items():
                if isinstance(value, int | float) and math.isfinite(value):
                    points[name].append(self._point(float(value), moment))
        for name, own in points.items():
            is_count = name.startswith("count/")
            yield Metric(f"rl.{name.replace('/', '.')}", "", "", _sum(own) if is_count else Gauge(own))
        if points and self._num_events:
            now, counts = time.time(), sorted(self._num_events.items())
            yield Metric("rl.events", "", "", _sum(self._point(float(num), now, {"rl.event": kind}) for kind, num in counts))

    def _point(self, value: float, moment: float, attributes: Mapping[str, str] | None = None) -> NumberDataPoint:
        return NumberDataPoint(attributes or {}, _nanoseconds(self._since), _nanoseconds(moment), value)

    def _span(self, placed: Placed) -> ReadableSpan:
        span, root = placed.span, self._id(f"root {placed.trace}", 8)
        self._num_spans += 1
        own = root if placed.is_root else self._id(f"span {self._num_spans}", 8)
        trace = self._id(f"trace {placed.trace}", 16)
        optional = {"rl.step": span.step, "rl.version": span.version}
        is_call = span.process == "controller" and span.name.startswith("wait for ")
        name = re.sub(r"[^\w.]+", "_", span.name.removeprefix("wait for "))
        attributes: dict[str, str | int | float] = {
            "rl.process": span.process,
            "rl.kind": span.kind,
            "rl.busy_seconds": span.busy_s,
            "rl.count": span.count,
            **{key: value for key, value in optional.items() if value is not None},
        }
        return ReadableSpan(
            name=f"rl.{name}" if placed.is_root else f"rl.{_GROUPS[span.kind]}.{name}",
            context=_context(trace, own),
            parent=None if placed.is_root else _context(trace, root),
            resource=self._resource(span.process),
            attributes=attributes,
            events=self._events_of(placed.trace) if placed.is_root else (),
            kind=SpanKind.SERVER if span.kind == "serve" else SpanKind.CLIENT if is_call else SpanKind.INTERNAL,
            start_time=_nanoseconds(span.start),
            end_time=_nanoseconds(span.start + span.seconds),
            instrumentation_scope=SCOPE,
        )

    def _events_of(self, trace: int) -> list[Event]:
        start, end = self._traces.window(trace)
        own = [event for event in self._events if start < event["time"] <= end]
        self._events = [event for event in self._events if event not in own]
        found = []
        for event in own:
            fields = {f"rl.{key}": value for key, value in event.items() if key not in {"time", "kind"} and value is not None}
            attributes = {  # lists and mappings as JSON
                key: value if isinstance(value, str | int | float) else json.dumps(value) for key, value in fields.items()
            }
            found.append(Event(f"rl.{event['kind']}", attributes, _nanoseconds(event["time"])))
        return found

    def _id(self, name: str, size: int) -> int:
        """Return an id of this run and start that no other one has."""
        key = f"{self._run_dir} {self._since} {name}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=size).digest()) or 1

    def _resource(self, process: str) -> Resource:
        return self._resources.get(process) or self._described(process, {})

    def _described(self, process: str, head: Mapping[str, Any]) -> Resource:
        """Return the attributes of a process, of which the first line of its part has some."""
        found = {"host.name": head.get("host"), "process.pid": head.get("pid")}
        return Resource(
            {
                "service.name": "titanrl",
                "service.instance.id": f"{self._run_dir.name}/{process}",
                "rl.run": self._run_dir.name,
                "rl.process": process,
                **{key: value for key, value in found.items() if isinstance(value, str | int)},
            }
        )


def _context(trace: int, span: int) -> SpanContext:
    return SpanContext(trace, span, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _sum(points: Iterable[NumberDataPoint]) -> Sum:
    return Sum(list(points), AggregationTemporality.CUMULATIVE, is_monotonic=True)


def _nanoseconds(moment: float) -> int:
    return round(moment * 1e9)


def _with_hexadecimal_ids(value: Any) -> Any:
    """Return a message with its ids in hexadecimal, as OTLP's JSON has them; protobuf's has base64."""
    if isinstance(value, list):
        return [_with_hexadecimal_ids(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: base64.b64decode(item).hex() if key in {"traceId", "spanId", "parentSpanId"} else _with_hexadecimal_ids(item)
        for key, item in value.items()
    }
