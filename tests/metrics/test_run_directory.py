import json
import math
import shutil
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import pytest

from tests.recorded import record, recorded
from titanrl.carriers.record import parts_of, read_lines
from titanrl.carriers.types import StepMetrics
from titanrl.metrics.reading import read_metrics
from titanrl.metrics.run_directory import RunDirectory, append_line


def opened(path: Path, **options: Any) -> AbstractContextManager[RunDirectory]:
    return closing(RunDirectory(path, **options))


def metrics(step: int, **values: float) -> StepMetrics:
    return StepMetrics(step=step, version=step, values={"reward/mean": step / 10, **values})


def write_run(path: Path, num_steps: int) -> None:
    with opened(path) as run:
        for step in range(1, num_steps + 1):
            run.log(metrics(step))


def test_metrics_line_has_step_version_time_and_values(tmp_path: Path) -> None:
    with opened(tmp_path / "run") as run:
        run.log(StepMetrics(step=3, version=2, values={"reward/mean": 0.5, "grad/norm": 1.25}))
    (row,) = read_metrics(run.metrics)
    assert list(row) == ["step", "version", "time", "reward/mean", "grad/norm"]
    assert (row["step"], row["version"], row["reward/mean"], row["grad/norm"]) == (3, 2, 0.5, 1.25)
    assert row["time"] > 1_700_000_000


def test_line_is_flushed_before_the_file_is_closed(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.log(metrics(1))
    assert [row["step"] for row in read_metrics(run.metrics)] == [1]
    run.close()


def test_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "mine", num_steps=1)
    with pytest.raises(ValueError, match=r"name: .*mine already contains a run.*Choose another name.*--resume .*mine"):
        RunDirectory(tmp_path / "mine")
    assert len(read_metrics(tmp_path / "mine" / "metrics.jsonl")) == 1


def test_folder_of_a_run_without_steps_is_reused(tmp_path: Path) -> None:
    with opened(tmp_path / "run") as run:
        record(run.path, "rollouts", {"index": 0})
        run.event("stall", waiting_for="a batch", seconds=30.0)
        run.log_advantages(1, [(0, 0, (0.5, -0.5))])
    with opened(tmp_path / "run") as run:
        assert parts_of(run.path) == []
        assert not run.events.exists()
        assert not run.advantages.exists()


def test_resume_drops_lines_after_the_checkpoint(tmp_path: Path) -> None:
    write_run(tmp_path / "run", num_steps=7)
    with opened(tmp_path / "run", resume_step=7) as run:
        for step in range(1, 8):
            run.log_advantages(step, [(step, step - 1, (0.5, -0.5))])
    with opened(tmp_path / "run", resume_step=4) as run:
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
    with opened(tmp_path / "run", resume_step=2) as run:
        run.log(metrics(3))
    assert [row["step"] for row in read_metrics(run.metrics)] == [1, 2, 3]


def test_unreadable_lines_do_not_prevent_resuming(tmp_path: Path) -> None:
    write_run(tmp_path / "run", num_steps=3)
    metrics_file = tmp_path / "run" / "metrics.jsonl"
    first, second, third = metrics_file.read_bytes().splitlines(keepends=True)
    odd = [b'{"step":\n', b"\0" * 50 + b"\n", b'{"version":2}\n', b"[1]\n", b"\xff\n", b'{"step":"2"}\n', b"[" * 5000 + b"\n"]
    metrics_file.write_bytes(first + b"".join(odd) + b"\n" + second + third)
    warnings: list[str] = []
    with opened(tmp_path / "run", resume_step=2, warn=warnings.append) as run:
        run.log(metrics(3))
    assert [row["step"] for row in read_metrics(run.metrics)] == [1, 2, 3]
    assert run.metrics.read_bytes().startswith(first + second)  # lines that stay are not changed
    assert warnings == [f"{metrics_file}: dropped 7 unreadable lines"]


