"""Real trackers: a run and its resumption are written by processes of their own, then read back."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from titanrl.metrics.trackers import Trackers, make_trackers

WRITE = """
import asyncio, os, signal, sys, time
from pathlib import Path
from titanrl.metrics.trackers import make_trackers

name, run_dir, first, last, ending = sys.argv[1:]
resume_step = int(first) - 1 or None
made = []

async def start():
    made.append(make_trackers((name,), Path(run_dir), {"seed": 0}, warn=print, resume_step=resume_step))

async def steps():
    for step in range(int(first), int(last) + 1):
        made[0].log(step, {"reward/mean": step / 10})
        if step % 4 == 0:
            made[0].log(step, {"eval/sums/mean": step / 20})

async def main():  # start, steps and end run in contexts of their own, as the tasks of a run do
    await asyncio.create_task(start())
    await asyncio.create_task(steps())
    if ending == "kill":
        time.sleep(2.5)
        os.kill(os.getpid(), signal.SIGKILL)
    made[0].close()

asyncio.run(main())
"""


def write(name: str, run_dir: Path, first: int, last: int, ending: str = "close") -> None:
    run_dir.mkdir(exist_ok=True)
    env = {**os.environ, "WANDB_MODE": "offline", "TRACKIO_DIR": str(run_dir.parent / "trackio")}
    command = [sys.executable, "-c", WRITE, name, str(run_dir), str(first), str(last), ending]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == (-9 if ending == "kill" else 0), done.stderr
    assert "Traceback" not in done.stderr
    assert "receives no more" not in done.stdout


Points = list[tuple[int, float]]


def tensorboard_points(run_dir: Path, metric: str) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run_dir / "tensorboard"))
    accumulator.Reload()
    return [(event.step, round(event.value, 4)) for event in accumulator.Scalars(metric)]


def wandb_records(path: Path) -> Iterator[bytes]:
    """Records of a `.wandb` file: LevelDB's log format behind a header of 7 bytes."""
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


POINTS = {"tensorboard": tensorboard_points, "wandb": wandb_points, "trackio": trackio_points}


@pytest.mark.parametrize("name", POINTS)
def test_run_and_resumes_leave_no_gaps_and_no_double_points(name: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "quickstart"
    write(name, run_dir, 1, 7, "kill")
    write(name, run_dir, 5, 9)  # from a checkpoint behind what was logged
    write(name, run_dir, 10, 12)  # from the end: the run is extended
    assert POINTS[name](run_dir, "reward/mean") == [(step, step / 10) for step in range(1, 13)]
    assert POINTS[name](run_dir, "eval/sums/mean") == [(4, 0.2), (8, 0.4), (12, 0.6)]


def test_trackio_does_not_continue_another_run_of_the_same_name(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    write("trackio", tmp_path / "a" / "run", 1, 2)
    (tmp_path / "b" / "trackio").symlink_to(tmp_path / "a" / "trackio")
    write("trackio", tmp_path / "b" / "run", 1, 2)
    with pytest.raises(AssertionError, match="another run named run was started later"):
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
        "logging.loggers: wandb failed and receives no more metrics (OSError: no space left on device)",
        "logging.loggers: trackio failed and receives no more metrics (RuntimeError: server gone)",
    ]


def test_tracker_that_cannot_start_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise ConnectionError("no account")

    monkeypatch.setattr("wandb.init", refuse)
    warnings: list[str] = []
    trackers = make_trackers(("wandb", "tensorboard"), tmp_path, {}, warn=warnings.append)
    trackers.log(1, {"reward/mean": 0.25})
    trackers.close()
    assert warnings == ["logging.loggers: wandb failed and receives no more metrics (ConnectionError: no account)"]
    assert tensorboard_points(tmp_path, "reward/mean") == [(1, 0.25)]


@pytest.mark.parametrize(
    ("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb"), ("trackio", "trackio")]
)
def test_missing_package_is_named_with_its_install_command(
    name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    expected = rf"logging.loggers: the package of {name} cannot be imported .* Run `pip install {name}`, or remove"
    with pytest.raises(ValueError, match=expected):
        make_trackers((name,), tmp_path, {}, warn=print)  # type: ignore[arg-type]
