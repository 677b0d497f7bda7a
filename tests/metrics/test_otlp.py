"""Spans, metrics and events as OpenTelemetry's own classes decode them, from a collector of this test and from a file."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.collector import Collector, Exported, points_in, spans_in
from tests.metrics.test_timeline import span
from tests.recorded import record
from titanrl.base.files import replace_text
from titanrl.metrics import otlp
from titanrl.metrics.otlp import Exporter, FileSink, HttpSink, Sink, Traces

SERVER, CLIENT = 2, 3


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def line(name: str, kind: str, start: float, end: float, **more: Any) -> dict[str, Any]:
    return {"name": name, "kind": kind, "start": start, "seconds": end - start, "busy_s": end - start, "count": 1, **more}


CONTROLLER = (
    line("prepare the run", "phase", 100.0, 101.0),
    line("start the processes", "phase", 101.0, 105.0),
    line("step", "phase", 105.0, 108.0, step=1),
    line("wait for trainer.optim_step", "wait", 106.0, 107.0),
    line("evaluate", "phase", 108.5, 109.0),
    line("step", "phase", 109.0, 112.0, step=2),
    line("export", "phase", 112.5, 113.0),
)
TRAINER = (
    line("idle", "wait", 102.0, 106.0),
    line("PolicyTrainer.optim_step", "serve", 106.0, 107.0),
    line("push", "work", 107.5, 108.5, version=1),
)
ROWS = [
    {"step": 1, "version": 1, "time": 107.9, "reward/mean": 0.25, "count/rollouts": 64},
    {"step": 2, "version": 2, "time": 111.9, "reward/mean": 0.5, "count/rollouts": 128, "grad/norm": None},
]
EVENTS = [
    {"time": 100.5, "kind": "start", "step": 0},
    {"time": 107.0, "kind": "fault", "cause": "rollout_0_0 died", "ranks": [1, 2]},
    {"time": 107.0, "kind": "respawn"},  # at the same time as another one
    {"time": 110.0, "kind": "checkpoint", "step": 1},
]


def write_run(folder: Path) -> None:
    record(folder, "spans", *CONTROLLER, process="controller")
    record(folder, "spans", *TRAINER, process="trainer_0")
    (folder / "metrics.jsonl").write_text(lines(ROWS))
    (folder / "events.jsonl").write_text(lines(EVENTS))


def export(run_dir: Path, sink: Sink, since: float = 50.0) -> list[str]:
    """Export all files of a run; return the warnings."""
    warnings: list[str] = []
    Exporter(run_dir, sink, since=since, warn=warnings.append).close()
    return warnings


def check_spans(spans: list[Exported]) -> None:
    roots = [span for span in spans if not span.parent]
    assert [span.name for span in roots] == ["rl.start_the_processes", "rl.step", "rl.step", "rl.finish"]
    assert len({span.id for span in spans}) == len(spans) == 11
    assert len({span.trace for span in roots}) == 4
    by_root = {
        root.id: sorted(span.name for span in spans if (span.trace, span.parent) == (root.trace, root.id)) for root in roots
    }
    assert list(by_root.values()) == [
        ["rl.phase.prepare_the_run", "rl.wait.idle"],
        ["rl.request.PolicyTrainer.optim_step", "rl.wait.trainer.optim_step", "rl.work.push"],
        ["rl.phase.evaluate"],
        ["rl.phase.export"],
    ]
    assert [root.attributes.get("rl.step") for root in roots] == [None, 1, 2, None]
    (push,) = (span for span in spans if span.name == "rl.work.push")
    assert push.attributes == {
        "rl.process": "trainer_0",
        "rl.kind": "work",
        "rl.version": 1,
        "rl.busy_seconds": 1.0,
        "rl.count": 1,
    }
    assert (push.start, push.seconds) == pytest.approx((107.5, 1.0))
    assert push.resource["service.name"] == "titanrl"
    assert (push.resource["rl.process"], push.resource["process.pid"] > 0) == ("trainer_0", True)
    kinds = {span.name: span.kind for span in spans}
    assert kinds["rl.request.PolicyTrainer.optim_step"] == SERVER
    assert kinds["rl.wait.trainer.optim_step"] == CLIENT
    of_step = [("rl.fault", 107.0), ("rl.respawn", 107.0)]
    assert [root.events for root in roots] == [[("rl.start", 100.5)], of_step, [("rl.checkpoint", 110.0)], []]


def test_collector_receives_a_trace_per_step(tmp_path: Path, collector: Collector) -> None:
    write_run(tmp_path)
    assert export(tmp_path, HttpSink(collector.url)) == []
    check_spans(collector.spans)


def test_collector_receives_every_value_once(tmp_path: Path, collector: Collector) -> None:
    write_run(tmp_path)
    assert export(tmp_path, HttpSink(collector.url + "/")) == []
    found = {(point.name, point.time): point.value for point in collector.points if point.name != "rl.events"}
    assert found == {
        ("rl.step", 107.9): 1.0,
        ("rl.step", 111.9): 2.0,
        ("rl.reward.mean", 107.9): 0.25,
        ("rl.reward.mean", 111.9): 0.5,
        ("rl.count.rollouts", 107.9): 64.0,
        ("rl.count.rollouts", 111.9): 128.0,
    }
    assert {point.name for point in collector.points if point.is_counter} == {"rl.count.rollouts", "rl.events"}
    events = {point.attributes["rl.event"]: point.value for point in collector.points if point.name == "rl.events"}
    assert events == {"start": 1.0, "fault": 1.0, "respawn": 1.0, "checkpoint": 1.0}


def test_file_has_the_same_requests(tmp_path: Path) -> None:
    write_run(tmp_path)
    path = tmp_path / "folder" / "otlp.jsonl"
    assert export(tmp_path, FileSink(path)) == []
    requests = [json.loads(text) for text in path.read_text().splitlines()]
    (spans,) = (request for request in requests if "resourceSpans" in request)
    (metrics,) = (request for request in requests if "resourceMetrics" in request)
    for each in (each for group in spans["resourceSpans"] for scope in group["scopeSpans"] for each in scope["spans"]):
        assert (len(bytes.fromhex(each["traceId"])), len(bytes.fromhex(each["spanId"]))) == (16, 8)
        for key in ("traceId", "spanId", "parentSpanId"):  # protobuf reads base64
            if key in each:
                each[key] = otlp.base64.b64encode(bytes.fromhex(each[key])).decode()
    check_spans(spans_in(ParseDict(spans, ExportTraceServiceRequest())))
    assert len(points_in(ParseDict(metrics, ExportMetricsServiceRequest()))) == 10


def test_resumed_run_exports_only_what_is_new(tmp_path: Path, collector: Collector) -> None:
    write_run(tmp_path)
    export(tmp_path, HttpSink(collector.url), since=109.0)
    assert [span.name for span in collector.spans] == ["rl.step", "rl.phase.evaluate", "rl.phase.export", "rl.finish"]
    assert {(point.name, point.value) for point in collector.points} == {
        ("rl.step", 2.0),
        ("rl.reward.mean", 0.5),
        ("rl.count.rollouts", 128.0),
        ("rl.events", 1.0),
    }


def test_lines_are_exported_while_the_run_writes_them(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "INTERVAL_S", 0.02)
    exporter = Exporter(tmp_path, HttpSink(collector.url), since=50.0, warn=pytest.fail)
    write_run(tmp_path)
    received = threading.Event()
    for _ in range(3000):
        if len(collector.spans) >= 10 and len(collector.points) >= 10:
            break
        received.wait(0.02)
    replace_text(tmp_path / "metrics.jsonl", lines(ROWS[:1]))  # a restart from a checkpoint
    again = {"step": 2, "version": 2, "time": 120.0, "reward/mean": 0.75}
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(lines([again]))
    exporter.close()
    exporter.close()
    check_spans(collector.spans)
    rewards = [(point.time, point.value) for point in collector.points if point.name == "rl.reward.mean"]
    assert rewards == [(107.9, 0.25), (111.9, 0.5), (120.0, 0.75)]


def test_span_waits_until_the_end_of_its_step_is_known() -> None:
    traces = Traces(0.0)
    traces.add(span("decode", "work", 1.0, 2.0, "generator_0_0"))
    traces.add(span("decode", "work", 6.0, 7.0, "generator_0_0"))
    assert [placed.span.start for placed in traces.take(5.0)] == [1.0]
    traces.add(span("step", "phase", 0.5, 4.0, "controller", step=1))
    assert [(placed.trace, placed.is_root) for placed in traces.take(9.0)] == [(0, True), (1, False)]


def test_collector_that_refuses_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "TIMEOUT_S", 0.2)
    collector = Collector(status=400)
    write_run(tmp_path)
    warnings = export(tmp_path, HttpSink(collector.url))
    collector.close()
    assert len(warnings) == 2
    assert "a request was not delivered" in warnings[0]
    assert "2 requests were not delivered" in warnings[1]


def test_missing_collector_does_not_delay_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "TIMEOUT_S", 0.2)
    collector = Collector()
    collector.close()
    write_run(tmp_path)
    assert "a request was not delivered" in export(tmp_path, HttpSink(collector.url))[0]


def test_full_disk_ends_the_export_with_a_warning(tmp_path: Path) -> None:
    write_run(tmp_path)
    (warning,) = export(tmp_path, FileSink(Path("/dev/full")))
    assert "nothing more is exported (OSError: [Errno 28] No space left on device)" in warning


def test_headers_of_the_environment_are_sent(tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
    write_run(tmp_path)
    export(tmp_path, HttpSink(collector.url))
    assert {headers.get("x-key") for headers in collector.headers} == {"secret"}
