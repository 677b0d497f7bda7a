"""Runs whose reward always or sometimes raises."""

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import Finished, Start


def test_reward_that_always_raises_ends_the_run_with_its_exception(
    start_run: Start, plain_run: Finished, tmp_path: Path
) -> None:
    (tmp_path / "broken_reward.py").write_text("def score(text, entry):\n    return 1 / 0\n")
    reward = f"data.rewards={{answer: '{tmp_path}/broken_reward.py:score'}}"
    finished = start_run("broken", *plain_run.as_start, reward).finish()
    assert finished.code == 1
    last = finished.output.splitlines()[-1]
    assert "ScorerError: data.rewards: the reward failed on all 32 completions" in last
    assert "answer: ZeroDivisionError: division by zero" in last
    assert "Traceback" not in finished.output


def test_failed_rollouts_are_left_out_counted_and_marked(start_run: Start, plain_run: Finished, tmp_path: Path) -> None:
    (tmp_path / "unlucky_reward.py").write_text(
        "def score(text, entry):\n    assert len(text) % 4, 'unlucky'\n    return len(text) % 2\n"
    )
    overrides = (
        *plain_run.as_start,
        f"data.rewards={{answer: '{tmp_path}/unlucky_reward.py:score'}}",
        "num_steps=2",
        "logging.rollouts_per_step=8",
    )
    finished = start_run("unlucky", *overrides).finish()
    assert finished.code == 0, finished.output
    groups = finished.rollouts()
    failed = [completion for group in groups for completion in group["completions"] if completion["reward"] is None]
    assert {completion["error"] for completion in failed} == {"answer: AssertionError: unlucky (unlucky_reward.py:2)"}
    assert all(len(completion["text"]) % 4 == 0 for completion in failed)
    lines = map(json.loads, (finished.run_dir / "advantages.jsonl").read_text().splitlines())
    advantages = {(line["index"], line["version"]): line["advantages"] for line in lines}
    trained = [group for group in groups if (group["index"], group["version"]) in advantages]
    assert len(trained) == 2 * 8
    for group in trained:
        rewards = [completion["reward"] for completion in group["completions"] if completion["reward"] is not None]
        assert [completion["reward"] for completion in group["completions"]][: len(rewards)] == rewards
        centred = [reward - sum(rewards) / len(rewards) for reward in rewards]  # dr_grpo over the scored rollouts
        assert advantages[group["index"], group["version"]] == pytest.approx(centred)
    assert all(0.0 < row["reward/error_frac"] < 1.0 for row in finished.steps)
    assert "AssertionError: unlucky" in finished.output
