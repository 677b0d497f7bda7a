"""Runs whose processes are killed: they are replaced, or the run continues from its last checkpoint, with the same results."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import REPO, Finished, Start
from tests.e2e.exactly_once import OVERLAPPING, check_every_prompt_once, check_files
from tests.e2e.test_kill_anywhere import curve, weights

KILLER = f"hooks=[{REPO}/tests/e2e/killer.py:Killer]"


def restarts(run: Finished) -> list[tuple[str, int, int]]:
    """Return part, step and checkpoint of each restart."""
    return [(event["part"], event["step"], event["from_step"]) for event in run.events() if event["kind"] == "restart"]


def check_same(run: Finished, plain: Finished) -> None:
    """Check that a run ended bit for bit like one without faults."""
    assert run.code == 0, run.output
    assert curve(run) == curve(plain)
    assert run.evaluations() == plain.evaluations()
    assert weights(run.run_dir) == weights(plain.run_dir)
    check_files(run)
    names = [(row["index"], row["version"]) for row in run.rollouts()]
    assert len(set(names)) == len(names)


@pytest.mark.slow
def test_killed_trainer_and_store_change_nothing(start_run: Start, plain_run: Finished) -> None:
    kills = ("trainer:after_evaluation:0", "trainer:after_step:1", "trainer:before_step:2", "store:after_step:3")
    last = "trainer:after_checkpoint:4"  # before the export
    run = start_run("restarted", KILLER, "faults.max_respawns=9", kill=" ".join([*kills, last])).finish()
    check_same(run, plain_run)
    assert restarts(run) == [("trainer", 0, 0), ("trainer", 1, 0), ("trainer", 2, 2), ("store", 3, 2), ("trainer", 4, 4)]
    assert run.output.count("warning: ") == 5
    assert "at step 1: continuing from the beginning, as there is no checkpoint yet (2 of 9 replacements)" in run.output
    assert "at step 3: continuing from the checkpoint of step 2 (4 of 9 replacements)" in run.output
    assert [event["version"] for event in run.events() if event["kind"] == "publication"] == [0, 1, 2, 3, 4]


IMPORTED_ONCE = {
    "datasets",
    "pandas",
    "reasoning_gym",
    "torch",
    "torch.distributed.checkpoint",
    "torchtitan.models.common",
    "torchtitan.models.qwen3",
    "torchtitan.trainer",
    "vllm",
    "vllm.v1.worker.cpu_worker",
}
"""Modules that are slow to import; only templates import them, or no process at all."""


def imported_by(run: Finished, log: str) -> set[str]:
    """Return the modules that the processes of a role imported themselves, from the log of a run that records imports.

    What is imported to save rollouts, after the import of pyarrow's writer, is left out.
    """
    lines = (run.run_dir / "logs" / f"{log}.log").read_text().partition("| pyarrow.parquet\n")[0].splitlines()
    if log.startswith("controller"):
        lines += run.output.splitlines()
    return {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}


def test_all_processes_are_forks_of_templates(plain_run: Finished) -> None:
    """A package that starts a thread on import, or a module that imports Monarch, would silently disable forking."""
    logs = {file.stem: file.read_text() for file in (plain_run.run_dir / "logs").glob("template_*.log")}
    assert logs.keys() == {f"template_{kind}" for kind in ("base", "generator", "rollout", "store", "trainer")}
    assert not [name for name, text in logs.items() if "template disabled" in text or "Traceback" in text]
    for log in ("generator_0_0", "rollout_0_0", "store_0", "trainer_0"):
        assert imported_by(plain_run, log), "its imports are not recorded"
        assert imported_by(plain_run, log) & IMPORTED_ONCE == set(), log


def replaced(run: Finished) -> list[str]:
    """Return the parts that were replaced."""
    return [event["part"] for event in run.events() if event["kind"] == "respawn"]


def test_killed_generators_workers_and_trainer_change_nothing(start_run: Start, plain_run: Finished) -> None:
    """The generator that dies with the trainer is replaced in parallel to the restart, or restarted with it."""
    kills = "generator_0:before_step:1 rollout_0:after_evaluation:0 rollout_1:before_step:2"
    both = "generator_0:after_step:3 trainer:after_step:3"
    options = (KILLER, "rollout.num_workers=2", "faults.max_respawns=9")
    run = start_run("replaced", *options, kill=f"{kills} {both}", PYTHONPROFILEIMPORTTIME="1").finish()
    check_same(run, plain_run)
    assert sorted(replaced(run)[:3]) == ["generator_0", "rollout_0", "rollout_1"]
    assert {checkpoint for *_, checkpoint in restarts(run)} == {2}
    assert run.output.count("replaced after") >= 3
    for log in ("generator_0_0", "rollout_0_0", "rollout_1_0", "store_0", "trainer_0"):  # no replacement has imported them
        assert imported_by(run, log) & IMPORTED_ONCE == set(), log
    assert not list((run.run_dir / "logs").glob("template_*.log")), "it forked from the templates of `titanrl warm`"
    assert imported_by(run, "controller_0"), "its imports are not recorded"
    assert imported_by(run, "controller_0") & {"torch", "torchstore", "torchtitan", "transformers", "vllm"} == set()


@pytest.mark.slow
def test_batch_whose_tokens_are_lost_is_sampled_again(start_run: Start, plain_run: Finished) -> None:
    own = f"algorithm.advantage={REPO}/tests/e2e/killer.py:after_the_batch_was_taken"
    run_dir = str(plain_run.run_dir.with_name("lost"))
    overrides = (KILLER, own, "rollout.num_workers=2", *OVERLAPPING)
    run = start_run("lost", *overrides, kill="generator_0:before_step:3", KILL_RUN=run_dir).finish()
    assert run.code == 0, run.output
    assert sorted(replaced(run)) == ["generator_0", "rollout_0", "rollout_1"]
    assert restarts(run) == []
    check_every_prompt_once(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_hosts", "kill", "replacements", "num_restarts"),
    [
        (2, "host-generators-1:before_step:2", ["generator_1", "rollout_1"], 0),
        (1, "host-generators-0:before_step:2", [], 1),
        (1, "host-trainers-0:before_step:3", [], 1),
    ],
)
def test_run_survives_the_death_of_a_host(
    start_run: Start, plain_run: Finished, num_hosts: int, kill: str, replacements: list[str], num_restarts: int
) -> None:
    hosts = f"hosts={{kind: process, generator_hosts: {num_hosts}}}"
    overrides = (hosts, "generator.replicas=2", "rollout.num_workers=2", "max_staleness=1", "logging.rollouts_per_step=8")
    overrides += ("num_steps=16",)
    run = start_run(f"{kill.split(':')[0]}-of-{num_hosts}", KILLER, *overrides, kill=kill).finish()
    assert run.code == 0, run.output
    assert set(replaced(run)) <= set(replacements)  # the run may end before the replacement has started
    faults = [event["cause"] for event in run.events() if event["kind"] == "fault"]
    assert all(any(cause.startswith(part) for cause in faults) for part in replacements)
    assert len(restarts(run)) == num_restarts
    check_every_prompt_once(run)


def fine_tune(folder: Path, *overrides: str, kill: str) -> Finished:
    """Fine-tune a tiny model for four steps."""
    small = ("model.recipe.num_layers=1", "num_steps=4", "sft.batch_size=4", "evaluation.num_prompts=8", "name=run")
    places = ("logging.console=plain", f"cache_dir={folder}/cache", f"output_dir={folder}/runs")
    arguments = ["--config", "sft_quickstart", *small, *places, KILLER, *overrides]
    (folder / "runs").mkdir()
    (folder / "runs/run.kill").write_text(kill)
    command = [sys.executable, "-m", "titanrl.sft", *arguments]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=240, check=False)
    return Finished(done.returncode, done.stdout + done.stderr, folder / "runs" / "run")


@pytest.mark.slow
def test_run_with_repeatedly_dying_trainer_ends_with_the_reason(tmp_path: Path) -> None:
    kills = "trainer:after_step:1 trainer:after_step:2"
    run = fine_tune(tmp_path, "faults.max_respawns=1", "checkpoint.every_steps=1", kill=kills)
    assert run.code == 1
    last = run.output.splitlines()[-1]
    expected = (
        "RespawnLimitError: faults.max_respawns: trainer ended after 1 replacements within 600 s (trainer 1 times; got 1)."
    )
    assert f"{expected} Last cause: trainer_0 (process " in last
    assert [event["kind"] for event in run.events() if event["kind"] in ("fault", "restart")] == ["fault", "restart", "fault"]


@pytest.mark.slow
def test_killed_rank_of_two_changes_nothing(start_run: Start, plain_run: Finished) -> None:
    overrides = ("trainer.parallelism.dp_shard=2", *plain_run.as_start)
    plain = start_run("two-ranks", *overrides).finish()
    run = start_run("two-ranks-restarted", *overrides, KILLER, kill="trainer:after_step:3").finish()
    check_same(run, plain)
    assert restarts(run) == [("trainer", 3, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("saves", [False, True])
def test_interrupt_during_restart_shuts_down_cleanly(start_run: Start, plain_run: Finished, saves: bool) -> None:
    overrides: tuple[Any, ...] = ("num_steps=100000", f"checkpoint.on_interrupt={str(saves).lower()}")
    command = start_run(f"restart-interrupted-{saves}", *overrides)
    command.wait_for_step(3)
    command.process_of("trainer").kill()
    log, deadline = command.run_dir / "logs" / "controller_0.log", time.monotonic() + 60
    while "stopped all processes" not in log.read_text():  # of the first session
        assert time.monotonic() < deadline
        time.sleep(0.05)
    command.process.send_signal(signal.SIGINT)
    finished = command.finish(timeout_s=60)
    assert finished.code == 130, finished.output
    assert command.leftovers() == []
    assert finished.output.count("Traceback") == 0