def test_resume_drops_groups_that_are_sampled_again(tmp_path: Path) -> None:
    write_run(tmp_path / "run", num_steps=2)
    with opened(tmp_path / "run", resume_step=2, resume_index=16) as run:
        # The group of prompt 16 overtook others.
        record(run.path, "rollouts", *({"version": index // 8, "index": index} for index in (0, 1, 16, 8, 17, 9)))
        with parts_of(run.path)[0].path.open("a") as file:
            file.write('{"version":1,"ind')
    with opened(tmp_path / "run", resume_step=2, resume_index=16, warn=str) as run:
        record(run.path, "rollouts", {"version": 2, "index": 16})
    assert recorded(run.path, "rollouts") == [0, 1, 8, 9, 16]
    assert [part.number for part in parts_of(run.path)] == [0, 1]


def test_resume_drops_samples_and_losses_that_are_computed_again(tmp_path: Path) -> None:
    write_run(tmp_path / "run", num_steps=4)
    record(tmp_path / "run", "evaluations", *({"set": "sums", "version": version, "index": 0} for version in (0, 2, 4)))
    record(tmp_path / "run", "trained", *({"step": step, "index": step} for step in (1, 2, 3, 4)), process="trainer_0")
    with opened(tmp_path / "run", resume_step=2, resume_version=2, resume_index=16) as run:
        assert recorded(run.path, "evaluations", "version") == [0, 2]
        assert recorded(run.path, "trained", "step") == [1, 2]
        assert recorded(run.path, "evaluations", "format") == [1], "the first line of a part stays"


def test_resume_drops_groups_that_were_in_flight(tmp_path: Path) -> None:
    write_run(tmp_path / "run", num_steps=2)
    with opened(tmp_path / "run", resume_step=2, resume_index=0) as run:
        for index in range(24):
            record(run.path, "rollouts", {"version": 1, "index": index})
    with opened(tmp_path / "run", resume_step=2, resume_index=20, resume_in_flight=(16, 18)) as run:
        run.drop_rollouts((17,))
    assert recorded(run.path, "rollouts") == [*range(16), 19]


def test_resume_drops_events_that_it_repeats(tmp_path: Path) -> None:
    write_run(tmp_path / "run", num_steps=4)
    run_dir = tmp_path / "run"
    events: list[dict[str, Any]] = [
        {"kind": "start", "step": 0},
        {"kind": "publication", "version": 0},
        {"kind": "drop", "step": 1, "groups": 2},
        {"kind": "publication", "version": 2},
        {"kind": "checkpoint", "step": 2},
        {"kind": "resume", "step": 2},
        {"kind": "skipped_step", "step": 3},
        {"kind": "publication", "version": 4},
        {"kind": "checkpoint", "step": 4},
        {"kind": "fault", "cause": "killed"},
        {"kind": "resume", "step": 4},
        {"kind": "restart", "step": 7, "from_step": 4},
    ]
    (run_dir / "events.jsonl").unlink(missing_ok=True)
    for event in events:
        append_line(run_dir / "events.jsonl", event)
    with (run_dir / "events.jsonl").open("a") as file:
        file.write('{"kind":"publica')
    with opened(run_dir, resume_step=3, resume_published=2, warn=str) as run:
        kept = list(read_lines(run.events))
        assert kept == [events[i] for i in (0, 1, 2, 4, 5, 6, 9, 10, 11)]
        assert run.has_event("checkpoint", step=2)
        assert not run.has_event("checkpoint", step=3)


def test_resume_drops_learning_rates_newer_than_the_checkpoint(tmp_path: Path) -> None:
    write_run(tmp_path / "run", num_steps=2)
    events: list[dict[str, Any]] = [
        {"kind": "learning_rate", "step": 1, "value": 1e-5, "number": 1},
        {"kind": "learning_rate", "step": 2, "value": None, "number": 2},
        {"kind": "checkpoint", "step": 2},
        {"kind": "learning_rate", "step": 2, "value": 1e-6, "number": 3},  # after the checkpoint of the same step
        {"kind": "learning_rate", "step": 3, "value": 1e-7, "number": 4},
    ]
    for event in events:
        append_line(tmp_path / "run" / "events.jsonl", event)
    with opened(tmp_path / "run", resume_step=2, resume_rates=2) as run:
        assert list(read_lines(run.events)) == events[:3]


@pytest.mark.parametrize("file", ["metrics", "events", "advantages"])
def test_error_on_a_full_disk_names_the_file(file: str, tmp_path: Path) -> None:
    with opened(tmp_path / "run") as run:
        pass
    path = {"metrics": run.metrics, "events": run.events, "advantages": run.advantages}[file]
    path.unlink(missing_ok=True)
    run = RunDirectory(tmp_path / "run")
    if file == "metrics":
        run.close()
        path.unlink()
    path.symlink_to("/dev/full")
    if file == "metrics":
        run = RunDirectory(tmp_path / "run")
    write = {
        "metrics": lambda: run.log(metrics(1)),
        "events": lambda: run.event("stall"),
        "advantages": lambda: run.log_advantages(1, [(0, 0, (0.5,))]),
    }[file]
    with pytest.raises(OSError, match=rf"No space left on device: '.*run/{file}\.jsonl'"):
        write()


def test_deleted_directory_raises_at_the_next_step(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.log(metrics(1))
    shutil.rmtree(run.path)
    with pytest.raises(FileNotFoundError, match=r"deleted while the run was writing to it: '.*metrics\.jsonl'"):
        run.log(metrics(2))
    with pytest.raises(FileNotFoundError, match=r"events\.jsonl"):
        run.event("end")
    run.close()


def test_resuming_a_missing_folder_creates_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing does not exist"):
        RunDirectory(tmp_path / "nothing", resume_step=3)
    assert not (tmp_path / "nothing").exists()


def test_error_names_a_broken_line_before_the_last(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1}\n{"step":\n{"step":3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: not a JSON object"):
        read_metrics(path)


def test_event_has_time_kind_and_fields(tmp_path: Path) -> None:
    with opened(tmp_path / "run") as run:
        run.event("drop", step=1, groups=3, reason="no signal")
    event = json.loads(run.events.read_text())
    assert list(event) == ["time", "kind", "step", "groups", "reason"]
    assert (event["kind"], event["groups"]) == ("drop", 3)


def test_advantages_are_one_line_per_group(tmp_path: Path) -> None:
    with opened(tmp_path / "run") as run:
        run.log_advantages(3, [(16, 2, (0.5, -0.5)), (17, 1, (0.25, math.nan))])
    assert list(read_lines(run.advantages)) == [
        {"step": 3, "index": 16, "version": 2, "advantages": [0.5, -0.5]},
        {"step": 3, "index": 17, "version": 1, "advantages": [0.25, None]},
    ]


def test_torn_lines_are_skipped_when_reading(tmp_path: Path) -> None:
    path = tmp_path / "advantages.jsonl"
    path.write_text('{"version":0}\n{"version":1,"te{"version":2}\n{"version":3}\n')
    assert [row["version"] for row in read_lines(path)] == [0, 3]
