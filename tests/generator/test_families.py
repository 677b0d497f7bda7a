"""Every model family in the trainer and in both model implementations: equal log-probabilities, and a few GRPO steps.

All trainers share one process, and so do all generators: importing vLLM takes many seconds, building an engine less than one.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.forks import fork, prepare_templates
from tests.models.tiny import FAMILIES, add_changed_weights, change_config, write_model
from tests.workers import Looped
from titanrl.carriers.types import AdamParams, Completion, GenerationRequest, SamplingParams, sampled_datum
from titanrl.config import load_config
from titanrl.config.device import DEVICES
from titanrl.generator.actor import Generator, GeneratorSetup
from titanrl.launch.assembly import Fleet
from titanrl.launch.roles import Roles
from titanrl.launch.supervision import Supervisor
from titanrl.launch.trainer_mesh import TrainerMesh
from titanrl.models.family import LOAD_FORMAT
from titanrl.processes.actors import resolve
from titanrl.processes.variables import generator_environment, trainer_environment, worker_environment
from titanrl.rollout.pool import GeneratorPool
from titanrl.session.training import TrainingClient
from titanrl.trainer.rank import PolicyTrainer, TrainerSetup
from titanrl.weights.records import Commit
from titanrl.weights.store import IMPORTS, WeightSource, spawn_store

IMPLEMENTATIONS = ("titan", "native")
PROMPTS = [tuple(2 + (7 * i + j) % 90 for j in range(5 + i)) for i in range(4)]
GROUP_SIZE, NUM_TOKENS, NUM_STEPS = 4, 12, 3
ADAM = AdamParams(learning_rate=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, max_grad_norm=1.0)


@dataclass
class Family:
    """The trainer and the generators of one family."""

    trainer: TrainerMesh
    client: TrainingClient
    generators: dict[str, Any]
    frozen: Any
    """Generator that loads the weights of the directory itself."""
    model: Path
    version: int = 0

    async def publish(self) -> None:
        """Publish the trainer's weights, and pull them into every generator."""
        commit = Commit(self.version, tuple(await self.trainer.push_weights(self.version)))
        await asyncio.gather(*(resolve(generator.pull_weights.call(commit)) for generator in self.generators.values()))

    async def sample(self, impl: str, seed: int) -> list[Completion]:
        """Return a group of completions for each prompt."""
        generator = self.frozen if impl == "frozen" else self.generators[impl]
        pool = GeneratorPool([generator.slice(procs=0)], max_num_seqs=64)
        requests = [
            GenerationRequest(
                token_ids=prompt,
                sampling=SamplingParams(max_new_tokens=NUM_TOKENS, temperature=1.0, seed=1000 * seed + index),
            )
            for prompt in PROMPTS
            for index in range(GROUP_SIZE)
        ]
        return await pool.generate(requests)


