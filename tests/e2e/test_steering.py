"""Steering of real runs: changes and their repetition after a resume, and pauses."""

import asyncio
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Command, Finished, Start
from tests.e2e.test_kill_anywhere import curve, weights
from titanrl.base.control import SteeringError, steer
from titanrl.metrics.reading import read_metrics

EASY = "{weight: 1, task_config: {min_terms: 3, max_terms: 3, min_digits: 1, max_digits: 1}}"
HARD = "{weight: 1, task_config: {min_terms: 4, max_terms: 4, min_digits: 1, max_digits: 1}}"
TARGET = 0.5
MIXED = f"data.mixture={{easy: {EASY}, hard: {HARD}}}"


def ask(run_dir: Path, action: Any, **values: Any) -> dict[str, Any]:
    return asyncio.run(steer(run_dir, action, {key.replace("__", "."): value for key, value in values.items()}))


def wait_until(command: Command, state: str, timeout_s: float = 180) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    while (reply := ask(command.run_dir, "status"))["state"] != state:
        assert time.monotonic() < deadline, f"not {state} within {timeout_s} s: {reply['text']}"
        time.sleep(0.05)
    return reply


def exact(run: Finished) -> list[dict[str, float]]:
    """Return the metrics of the steps that do not depend on time."""
    return [{name: value for name, value in row.items() if not name.endswith("_s_mean")} for row in curve(run)]


def test_changes_are_made_at_their_steps_and_repeated_after_a_resume(start_run: Start, plain_run: Finished) -> None:
    sizes = (
        "num_steps=8",
        "checkpoint.keep_last=9",
        "evaluation.num_prompts=8",
        "rollout.groups_per_step=4",
        "algorithm.num_warmup_steps=0",
        f"algorithm.entropy_target={TARGET}",
    )
    command = start_run("steered", MIXED, *sizes, *plain_run.as_start)
    command.wait_for_step(1)
    ask(command.run_dir, "pause")
    while (step := wait_until(command, "paused")["step"]) < 3:
        ask(command.run_dir, "resume")
        ask(command.run_dir, "pause")  # after the next step
    assert step < 6
    for values, problem in (
        ({"algorithm__learning_rate": -1.0}, r"algorithm.learning_rate=-1.0\n  rule: must be a number > 0"),
        ({"algorithm__entropy_target": None}, "were started with an entropy target"),
        ({"algorithm__loss": "gspo"}, r"algorithm.loss=.*\n  rule: this key cannot be changed during the run"),
    ):
        with pytest.raises(SteeringError, match=problem):
            ask(command.run_dir, "set", **values)
    reply = ask(command.run_dir, "set", algorithm__learning_rate=2e-5, evaluation__every_steps=3)
    ask(command.run_dir, "set", algorithm__entropy_delta=0.01)
    assert reply["text"] == f"algorithm.learning_rate = 2e-05, evaluation.every_steps = 3 from step {step + 1} on"
    of_prompts = {"data__mixture__hard__weight": 7.0, "rollout__temperature": 0.5}
    assert ask(command.run_dir, "set", **of_prompts)["text"].endswith(f"from step {step + 2} on")
    assert ask(command.run_dir, "resume")["text"] == "the run continues"
    unbroken = command.finish()
    assert unbroken.code == 0, unbroken.output

    assert [row["optim/lr"] for row in unbroken.steps] == [5e-5] * step + [2e-5] * (8 - step)
    coef, applied = 0.0, 0.0
    for number, row in enumerate(unbroken.steps, 1):
        assert row["policy/entropy_coef"] == applied
        assert row["loss/entropy"] == pytest.approx(-applied * row["policy/entropy"], rel=1e-5)
        delta, is_low = 0.005 if number <= step else 0.01, row["policy/entropy"] <= TARGET
        coef = max(coef + (delta if is_low else -delta), 0.0)
        applied = coef if is_low else 0.0
    sets = [(event["step"], event["key"], event["value"]) for event in unbroken.events() if event["kind"] == "set"]
    assert sets == [
        (step, "algorithm.learning_rate", 2e-5),
        (step, "evaluation.every_steps", 3),
        (step, "algorithm.entropy_delta", 0.01),
        (step + 1, "data.mixture.hard.weight", 7.0),
        (step + 1, "rollout.temperature", 0.5),
    ]
    assert [row.get("set/data.mixture.hard.weight") for row in unbroken.steps] == [None] * (step + 1) + [7.0] * (7 - step)
    assert [row["task/hard/groups"] for row in unbroken.steps[: step + 1]] == [2] * (step + 1)
    assert sum(row["task/hard/groups"] for row in unbroken.steps[step + 1 :]) == round(4 * (7 - step) * 7 / 8)

    # Trainer and generators change together: their log-probabilities agree in every step.
    assert max(row["mismatch/logprob_abs_max"] for row in unbroken.steps) < 1e-4
    entropies = [row["policy/entropy"] for row in unbroken.steps]
    assert max(entropies[step + 1 :]) < 0.8 * min(entropies[: step + 1])

    steps, kept, trained = exact(unbroken), unbroken.evaluations("easy"), weights(unbroken.run_dir)
    assert len(kept) == 3, "before the first step, after step 6 and at the end"
    for folder in (unbroken.run_dir / "checkpoints").glob("step-*"):
        if int(folder.name.removeprefix("step-")) > 2:
            shutil.rmtree(folder)
    resumed = start_run("steered", resume=True).finish()
    assert resumed.code == 0, resumed.output
    assert [event["step"] for event in resumed.events() if event["kind"] == "resume"] == [2]
    assert exact(resumed) == steps
    assert (resumed.evaluations("easy"), weights(resumed.run_dir)) == (kept, trained)
    assert [(e["step"], e["key"], e["value"]) for e in resumed.events() if e["kind"] == "set"] == sets
    assert "learning_rate: 5.0e-05" in (resumed.run_dir / "config.yaml").read_text()


