"""Runs of the examples with custom rewards and prompts, named in a configuration or passed as Python objects."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from tests.e2e.conftest import REPO, SMALL, Finished, Start
from titanrl.algorithms.advantages import decoupled_advantages
from titanrl.algorithms.contracts import GroupRewards

JUDGE = REPO / "examples" / "judge"
PROMPTS = '''
def sums(seed, largest):
    """Return the questions of the quick start with two terms."""
    question = "State the final answer to the following arithmetic problem: {} + {} ="
    return [
        {"prompt": question.format(a, b), "answer": str(a + b), "first": a} for a in range(largest) for b in range(largest)
    ]
'''
GROUP = """
import titanrl

@titanrl.group_reward
def rare(completions, entry, finish_reasons):
    assert entry["metadata"]["first"] < 10
    return [1 - completions.count(text) / len(completions) for text in completions]
"""


@pytest.fixture
def judge_url() -> Iterator[str]:
    """URL of the rule-based judge, which runs in a separate process."""
    with subprocess.Popen([sys.executable, str(JUDGE / "rule_judge.py"), "0"], stdout=subprocess.PIPE, text=True) as server:
        yield server.stdout.readline().split()[-1]
        server.kill()


def test_run_with_judges_a_group_reward_penalties_and_own_prompts(
    start_run: Start, plain_run: Finished, judge_url: str, tmp_path: Path
) -> None:
    (tmp_path / "custom_prompts.py").write_text(PROMPTS)
    (tmp_path / "group_reward.py").write_text(GROUP)
    # Not with JUDGE_URL: a run with other environment variables imports everything itself.
    (tmp_path / "judge.py").write_text((JUDGE / "judge.py").read_text().replace("http://127.0.0.1:8001/v1", judge_url))
    judge = {"function": f"{tmp_path}/judge.py:judge", "weight": 0.5, "trusted": True}
    built_in = yaml.safe_load((JUDGE / "built_in.yaml").read_text())["data"]["rewards"]["judge"]
    rubric = {
        "url": judge_url,
        "model": "judge",
        "criteria": {"right": {"description": "The result is right.", "weight": 3}, "steps": "Every step is written out."},
        "prompt": "{criteria}\nRight result: {answer}\nSolution: {completion}",
    }
    rewards = {
        "answer": "exact",
        "judge": judge,
        "rubric": {"function": "judge", "options": rubric},
        "rare": {"function": f"{tmp_path}/group_reward.py:rare", "weight": 0.25},
        "grade": {**built_in, "options": {**built_in["options"], "url": judge_url}},
        "short": {"function": "overlong", "weight": 2.0, "options": {"cache_tokens": 5}},
        "again": {"function": "repetition", "options": {"ngram_size": 1}},
        "form": {"function": "regex", "options": {"pattern": "<answer>", "match": "anywhere"}},
    }
    overrides = (
        *plain_run.as_start,
        f"data.source={tmp_path}/custom_prompts.py:sums",
        "data.options={largest: 10}",
        "data.task=sums",
        f"data.rewards={json.dumps(rewards)}",
        "algorithm.advantage=gdpo",
        "algorithm.mask_truncated=true",
        "rollout.max_new_tokens=9",  # truncates some completions
        "num_steps=2",
        "evaluation.num_prompts=8",
        "logging.rollouts_per_step=8",
    )
    finished = start_run("judged", *overrides).finish()
    assert finished.code == 0, finished.output
    assert len(finished.evaluations("sums")) == 2
    completions = [(group, completion) for group in finished.rollouts() for completion in group["completions"]]
    assert len(completions) >= 2 * 64
    weights = {"rubric/right": 1.0, "rubric/steps": 1.0}
    weights |= {"answer": 1.0, "judge": 0.5, "rare": 0.25, "grade": 0.5, "short": 2.0, "again": 1.0, "form": 1.0}
    for group, completion in completions:
        parts = completion["reward_parts"]
        assert completion["reward"] == pytest.approx(sum(weights[part] * value for part, value in parts.items()))
        assert parts["grade"] == parts["judge"]  # the built-in judge is the example's function
        assert parts["short"] == pytest.approx(-max(completion["num_tokens"] - 4, 0) / 5)  # of 9 tokens
        assert parts["form"] == ("<answer>" in completion["text"])
        answers = re.findall("<answer>(.*?)</answer>", completion["text"])
        if completion["text"].count("<answer>") == len(answers) == 1:
            assert parts["answer"] == (answers[0] == group["answer"])
        has_steps = completion["text"].count("=") >= 2
        assert parts["judge"] == 0.5 * (answers[-1:] == [group["answer"]]) + 0.5 * has_steps
        assert parts["rubric/right"] == 0.75 * (answers[-1:] == [group["answer"]])
        assert parts["rubric/steps"] == 0.25 * has_steps
        assert re.fullmatch(r"State .*: \d \+ \d =", group["prompt"])
    for row in finished.steps:
        assert row["reward/error_frac"] == 0.0
        assert row["reward/mean"] == pytest.approx(sum(weight * row[f"reward/{part}"] for part, weight in weights.items()))
    assert_advantages_are_gdpo(finished, weights)
    assert_truncated_completions_are_not_trained_on(finished)


def assert_advantages_are_gdpo(finished: Finished, weights: Mapping[str, float]) -> None:
    """Recompute the advantages from the recorded parts of every group, and compare."""
    recorded = [json.loads(line) for line in (finished.run_dir / "advantages.jsonl").read_text().splitlines()]
    parts_of = {
        group["index"]: [completion["reward_parts"] for completion in group["completions"]] for group in finished.rollouts()
    }
    for step in (1, 2):
        rows = [row for row in recorded if row["step"] == step]
        assert len(rows) == 8
        groups = [
            GroupRewards(
                rewards=[0.0] * 8, parts={part: [p[part] for p in parts_of[row["index"]]] for part in weights}, weights=weights
            )
            for row in rows
        ]
        for row, advantages in zip(rows, decoupled_advantages(groups), strict=True):
            assert row["advantages"] == pytest.approx(advantages, abs=1e-9)


def assert_truncated_completions_are_not_trained_on(finished: Finished) -> None:
    """Recount the trained tokens from the recorded completions, and compare."""
    trained, num_truncated = 0, 0
    advantages_of = {
        row["index"]: row["advantages"]
        for row in map(json.loads, (finished.run_dir / "advantages.jsonl").read_text().splitlines())
    }
    for group in finished.rollouts():
        if group["index"] in advantages_of:
            for completion, advantage in zip(group["completions"], advantages_of[group["index"]], strict=True):
                num_truncated += completion["finish_reason"] == "length"
                trained += completion["num_tokens"] * (completion["finish_reason"] == "stop" and advantage != 0.0)
    assert num_truncated > 0
    assert sum(row["tokens/truncated_frac"] for row in finished.steps) == pytest.approx(num_truncated / 64)
    assert finished.steps[-1]["count/trained_tokens"] == trained


def test_example_trains_with_functions_from_python(plain_run: Finished, tmp_path: Path) -> None:
    overrides = [*SMALL, *plain_run.as_start, "num_steps=2", f"output_dir={tmp_path}", f"cache_dir={tmp_path}"]
    command = [sys.executable, str(REPO / "examples/custom_reward/train.py"), *overrides]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    finished = Finished(0, done.stdout, tmp_path / "custom_reward")
    assert (finished.run_dir / "checkpoints/final/config.json").is_file()
    for row in finished.steps:
        assert row["reward/mean"] == pytest.approx(row["reward/right"] + 0.1 * row["reward/brief"])
    assert 0.0 < finished.steps[0]["reward/brief"] < 1.0
