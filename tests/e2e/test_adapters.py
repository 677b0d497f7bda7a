"""A run that publishes adapters by themselves equals one that publishes merged weights, also after faults."""

from itertools import chain

import numpy as np
import pytest

from tests.e2e.conftest import Finished, Start
from titanrl.metrics.reading import open_run

LORA = ("trainer.lora={rank: 4, alpha: 8}", "generator.model_impl=native", "algorithm.learning_rate=3e-3")


def curve(run: Finished) -> list[float]:
    return [row["reward/mean"] for row in run.steps]


def sampled(run: Finished) -> tuple[list[int], list[float]]:
    """Return the tokens of all trained completions in prompt order, and the generators' log-probabilities."""
    ids, logprobs = list[int](), list[float]()
    for group in sorted(open_run(run.run_dir).groups(), key=lambda group: group.index):
        for segment in chain.from_iterable(group.tokens()):
            ids += segment["token_ids"][segment["mask"]].tolist()
            logprobs += segment["logprobs"][segment["mask"]].tolist()
    return ids, logprobs


def test_adapters_give_the_curve_of_merged_weights_through_death_and_resume(plain_run: Finished, start_run: Start) -> None:
    merged = start_run("merged", *plain_run.as_start, *LORA).finish()
    assert merged.code == 0, merged.output
    command = start_run("adapters", *plain_run.as_start, *LORA, "weights.lora=adapters")
    command.wait_for_step(1)
    command.process_of("generator_0").kill()  # the replacement gets the base and the newest adapter
    command.wait_for_step(3)
    command.process.kill()
    command.finish()
    found = start_run("adapters", resume=True).finish()
    assert found.code == 0, found.output
    assert curve(found) == curve(merged)
    assert len(set(curve(found))) > 1
    (tokens, logprobs), (expected_tokens, expected) = sampled(found), sampled(merged)
    assert tokens == expected_tokens
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)
    sizes = [row["sync/bytes"] for row in found.steps if "sync/bytes" in row]
    assert min(sizes) < 0.2 * max(row["sync/bytes"] for row in merged.steps if "sync/bytes" in row)
    exports = [(run.run_dir / "checkpoints/final/model.safetensors") for run in (found, merged)]
    assert all(path.is_file() for path in exports)


@pytest.mark.parametrize("tp", [1, 2])
def test_adapters_with_sharded_trainer_and_generators(tp: int, plain_run: Finished, start_run: Start) -> None:
    layout = ("trainer.parallelism={dp_shard: 2}",) if tp == 1 else ("trainer.parallelism={tp: 2}", "generator.tp=2")
    run = start_run(f"adapters-{tp}", *plain_run.as_start, *LORA, *layout, "weights.lora=adapters", "num_steps=2").finish()
    assert run.code == 0, run.output
    assert all(row["mismatch/logprob_abs_max"] < 1e-4 for row in run.steps)
    assert {version for row in run.steps for version in [row["version"]]} == {1, 2}
