"""Runs and sessions that publish adapters by themselves, compared with merged weights, also after faults."""

import asyncio
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from tests.e2e.conftest import SMALL, Finished, Start
from titanrl import AdamParams, connect, supervised_datum
from titanrl.config import load_config
from titanrl.metrics.reading import open_run
from titanrl.session.sampling import AdapterLimitError, ReleasedError, SamplingClient
from titanrl.session.session import Session
from titanrl.weights.records import adapters_run, rank_key

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


def weights(folder: Path) -> dict[str, Any]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.slow
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
    ours, theirs = (weights(run.run_dir / "checkpoints/final") for run in (found, merged))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_allclose(value, theirs[name], atol=1e-5)
    assert (found.run_dir / "checkpoints/final/adapter/adapter_config.json").is_file()


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_adapters_with_sharded_trainer_and_generators(tp: int, plain_run: Finished, start_run: Start) -> None:
    layout = ("trainer.parallelism={dp_shard: 2}",) if tp == 1 else ("trainer.parallelism={tp: 2}", "generator.tp=2")
    run = start_run(f"adapters-{tp}", *plain_run.as_start, *LORA, *layout, "weights.lora=adapters", "num_steps=2").finish()
    assert run.code == 0, run.output
    assert all(row["mismatch/logprob_abs_max"] < 1e-4 for row in run.steps)
    assert {version for row in run.steps for version in [row["version"]]} == {1, 2}


def test_kept_sampler_gives_identical_tokens_after_saves_and_a_replaced_generator(plain_run: Finished, tmp_path: Path) -> None:
    places = ("name=kept", f"output_dir={tmp_path}", *plain_run.as_start, "logging.console=off")
    config = load_config("configs/quickstart.yaml", [*SMALL, *places, *LORA, "weights={lora: adapters, held_adapters: 4}"])
    prompts = ["1 + 2 + 3 =", "4 + 4 + 1 ="]

    async def tokens(client: SamplingClient) -> list[Any]:
        groups = await client.sample(prompts, num_samples=2, max_tokens=12, temperature=1.0, seed=3)
        return [(sample.tokens.tolist(), sample.versions.tolist()) for group in groups for sample in group]

    async def two_models(session: Session, old: SamplingClient, before: list[Any]) -> None:
        """A second model with another rank and scale trains and samples beside the policy."""
        await kept.pop().release()
        other = await session.new_model("other", rank=2, alpha=1.0, seed=5)
        datum = supervised_datum(session.tokenizer.encode(prompts[1]), session.tokenizer.encode("7"))
        for _ in range(3):
            other.forward_backward([datum], "cross_entropy")
            await other.optim_step(AdamParams(learning_rate=5e-2))
        client = await other.publish()
        sampled, of_old = await asyncio.gather(client.sample(prompts, num_samples=2, max_tokens=12, seed=3), tokens(old))
        assert of_old == before
        data = [sample.datum() for group in sampled for sample in group]
        computed = await other.compute_logprobs(data)
        for sample, values in zip((sample for group in sampled for sample in group), computed, strict=True):
            np.testing.assert_allclose(sample.logprobs, values[-len(sample.tokens) :], atol=1e-4)
        await client.release()
        await other.free()

    async def cancelled_publications(session: Session) -> None:
        """The generators and the store hold nothing of them."""
        generators, store = session.sampling._sampler._generators, session._parts.assembly._source.store
        held = dict(generators._held)
        for _ in range(3):
            publishing = session.training.publish(keep=True)
            while generators._held == held and not publishing.done():  # until the request is sent
                await asyncio.sleep(0)
            (number,) = generators._held.keys() - held.keys()
            publishing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await publishing
            assert generators._held == held
            assert not await store.exists(rank_key(adapters_run("kept"), number, 0))
            await session.training.zero_grad()

    kept: list[SamplingClient] = []

    async def scenario() -> None:
        async with connect(config) as session:
            datum = supervised_datum(session.tokenizer.encode(prompts[0]), session.tokenizer.encode("9"))

            async def step() -> None:
                session.training.forward_backward([datum], "cross_entropy")
                await session.training.optim_step(AdamParams(learning_rate=3e-2))

            await step()
            old = await session.training.publish(keep=True)
            before, base = await tokens(old), await tokens(session.base)
            assert {version for _, versions in before for version in versions} == {1}
            for _ in range(3):
                await step()
                kept.append(await session.training.publish(keep=True))
            await step()
            await session.training.publish()
            newest = await tokens(session.sampling)
            assert {version for _, versions in newest for version in versions} == {5}
            assert await tokens(old) == before
            assert newest != before
            with pytest.raises(AdapterLimitError, match="held_adapters"):
                await session.training.publish(keep=True)
            await kept.pop().release()
            await cancelled_publications(session)
            assert await tokens(old) == before
            kept.append(await session.training.publish(keep=True))
            pid = int((session.run_dir / "logs" / "generator_0_0.pid").read_text().split()[0])
            psutil.Process(pid).kill()
            assert await tokens(old) == before, "the replacement holds the adapter"
            assert await tokens(session.base) == base
            expected = await tokens(kept[0])
            await two_models(session, old, before)
            await old.release()
            await old.release()
            with pytest.raises(ReleasedError):
                await tokens(old)
            await step()
            again = await session.training.publish(keep=True)
            assert await tokens(kept[0]) == expected
            assert {version for _, versions in await tokens(again) for version in versions} == {6}

    asyncio.run(scenario())
