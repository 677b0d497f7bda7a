"""Metrics of a step against numbers computed by hand."""

import math

import numpy as np
import pytest

from tests.records import make_record
from tests.simulated_clock import Clock
from titanrl.carriers.tables import RecordTable, pack_record
from titanrl.carriers.types import EvaluationResult, GenerationStats, GroupHandle, GroupRecord, LossSums
from titanrl.config.data import CurriculumConfig, DataConfig
from titanrl.metrics.steps import (
    PhaseTimer,
    environment_metrics,
    evaluation_metrics,
    loss_metrics,
    part_means,
    rollout_metrics,
    speed_metrics,
    task_metrics,
)


def test_loss_terms_are_sums_and_other_metrics_are_token_means() -> None:
    sums = {"num_tokens": 4.0, "loss/policy": -3.0, "loss/kl": 0.5, "loss/total": -2.5, "policy/entropy": 6.0}
    assert loss_metrics(LossSums(sums=sums, maxima={"policy/ratio_max": 1.5})) == {
        "loss/policy": -3.0,
        "loss/kl": 0.5,
        "loss/total": -2.5,
        "policy/entropy": 1.5,
        "policy/ratio_max": 1.5,
    }


def test_effective_sample_size_follows_from_weight_sums() -> None:
    # Weights 1, 1, 2 and 0: mean 1, mean square 1.5.
    sums = {"num_tokens": 4.0, "correction_weight": 4.0, "correction_weight_squared": 6.0, "correction/clip_frac": 1.0}
    assert loss_metrics(LossSums(sums=sums, maxima={})) == pytest.approx(
        {"correction/ess": 1 / 1.5, "correction/clip_frac": 0.25}
    )


def test_step_without_tokens_has_zero_metrics() -> None:
    sums = {"num_tokens": 0.0, "loss/total": 0.0, "correction_weight": 0.0, "correction_weight_squared": 0.0}
    assert loss_metrics(LossSums(sums=sums, maxima={})) == {"loss/total": 0.0, "correction/ess": 0.0}


def record(index: int, rewards: tuple[float, ...], prompt_len: int, lengths: tuple[int, ...]) -> GroupRecord:
    return GroupRecord(
        index=index,
        task="sums",
        handle=GroupHandle(shard=0, location=index, serial=1),
        has_payload=True,
        rewards=rewards,
        reward_parts={"answer": rewards} if index else {"answer": rewards, "format": (0.5, 1.0)},
        prompt_len=prompt_len,
        lengths=lengths,
        num_sampled=tuple(length - prompt_len for length in lengths),
        num_truncated=index,
        num_overlong=0,
        num_nonfinite=index,
        min_version=0,
        max_version=0,
        generate_s=1.0 + index,
        score_s=0.5,
    )


def test_weighted_parts_of_each_task_add_up_to_the_mean_reward() -> None:
    # The second rollout was cut off before its environment judged it, and the last group belongs to another task.
    table = RecordTable.join(
        [
            pack_record(make_record(0, (0.5, -0.25), reward_parts={"found": (0.5, math.nan), "truncated": (math.nan, -0.25)})),
            pack_record(make_record(1, (1.0, 0.0), reward_parts={"found": (1.0, 0.0)})),
            pack_record(make_record(2, (3.0, 5.0), reward_parts={"game": (3.0, 5.0)}), task=1),
        ]
    )
    assert part_means(table) == {"found": 1.5 / 4, "truncated": -0.25 / 4, "game": 4.0}
    own = table.take(np.array([0, 1]))
    assert part_means(own)["found"] + part_means(own)["truncated"] == own.rewards.mean()
    assert "game" not in part_means(own)


def test_rollout_metrics_summarize_the_groups_of_a_batch() -> None:
    records = RecordTable.of([record(0, (0.1, 0.2), 4, (6, 8)), record(1, (0.3,), 5, (15,))])
    values = rollout_metrics(records, num_tried=4, num_equal_rewards=1, num_tried_rollouts=16, num_errors=4)
    assert values == {
        "reward/mean": (0.1 + 0.2 + 0.3) / 3,  # added from the left
        "reward/answer": (0.1 + 0.2 + 0.3) / 3,
        "reward/format": (0.5 + 1.0) / 3,  # 0 where a rollout lacks the part
        "reward/error_frac": 0.25,
        "reward/num_errors": 4.0,
        "reward/num_completions": 16.0,
        "group/zero_variance_frac": 0.25,
        "tokens/prompt_len_mean": 4.5,
        "tokens/prompt_len_max": 5.0,
        "tokens/response_len_mean": 16 / 3,
        "tokens/response_len_max": 10.0,
        "tokens/truncated_frac": 1 / 3,
        "tokens/overlong_frac": 0.0,
        "tokens/nonfinite_frac": 1 / 17,
        "group/generate_s_mean": 1.5,
        "group/score_s_mean": 0.5,
    }
    assert {type(value) for value in values.values()} == {float}


def test_throughput_counts_only_busy_seconds() -> None:
    # Two replicas decode 6 of 20 s each; the trainer computes 4 of 10 s.
    generated = GenerationStats(num_tokens=1200, busy_s=12.0, wall_s=40.0, num_replicas=2)
    assert speed_metrics(trained_tokens=800, generated=generated, trainer_busy_s=4.0, step_s=10.0) == pytest.approx(
        {
            "perf/gen_tokens_per_s": 200.0,
            "perf/train_tokens_per_s": 200.0,
            "perf/generator_idle_frac": 0.7,
            "perf/trainer_idle_frac": 0.6,
            "time/step_s": 10.0,
        }
    )


