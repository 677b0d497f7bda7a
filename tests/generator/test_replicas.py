"""Two real replicas and one weight sync: a draining replica delays neither the other replica nor the controller.

They generate in bfloat16, which no other test does: replica 0 with torchtitan's model, replica 1 with vLLM's own.
"""

import asyncio
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.forks import fork, prepare_templates
from tests.generator.lab import titan_names
from tests.workers import Looped
from titanrl.carriers.types import Completion, GenerationRequest, SamplingParams
from titanrl.config import load_config
from titanrl.config.device import DEVICES
from titanrl.config.sections import RecipeConfig
from titanrl.generator.actor import Generator, GeneratorSetup
from titanrl.launch.assembly import Fleet
from titanrl.launch.generators import GeneratorMeshes, Replica, WeightSync
from titanrl.launch.roles import Roles
from titanrl.launch.supervision import Part, SharedContext, Supervisor
from titanrl.models.recipe import create_model
from titanrl.processes.children import Respawns
from titanrl.processes.variables import generator_environment, worker_environment
from titanrl.rollout.pool import GeneratorPool
from titanrl.weights.records import WeightManifest
from titanrl.weights.store import IMPORTS, WeightSource, WeightStore, spawn_store
from titanrl.weights.transport import WeightPublisher

MAX_LEN = 1024
PROMPT = tuple(range(2, 12))


@dataclass
class Pair(Looped):
    """Two replicas that drain before an update, and a publisher of one model's weights."""

    folder: Path
    store: WeightStore
    generators: GeneratorMeshes
    pools: tuple[GeneratorPool, ...]
    publisher: WeightPublisher
    state: dict[str, torch.Tensor]
    version: int = 0

    async def generate(self, replica: int, num_tokens: int, count: int = 1) -> list[Completion]:
        sampling = SamplingParams(max_new_tokens=num_tokens, temperature=1.0, seed=None)
        return await self.pools[replica].generate([GenerationRequest(token_ids=PROMPT, sampling=sampling)] * count)

    async def decoding(self, replica: int, num_tokens: int) -> "asyncio.Task[list[Completion]]":
        """Start a long completion; return once the engine is decoding it."""
        task = asyncio.create_task(self.generate(replica, num_tokens))
        await asyncio.sleep(0)
        await self.generate(replica, 4)  # a later request; requests decode in step with each other
        return task