def seconds_of(row: dict[str, Any]) -> float:
    """Return the time of a step, in seconds."""
    return sum(value for name, value in row.items() if name.startswith("time/"))


def test_paused_asynchronous_run_waits_continues_and_can_be_interrupted(start_run: Start, plain_run: Finished) -> None:
    sizes = ("num_steps=100000", "evaluation.num_prompts=0", "checkpoint.every_steps=0", "checkpoint.on_interrupt=true")
    command = start_run("paused", "max_staleness=1", *sizes, *plain_run.as_start)
    command.wait_for_step(2)
    ask(command.run_dir, "pause")
    step = wait_until(command, "paused")["step"]
    paused_s = max(3.0, *(3 * seconds_of(row) for row in read_metrics(command.run_dir / "metrics.jsonl")))
    time.sleep(paused_s)  # longer than a step, so that a pause in a step's time would show
    assert wait_until(command, "paused")["step"] == step
    assert ask(command.run_dir, "set", logging__rollouts_per_step=1)["keys"]["logging.rollouts_per_step"] == 2
    ask(command.run_dir, "resume")
    command.wait_for_step(step + 3)
    ask(command.run_dir, "pause")
    last = wait_until(command, "paused")["step"]
    os.killpg(command.process.pid, signal.SIGINT)
    run = command.finish(timeout_s=90)
    assert run.code == 130, run.output
    assert f"saved step {last}; --resume continues after it" in run.output
    assert command.leftovers() == []
    assert not (run.run_dir / "steer.sock").exists()

    events = [event for event in run.events() if event["kind"] in ("paused", "continued")]
    assert [(event["kind"], event["step"]) for event in events[:3]] == [("paused", step), ("continued", step), ("paused", last)]
    assert events[1]["seconds"] > paused_s
    seconds = {row["step"]: seconds_of(row) for row in run.steps}
    assert seconds[step + 1] < paused_s, "a pause is in no step's time"
    assert {row["step"] for row in run.steps} == set(range(1, last + 1))
    assert max(row["staleness/max"] for row in run.steps) <= 1
    assert not [event for event in run.events() if event["kind"] in ("stall", "fault", "respawn")]
    changes = json.loads((run.run_dir / "changes.json").read_text())
    assert [(change["key"], change["value"]) for change in changes] == [("logging.rollouts_per_step", 1)]
