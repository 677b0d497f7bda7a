"""The command `python -m titanrl.grpo`: the entire stack, from a config to a trained model, and all ways a run can end."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import REPO, Finished, Start
from tests.shared_memory import abandoned


def test_run_trains_evaluates_records_and_exports(plain_run: Finished) -> None:
    assert [row["step"] for row in plain_run.steps] == [1, 2, 3, 4]
    assert [row["version"] for row in plain_run.steps] == [1, 2, 3, 4]
    assert len(plain_run.evaluations()) == 2
    for file in (
        "config.yaml",
        "report.html",
        "record/rollouts-rollout_0_0.000000.jsonl",
        "checkpoints/final/model.safetensors.index.json",
    ):
        assert (plain_run.run_dir / file).exists(), file
    assert {"trainer_0.log", "generator_0_0.log", "rollout_0_0.log", "store_0.log", "controller_0.log"} <= {
        path.name for path in (plain_run.run_dir / "logs").iterdir()
    }


def test_successful_run_logs_no_error(plain_run: Finished) -> None:
    for log in (plain_run.run_dir / "logs").glob("*.log"):
        assert not re.search(r" ERROR |Traceback", log.read_text()), log.read_text()[-3000:]


def test_synchronous_steps_are_on_policy_and_log_probabilities_agree(plain_run: Finished) -> None:
    for row in plain_run.steps:
        assert row["staleness/max"] == 0
        assert row["mismatch/logprob_abs_max"] < 1e-4
        assert row["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
        assert row["sync/bytes"] == 408_320 * 4


def test_recorded_rollouts_carry_the_version_that_sampled_them(plain_run: Finished) -> None:
    rollouts = plain_run.rollouts()
    # Groups 0 and 1 of each batch of 8; the batch of step k is made by version k - 1, the last one is never trained on.
    assert {(row["version"], row["index"] // 8) for row in rollouts} <= {(step, step) for step in range(5)}


def test_last_lines_show_result_and_next_steps(plain_run: Finished) -> None:
    assert re.search(r"held-out chain_sum 0\.\d+ -> 0\.\d+", plain_run.output)
    for line in ("report ", "titanrl chat"):
        assert line in plain_run.output
    assert "--resume" not in plain_run.output, "a finished run offers nothing to resume"


def test_every_publication_and_checkpoint_is_an_event(plain_run: Finished) -> None:
    events = plain_run.events()
    assert events[0]["kind"] == "start"
    assert [event["version"] for event in events if event["kind"] == "publication"] == [0, 1, 2, 3, 4]
    assert [event["step"] for event in events if event["kind"] == "checkpoint"] == [2, 4]
    assert (events[-1]["kind"], events[-1]["code"]) == ("end", 0)


def test_libraries_print_nothing(plain_run: Finished) -> None:
    for noise in ("WARNING", "Warning", "vllm", "INFO", "monarch"):
        assert noise not in plain_run.output


@pytest.mark.parametrize(
    ("doing", "overrides"),
    [
        ("training", ["max_staleness=1"]),
        pytest.param(
            "evaluating",
            ["evaluation.every_steps=3", "evaluation.num_prompts=1000"],  # takes several seconds after step 3
            marks=pytest.mark.slow,
        ),
    ],
)
def test_ctrl_c_is_acknowledged_and_shuts_the_run_down_cleanly(
    start_run: Start, plain_run: Finished, doing: str, overrides: list[str]
) -> None:
    before = abandoned()
    close_s = 60  # enough for a busy machine
    command = start_run(f"interrupted-{doing}", "num_steps=100000", f"timeouts.close_s={close_s}", *overrides)
    command.wait_for_step(3)  # the checkpoint of step 2 is written before this step begins
    interrupted = time.monotonic()
    os.killpg(command.process.pid, signal.SIGINT)  # as a terminal does
    finished = command.finish()
    assert finished.code == 130
    assert time.monotonic() - interrupted < close_s
    assert command.leftovers() == []
    assert abandoned() <= before
    assert "interrupted; shutting down; the last" in finished.output
    assert "steps are in no checkpoint. A second signal ends the run immediately." in finished.output
    assert "titanrl train --resume" in finished.output
    assert "while closing" not in finished.output
    for log in (finished.run_dir / "logs").glob("*.log"):
        assert "Traceback" not in log.read_text(), log.read_text()[-3000:]


def test_sigterm_during_start_shuts_down_cleanly_with_143(start_run: Start, plain_run: Finished) -> None:
    command = start_run("terminated", "num_steps=100000")
    deadline = time.monotonic() + 180
    while not (command.run_dir / "logs" / "generator_0_0.log").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    command.process.terminate()
    finished = command.finish(timeout_s=90)
    assert finished.code == 143, finished.output
    assert "interrupted; shutting down." in finished.output


def test_task_without_signal_ends_with_starvation_error(start_run: Start, plain_run: Finished, tmp_path: Path) -> None:
    (tmp_path / "same_reward.py").write_text("def score(text, entry):\n    return 0.5\n")
    reward = f"data.rewards={{answer: '{tmp_path}/same_reward.py:score'}}"
    finished = start_run("starved", *plain_run.as_start, reward, "rollout.starvation_timeout_s=3").finish()
    assert finished.code == 1
    last = finished.output.splitlines()[-1]
    assert "StarvationError" in last
    assert "with every reward 0.5" in last
    assert "Traceback" not in finished.output
    assert "stall" in [event["kind"] for event in finished.events()]


def test_dry_run_starts_and_writes_nothing(tmp_path: Path) -> None:
    before = os.times()
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "titanrl.grpo",
            "--config",
            "configs/quickstart.yaml",
            "--dry-run",
            f"output_dir={tmp_path}/runs",
        ],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    after = os.times()
    cpu_s = after.children_user - before.children_user + after.children_system - before.children_system
    assert cpu_s < 20, "it takes 5 s"
    assert "408" in result.stdout
    assert list(tmp_path.iterdir()) == []
