"""Per-task metrics of a mixture."""

from tests.records import make_record
from titanrl.carriers.tables import RecordTable, pack_record
from titanrl.config.data import CurriculumConfig, DataConfig
from titanrl.metrics.steps import task_metrics

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
