"""The timeline of a run: states, shares, lanes, the trace that Perfetto opens, and the command."""

import json
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest

from tests.recorded import record
from titanrl.carriers.record import SpanKind
from titanrl.commands.runs import steps, timeline
from titanrl.metrics.reading import RecordedProcess, RunRecord, Span
from titanrl.metrics.timeline import State, Window, lanes_of, states_of, trace_of, usage_of, usages, window_of

# The trace event format (docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU), for the phases written here.
_NUMBER, _ID = {"type": "number", "minimum": 0}, {"type": "integer", "minimum": 0}
_COMMON = {"name": {"type": "string", "minLength": 1}, "pid": _ID, "tid": _ID, "args": {"type": "object"}}
_TIMED = {**_COMMON, "cat": {"type": "string", "minLength": 1}, "ts": {"type": "number"}}


def _event(phase: str, required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": ["ph", "name", "pid", "tid", *required],
        "properties": {"ph": {"const": phase}, **properties},
    }


_NAMES = {"enum": ["process_name", "process_labels", "process_sort_index", "thread_name", "thread_sort_index"]}
SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "otherData": {"type": "object"},
        "traceEvents": {
            "type": "array",
            "items": {
                "oneOf": [
                    _event("X", ["cat", "ts", "dur"], **_TIMED, dur=_NUMBER, cname={"type": "string"}),
                    _event("i", ["ts", "s"], **_TIMED, s={"enum": ["g", "p", "t"]}),
                    _event("s", ["cat", "ts", "id"], **_TIMED, id=_ID),
                    _event("f", ["cat", "ts", "id", "bp"], **_TIMED, id=_ID, bp={"const": "e"}),
                    _event("M", ["args"], **{**_COMMON, "name": _NAMES}),
                ]
            },
        },
    },
}


def span(name: str, kind: SpanKind, start: float, end: float, process: str = "trainer_0", **more: Any) -> Span:
    return Span(process=process, name=name, kind=kind, start=start, seconds=end - start, busy_s=end - start, count=1, **more)


def process(name: str, start: float, end: float) -> RecordedProcess:
    return RecordedProcess(name=name, pid=7, host="here", start=start, end=end)


TRAINER = (
    span("PolicyTrainer.forward_backward", "serve", 1.0, 6.0),
    span("wait for rollouts", "wait", 1.0, 3.0),
    span("compute", "work", 2.0, 5.0),
    span("idle", "wait", 6.0, 9.0),
)


def test_work_decides_before_waits_and_waits_before_requests() -> None:
    assert states_of(TRAINER, Window(0.0, 10.0)) == [
        State(0.0, 1.0, "unknown", ""),
        State(1.0, 2.0, "wait", "wait for rollouts"),
        State(2.0, 5.0, "busy", "compute"),
        State(5.0, 6.0, "busy", "PolicyTrainer.forward_backward"),
        State(6.0, 9.0, "wait", "idle"),
        State(9.0, 10.0, "unknown", ""),
    ]


def test_of_several_waits_the_one_that_started_last_decides() -> None:
    spans = [span("watch for failures", "wait", 0.0, 9.0), span("wait for groups", "wait", 2.0, 3.0)]
    assert [(state.name, state.seconds) for state in states_of(spans, Window(1.0, 5.0))] == [
        ("watch for failures", 1.0),
        ("wait for groups", 1.0),
        ("watch for failures", 2.0),
    ]


def test_shares_of_a_process_add_up_to_one() -> None:
    usage = usage_of("trainer_0", states_of(TRAINER, Window(0.0, 10.0)))
    assert (usage.seconds, usage.busy, usage.unknown) == pytest.approx((10.0, 0.4, 0.2))
    assert usage.waiting == {"idle": pytest.approx(0.3), "wait for rollouts": pytest.approx(0.1)}
    assert list(usage.waiting) == ["idle", "wait for rollouts"]
    assert usage.busy + usage.unknown + sum(usage.waiting.values()) == pytest.approx(1.0)


def test_time_between_a_process_and_its_replacement_does_not_count() -> None:
    lives = [process("trainer_0", 1.0, 3.0), process("trainer_0", 6.0, 9.0)]
    (usage,) = usages(lives, TRAINER, Window(0.0, 20.0))
    assert (usage.seconds, usage.busy, usage.unknown) == pytest.approx((5.0, 0.2, 0.0))
    assert usages(lives, TRAINER, Window(3.5, 5.0)) == []


def test_gaps_of_rounding_are_not_a_state() -> None:
    spans = [span("compute", "work", 0.0, 1.0), span("push", "work", 1.000001, 2.0)]
    assert [state.name for state in states_of(spans, Window(0.0, 2.0))] == ["compute", "push"]


def test_window_of_a_repeated_step_is_that_of_its_last_attempt() -> None:
    found = [
        span("step", "phase", start, start + 1, "controller", step=step) for start, step in ((1, 1), (2, 2), (8, 2), (9, 3))
    ]
    assert window_of(found, 2, 2) == (8.0, 9.0)
    assert window_of(found, None, 1) == (1.0, 2.0)
    assert window_of(found, 3) == (9.0, 10.0)
    assert window_of([*found, *TRAINER]) == (1.0, 10.0)
    with pytest.raises(ValueError, match="no step from 4 to the end is recorded"):
        window_of(found, 4)


