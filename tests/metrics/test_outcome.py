import math
import shlex
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest

from titanrl.carriers.types import StepMetrics
from titanrl.metrics.report import conclude, idle_line, relative
from titanrl.metrics.run_directory import RunDirectory


def write_run(path: Path, *steps: Mapping[str, float], checkpoint: bool = True) -> Path:
    with closing(RunDirectory(path)) as run:
        for step, values in enumerate(steps, start=1):
            run.log(StepMetrics(step=step, version=step, values=values))
    if checkpoint:
        folder = path / "checkpoints" / "step-1"
        folder.mkdir()
        (folder / "commit.json").write_text("{}")
    return path


def words(lines: list[str]) -> list[str]:
    return [line.split()[0] for line in lines]


def test_finished_run_offers_no_resume(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", {"reward/mean": 0.25}, {"reward/mean": 0.75})
    shown = conclude(run_dir, code=0, cause="", num_steps=2)
    assert shown[0] == "Mean reward: training 0.250 -> 0.750 over 2 steps"
    assert shown[-1] == f"report   {relative(run_dir / 'report.html')}"
    assert words(shown) == ["Mean", "run", "report"]


@pytest.mark.parametrize(("code", "num_steps"), [(0, 3), (1, 2), (130, 3)])
def test_unfinished_or_failed_run_offers_resume(code: int, num_steps: int, tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", {"reward/mean": 0.25}, {"reward/mean": 0.75})
    assert "resume" in words(conclude(run_dir, code=code, cause="SIGINT", num_steps=num_steps))


def test_run_without_a_checkpoint_offers_no_resume(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", {"reward/mean": 0.25}, checkpoint=False)
    assert "resume" not in words(conclude(run_dir, code=1, cause="boom", num_steps=3))


def test_closing_lines_count_failed_rewards(tmp_path: Path) -> None:
    evaluated = {"eval/sums/mean": 0.2, "eval/sums/num_errors": 0.0, "eval/sums/num_completions": 5.0}
    trained = {"reward/mean": 0.5, "reward/num_errors": 3.0, "reward/num_completions": 16.0}
    run_dir = write_run(tmp_path / "run", {**evaluated, **trained}, {**trained, **evaluated, "eval/sums/num_errors": 2.0})
    shown = conclude(run_dir, code=0, cause="", num_steps=2)
    assert shown[0] == (
        "Mean reward: held-out sums 0.200 -> 0.200 (completions without a reward: 0 of 5 -> 2 of 5), "
        "training 0.500 -> 0.500 over 2 steps"
    )
    assert shown[1] == (
        "failed   6 of 32 completions had no reward in training (scorer_error in events.jsonl has the first error of each step)"
    )
    page = (run_dir / "report.html").read_text()
    assert "0 of 5 and 2 of 5 completions had no reward and are not in the mean" in page
    assert "6 of 32 completions had no reward in training" in page


def test_outcome_of_fine_tuning_shows_losses(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", {"loss/eval": 2.0, "loss/train": 2.5}, {"loss/train": 1.5, "loss/eval": 1.0})
    shown = conclude(run_dir, code=1, cause="boom", num_steps=3, command="titanrl sft")
    assert shown[0].endswith("Loss: held-out 2.000 -> 1.000, training 2.500 -> 1.500 over 2 steps")
    assert f"resume   titanrl sft --resume {relative(run_dir)}" in shown


def test_printed_commands_quote_the_run_directory(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "my run", {"loss/eval": 2.0, "loss/train": 2.5})
    (run_dir / "checkpoints" / "final").mkdir()
    (run_dir / "checkpoints" / "final" / "config.json").write_text("{}")
    shown = conclude(run_dir, code=1, cause="boom", num_steps=3)
    commands = [shlex.split(line) for line in shown if line.split()[0] in ("chat", "resume")]
    assert [command[-1] for command in commands] == [str(relative(run_dir))] * 2


@pytest.mark.parametrize("values", [{}, {"eval/sums/mean": math.nan, "reward/mean": math.nan, "time/train_s": math.nan}])
def test_run_without_finite_metrics_is_summarized(values: Mapping[str, float], tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", values)
    assert words(conclude(run_dir, code=0, cause="", num_steps=1)) == ["run", "report"]


@pytest.mark.parametrize("code", [129, 130, 143])
def test_interrupt_names_step_and_cause(tmp_path: Path, code: int) -> None:
    run_dir = write_run(tmp_path / "run", {"reward/mean": 0.25})
    shown = conclude(run_dir, code=code, cause="interrupted", num_steps=9)
    assert shown[0].startswith("Stopped after step 1: interrupted. Mean reward: training 0.250")


def test_unwritable_report_is_a_warning(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", {"reward/mean": 0.25})
    (run_dir / "report.html").mkdir()
    shown = conclude(run_dir, code=1, cause="boom", num_steps=9)
    assert shown[0].startswith("Stopped after step 1. ")
    (problem,) = [line for line in shown if line.startswith("warning")]
    assert "the report cannot be written (IsADirectoryError" in problem


def test_damaged_metrics_are_a_warning(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", {"reward/mean": 0.25})
    (run_dir / "metrics.jsonl").write_text('{"step":\n{"step": 2}\n{"version": 3}\n')
    shown = conclude(run_dir, code=1, cause="boom", num_steps=9)
    assert words(shown) == ["Stopped", "warning", "run", "resume"]
    assert "metrics.jsonl cannot be read (ValueError" in shown[1]


def test_paths_are_relative_to_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "checkout/docs/notebooks"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    assert relative(folder / "runs/demo") == Path("runs/demo")
    assert relative(tmp_path / "checkout/runs/demo") == Path("../../runs/demo")
    assert relative(Path("/srv/runs")) == Path("/srv/runs")


@pytest.mark.parametrize(
    ("trainer", "generator", "max_staleness", "advice"),
    [
        (0.60, 0.05, 1, "; generation is the bottleneck: give the "),
        (0.05, 0.60, 1, "; training is the bottleneck: give the "),
        (0.40, 0.45, 1, "; each waits for the other: raise max_staleness"),
        (0.08, 0.12, 1, "; they are well balanced"),
        (0.50, 0.50, 0, "; they alternate because max_staleness is 0"),
    ],
)
def test_idle_line_shows_medians_without_the_first_steps_and_advice(
    trainer: float, generator: float, max_staleness: int, advice: str
) -> None:
    values = {"perf/trainer_idle_frac": trainer, "perf/generator_idle_frac": generator, "staleness/max": 0.0}
    rows = [{"step": 1, **dict.fromkeys(values, 1.0)}, *({"step": step, **values} for step in range(2, 6))]
    shares = f"trainer {trainer:.0%}, generators {generator:.0%} of the time (median)"
    assert idle_line(rows, max_staleness).startswith(f"{shares}{advice}")
    assert idle_line([], max_staleness) == ""


@pytest.mark.parametrize(
    ("measured", "advice"),
    [
        ({"episode/environment_s_mean": 0.25}, "both wait for the environment, which takes 0.25 s per episode"),
        ({"group/score_s_mean": 3.0, "group/generate_s_mean": 1.0}, "both wait for the rewards, which take 3 s per group"),
        ({"group/score_s_mean": 1.0, "group/generate_s_mean": 3.0}, "they alternate because max_staleness is 0"),
    ],
)
def test_idle_line_names_what_both_wait_for(measured: dict[str, float], advice: str) -> None:
    idle = {"perf/trainer_idle_frac": 0.9, "perf/generator_idle_frac": 0.7, "staleness/max": 0.0}
    rows = [{"step": step, **idle, **measured} for step in range(1, 6)]
    assert f"; {advice}" in idle_line(rows, 0)
