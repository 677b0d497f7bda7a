"""A run with a critic: turns with rewards, warm-up, two ranks and mini-batches."""

from pathlib import Path

import pytest

from benchmarks import critic
from tests.e2e.conftest import SMALL, Finished
from tests.e2e.test_epochs import rows, watched_run
from titanrl import load_config


def test_critic_warms_up_and_learns(plain_run: Finished, tmp_path: Path) -> None:
    passes = ("trainer.minibatches_per_batch=2", "trainer.parallelism.dp_shard=2", "algorithm.learning_rate=1e-3")
    options = critic.overrides(plain_run.run_dir / "checkpoints/final", "critic")
    warmup = "algorithm.critic={learning_rate: 1e-3, warmup_steps: 1, turn_lambda: 0.5, token_lambda: 0.9}"
    changed = [
        *SMALL,
        *options,
        *passes,
        warmup,
        "algorithm.turn_discount=0.5",
        f"output_dir={tmp_path}",
        "logging.console=off",
    ]
    config = load_config("configs/quickstart.yaml", changed)
    run = watched_run(config)
    found = rows(run.run_dir)
    assert [row["optim/empty"] for row in found] == [1.0, 0.0, 0.0, 0.0], "the first step trains only the critic"
    assert [row["version"] for row in found] == [1, 2, 3, 4]
    assert found[0]["critic/value_mean"] == 0.0, "the head starts at zero"
    assert abs(found[0]["critic/explained_variance"]) < 1e-6
    assert all(row["critic/value_mean"] != 0.0 for row in found[1:])
    for row, updates, losses in zip(found, run.updates, run.passes, strict=True):
        assert len(updates) == 2
        assert row["critic/skipped"] == 0.0
        assert row["critic/grad_norm"] > 0.0
        assert row["loss/critic"] == pytest.approx(sum(part.sums["loss/critic"] for part in losses) / 2)
        assert row["episode/turns_mean"] == critic.NUM_TURNS