def test_spans_of_a_lane_follow_or_contain_each_other() -> None:
    spans = [
        span("a", "wait", 0.0, 4.0),
        span("inside a", "wait", 1.0, 2.0),
        span("across the end of a", "wait", 3.0, 6.0),
        span("after all", "wait", 6.0, 7.0),
        span("step", "phase", 0.0, 9.0),
    ]
    lanes = [(lane.name, [each.name for each in lane.spans]) for lane in lanes_of(spans)]
    assert lanes == [
        ("phases", ["step"]),
        ("waits", ["a", "inside a", "after all"]),
        ("waits 2", ["across the end of a"]),
    ]


def traced() -> dict[str, Any]:
    spans = [
        *TRAINER,
        span("push", "work", 5.0, 5.5, version=3),
        span("pull", "work", 5.6, 5.9, "generator_0_0", version=3),
        span("step", "phase", 0.5, 9.0, "controller", step=4),
    ]
    processes = [process("trainer_0", 0.0, 10.0), process("generator_0_0", 0.0, 10.0), process("controller", 0.0, 10.0)]
    events = [{"time": 5.0, "kind": "checkpoint", "step": 4}, {"time": 99.0, "kind": "end"}, {"kind": "damaged"}]
    return trace_of(processes, spans, events, window=Window(0.5, 10.0))


def test_trace_has_tracks_named_waits_steps_events_and_arrows() -> None:
    trace = traced()
    jsonschema.validate(trace, SCHEMA)
    events = trace["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["controller (pid 7 on here)", "trainer_0 (pid 7 on here)", "generator_0_0 (pid 7 on here)"]
    (wait,) = (event for event in events if event["name"] == "wait for rollouts")
    assert (wait["ph"], wait["cat"], wait["ts"], wait["dur"]) == ("X", "wait", 0.5e6, 2e6)
    assert {event["name"] for event in events if event["ph"] == "i"} == {"step 4", "checkpoint"}
    start, end = (event for event in events if event["ph"] in "sf")
    assert (start["pid"], end["pid"]) == (2, 3)
    assert start["id"] == end["id"]
    for arrow, name in ((start, "push"), (end, "pull")):
        (its,) = (event for event in events if event["name"] == name)
        assert its["ts"] <= arrow["ts"] <= its["ts"] + its["dur"]
        assert (its["pid"], its["tid"]) == (arrow["pid"], arrow["tid"])


def test_schema_refuses_other_traces() -> None:
    for changes in ({"ph": "Q"}, {"ts": "0"}, {"dur": -1.0}, {"pid": None}, {"colour": "red"}):
        trace = traced()
        index = next(n for n, event in enumerate(trace["traceEvents"]) if event["ph"] == "X")
        trace["traceEvents"][index] |= changes
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(trace, SCHEMA)


def test_damaged_spans_are_read_as_work_without_duration(tmp_path: Path) -> None:
    record(tmp_path, "spans", {"name": "x", "kind": "sleep", "start": 1.0, "seconds": -5}, {"name": "y", "seconds": 1e300})
    (tmp_path / "config.yaml").write_text("")
    run = RunRecord(tmp_path)
    assert [(span.name, span.kind, span.seconds) for span in run.spans()] == [("y", "work", 0.0), ("x", "work", 0.0)]
    assert {span.kind for span in run.spans()} <= set(get_args(SpanKind))
    jsonschema.validate(trace_of(run.processes(), run.spans(), window=window_of(run.spans())), SCHEMA)


@pytest.mark.parametrize(
    ("text", "expected"), [("3:5", (3, 5)), ("3:", (3, None)), (":5", (None, 5)), ("3", (3, 3)), ("0:0", (0, 0))]
)
def test_steps_have_two_limits(text: str, expected: tuple[int | None, int | None]) -> None:
    assert steps(text) == expected


def write_run(folder: Path) -> None:
    lines = [{"name": s.name, "kind": s.kind, "start": s.start, "seconds": s.seconds} for s in TRAINER]
    record(folder, "spans", *lines, process="trainer_0")
    step = {"name": "step", "kind": "phase", "start": 2.0, "seconds": 4.0, "step": 1}
    record(folder, "spans", step, process="controller")
    (folder / "config.yaml").write_text("")


def test_command_prints_who_waits_and_writes_the_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    timeline([str(tmp_path), "--steps", "1", "--output", str(tmp_path / "trace.json")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"# 4.0 s of {tmp_path}"
    assert lines[2].split() == ["trainer_0", "4.0", "100.0%"]
    timeline([str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[2:6]] == [
        ["trainer_0", "8.0", "50.0%", "37.5%", "idle"],
        ["12.5%", "rollouts"],
        ["controller", "4.0", "100.0%"],
        [],
    ]
    trace = json.loads((tmp_path / "trace.json").read_text())
    jsonschema.validate(trace, SCHEMA)
    (tmp_path / "events.jsonl").unlink(missing_ok=True)
    (tmp_path / "events.jsonl").mkdir()
    with pytest.raises(SystemExit, match=r"^2$"):
        timeline([str(tmp_path), "--output", str(tmp_path / "trace.json")])
    assert capsys.readouterr().err == f"{tmp_path}/events.jsonl: not a regular file. Correct the path or its permissions.\n"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--steps", "9:"], "no step from 9 to the end is recorded"),
        (["--steps", "x"], "write A:B, such as 10:20, or one number"),
        (["--steps", "5:4"], "the last step must not be before the first one"),
        (["--output", "/nowhere/trace.json"], "cannot be written"),
    ],
)
def test_command_refuses(arguments: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    with pytest.raises(SystemExit):
        timeline([str(tmp_path), *arguments])
    assert error in capsys.readouterr().err
