"""Figures of the comparison with other programs, and the order of its runs."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import table
from benchmarks.peers.__main__ import OURS, PAYLOADS, PEERS, QUICKSTART, missing, our_rows, overrides, trials
from benchmarks.peers.figures import Run, cpu_at, medians, score_figures, speed_figures, summary
from benchmarks.peers.job import Job, answered, digits
from benchmarks.peers.watch import busy_seconds, role_of
from titanrl.config import load_config

# Launched at 100; the first step takes from 110 to 114, the others 2 s each.
STEPS = [
    {"time": 114.0 + 2 * number, "step": number, "step_s": 2.0, "tokens": 10 * (number + 1), "generate_s": 1.5, "train_s": 0.5}
    for number in range(4)
]
CPU = [(110.0, {"main": 1.0}), (120.0, {"main": 6.0, "trainer": 20.0})]
RUN = Run(launched=100.0, rows=STEPS, cpu_s=CPU, peak_bytes=7, others_share=0.0)


def test_speed_counts_only_the_steps_between_skipped_and_dropped() -> None:
    figures = speed_figures(RUN, num_skipped=1, num_dropped=1)
    assert figures["tokens_per_s"] == (20 + 30) / 4
    assert figures["step_s"] == 2.0
    assert figures["train_tokens_per_s"] == 50.0
    assert figures["first_step_s"] == 14.0
    assert figures["first_step_cpu_s"] == pytest.approx(1 + 0.4 * (5 + 20))
    # From 114 to 118, 4 of the 10 s between the samples.
    assert figures["cpu_ms_per_token"] == pytest.approx({"main": 1e3 * 2 / 50, "trainer": 1e3 * 8 / 50})


def test_first_step_counts_from_its_own_start() -> None:
    assert speed_figures(RUN, num_skipped=0, num_dropped=3)["tokens_per_s"] == 10 / 2


def test_cpu_seconds_are_interpolated() -> None:
    assert cpu_at(CPU, 115.0) == {"main": 3.5, "trainer": 10.0}
    assert cpu_at(CPU, 90.0) == {"main": 1.0}
    assert cpu_at(CPU, 130.0) == CPU[1][1]


def test_time_to_score_is_that_of_the_first_evaluation_that_reaches_it() -> None:
    evaluations = [{"time": 112.0, "score": 0.1}, {"time": 117.0, "score": 0.8}, {"time": 119.0, "score": 0.9}]
    figures = score_figures(Run(launched=100.0, rows=[*STEPS, *evaluations], cpu_s=CPU, peak_bytes=7, others_share=0.0))
    assert (figures["time_to_score_s"], figures["score_first"], figures["score_last"]) == (17.0, 0.1, 0.9)
    assert (
        score_figures(Run(launched=100.0, rows=[*STEPS, evaluations[0]], cpu_s=CPU, peak_bytes=7, others_share=0.0))[
            "time_to_score_s"
        ]
        is None
    )


def test_medians_leave_out_numbers_that_a_run_lacks() -> None:
    rows = [{"a": 1.0, "b": None, "c": {"x": 2.0, "y": 1.0}}, {"a": 3.0, "b": 1.0, "c": {"x": 4.0}}]
    assert medians(rows) == {"a": 2.0, "c": {"x": 3.0}}


@pytest.mark.parametrize("name", PAYLOADS)
@pytest.mark.parametrize("max_staleness", OURS.values())
def test_configuration_of_every_payload_is_valid(name: str, max_staleness: int, tmp_path: Path) -> None:
    payload = PAYLOADS[name]
    job = Job(
        model="model", train_file="", heldout_file="", evaluate_every=payload.evaluate_every, reward=payload.reward,
        num_steps=payload.num_steps, groups=payload.groups, group_size=payload.group_size,
        max_new_tokens=payload.max_new_tokens, learning_rate=payload.learning_rate, seed=0,
    )  # fmt: skip
    config = load_config(QUICKSTART, overrides(job, tmp_path, max_staleness))
    assert config.trainer.row_tokens >= config.data.max_prompt_tokens + config.rollout.max_new_tokens
    assert config.rollout.groups_per_step * config.rollout.group_size == job.batch


def test_metrics_of_a_run_become_a_record() -> None:
    step = {"reward/mean": 0.5, "time/step_s": 2.0, "time/rollout_s": 1.0, "time/train_s": 0.75, "time/optim_s": 0.25}
    rows = [
        {"time": 1.0, "step": 0, "eval/answered/mean": 0.25},
        {"time": 2.0, "step": 1, "count/generated_tokens": 100, **step},
        {"time": 3.0, "step": 2, "count/generated_tokens": 150, **step},
    ]
    evaluated, first, second = our_rows(rows)
    assert evaluated == {"time": 1.0, "score": 0.25}
    assert (first["tokens"], second["tokens"]) == (100, 50)
    assert (second["generate_s"], second["train_s"]) == (1.0, 1.0)


def run_all(payload: str, num_turns: int, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make all missing runs; the last setting of a peer is the fastest."""
    made = []
    for asked in missing(payload, runs, ["TitanRL", *PEERS], num_turns):
        setting = (
            None if asked.setting is None else {"threads": asked.setting.threads, "device_batch": asked.setting.device_batch}
        )
        setting = setting and setting | {"continuous_batching": asked.setting is not None and asked.setting.continuous_batching}
        run = {"payload": asked.payload, "system": asked.system, "turn": asked.turn, "setting": setting}
        run["figures"] = {"tokens_per_s": float(len(runs)), "step_s": 1.0}
        runs.append(run)
        made.append(run)
    return made


