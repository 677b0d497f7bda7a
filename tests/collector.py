"""A collector of OTLP over HTTP, which decodes requests with OpenTelemetry's own classes."""

import gzip
import threading
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Exported(NamedTuple):
    """A decoded span."""

    name: str
    trace: bytes
    id: bytes
    parent: bytes
    start: float
    """Start in Unix seconds."""
    seconds: float
    kind: int
    attributes: dict[str, Any]
    resource: dict[str, Any]
    events: list[tuple[str, float]]


class Point(NamedTuple):
    """A decoded value of a metric."""

    name: str
    time: float
    value: float
    attributes: dict[str, Any]
    is_counter: bool


def values_of(attributes: Iterable[Any]) -> dict[str, Any]:
    """Return attributes as plain values."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


def spans_in(request: ExportTraceServiceRequest) -> list[Exported]:
    """Return the spans of a request."""
    return [
        Exported(
            span.name,
            span.trace_id,
            span.span_id,
            span.parent_span_id,
            span.start_time_unix_nano / 1e9,
            (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
            span.kind,
            values_of(span.attributes),
            values_of(group.resource.attributes),
            [(event.name, event.time_unix_nano / 1e9) for event in span.events],
        )
        for group in request.resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    ]


def points_in(request: ExportMetricsServiceRequest) -> list[Point]:
    """Return the values of a request."""
    found = []
    for group in request.resource_metrics:
        for metric in (metric for scope in group.scope_metrics for metric in scope.metrics):
            is_counter = metric.WhichOneof("data") == "sum"
            assert not is_counter or metric.sum.is_monotonic
            for point in (metric.sum if is_counter else metric.gauge).data_points:
                found.append(
                    Point(metric.name, point.time_unix_nano / 1e9, point.as_double, values_of(point.attributes), is_counter)
                )
    return found


class Collector:
    """A collector on loopback. It keeps what it received, or refuses everything with `status`."""

    def __init__(self, status: int = 200) -> None:
        """Listen at a free port."""
        self.spans: list[Exported] = []
        self.points: list[Point] = []
        self.headers: list[dict[str, str]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                if status == 200:
                    assert self.headers["content-type"] == "application/x-protobuf"
                    collector.headers.append({name.lower(): value for name, value in self.headers.items()})
                    if self.path == "/v1/traces":
                        collector.spans += spans_in(ExportTraceServiceRequest.FromString(body))
                    elif self.path == "/v1/metrics":
                        collector.points += points_in(ExportMetricsServiceRequest.FromString(body))
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
