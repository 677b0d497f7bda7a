"""Real trackers: separate processes write a run and resume it, then the test reads the records back."""

import functools
import importlib
import importlib.util
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.metrics import custom_tracker
from tests.recorded import record
from titanrl.base.plugins import plugin_of
from titanrl.carriers.record import read_lines
from titanrl.carriers.types import EvaluationResult, StepMetrics
from titanrl.metrics.console import Console
from titanrl.metrics.reading import read_metrics
from titanrl.metrics.run_directory import RunDirectory
from titanrl.metrics.trackers import (
    SAMPLE_COLUMNS,
    MlflowTracker,
    Recorder,
    Trackers,
    WandbTracker,
    check_tracker,
    make_trackers,
)

WRITE = """
import asyncio, os, signal, sys, time
from pathlib import Path
from titanrl.metrics.trackers import make_trackers

name, run_dir, first, last, ending = sys.argv[1:]
resume_step = int(first) - 1 or None
made = []

async def start():
    config = {"seed": 0, "algorithm": {"loss": "ppo", "kl": None, "tasks": ["a", "b"]}}
    made.append(make_trackers((name,), Path(run_dir), config, warn=print, resume_step=resume_step))

async def steps():
    for step in range(int(first), int(last) + 1):
        made[0].log(step, {"reward/mean": step / 10})
        if step % 4 == 0:
            made[0].log(step, {"eval/sums/mean": step / 20})
            wrong, right = ("2 + 2 =", {"sum": 4}, "four", None, "reward_error"), ("1 + 1 =", "2", "2", 1.0, "ok")
            made[0].log_samples(step, "sums", [wrong, right])

async def main():  # start, steps and end run in separate contexts, like the asyncio tasks of a run
    await asyncio.create_task(start())
    await asyncio.create_task(steps())
    if ending == "kill":
        time.sleep(2.5)
        os.kill(os.getpid(), signal.SIGKILL)
    made[0].close()
    assert "torch" not in sys.modules, "the controller does not import it"

asyncio.run(main())
"""


def write(name: str, run_dir: Path, first: int, last: int, ending: str = "close") -> None:
    run_dir.mkdir(exist_ok=True)
    env = os.environ | {"WANDB_MODE": "offline", "TRACKIO_DIR": str(run_dir.parent / "trackio")} | mlflow_store(run_dir)
    command = [sys.executable, "-c", WRITE, name, str(run_dir), str(first), str(last), ending]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, cwd=run_dir)
    assert done.returncode == (-9 if ending == "kill" else 0), done.stderr
    assert "Traceback" not in done.stderr
    assert "will receive no more" not in done.stdout, done.stdout  # pytest would shorten it


Points = list[tuple[int, float]]


def mlflow_store(run_dir: Path) -> dict[str, str]:
    """Return the variable that makes MLflow write to files beside the run directory."""
    return {"MLFLOW_TRACKING_URI": f"sqlite:///{run_dir.parent}/mlflow.db", "PYTHONPATH": os.getcwd()}


def mlflow_run(run_dir: Path) -> Any:
    """Return MLflow's client, and its only run."""
    mlflow = importlib.import_module("mlflow")
    client = mlflow.MlflowClient(mlflow_store(run_dir)["MLFLOW_TRACKING_URI"])
    (run,) = client.search_runs([client.get_experiment_by_name("titanrl").experiment_id])
    return client, run


def mlflow_points(run_dir: Path, metric: str) -> Points:
    client, run = mlflow_run(run_dir)
    return [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, metric)]


def tensorboard_points(run_dir: Path, metric: str) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run_dir / "tensorboard"))
    accumulator.Reload()
    return [(event.step, round(event.value, 4)) for event in accumulator.Scalars(metric)]


def wandb_records(path: Path) -> Iterator[bytes]:
    """Yield the records of a `.wandb` file: LevelDB's log format after a 7-byte header."""
    data, offset, record = path.read_bytes(), 7, b""
    while offset + 7 <= len(data):
        if 32768 - offset % 32768 < 7:
            offset += 32768 - offset % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[offset : offset + 7])
        record += data[offset + 7 : offset + 7 + size]
        offset += 7 + size
        if kind in (1, 4):  # whole, or the last of several
            yield record
            record = b""