def test_throughput_of_an_idle_side_is_omitted() -> None:
    generated = GenerationStats(num_tokens=0, busy_s=0.0, wall_s=10.0, num_replicas=1)
    assert speed_metrics(trained_tokens=0, generated=generated, trainer_busy_s=0.0, step_s=10.0) == {
        "perf/generator_idle_frac": 1.0,
        "perf/trainer_idle_frac": 1.0,
        "time/step_s": 10.0,
    }


def test_numbers_of_environments_are_means_over_tasks_and_of_each() -> None:
    by_task = {"sums": {"calls": (6.0, 4), "late": (1.0, 1)}, "games": {"calls": (1.0, 3)}}
    means = {"environment/calls_mean": 1.0, "environment/late_mean": 1.0}
    assert environment_metrics(by_task, is_mixture=False) == means
    assert environment_metrics(by_task, is_mixture=True) == means | {
        "task/sums/environment/calls_mean": 1.5,
        "task/sums/environment/late_mean": 1.0,
        "task/games/environment/calls_mean": 1 / 3,
    }
    assert environment_metrics({}, is_mixture=True) == {}


def test_metrics_of_an_evaluation_have_the_denominator() -> None:
    failed = EvaluationResult(
        task="sums", version=3, mean=0.2, num_prompts=5, response_len_mean=4.0, num_samples=2, num_errors=4
    )
    assert evaluation_metrics(failed) == {
        "eval/sums/mean": 0.2,
        "eval/sums/response_len_mean": 4.0,
        "eval/sums/error_frac": 0.4,
        "eval/sums/num_errors": 4.0,
        "eval/sums/num_completions": 10.0,
        "eval/sums/truncated_frac": 0.0,
    }


HALF = DataConfig(curriculum=CurriculumConfig(levels=2, solved_from=0.5))


def test_metrics_of_a_task_cover_only_its_groups() -> None:
    table = RecordTable.join(
        [
            pack_record(make_record(0, (0.0, 1.0), reward_parts={"a": (0.0, 1.0)}, generate_s=1.0), task=0),
            pack_record(make_record(1, (0.5, 0.5), (4, 6), num_truncated=1, generate_s=3.0), task=1),
            pack_record(make_record(2, (1.0, 1.0), reward_parts={"a": (1.0, 1.0)}, generate_s=2.0), task=0),
        ]
    )
    values = task_metrics(table, {"sums": DataConfig(), "words": HALF, "games": DataConfig()}, {"games": 2})
    assert values == {
        "task/sums/groups": 2.0,
        "task/sums/dropped": 0.0,
        "task/sums/reward_mean": 0.75,
        "task/sums/solved_frac": 0.75,
        "task/sums/reward/a": 0.75,
        "task/sums/response_len_mean": 2.0,
        "task/sums/truncated_frac": 0.0,
        "task/sums/generate_s_mean": 1.5,
        "task/words/groups": 1.0,
        "task/words/dropped": 0.0,
        "task/words/reward_mean": 0.5,
        "task/words/solved_frac": 1.0,
        "task/words/response_len_mean": 5.0,
        "task/words/truncated_frac": 0.5,
        "task/words/generate_s_mean": 3.0,
        "task/games/groups": 0.0,
        "task/games/dropped": 2.0,
    }
    assert task_metrics(table, {"sums": DataConfig()}, {}) == {}


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_repeated_phase_adds_up_the_seconds_of_its_body(clock: Clock) -> None:
    timer = PhaseTimer(clock=clock)
    for seconds in (1.0, 2.0, 4.0):
        with timer.phase("sync"):
            clock.now += seconds
        clock.now += 5.0  # outside any phase
    assert timer.take() == {"time/sync_s": 7.0}


def test_nested_phases_add_up_to_wall_time(clock: Clock) -> None:
    timer = PhaseTimer(clock=clock)
    with timer.phase("train"):
        clock.now += 1.0
        with timer.phase("sync"):
            clock.now += 10.0
        clock.now += 2.0
    assert timer.take() == {"time/train_s": 3.0, "time/sync_s": 10.0}


def test_take_resets_an_open_phase(clock: Clock) -> None:
    timer = PhaseTimer(clock=clock)
    with timer.phase("train"):
        clock.now += 1.0
        assert timer.take() == {"time/train_s": 1.0}
        clock.now += 4.0
    assert timer.take() == {"time/train_s": 4.0}
    assert timer.take() == {}


def test_phase_that_raises_is_counted_and_closed(clock: Clock) -> None:
    timer = PhaseTimer(clock=clock)

    def fail() -> None:
        with timer.phase("train"):
            clock.now += 1.0
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    assert timer.take() == {"time/train_s": 1.0}


def test_callback_receives_every_phase_change(clock: Clock) -> None:
    heard: list[str | None] = []
    timer = PhaseTimer(on_change=heard.append, clock=clock)
    with timer.phase("train"), timer.phase("sync"):
        pass
    assert heard == ["train", "sync", "train", None]
