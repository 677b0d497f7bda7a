"""Files of a run that rolls back to a checkpoint, or to its start."""

from pathlib import Path

from tests.recorded import record, recorded
from titanrl.carriers.record import read_lines
from titanrl.carriers.types import EvaluationResult, StepMetrics
from titanrl.config import load_config
from titanrl.metrics.console import Console
from titanrl.metrics.reading import read_metrics
from titanrl.metrics.trackers import Recorder
from titanrl.run.checkpoints import Resumable, RunState
from titanrl.run.recording import open_recorder

CONFIG = load_config("quickstart", ["logging.loggers=[]"])
EVALUATION = EvaluationResult(task="sums", version=0, mean=0.5, num_prompts=8, response_len_mean=3.0)


def open_at(run_dir: Path, state: RunState, kind: str) -> Recorder:
    found = Resumable(state=state, unusable={})
    return open_recorder(CONFIG, run_dir, kind, found, Console("off", total_steps=9), {})  # type: ignore[arg-type]


def take_steps(recorder: Recorder, first: int, last: int) -> None:
    for step in range(first, last + 1):
        recorder.step(StepMetrics(step=step, version=step, values={"reward/mean": 0.1}))
        recorder.directory.event("publication", version=step)
        record(recorder.directory.path, "rollouts", {"index": step})
        recorder.directory.log_advantages(step, [(step, step, [0.0])])


def test_run_rolls_back_to_a_checkpoint_or_its_start(tmp_path: Path) -> None:
    recorder = open_at(tmp_path, RunState(step=0, version=0, next_index=0), "start")
    recorder.evaluation(0, EVALUATION)
    recorder.directory.event("publication", version=0)
    take_steps(recorder, 1, 3)
    (recorder.directory.checkpoints / "step-2").mkdir()
    half_written = recorder.directory.checkpoints / "step-3"
    half_written.mkdir()

    recorder.close(resumes=True)
    recorder = open_at(tmp_path, RunState(step=2, version=2, next_index=3, published=(2,)), "restart")
    directory = recorder.directory
    assert [row["step"] for row in read_metrics(directory.metrics)] == [0, 1, 2]
    assert recorded(directory.path, "rollouts") == [1, 2]
    assert [row["step"] for row in read_lines(directory.advantages)] == [1, 2]
    events = [(row["kind"], row.get("version", row.get("step"))) for row in read_lines(directory.events)]
    assert events == [("start", 0), ("publication", 0), ("publication", 1), ("checkpoint", 2)]
    assert not half_written.exists()
    directory.event("restart", step=3, from_step=2)
    take_steps(recorder, 3, 4)

    recorder.close(resumes=True)
    recorder = open_at(tmp_path, RunState(step=0, version=0, next_index=0, evaluated_step=0), "restart")
    directory = recorder.directory
    assert [row["step"] for row in read_metrics(directory.metrics)] == [0], "the evaluation before the first step stays"
    assert recorded(directory.path, "rollouts") == list(read_lines(directory.advantages)) == []
    assert [row["kind"] for row in read_lines(directory.events)] == ["start", "restart"]
    recorder.close()