@dataclass
class Lab(Looped):
    """All families, and the event loop that calls their actors."""

    families: dict[str, Family]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, shared_templates: None) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("families")
    models = {family: write_model(family, folder / family) for family in FAMILIES}
    for model in models.values():
        add_changed_weights(model, "model-old.safetensors")
        add_changed_weights(model, "consolidated.safetensors")
        (model / "params.json").write_text('{"dim": 64, "n_layers": 1}')
        (model / "code.py").write_text(f"open({str(model / 'ran')!r}, 'w')")
        change_config(model, auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"})
    config = load_config("configs/quickstart.yaml", ["generator.kv_cache_bytes=8000000"])
    device = DEVICES["cpu"]

    async def start() -> tuple[Lab, Fleet, Supervisor]:
        supervisor = Supervisor()
        (folder / "logs").mkdir()
        fleet = Fleet(folder / "logs", supervisor)
        prepare_templates(fleet, config, Roles())
        trainer_procs = await fork(fleet, "trainer", trainer_environment(config, device), "titanrl.trainer.rank")
        await fleet.join_process_group(trainer_procs, one_machine=True)
        generator_procs = await fork(fleet, "generator", generator_environment(config, device, 0), "titanrl.generator.actor")
        store = await spawn_store(await fork(fleet, "store", worker_environment(), *IMPORTS))

        def trainer_of(family: str) -> TrainerMesh:
            named = config.model_copy(update={"name": family})
            run_dir = folder / "runs" / family
            setup = TrainerSetup(config=named, device=device, run_dir=run_dir, store=store, transports=("arena",))
            return TrainerMesh(trainer_procs.spawn(family, PolicyTrainer, setup), supervisor, config.timeouts)

        def generator_of(family: str, impl: str) -> Any:
            setup = GeneratorSetup(
                model_dir=models[family],
                config=config.generator.model_copy(update={"model_impl": impl}),
                device=device,
                max_len=64,
                stop_ids=(),
                source=WeightSource(family, store),
            )
            if impl == "frozen":
                frozen = setup.config.model_copy(update={"model_impl": "native", "vllm": {"load_format": LOAD_FORMAT}})
                setup = replace(setup, config=frozen, source=None)
            return generator_procs.spawn(f"{family}_{impl}", Generator, setup)

        async def start_trainers() -> dict[str, TrainerMesh]:
            trainers = {family: trainer_of(family) for family in FAMILIES}
            for family, trainer in trainers.items():
                await trainer.start()
                await trainer.load_model(models[family])
            return trainers

        async def start_generators() -> dict[tuple[str, str], Any]:
            kinds = (*IMPLEMENTATIONS, "frozen")
            generators = {(family, impl): generator_of(family, impl) for family in FAMILIES for impl in kinds}
            for generator in generators.values():  # vLLM builds one engine of a process at a time
                await resolve(generator.start.call())
            return generators

        trainers, generators = await asyncio.gather(start_trainers(), start_generators())
        families = {
            family: Family(
                trainer,
                TrainingClient(trainer, folder / "states"),
                {impl: generators[family, impl] for impl in IMPLEMENTATIONS},
                generators[family, "frozen"],
                models[family],
            )
            for family, trainer in trainers.items()
        }
        return Lab(runner, families), fleet, supervisor

    async def stop() -> None:
        supervisor.expect_deaths()
        await fleet.stop(20)

    with asyncio.Runner() as runner:
        lab, fleet, supervisor = runner.run(start())
        yield lab
        runner.run(stop())


def rewards_of(completions: list[Completion]) -> np.ndarray:
    """Return the share of each completion's tokens that have an even id."""
    return np.array([np.mean(completion.token_ids % 2 == 0) for completion in completions], np.float32)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_trainer_and_generator_agree_across_grpo_steps(family: str, impl: str, lab: Lab) -> None:
    """Sample, compare log-probabilities, and train on group advantages, three times."""
    parts = lab.families[family]
    prompts = [prompt for prompt in PROMPTS for _ in range(GROUP_SIZE)]

    async def scenario() -> list[tuple[float, float]]:
        steps = []
        await parts.publish()
        for step in range(NUM_STEPS):
            completions = await parts.sample(impl, step)
            assert {int(v) for completion in completions for v in completion.versions} == {parts.version}
            rewards = rewards_of(completions).reshape(-1, GROUP_SIZE)
            advantages = (rewards - rewards.mean(axis=1, keepdims=True)).flatten()
            data = [
                sampled_datum(prompt, completion.token_ids, completion.logprobs, advantage)
                for prompt, completion, advantage in zip(prompts, completions, advantages.tolist(), strict=True)
            ]
            logprobs = await parts.client.compute_logprobs(data)
            mismatch = max(
                float(np.abs(found[-len(completion.logprobs) :] - completion.logprobs).max())
                for found, completion in zip(logprobs, completions, strict=True)
            )
            await parts.client.forward_backward(data, "ppo")
            update = await parts.client.optim_step(ADAM)
            assert not update.skipped
            parts.version = update.version
            await parts.publish()
            steps.append((mismatch, update.grad_norm))
        return steps

    for mismatch, grad_norm in lab.do(scenario()):
        assert mismatch < 1e-4
        assert grad_norm > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_model_has_the_weights_that_transformers_loads(family: str, lab: Lab) -> None:
    parts = lab.families[family]
    assert not (parts.model / "ran").exists()  # no process has run the code in the directory
    policy = transformers.AutoModelForCausalLM.from_pretrained(parts.model, dtype=torch.float32)
    for index, completion in enumerate(lab.do(parts.sample("frozen", 5))):
        prompt = PROMPTS[index // GROUP_SIZE]
        tokens = torch.tensor([*prompt, *completion.token_ids])
        with torch.no_grad():
            logprobs = policy(tokens[None]).logits[0, :-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        np.testing.assert_allclose(completion.logprobs, logprobs[len(prompt) - 1 :].numpy(), atol=1e-4)
