"""An asynchronous run of two tasks with unequal latencies, one with a curriculum, before and after a resume."""

import pytest

from tests.e2e.conftest import REPO, Finished, Start

SLOW = """
import time


def slow(completion, entry):
    time.sleep(0.05)
    return float(entry["answer"] in completion)
"""

MIXTURE = """data.mixture={
    sums: {weight: 3, task_config: {min_terms: 3, max_terms: 3, min_digits: 1, max_digits: 1},
           curriculum: {task_configs: [{max_terms: 3}, {max_terms: 4}, {min_terms: 4, max_terms: 4}],
                        raise_at: 0.02, lower_at: 0.0, window: 2, solved_from: 0.01}},
    slow: {environment: single_turn, rewards: {found: "SLOW:slow"}, max_new_tokens: 20, group_size: 4, advantage: grpo}}"""


@pytest.fixture(scope="module")
def resumed(start_run: Start, plain_run: Finished, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run of five steps, continued for five more."""
    rewards = tmp_path_factory.mktemp("rewards") / "slow.py"
    rewards.write_text(SLOW)
    mixture = MIXTURE.replace("SLOW", str(rewards)).replace("\n", " ")
    asynchronous = ("max_staleness=2", "rollout.window=0.3", "rollout.dynamic_sampling=true", "algorithm.loss=ppo")
    sizes = ("num_steps=5", "evaluation.num_prompts=8", "checkpoint.every_steps=0", "rollout.groups_per_step=4")
    first = start_run("mixture", mixture, *plain_run.as_start, *asynchronous, *sizes).finish()
    assert first.code == 0, first.output
    finished = start_run("mixture", "num_steps=10", resume=True).finish()
    assert finished.code == 0, finished.output
    return finished


def test_trained_groups_keep_the_ratio_over_two_attempts(resumed: Finished) -> None:
    totals = {name: sum(row[f"task/{name}/groups"] for row in resumed.steps) for name in ("sums", "slow")}
    last = resumed.steps[-1]
    assert last["task/sums/groups_total"] == totals["sums"]
    assert last["task/slow/groups_total"] == totals["slow"]
    assert totals["sums"] + totals["slow"] == 40
    # Groups in flight or finished at the end may account for the difference between the ratios of turns and of trained groups.
    assert abs(totals["sums"] - 30) <= 6
    assert last["task/sums/share"] == totals["sums"] / 40


def test_larger_num_steps_extends_a_finished_run(resumed: Finished) -> None:
    assert [row["step"] for row in resumed.steps] == list(range(1, 11))
    assert "num_steps: 10" in (resumed.run_dir / "config.yaml").read_text()


def test_metrics_evaluations_and_rollouts_are_by_task(resumed: Finished) -> None:
    assert len(resumed.evaluations("sums")) == len(resumed.evaluations("slow")) == 3
    with_slow = [row for row in resumed.steps if row["task/slow/groups"]]
    assert all(0.0 <= row["task/slow/reward/found"] <= 1.0 for row in with_slow)
    assert all(row["task/slow/response_len_mean"] <= 20 for row in with_slow)
    assert all("task/sums/reward/answer" in row for row in resumed.steps if row["task/sums/groups"])
    groups = resumed.rollouts()
    assert {group["task"] for group in groups} == {"sums", "slow"}
    assert {len(group["completions"]) for group in groups if group["task"] == "slow"} == {4}
    assert {len(group["completions"]) for group in groups if group["task"] == "sums"} == {8}
    indices = [group["index"] for group in groups]
    assert len(set(indices)) == len(indices)


def test_curriculum_moves_and_continues_after_a_resume(resumed: Finished) -> None:
    moves = [row["curriculum/sums/moves"] for row in resumed.steps]
    assert moves == sorted(moves)
    assert moves[-1] >= 1
    assert max(row["curriculum/sums/level"] for row in resumed.steps) >= 1
    assert moves[5] >= moves[4], "the level is that of the checkpoint"


@pytest.mark.slow
def test_synchronous_run_of_unlike_tasks_repeats_after_a_resume(start_run: Start, plain_run: Finished) -> None:
    tries = f"environment: {{function: '{REPO}/examples/mixture/tries.py:SecondTry', max_turns: 2}}"
    levels = "curriculum: {task_configs: [{max_terms: 3}, {min_terms: 4}], window: 2, raise_at: 0.02, lower_at: 0, review: 0.3}"
    mixture = f"data.mixture={{sums: {{weight: 3, {levels}}}, tries: {{{tries}, group_size: 4}}}}"
    settings = (mixture, *plain_run.as_start, "rollout.dynamic_sampling=true", "rollout.groups_per_step=4")
    sizes = ("evaluation.num_prompts=8", "checkpoint.every_steps=3", "trainer.row_tokens=192")
    whole = start_run("mixed-whole", *settings, *sizes, "num_steps=6").finish()
    start_run("mixed-half", *settings, *sizes, "num_steps=3").finish()
    half = start_run("mixed-half", "num_steps=6", resume=True).finish()
    assert whole.code == half.code == 0, whole.output + half.output
    keys = [key for key in whole.steps[-1] if key.startswith(("reward/", "task/", "curriculum/", "loss/", "grad/"))]
    keys = [key for key in keys if not key.endswith("generate_s_mean")]
    assert [[row.get(key) for key in keys] for row in half.steps] == [[row.get(key) for key in keys] for row in whole.steps]
    assert {row["task/sums/groups"] for row in whole.steps} == {3.0}
