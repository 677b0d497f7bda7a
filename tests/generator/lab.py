"""Shared setup for engine tests: a store, generators of every model implementation, and two versions of weights."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.forks import fork, prepare_templates
from tests.workers import Looped
from titanrl.carriers.types import Completion, GenerationRequest, SamplingParams
from titanrl.config import load_config
from titanrl.config.device import DEVICES
from titanrl.config.sections import RecipeConfig
from titanrl.generator.actor import Generator, GeneratorSetup
from titanrl.launch.assembly import Fleet
from titanrl.launch.roles import Roles
from titanrl.launch.supervision import Supervisor
from titanrl.models.recipe import create_model
from titanrl.processes.actors import resolve
from titanrl.processes.variables import generator_environment, worker_environment
from titanrl.rollout.pool import GeneratorPool
from titanrl.weights.records import Commit
from titanrl.weights.store import IMPORTS, WeightSource, WeightStore, spawn_store
from titanrl.weights.transport import WeightPublisher

PROMPTS = [tuple(2 + (7 * i + j) % 90 for j in range(5 + i)) for i in range(8)]
RECIPE = RecipeConfig(init_std=0.2)  # large weights, so that greedy sampling has no near-ties


RENAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.": "",
    "self_attn.q_proj": "attention.qkv_linear.wq",
    "self_attn.k_proj": "attention.qkv_linear.wk",
    "self_attn.v_proj": "attention.qkv_linear.wv",
    "self_attn.o_proj": "attention.wo",
    "self_attn.": "attention.",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""Parts of Hugging Face names, and of the names under which the trainer publishes."""
IMPLEMENTATIONS = {
    "titan": {"model_impl": "titan", "on_update": "continue"},
    "native": {"model_impl": "native", "on_update": "restart"},
    "titan-tp2": {"model_impl": "titan", "on_update": "continue", "tp": 2},
    "native-tp2": {"model_impl": "native", "on_update": "restart", "tp": 2},
}


def titan_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename the tensors of a Hugging Face state dict as the trainer publishes them."""
    renamed = {}
    for name, value in state.items():
        for theirs, ours in RENAMES.items():
            name = name.replace(theirs, ours)
        renamed[name] = value
    return renamed


@dataclass
class Lab(Looped):
    """A store, one generator per model implementation with and without tensor parallelism, and two versions of weights."""

    store: WeightStore
    generators: dict[str, Any]
    fleet: Fleet
    models: dict[int, Path]
    publisher: WeightPublisher
    commits: dict[int, Commit] = field(default_factory=dict)

    async def publish(self, version: int) -> None:
        state = titan_names(load_file(self.models[version] / "model.safetensors"))
        self.commits[version] = Commit(version, (await self.publisher.publish(version, state),))

    async def generate(
        self, impl: str, sampling: SamplingParams, prompts: Sequence[tuple[int, ...]] = PROMPTS
    ) -> list[Completion]:
        return await self.pool(impl).generate(requests_of(prompts, sampling))

    def pool(self, impl: str) -> GeneratorPool:
        return GeneratorPool([self.generators[impl].slice(procs=0)], max_num_seqs=256)


def requests_of(prompts: Sequence[tuple[int, ...]], sampling: SamplingParams) -> list[GenerationRequest]:
    return [GenerationRequest(token_ids=prompt, sampling=sampling) for prompt in prompts]


@contextmanager
def running_lab(folder: Path) -> Iterator[Lab]:
    """Start the store and the generators in a folder, and publish both versions."""
    models = {version: folder / f"v{version}" for version in (1, 2)}
    for version, path in models.items():
        create_model(path, RECIPE, seed=version)
    config = load_config("configs/quickstart.yaml")
    with asyncio.Runner() as runner:

        async def start() -> tuple[Lab, Fleet, Supervisor]:
            supervisor = Supervisor()
            fleet = Fleet(folder, supervisor)
            prepare_templates(fleet, config, Roles(trainer=False))
            store = await spawn_store(await fork(fleet, "store", worker_environment(), *IMPORTS))
            generators = {}
            for impl, options in IMPLEMENTATIONS.items():
                environment = generator_environment(config, DEVICES["cpu"], 0)
                settings = config.generator.model_copy(update=options)
                module, num_procs = "titanrl.generator.actor", settings.tp
                procs = await fork(fleet, "generator", environment, module, role=impl, num_procs=num_procs)
                if settings.tp > 1:
                    await fleet.join_process_group(procs, one_machine=True)
                setup = GeneratorSetup(
                    model_dir=models[1],
                    config=settings,
                    device=DEVICES["cpu"],
                    max_len=256,
                    stop_ids=(1,),
                    source=WeightSource("lab", store),
                )
                generators[impl] = procs.spawn("generator", Generator, setup)
            await asyncio.gather(*(resolve(generator.start.call()) for generator in generators.values()))
            lab = Lab(runner, store, generators, fleet, models, WeightPublisher("lab", 0, store, torch.float32, ["arena"]))
            for version in models:
                await lab.publish(version)
            return lab, fleet, supervisor

        async def stop() -> None:
            supervisor.expect_deaths()
            await fleet.stop(20)

        lab, fleet, supervisor = runner.run(start())
        try:
            yield lab
        finally:
            runner.run(stop())