def test_peers_run_with_their_fastest_setting_and_by_turns() -> None:
    made = run_all("10M", 2, [])
    turns = [run for run in made if run["turn"] is not None]
    assert [run["system"] for run in turns] == ["TitanRL", *PEERS, *reversed(PEERS), "TitanRL"]
    for system in PEERS:
        tried = [run["setting"] for run in made if run["system"] == system and run["turn"] is None]
        assert len(tried) == len(list(trials(system, PAYLOADS["10M"])))
        assert {run["system"]: run["setting"] for run in turns}[system] == tried[-1]


def test_second_call_makes_only_missing_runs() -> None:
    runs: list[dict[str, Any]] = []
    run_all("quickstart", 1, runs)
    assert run_all("quickstart", 1, runs) == []
    assert [run["turn"] for run in run_all("quickstart", 2, runs)] == [1, 1, 1]
    assert [run["turn"] for run in run_all("score", 1, runs)] == [0, 0, 0]  # the settings are those of the quick start


def test_summary_has_the_medians_of_the_turns_without_trials() -> None:
    runs: list[dict[str, Any]] = []
    run_all("10M", 2, runs)
    found = summary(runs)["10M"]
    assert found.keys() == {"TitanRL", *PEERS}
    assert found["TitanRL"]["turns"] == 2
    speeds = [run["figures"]["tokens_per_s"] for run in runs if run["system"] == "TitanRL"]
    assert found["TitanRL"]["tokens_per_s"] == sum(speeds) / 2


def test_cells_show_the_ratio_to_the_baseline() -> None:
    assert table.peer_cells([2.0, 3.0, None], ".1f", baseline=1) == ["2.0 (x0.67)", "3.0", "-"]
    assert table.peer_cells([2.0, None], ".0f", baseline=1) == ["2", "-"]


def test_cpu_text_lists_the_roles_that_matter() -> None:
    assert table.cpu_text({"main": 1.0, "trainer": 3.0, "store": 0.01}) == "4.01: trainer 3.00, main 1.00"
    assert table.cpu_text({"main": 1.0}) == "1.00"


def test_role_is_the_log_without_its_numbers() -> None:
    assert role_of(5, {5: "generator_0_1"}, command=1) == "generator"
    assert role_of(1, {1: "generator_0"}, command=1) == "main"
    assert role_of(6, {}, command=1) == "others"


def test_busy_seconds_grow_with_the_work_of_any_process() -> None:
    before = busy_seconds()
    subprocess.run([sys.executable, "-c", "sum(range(10_000_000))"], check=True)
    assert busy_seconds() > before + 0.05


def test_rewards_are_those_of_the_task() -> None:
    assert answered("<think>1+2=3</think><answer> 3</answer>", {"answer": "3"}) == 1.0
    assert answered("3", {"answer": "3"}) == 0.0
    assert digits("a1b2", {}) == 0.5
