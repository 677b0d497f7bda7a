"""A run with several epochs and mini-batches per batch, which also trains on examples."""

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import SMALL, Finished
from titanrl import GRPO, load_config
from titanrl.algorithms.batch_plan import StepPlan
from titanrl.carriers.types import LossSums, OptimUpdate, StepMetrics
from titanrl.config import Config, ConfigError
from titanrl.grpo import Trained
from titanrl.launch.preflight import read_examples
from titanrl.metrics.reading import read_metrics
from titanrl.replay.groups import Batch

TIMES = ("time/", "perf/", "sync/", "group/generate_s", "group/score_s", "episode/environment_s")


class Watched(GRPO):
    """A run that records the metrics of each optimizer step."""

    def __init__(self, config: Config, **options: Any) -> None:
        super().__init__(config, **options)
        self.passes: list[Sequence[LossSums]] = []
        self.updates: list[Sequence[OptimUpdate]] = []

    def _report(self, batch: Batch, plan: StepPlan, trained: Trained, *others: Any) -> StepMetrics:
        self.passes.append(trained.losses)
        self.updates.append(trained.updates)
        return super()._report(batch, plan, trained, *others)


def watched_run(config: Config, **options: Any) -> Watched:
    """Train and export."""

    async def train() -> Watched:
        run = Watched(config, **options)
        async with run:
            await run.train()
            await run.export()
        return run

    return asyncio.run(train())


def rows(run_dir: Path) -> list[dict[str, float]]:
    """Return the time-independent metrics of the steps."""
    found = [row for row in read_metrics(run_dir / "metrics.jsonl") if "reward/mean" in row]
    return [{key: value for key, value in row.items() if key != "time" and not key.startswith(TIMES)} for row in found]


def exported(run_dir: Path) -> list[bytes]:
    """Return the bytes of the exported weights."""
    return [path.read_bytes() for path in sorted((run_dir / "checkpoints/final").glob("*.safetensors"))]


def test_epochs_and_minibatches_take_several_optimizer_steps_and_resume_bit_for_bit(
    plain_run: Finished, tmp_path: Path
) -> None:
    places = (f"output_dir={tmp_path}", "warm_start=null", f"model.path={plain_run.run_dir}/checkpoints/final")
    passes = ("trainer.epochs=2", "trainer.minibatches_per_batch=2", "trainer.parallelism.dp_shard=2")
    options = ("algorithm.proximal=interval_start", "algorithm.learning_rate=1e-3", "evaluation.every_steps=2")
    path = tmp_path / "examples.jsonl"
    # Texts unlike the task, so that the policy learns them without changing how it solves the task.
    path.write_text("".join(f'{{"prompt": "Name {number}:", "completion": "the name"}}\n' for number in range(40)))
    examples = f"examples={{path: {path}, heldout_fraction: 0.5, batch_size: 8, weight: 0.1}}"
    config = load_config("configs/quickstart.yaml", [*SMALL, *places, *passes, *options, examples, "logging.console=off"])
    run = watched_run(config)
    assert [len(updates) for updates in run.updates] == [4, 4, 4, 4]
    assert [[update.version for update in updates] for updates in run.updates] == [[n, n, n, n + 1] for n in range(4)]
    for losses in run.passes:
        first, *later = (part.maxima["policy/ratio_max"] for part in losses)
        assert first == 1.0
        assert min(later) > 1.0
        # Every epoch trains on every token once.
        tokens = [part.sums["num_tokens"] for part in losses]
        assert tokens[0] + tokens[1] == tokens[2] + tokens[3]
        assert [part.sums["lag/0"] > 0 for part in losses] == [True, False, False, False]
    found = rows(run.run_dir)
    assert [row["optim/steps"] for row in found] == [4, 4, 4, 4]
    assert [row["version"] for row in found] == [1, 2, 3, 4]
    assert all(row["mismatch/logprob_abs_max"] < 1e-4 for row in found), "compared with the weights that sampled"
    for row, losses in zip(found, run.passes, strict=True):
        num_tokens = sum(part.sums["num_tokens"] for part in losses)
        ratios = sum(part.sums["policy/ratio_mean"] for part in losses)
        assert row["policy/ratio_mean"] == pytest.approx(ratios / num_tokens)
        assert row["loss/policy"] == pytest.approx(sum(part.sums["loss/policy"] for part in losses) / 4)
    trained = [sum(part.sums["num_tokens"] for part in losses) for losses in run.passes]
    assert found[-1]["count/trained_tokens"] == sum(trained)

    # Each of the 16 optimizer steps takes the next 8 examples.
    found_examples = read_examples(config)
    batches = [found_examples.batch(32 * step, 32, config.seed) for step in range(4)]
    assert [row["examples/tokens"] for row in found] == [sum(each.num_trained for each in batch) for batch in batches]
    assert found[-1]["examples/epoch"] == 128 / len(found_examples.training)
    losses_of_examples = [row["examples/loss"] for row in found]
    assert losses_of_examples[-1] < 0.5 * losses_of_examples[0], losses_of_examples
    heldout = {row["step"]: row["examples/heldout_loss"] for row in found if "examples/heldout_loss" in row}
    assert list(heldout) == [2, 4]
    assert heldout[4] < heldout[2] < losses_of_examples[0]

    weights = exported(run.run_dir)
    shutil.rmtree(run.run_dir / "checkpoints/step-4")
    shutil.rmtree(run.run_dir / "checkpoints/final")
    resumed = watched_run(config, resume=run.run_dir)
    assert len(resumed.updates) == 2
    assert rows(resumed.run_dir) == found
    assert exported(resumed.run_dir) == weights

    path.write_text(path.read_text() + path.read_text().splitlines(keepends=True)[0])
    with pytest.raises(ConfigError, match=r"--resume: examples\.path: the data differ from those that the run was trained on"):
        GRPO(config, resume=run.run_dir)
