"""Runs whose caller trains and samples between two steps."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.conftest import SMALL, Finished
from titanrl import GRPO, AdamParams, load_config


class BodyFailed(Exception):
    """Raised by the body of a run."""


def test_ages_stay_bounded_when_the_caller_publishes_between_steps(plain_run: Finished, tmp_path: Path) -> None:
    places = (f"output_dir={tmp_path}", "warm_start=null", f"model.path={plain_run.run_dir}/checkpoints/final")
    intervals = ("max_staleness=1", "algorithm.updates_per_publish=2", "algorithm.proximal=interval_start")
    config = load_config(
        "configs/quickstart.yaml", [*SMALL, *places, *intervals, "algorithm.correction.weight=token", "rollout.top_k=20"]
    )

    async def scenario() -> Path:
        async with GRPO(config) as run:
            before = [await run.step() for _ in range(3)]
            await run.session.rollouts.buffer.wait_until_full()  # with groups of the versions so far
            for number in range(3):
                [[sample]] = await run.sampling.sample(["What is 1 + 2?"], max_tokens=8, top_p=0.9)
                passes = run.training.forward_backward([sample.datum(1.0)], "importance_sampling")
                update = await run.training.optim_step(AdamParams(learning_rate=1e-4))
                (output,) = (await passes).loss_fn_outputs
                if number:  # the first sample may be older than the trainer
                    computed = output["logprobs"][-len(sample.tokens) :]
                    assert np.abs(computed - sample.logprobs).max() < 1e-4, "both are of the truncated distribution"
                client = await run.training.publish()
                assert client.version == update.version
            after = [await run.step() for _ in range(2)]
            assert [metrics.version for metrics in before] == [1, 2, 3]
            assert [metrics.version for metrics in after] == [7, 8]
            # Only the first step of an interval has the weights of the interval's start, with which the ratio compares.
            assert [metrics.values["policy/ratio_max"] == 1.0 for metrics in before] == [True, False, True]
            assert max(metrics.values["staleness/max"] for metrics in before + after) <= config.staleness_bound
            assert all(metrics.values.get("mismatch/numeric/logprob_abs_max", 0.0) < 1e-4 for metrics in after)
            assert all(1.0 < metrics.values["tokens/support_size_mean"] <= 20.0 for metrics in after)
            folder = run.run_dir
            assert json.loads((await run.save()).joinpath("controller.json").read_text())["version"] == 8
            raise BodyFailed("on purpose")
        return folder

    with pytest.raises(BodyFailed):
        asyncio.run(scenario())
    events = [json.loads(line) for line in (tmp_path / config.name / "events.jsonl").read_text().splitlines()]
    assert [event for event in events if event["kind"] == "drop" and event["reason"] == "too old"]
    assert events[-1]["kind"] == "end"
    assert (events[-1]["code"], events[-1]["cause"]) == (1, "BodyFailed: on purpose")
