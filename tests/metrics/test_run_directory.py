import json
import math
import multiprocessing
from pathlib import Path

import pytest

from titanrl.metrics.run_directory import RunDirectory, append_line, read_lines, read_metrics
from titanrl.types import StepMetrics


def metrics(step: int, **values: float) -> StepMetrics:
    return StepMetrics(step=step, version=step, values={"reward/mean": step / 10, **values})


def write_run(path: Path, num_steps: int) -> None:
    with RunDirectory(path) as run:
        for step in range(1, num_steps + 1):
            run.log(metrics(step))


def test_metrics_line_has_step_version_time_and_values(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run") as run:
        run.log(StepMetrics(step=3, version=2, values={"reward/mean": 0.5, "grad/norm": 1.25}))
    (row,) = read_metrics(run.metrics)
    assert list(row) == ["step", "version", "time", "reward/mean", "grad/norm"]
    assert (row["step"], row["version"], row["reward/mean"], row["grad/norm"]) == (3, 2, 0.5, 1.25)
    assert row["time"] > 1_700_000_000


def test_line_is_written_before_the_file_is_closed(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.log(metrics(1))
    assert [row["step"] for row in read_metrics(run.metrics)] == [1]
    run.close()


def test_non_finite_values_become_null(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run") as run:
        run.log(metrics(1, **{"grad/norm": math.nan, "loss/total": math.inf}))
        append_line(run.rollouts, {"logprobs": [-0.5, -math.inf], "nested": ({"x": math.nan},)})
    (row,) = read_metrics(run.metrics)
    assert row["grad/norm"] is None
    assert row["loss/total"] is None
    assert list(read_lines(run.rollouts)) == [{"logprobs": [-0.5, None], "nested": [{"x": None}]}]


def test_new_run_gets_folders_and_config(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "runs" / "a") as run:
        run.write_config("name: a\n")
    assert run.logs.is_dir()
    assert run.checkpoints.is_dir()
    assert run.config.read_text() == "name: a\n"
    assert not list(run.path.glob("*.partial"))


def test_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "mine", num_steps=1)
    with pytest.raises(ValueError, match=r"name: .*mine already holds a run.*Choose another name.*--resume .*mine"):
        RunDirectory(tmp_path / "mine")
    assert len(read_metrics(tmp_path / "mine" / "metrics.jsonl")) == 1


def test_folder_of_a_run_without_steps_is_reused(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run") as run:
        append_line(run.rollouts, {"version": 0})
        run.event("stall", waiting_for="a batch", seconds=30.0)
        run.log_advantages(1, [(0, 0, (0.5, -0.5))])
    with RunDirectory(tmp_path / "run") as run:
        assert not run.rollouts.exists()
        assert not run.events.exists()
        assert not run.advantages.exists()


def test_resume_drops_lines_after_the_checkpoint(tmp_path: Path) -> None:
    write_run(tmp_path / "run", num_steps=7)
    with RunDirectory(tmp_path / "run", resume_step=7) as run:
        for step in range(1, 8):
            run.log_advantages(step, [(step, step - 1, (0.5, -0.5))])
    with RunDirectory(tmp_path / "run", resume_step=4) as run:
        assert [row["step"] for row in read_lines(run.advantages)] == [1, 2, 3, 4]
        assert [row["step"] for row in read_metrics(run.metrics)] == [1, 2, 3, 4]
        run.log(metrics(5))
    rows = read_metrics(run.metrics)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["reward/mean"] for row in rows] == [0.1, 0.2, 0.3, 0.4, 0.5]


def test_resume_removes_a_torn_last_line(tmp_path: Path) -> None:
    write_run(tmp_path / "run", num_steps=2)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step":3,"vers')
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2]
    with RunDirectory(tmp_path / "run", resume_step=2) as run:
        run.log(metrics(3))
    assert [row["step"] for row in read_metrics(run.metrics)] == [1, 2, 3]


def test_resume_of_a_missing_folder_creates_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing does not exist"):
        RunDirectory(tmp_path / "nothing", resume_step=3)
    assert not (tmp_path / "nothing").exists()


def test_broken_line_before_the_last_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1}\n{"step":\n{"step":3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: not a JSON object"):
        read_metrics(path)


def test_event_has_time_kind_and_fields(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run") as run:
        run.event("drop", step=1, groups=3, reason="no signal")
    event = json.loads(run.events.read_text())
    assert list(event) == ["time", "kind", "step", "groups", "reason"]
    assert (event["kind"], event["groups"]) == ("drop", 3)


def test_advantages_are_one_line_per_group(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run") as run:
        run.log_advantages(3, [(16, 2, (0.5, -0.5)), (17, 1, (0.25, math.nan))])
    assert list(read_lines(run.advantages)) == [
        {"step": 3, "index": 16, "version": 2, "advantages": [0.5, -0.5]},
        {"step": 3, "index": 17, "version": 1, "advantages": [0.25, None]},
    ]


def append_many(path: Path, writer: int) -> None:
    for number in range(200):
        append_line(path, {"writer": writer, "number": number, "text": str(writer) * 5000})


def test_lines_appended_by_four_processes_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=append_many, args=(path, writer)) for writer in range(4)]
    for process in writers:
        process.start()
    for process in writers:
        process.join(60)
    assert [process.exitcode for process in writers] == [0, 0, 0, 0]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {(row["writer"], row["number"]) for row in rows} == {
        (writer, number) for writer in range(4) for number in range(200)
    }
    assert len(rows) == 800
    assert all(row["text"] == str(row["writer"]) * 5000 for row in rows)


def test_torn_lines_are_skipped_when_reading(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text('{"version":0}\n{"version":1,"te{"version":2}\n{"version":3}\n')
    assert [row["version"] for row in read_lines(path)] == [0, 3]