class Sync:
    """The weight sync of a run, as in the controller."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        pulls = [lambda commit, replica=replica: pair.generators.pull_weights(replica, commit) for replica in (0, 1)]
        self.weights = WeightSync(pair.store.delete, push=self.push, expect=pair.generators.expect_weights, pulls=pulls)

    async def push(self, version: int) -> Sequence[WeightManifest]:
        return (await self.pair.publisher.publish(version, self.pair.state),)

    async def publish(self, updates: int = 1) -> asyncio.Event:
        """Publish a version this many updates after the last one; return an event that is set when its slots are freed."""
        freed = asyncio.Event()

        async def free() -> None:
            freed.set()

        await self.weights.pushed()
        self.pair.version += updates
        self.weights.publish(self.pair.version, free)
        return freed


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, shared_templates: None) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    create_model(folder / "model", RecipeConfig(max_positions=MAX_LEN), seed=1)
    config = load_config("configs/quickstart.yaml")
    settings = config.generator.model_copy(update={"dtype": "bfloat16", "on_update": "drain"})

    async def start() -> tuple[Pair, Fleet, Supervisor]:
        supervisor = Supervisor()
        fleet = Fleet(folder, supervisor)
        prepare_templates(fleet, config, Roles(trainer=False))
        store = await spawn_store(await fork(fleet, "store", worker_environment(), *IMPORTS))
        setups = [
            GeneratorSetup(
                model_dir=folder / "model",
                config=settings.model_copy(update={"model_impl": impl}),
                device=DEVICES["cpu"],
                max_len=MAX_LEN,
                stop_ids=(),
                source=WeightSource("pair", store),
            )
            for impl in ("titan", "native")
        ]
        (folder / "tmp").mkdir()
        environment = generator_environment(config, DEVICES["cpu"], 0) | {"TMPDIR": str(folder / "tmp")}
        shared = SharedContext(
            supervisor=supervisor, retire=fleet.retire, respawns=Respawns(config.faults), warn=print, start_s=120.0
        )

        async def spawn(setup: GeneratorSetup, part: Part) -> Replica:
            procs = await fork(fleet, "generator", environment, "titanrl.generator.actor", role=part.role)
            return Replica.of(procs.spawn("generator", Generator, setup))

        spawns = {f"replica_{number}": partial(spawn, setup) for number, setup in enumerate(setups)}
        generators = GeneratorMeshes(spawns, shared, config.timeouts)
        await generators.spawn()
        await generators.start()
        pools = tuple(GeneratorPool([actor], max_num_seqs=256) for actor in generators.actors)
        state = titan_names(load_file(folder / "model" / "model.safetensors"))
        publisher = WeightPublisher("pair", 0, store, torch.bfloat16, ["arena"])
        return Pair(runner, folder, store, generators, pools, publisher, state), fleet, supervisor

    async def stop() -> None:
        supervisor.expect_deaths()
        await fleet.stop(20)

    with asyncio.Runner() as runner:
        pair, fleet, supervisor = runner.run(start())
        yield pair
        runner.run(stop())


def test_engines_leave_no_rendezvous_file_in_the_temporary_folder(pair: Pair) -> None:
    left = [name for name in os.listdir(pair.folder / "tmp") if not name.startswith("torchinductor")]  # a cache, for all runs
    assert left == []


async def test_titan_model_generates_in_bfloat16_on_cpu(pair: Pair) -> None:
    sync = Sync(pair)
    await sync.publish()
    await sync.weights.ready()
    (completion,) = await pair.generate(0, 32)
    completion: Completion = completion
    policy = transformers.AutoModelForCausalLM.from_pretrained(pair.folder / "model", dtype=torch.float32)
    with torch.no_grad():
        logits = policy(torch.tensor([[*PROMPT, *completion.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=0.1)


async def test_slots_are_freed_and_stats_return_while_a_slow_replica_still_drains(pair: Pair) -> None:
    sync = Sync(pair)
    await sync.publish()
    await sync.weights.ready()
    slow = await pair.decoding(1, 800)
    await pair.generators.take_stats()
    freed = await sync.publish()
    await freed.wait()
    (completion,) = await pair.generate(0, 4)
    assert set(completion.versions.tolist()) == {pair.version}
    assert not slow.done(), "the slots were freed after the slow replica, not after the fast one"
    stats = await pair.generators.take_stats()
    assert not slow.done(), "the statistics came after the drain"
    assert stats.wall_s > 0
    held = asyncio.create_task(pair.generate(1, 4))
    assert set((await slow)[0].versions.tolist()) == {pair.version - 1}
    assert set((await held)[0].versions.tolist()) == {pair.version}
    await sync.weights.ready()


def test_thirty_publications_under_drain_cause_no_mismatch(pair: Pair) -> None:
    async def keep_busy(replica: int, done: asyncio.Event) -> int:
        num_tokens = 0
        while not done.is_set():
            completions = await pair.generate(replica, 10 + 30 * replica, count=4)
            num_tokens += sum(len(completion.token_ids) for completion in completions)
        return num_tokens

    async def scenario() -> None:
        sync, done = Sync(pair), asyncio.Event()
        pair.version += pair.version % 2
        await sync.publish(updates=2)
        await sync.weights.ready()
        busy = [asyncio.create_task(keep_busy(replica, done)) for replica in (0, 1)]
        for _ in range(30):
            await sync.publish(updates=2)
        await sync.weights.ready()
        done.set()
        assert min(await asyncio.gather(*busy)) > 0
        for replica in (0, 1):
            (completion,) = await pair.generate(replica, 4)
            assert set(completion.versions.tolist()) == {pair.version}

    pair.do(scenario())