def wandb_points(run_dir: Path, metric: str) -> Points:
    from wandb.proto import wandb_internal_pb2

    points, ids = [], set()
    for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb")):
        for data in wandb_records(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            if record.WhichOneof("record_type") == "history":
                values = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
                if metric in values:
                    points.append((record.history.step.num, float(values[metric])))
    assert len(ids) == 1, "a resumed run must continue the same W&B run"
    return points


def trackio_points(run_dir: Path, metric: str) -> Points:
    code = (
        "import json, sys; from trackio.sqlite_storage import SQLiteStorage as S; "
        "runs = S.get_run_records('titanrl'); assert len(runs) == 1, runs; "
        "print(json.dumps(S.get_logs('titanrl', sys.argv[1], run_id=runs[0]['id'])))"
    )
    env = {**os.environ, "TRACKIO_DIR": str(run_dir.parent / "trackio")}
    done = subprocess.run([sys.executable, "-c", code, run_dir.name], env=env, capture_output=True, text=True, check=True)
    return [(row["step"], row[metric]) for row in json.loads(done.stdout.splitlines()[-1]) if metric in row]


POINTS = {"tensorboard": tensorboard_points, "wandb": wandb_points, "trackio": trackio_points, "mlflow": mlflow_points}
HAS_MLFLOW = importlib.util.find_spec("mlflow") is not None and importlib.util.find_spec("sqlalchemy") is not None
needs_mlflow = pytest.mark.skipif(not HAS_MLFLOW, reason="needs the packages mlflow-skinny, sqlalchemy and alembic")


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Function that returns the directory of a run of 12 steps in a tracker, which was killed and resumed."""

    @functools.cache
    def written(name: str) -> Path:
        run_dir = tmp_path_factory.mktemp(name) / "quickstart"
        write(name, run_dir, 1, 7, "kill")
        write(name, run_dir, 5, 12)  # from a checkpoint behind what was logged
        return run_dir

    return written


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio", pytest.param("mlflow", marks=needs_mlflow)])
def test_resumed_runs_have_no_gaps_and_no_duplicate_points(name: str, resumed: Callable[[str], Path]) -> None:
    run_dir = resumed(name)
    assert POINTS[name](run_dir, "reward/mean") == [(step, step / 10) for step in range(1, 13)]
    assert POINTS[name](run_dir, "eval/sums/mean") == [(4, 0.2), (8, 0.4), (12, 0.6)]


FLAT = {"seed": 0, "algorithm.loss": "ppo", "algorithm.kl": None, "algorithm.tasks": ["a", "b"]}
SAMPLES = [["2 + 2 =", '{"sum": 4}', "four", None, "reward_error"], ["1 + 1 =", "2", "2", 1.0, "ok"]]


def test_wandb_gets_a_flat_configuration_and_tables_of_samples(resumed: Callable[[str], Path]) -> None:
    from wandb.proto import wandb_internal_pb2

    run_dir = resumed("wandb")
    config, tables = {}, []
    for path in run_dir.glob("wandb/offline-run-*/*.wandb"):
        for data in wandb_records(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            found = {tuple(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            if ("samples/sums", "_type") in found:
                fields = [found["samples/sums", name] for name in ("_type", "nrows", "ncols")]
                tables.append((record.history.step.num, fields))
    assert {key: config[key] for key in FLAT} == FLAT
    assert sorted(tables) == [(step, ["table-file", 2, 5]) for step in (4, 8, 12)]
    files = list(run_dir.glob("wandb/offline-run-*/files/media/table/samples/*.table.json"))
    assert len(files) == 3
    for file in files:
        assert json.loads(file.read_text()) == {"columns": list(SAMPLE_COLUMNS), "data": SAMPLES}


def test_trackio_gets_a_flat_configuration_and_tables_of_samples(resumed: Callable[[str], Path]) -> None:
    run_dir = resumed("trackio")
    code = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as S; (run,) = S.get_run_records('titanrl'); "
        "logs = S.get_logs('titanrl', run['name'], run_id=run['id']); "
        "print(json.dumps([S.get_run_config('titanrl', run['name']), [row for row in logs if 'samples/sums' in row]]))"
    )
    env = {**os.environ, "TRACKIO_DIR": str(run_dir.parent / "trackio")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    config, rows = json.loads(done.stdout.splitlines()[-1])
    assert {key: config[key] for key in FLAT} == FLAT
    assert [row["step"] for row in rows] == [4, 8, 12]
    for table in (row["samples/sums"] for row in rows):
        assert [list(each.values()) for each in table["_value"]] == SAMPLES
        assert list(table["_value"][0]) == list(SAMPLE_COLUMNS)


@needs_mlflow
def test_mlflow_gets_a_flat_configuration_and_tables_of_samples(tmp_path: Path) -> None:
    run_dir = tmp_path / "quickstart"
    write("mlflow", run_dir, 1, 4)
    client, run = mlflow_run(run_dir)
    assert (run.info.run_name, run.info.status) == ("quickstart", "FINISHED")
    assert run.data.params == {
        "seed": "0",
        "algorithm.loss": "ppo",
        "algorithm.kl": "None",
        "algorithm.tasks": '["a", "b"]',
    }
    (folder,) = client.list_artifacts(run.info.run_id, "samples")
    (file,) = client.list_artifacts(run.info.run_id, folder.path)
    assert (folder.path, file.path) == ("samples/sums", "samples/sums/4.json")
    text = (run_dir / run.info.artifact_uri / file.path).read_text()
    assert json.loads(text) == {"columns": list(SAMPLE_COLUMNS), "data": SAMPLES}


@needs_mlflow
def test_slow_mlflow_server_delays_nothing_and_a_resume_sends_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "quickstart"
    monkeypatch.setattr("titanrl.metrics.trackers.CLOSE_S", 0.1)
    for key, value in mlflow_store(run_dir).items():
        monkeypatch.setenv(key, value)
    mlflow = importlib.import_module("mlflow")
    mlflow.set_tracking_uri(mlflow_store(run_dir)["MLFLOW_TRACKING_URI"])
    may_answer, is_asked, log_batch = threading.Event(), threading.Event(), mlflow.MlflowClient.log_batch
    directory = RunDirectory(run_dir)

    def wait_and_log(*arguments: Any, metrics: Sequence[Any] = (), **options: Any) -> None:
        if metrics and metrics[0].step == 2:
            is_asked.set()
            assert may_answer.wait(60)
            raise ConnectionError("the process was killed")
        log_batch(*arguments, metrics=metrics, **options)

    def step(tracker: MlflowTracker, number: int, **values: float) -> None:
        directory.log(StepMetrics(step=number, version=number, values=values))
        tracker.log(number, values)

    with monkeypatch.context() as patch:
        patch.setattr(mlflow.MlflowClient, "log_batch", wait_and_log)
        killed = MlflowTracker(run_dir, {}, None)
        for number in (1, 2, 3):
            step(killed, number, reward=number / 10)
        step(killed, 3, evaluation=0.5)
        assert is_asked.wait(60)
        with pytest.raises(TimeoutError, match=r"the server did not take 4 requests within 0.1 s"):
            killed.close()
        may_answer.set()
        killed._thread.join(60)
    with pytest.raises(ConnectionError):
        killed.log(4, {"reward": 0.4})
    monkeypatch.setattr("titanrl.metrics.trackers.CLOSE_S", 60.0)
    with monkeypatch.context() as patch:
        patch.setattr(mlflow.MlflowClient, "log_batch", wait_and_log)
        with pytest.raises(ConnectionError):  # also if the server refuses what is missing
            MlflowTracker(run_dir, {}, 3).close()
    resumed = MlflowTracker(run_dir, {}, 3)
    step(resumed, 4, reward=0.4)
    resumed.close()
    assert mlflow_points(run_dir, "reward") == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert mlflow_points(run_dir, "evaluation") == [(3, 0.5)]
    again = MlflowTracker(run_dir, {}, 3)  # from a checkpoint behind what the server has
    again.log(4, {"reward": 0.9, "evaluation": 0.6})
    again.close()
    assert mlflow_points(run_dir, "reward")[3:] == [(4, 0.4)]
    assert mlflow_points(run_dir, "evaluation") == [(3, 0.5), (4, 0.6)]


def test_trackio_does_not_continue_another_run_of_the_same_name(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    write("trackio", tmp_path / "a" / "run", 1, 2)
    (tmp_path / "b" / "trackio").symlink_to(tmp_path / "a" / "trackio")
    write("trackio", tmp_path / "b" / "run", 1, 2)
    with pytest.raises(AssertionError, match="a newer run is also named run"):
        write("trackio", tmp_path / "a" / "run", 3, 4)


class Broken:
    """A tracker that raises in one of its methods."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.num_calls = 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.num_calls += 1
        if self.where == "log":
            raise OSError("no space left on device")

    def close(self) -> None:
        if self.where == "close":
            raise RuntimeError("server gone")


def test_failing_tracker_is_dropped_with_one_warning() -> None:
    warnings: list[str] = []
    broken, whole, late = Broken("log"), Broken("nowhere"), Broken("close")
    trackers = Trackers({"wandb": broken, "tensorboard": whole, "trackio": late}, warnings.append)
    for step in range(3):
        trackers.log(step, {"reward/mean": 0.5})
    trackers.close()
    assert (broken.num_calls, whole.num_calls) == (1, 3)
    assert warnings == [
        "logging.loggers: wandb failed and will receive no more metrics (OSError: no space left on device)",
        "logging.loggers: trackio failed and will receive no more metrics (RuntimeError: server gone)",
    ]


def test_tracker_cannot_change_what_others_receive() -> None:
    received: list[Mapping[str, float]] = []

    class Clears(Broken):
        def log(self, step: int, values: Any) -> None:
            received.append(dict(values))
            values.clear()

    values = {"reward/mean": 0.5}
    Trackers({"first": Clears("nowhere"), "second": Clears("nowhere")}, pytest.fail).log(1, values)
    assert [*received, values] == [values] * 3


def test_tracker_that_cannot_start_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise ConnectionError("no account")

    monkeypatch.setattr("wandb.init", refuse)
    warnings: list[str] = []
    trackers = make_trackers(("wandb", "tensorboard"), tmp_path, {}, warn=warnings.append)
    trackers.log(1, {"reward/mean": 0.25})
    trackers.close()
    assert warnings == ["logging.loggers: wandb failed and will receive no more metrics (ConnectionError: no account)"]
    assert tensorboard_points(tmp_path, "reward/mean") == [(1, 0.25)]


@pytest.mark.parametrize(
    ("name", "module"),
    [("tensorboard", "tensorboard.summary.writer.event_file_writer"), ("wandb", "wandb"), ("trackio", "trackio")],
)
def test_error_for_a_missing_package_shows_the_install_command(
    name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    expected = rf"logging.loggers: the package for {name} cannot be imported .* Run `pip install {name}`, or remove"
    with pytest.raises(ValueError, match=expected):
        make_trackers((name,), tmp_path, {}, warn=print)


def lines(run_dir: Path) -> list[Any]:
    return [json.loads(line) for line in (run_dir / "lines.jsonl").read_text().splitlines()]


FINISHED = object()


@pytest.mark.parametrize("given", [custom_tracker.Lines, custom_tracker.start, FINISHED], ids=["class", "function", "object"])
def test_custom_tracker_receives_every_metric(given: Any, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    if given is FINISHED:
        given = custom_tracker.Lines(run_dir, {"seed": 3}, 5)
    plugin = plugin_of("logging.loggers.1", given, is_local=True)
    own = {"logging.loggers.1": plugin} if plugin else {}
    names = ("tensorboard", "object:mine")
    trackers = make_trackers(names, run_dir, {"seed": 3}, warn=pytest.fail, resume_step=5, plugins=own)
    trackers.log(6, {"reward/mean": 0.5})
    trackers.close()
    assert lines(run_dir) == [["run", 3, 5], [6, {"reward/mean": 0.5}], "closed"]
    assert tensorboard_points(run_dir, "reward/mean") == [(6, 0.5)]


class Kept:
    """A custom tracker that can be closed only once."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.is_closed = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        assert not self.is_closed
        self.steps.append(step)

    def close(self) -> None:
        self.is_closed = True


def test_tracker_object_survives_a_restart(tmp_path: Path) -> None:
    tracker = Kept()
    plugin = plugin_of("logging.loggers.0", tracker, is_local=True)
    assert plugin is not None
    for resume_step, step in ((None, 1), (0, 1), (1, 2)):
        trackers = make_trackers(
            [plugin.path], tmp_path, {}, warn=pytest.fail, resume_step=resume_step, plugins={plugin.key: plugin}
        )
        trackers.log(step, {})
        trackers.close(keep_given=step < 2)
    assert tracker.steps == [1, 1, 2]
    assert tracker.is_closed


@pytest.mark.parametrize(
    ("candidate", "problem"),
    [
        (custom_tracker.Mute, r"the tracker has no method log \(got mine\)\. Write it as `def log\(self, step: int, values"),
        (custom_tracker.Wrong, r"wrong signature: too many positional arguments \(got mine\.log\(values"),
        (
            custom_tracker.WrongSamples,
            r"wrong signature: .*mine\.log_samples\(step: int, rows.* `def log_samples\(self, step: int, n",
        ),
        (custom_tracker.Asynchronous, r"must not be async, .* \(got mine\.log\)\. Write it as `def log\(self"),
        (
            custom_tracker.NoArguments,
            r"wrong signature: .* Write it as `class MyTracker: def __init__\(self, run_dir",
        ),
        (lambda run_dir: None, r"wrong signature: too many positional arguments"),
        (3, r"the tracker has no method log"),
    ],
    ids=["no-log", "log", "log-samples", "async", "arguments", "function", "number"],
)
def test_invalid_tracker_is_rejected(candidate: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=rf"^logging\.loggers\.0: {problem}"):
        check_tracker(candidate, key="logging.loggers.0", name="mine")


def test_function_that_returns_no_tracker_is_rejected(tmp_path: Path) -> None:
    plugin = plugin_of("logging.loggers.0", custom_tracker.start_mute, is_local=True)
    assert plugin is not None
    with pytest.raises(ValueError, match=r"^logging\.loggers\.0: the tracker has no method log \(got object:start_mute\)"):
        make_trackers(("object:start_mute",), tmp_path, {}, warn=print, plugins={"logging.loggers.0": plugin})


COMPLETE = EvaluationResult(task="sums", version=3, mean=0.2, num_prompts=5, response_len_mean=4.0, num_samples=2)
FAILED = replace(COMPLETE, num_errors=4, num_unscored_prompts=1, first_error="answer: KeyError: 'x'")


def test_failed_rewards_of_an_evaluation_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(RunDirectory(tmp_path)) as directory:
        recorder = Recorder(directory, Trackers({}, print), Console("plain", total_steps=9))
        for step, result in enumerate((COMPLETE, FAILED, FAILED)):
            recorder.evaluation(step, result)
        events = [{key: row[key] for key in row if key != "time"} for row in read_lines(directory.events)]
        errors = [row["eval/sums/num_errors"] for row in read_metrics(directory.metrics)]
    printed = capsys.readouterr()
    first, second, _ = printed.out.splitlines()
    assert first.endswith("held-out sums: mean reward 0.200 at version 3")
    assert second.endswith("at version 3 (4 of 10 completions have no reward; mean over 4 of 5 prompts)")
    assert (
        printed.err.count("warning: evaluation sums: 4 of 10 completions have no reward; mean over 4 of 5 prompts (first error")
        == 1
    )
    event = {"kind": "scorer_error", "set": "sums", "count": 4, "completions": 10, "error": "answer: KeyError: 'x'"}
    assert events == [event | {"step": 1}, event | {"step": 2}]
    assert errors == [0.0, 4.0, 4.0]


class Tables:
    """A tracker that receives samples."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, str, list[Any]]] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def log_samples(self, step: int, name: str, rows: Sequence[Sequence[Any]]) -> None:
        self.rows.append((step, name, list(rows)))

    def close(self) -> None:
        pass


def test_trackers_get_the_recorded_samples_of_the_evaluated_version(tmp_path: Path) -> None:
    tables, plain = Tables(), custom_tracker.Lines(tmp_path, {"seed": 0}, None)
    with closing(RunDirectory(tmp_path)) as directory:
        recorder = Recorder(directory, Trackers({"tables": tables, "plain": plain}, pytest.fail), Console("off", total_steps=9))
        for version in (2, 3):
            completion = {"text": f"four {version}", "num_tokens": 2, "reward": 0.5, "outcome": "ok"}
            line = {
                "index": 0,
                "set": "sums",
                "version": version,
                "prompt": "2 + 2 =",
                "answer": "4",
                "completions": [completion],
            }
            record(tmp_path, "evaluations", line)
            recorder.evaluation(version, replace(COMPLETE, version=version))
    assert tables.rows == [(step, "sums", [("2 + 2 =", "4", f"four {step}", 0.5, "ok")]) for step in (2, 3)]


def test_training_warns_once_of_failed_rewards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(RunDirectory(tmp_path)) as directory:
        recorder = Recorder(directory, Trackers({}, print), Console("off", total_steps=9))
        for step in (1, 2):
            recorder.scorer_errors(step, step, 8, "boom")
        counts = [(row["count"], row["completions"]) for row in read_lines(directory.events)]
    assert counts == [(1, 8), (2, 8)]
    assert capsys.readouterr().err.count("1 of 8 completions have no reward and are excluded (first error: boom)") == 1


def test_wandb_gets_an_evaluation_that_ended_after_later_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    (run_dir := tmp_path / "run").mkdir()
    tracker = WandbTracker(run_dir, {}, None)
    for step in range(1, 6):
        tracker.log(step, {"reward/mean": step / 10})
        if step == 4:  # of an evaluation beside training
            tracker.log(2, {"eval/sums/mean": 0.5})
    tracker.log(5, {"eval/sums/mean": 0.75})
    tracker.close()
    assert wandb_points(run_dir, "eval/sums/mean") == [(4, 0.5), (5, 0.75)]
    assert wandb_points(run_dir, "evaluated_step") == [(4, 2), (5, 5)]
    assert wandb_points(run_dir, "reward/mean") == [(step, step / 10) for step in range(1, 6)]
