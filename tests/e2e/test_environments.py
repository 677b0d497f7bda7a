"""Runs in environments: a policy that calls a tool, and environments that fail."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.e2e.conftest import REPO, SMALL, Finished, Start
from titanrl.carriers.dumps import DumpReader
from titanrl.carriers.types import Rollout
from titanrl.config import load_config
from titanrl.session.session import prepare_starting_model

OWN_TOOL = REPO / "examples/custom_tool/custom_tool.py"
REWARDS = "{{answer: reasoning_gym, brief: {{function: '{own}:brief', weight: 0.1}}, first: '{tokens}:first'}}"
FAILURES = ("environment_error", "timeout", "reward_error")
ENVIRONMENT = Path(__file__).with_name("flaky.py")


def trained_groups(run: Finished) -> list[dict[str, Any]]:
    """Return the recorded groups of batches; a next round may have begun when the run ended."""
    return [group for group in run.rollouts() if group["index"] < run.steps[-1]["count/prompts"]]


def test_policy_calls_a_tool_and_trains_on_its_sampled_tokens(start_run: Start, tmp_path: Path) -> None:
    run = start_run(
        "tools",
        f"data.environment={{function: '{OWN_TOOL}:Abacus', max_turns: 3}}",
        f"data.rewards={REWARDS.format(own=OWN_TOOL, tokens=Path(__file__).with_name('token_rewards.py'))}",
        "warm_start.tool_calls=true",
        "data.task_config={min_terms: 3, max_terms: 3, min_digits: 2, max_digits: 2}",
        "warm_start.num_steps=120",
        "warm_start.num_long_only_steps=90",
        "rollout.num_workers=2",
        "rollout.min_group_size=2",
        f"rollout.save={tmp_path}/dump",
        "algorithm.credit=token",
        "algorithm.token_discount=0.9",
        "logging.rollouts_per_step=8",
        "rollout.top_p=0.95",
        "num_steps=2",
    ).finish()
    assert run.code == 0, run.output
    assert [step["group/too_small_frac"] for step in run.steps] == [0.0] * 2
    saved = DumpReader(tmp_path / "dump")
    rollouts = [rollout for place in range(saved.num_groups) for rollout in saved.group(place).rollouts]
    assert len(rollouts) == 2 * 64
    assert max(len(rollout.turns) for rollout in rollouts) > 1
    for rollout in rollouts:
        assert sum(turn.reward for turn in rollout.turns) == pytest.approx(rollout.reward)
        assert rollout.turns[-1].end == len(rollout.segments[-1].token_ids)
        # 1/8 for the first sampled token, and the other rewards for the last one.
        assert rollout.token_rewards.tolist()[:-1] == [0.125, *[0.0] * (len(rollout.token_rewards) - 2)]
        assert rollout.token_rewards.sum() == pytest.approx(rollout.reward)
    check_against_transformers(run, [rollout for rollout in rollouts[:64] if len(rollout.turns) > 1][:16])
    groups = trained_groups(run)
    conversations = [completion["messages"] for group in groups for completion in group["completions"]]
    with_call = [messages for messages in conversations if len(messages) > 2]
    assert with_call, "no episode has a tool call"
    roles = [message["role"] for message in with_call[0]]
    assert roles[:3] == ["user", "assistant", "tool"]
    assert with_call[0][1]["tool_calls"][0]["function"]["name"] == "total"
    numbers = [completion["metrics"] for group in groups[:8] for completion in group["completions"] if "metrics" in completion]
    assert run.steps[0]["environment/tool_calls_mean"] == pytest.approx(np.mean([own["tool_calls"] for own in numbers]))
    assert 0.0 < run.steps[0]["reward/brief"] < 1.0, "the group reward compares the completions of a group"
    for step in run.steps:
        assert step["mismatch/logprob_abs_max"] < 1e-4, "the trainer sees the tokens that the generator sampled"
        assert step["tokens/support_size_mean"] < 20.0, "a nucleus is a small part of the vocabulary"
        assert 1.0 <= step["episode/turns_mean"] <= 3.0
    turns = sum(message["role"] == "assistant" for messages in conversations for message in messages)
    assert run.steps[-1]["count/environment_steps"] == turns
    assert run.steps[-1]["count/rollouts"] == len(conversations) == 2 * 64


def check_against_transformers(run: Finished, rollouts: Sequence[Rollout]) -> None:
    """Compare the log-probabilities of the first batch, over entire conversations, with those of the initial model."""
    base = prepare_starting_model(load_config(run.run_dir / "config.yaml")).base
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for segment in (segment for rollout in rollouts for segment in rollout.segments):
        assert segment.supports is not None
        with torch.no_grad():
            logits = model(torch.from_numpy(segment.token_ids)[None]).logits[0]
        for token in np.flatnonzero(segment.mask).tolist():
            support = torch.from_numpy(segment.supports.ids(token))
            logprobs = logits[token - 1, support].log_softmax(-1)
            (expected,) = logprobs[support == int(segment.token_ids[token])].tolist()
            assert segment.logprobs[token] == pytest.approx(expected, abs=1e-5)
    assert rollouts


def test_environment_failures_are_retried_counted_and_never_trained_on(
    start_run: Start, plain_run: Finished, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    run = start_run(
        "flaky",
        *plain_run.as_start,
        f"data.environment={{function: {ENVIRONMENT}:Flaky, options: {{log: {log}}}, step_timeout_s: 0.5, retries: 1}}",
        "data.rewards={answer: reasoning_gym}",
        "logging.rollouts_per_step=8",
        "num_steps=2",
    ).finish()
    assert run.code == 0, run.output
    noted = [line.split() for line in log.read_text().splitlines()]
    trained = {str(index) for index in range(int(run.steps[-1]["count/prompts"]))}
    injected = Counter(outcome for outcome, index in noted if index in trained)
    counted = {name: sum(step[f"episode/{name}_frac"] * step["episode/count"] for step in run.steps) for name in FAILURES}
    assert counted == pytest.approx({name: injected[name] for name in FAILURES})
    assert all(counted.values())
    assert sum(step["episode/count"] for step in run.steps) == injected.total()
    completions = [completion for group in trained_groups(run) for completion in group["completions"]]
    assert sum(completion["reward"] is not None for completion in completions) == injected["ok"]
    assert len(completions) == 2 * 64 > injected["ok"]
    assert any(event["kind"] == "scorer_error" for event in run.events())
    assert "have no reward and are excluded" in run.output


def test_example_trains_in_an_environment_from_python(plain_run: Finished, tmp_path: Path) -> None:
    credit = ("algorithm.credit=state", "algorithm.turn_discount=0.5")
    overrides = [*SMALL, *plain_run.as_start, *credit, "num_steps=2", f"output_dir={tmp_path}", f"cache_dir={tmp_path}"]
    command = [sys.executable, str(REPO / "examples/second_try/train.py"), *overrides]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    finished = Finished(0, done.stdout, tmp_path / "second_try")
    for row in finished.steps:
        assert 1.0 < row["episode/turns_mean"] <= 2.0
        assert row["reward/mean"] == pytest.approx(row["reward/right"])
    conversations = [completion["messages"] for group in finished.rollouts() for completion in group["completions"]]
    assert {len(messages) for messages in conversations} == {2, 4}
    # Both tries are asked with the same message, so all turns of a group are in one state.
    assert [row["episode/shared_state_frac"] for row in finished.steps] == [1.0, 1.0]
    groups = {group["index"]: group["completions"] for group in finished.rollouts()}
    recorded = [json.loads(line) for line in (finished.run_dir / "advantages.jsonl").read_text().splitlines()]
    assert recorded
    for row in recorded:
        tries = [(own["reward"], len(own["messages"]) // 2) for own in groups[row["index"]]]
        returns = [reward * 0.5**later for reward, count in tries for later in range(count)]
        for (reward, count), advantage in zip(tries, row["advantages"], strict=True):
            of_rollout = reward - np.mean([reward for reward, _ in tries])
            first, last = (of_rollout + reward * 0.5**later - np.mean(returns) for later in (count - 1, 0))
            assert min(first, last) - 1e-6 <= advantage <= max(first, last) + 1e-6
