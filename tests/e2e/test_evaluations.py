"""Evaluation sets in complete runs: background evaluations, the best policy, early stopping, and `titanrl evaluate`."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import REPO, Finished, Start
from titanrl.metrics.reading import read_metrics

KILLER = f"hooks=[{REPO}/tests/e2e/killer.py:Killer]"
EVERY_STEP = ("evaluation.every_steps=1", "evaluation.num_prompts=16")


def own_set(folder: Path) -> str:
    """Write the questions of a set, and return the override that defines the sets of a run."""
    questions = [{"prompt": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(12)]
    (folder / "doubles.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    doubles = {"num_prompts": 12, "split": "all", "every_steps": 0, "max_new_tokens": 12}
    doubles |= {"data": {"source": "jsonl", "task": "doubles", "path": str(folder / "doubles.jsonl")}}
    sampled = {"num_prompts": 8, "num_samples": 4, "temperature": 1.0, "pass_k": [1, 2], "every_steps": 2}
    return f"evaluation.sets={json.dumps({'sampled': sampled, 'doubles': doubles})}"


def evaluated(run: Finished, name: str) -> dict[int, int]:
    """Return the version of each evaluation of a set by its step."""
    rows = read_metrics(run.run_dir / "metrics.jsonl")
    return {row["step"]: row["version"] for row in rows if f"eval/{name}/mean" in row}


def of_kind(run: Finished, kind: str) -> list[dict[str, object]]:
    return [event for event in run.events() if event["kind"] == kind]


def check_overlap(finished: Finished, bound: int) -> None:
    """Check that generation overlapped with training, and that no token was older than the bound."""
    slots = f"B={8 * (bound + 1)} slots, window W=1, P=8 groups per publication"
    assert f"{slots}: no token older than (B + W - 2) // P = {bound}" in finished.output
    assert "idle     trainer" in finished.output
    assert [row["version"] for row in finished.steps] == list(range(1, 9))
    assert {row["staleness/max"] for row in finished.steps} <= set(range(bound + 1))
    stale = [row for row in finished.steps if row["staleness/lag_0_frac"] < 1]
    assert stale
    for row in finished.steps:
        assert row.get("mismatch/numeric/logprob_abs_max", 0.0) < 1e-4
        assert sum(row[key] for key in row if re.fullmatch(r"staleness/lag_\d+_frac", key)) == pytest.approx(1.0)
    assert max(row["mismatch/stale/logprob_abs_max"] for row in stale) > 1e-4
    assert max(row["replay/groups"] for row in finished.steps) >= 1
    assert all(row.get("replay/age_max", 0) <= 5 for row in finished.steps)


def test_asynchronous_run_evaluates_each_version_in_the_background(
    start_run: Start, plain_run: Finished, tmp_path: Path
) -> None:
    """With a bound of 3, the trainer publishes a version while a generator drains for the previous one."""
    best = "evaluation.best_metric=eval/chain_sum/mean"
    kill = "evaluator:before_step:4"
    asynchronous = ("max_staleness=3", "num_steps=8", "rollout.num_workers=2", "generator.on_update=drain")
    more = ("rollout.num_spare_completions=1", "replay={fraction: 0.5, max_age: 5}")
    overrides = (*plain_run.as_start, *asynchronous, *more, *EVERY_STEP, own_set(tmp_path), best, KILLER)
    run = start_run("background", *overrides, kill=kill).finish()
    assert run.code == 0, run.output
    check_overlap(run, bound=3)
    steps = evaluated(run, "chain_sum")
    assert all(step == version for step, version in steps.items())  # pinned to the version of their step
    without = [*of_kind(run, "evaluation_skipped"), *of_kind(run, "evaluation_lost")]
    left_out = [event["step"] for event in without if "chain_sum" in event["sets"]]
    assert sorted([*steps, *left_out]) == list(range(9))
    assert of_kind(run, "respawn")[0]["part"] == "evaluator"
    assert [event["version"] for event in of_kind(run, "publication")] == list(range(9))
    assert set(evaluated(run, "doubles")) == {0, 8}
    assert {0, 8} <= set(evaluated(run, "sampled")) <= {0, 2, 4, 6, 8}
    newest = of_kind(run, "best")[-1]
    assert newest["value"] == max(run.evaluations())
    assert (run.run_dir / "checkpoints" / "best" / "config.json").is_file()


def test_early_stopped_run_exports_a_model_with_the_same_score(start_run: Start, plain_run: Finished, tmp_path: Path) -> None:
    stop = ("evaluation.best_metric=eval/chain_sum/mean", "evaluation.patience=2", "evaluation.min_improvement=0.9")
    overrides = (*plain_run.as_start, "num_steps=6", *EVERY_STEP, own_set(tmp_path), *stop)
    run = start_run("early", *overrides).finish()
    assert run.code == 0, run.output
    # The evaluation before the first step is the best one; those after steps 1 and 2 are not 0.9 better.
    assert list(evaluated(run, "chain_sum")) == [0, 1, 2]
    assert list(evaluated(run, "doubles")) == [0, 2]
    assert "\nresume" not in run.output
    assert (of_kind(run, "early_stop")[0]["step"], of_kind(run, "early_stop")[0]["best_step"]) == (2, 0)
    assert (run.run_dir / "checkpoints" / "final" / "config.json").is_file()
    row = next(row for row in read_metrics(run.run_dir / "metrics.jsonl") if "eval/sampled/mean" in row)
    assert row["eval/sampled/avg@4"] == pytest.approx(row["eval/sampled/pass@1"])
    assert row["eval/sampled/pass@2"] >= row["eval/sampled/pass@1"]
    check_command_repeats_the_run(run)


def check_command_repeats_the_run(run: Finished) -> None:
    """Evaluate the exported model of a run with the command, and compare with the run's last evaluation."""
    command = [
        sys.executable,
        "-m",
        "titanrl.commands",
        "evaluate",
        "--model",
        str(run.run_dir),
        "--set",
        "chain_sum",
        "--set",
        "doubles",
    ]
    found = subprocess.run([*command, "--json"], cwd=REPO, env=os.environ, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    sets = json.loads(found.stdout)["sets"]
    assert list(sets) == ["chain_sum", "doubles"]
    assert sets["chain_sum"]["mean"] == pytest.approx(run.evaluations()[-1], abs=1 / 16)  # vLLM's own model rounds differently
    assert (sets["doubles"]["num_prompts"], sets["doubles"]["num_errors"]) == (12, 0)
