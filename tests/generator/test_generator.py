"""The real engine in its actor: weights that take effect, exact versions, log-probabilities against transformers."""

import asyncio
import re
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from monarch.actor import this_host
from safetensors.torch import load_file

from titanrl.config import load_config
from titanrl.config.sections import RecipeConfig
from titanrl.data.recipe import create_model
from titanrl.device import DEVICES
from titanrl.generator.actor import Generator, GeneratorSetup
from titanrl.launch.environment import generator_environment, worker_environment
from titanrl.launch.fleet import Fleet, join_process_group
from titanrl.launch.supervision import Supervisor
from titanrl.rollout.pool import GeneratorPool
from titanrl.types import Completion, GenerationRequest, SamplingParams
from titanrl.weights.manifest import Commit
from titanrl.weights.publish import WeightPublisher
from titanrl.weights.pull import WeightReader
from titanrl.weights.store import WeightStore, spawn_store

PROMPTS = [tuple(2 + (7 * i + j) % 90 for j in range(5 + i)) for i in range(8)]
RECIPE = RecipeConfig(init_std=0.2)  # large weights, so that every token has a favourite


IMPLEMENTATIONS = {
    "titan": {"model_impl": "titan", "on_update": "continue"},
    "native": {"model_impl": "native", "on_update": "restart"},
    "titan-tp2": {"model_impl": "titan", "on_update": "continue", "tp": 2},
    "native-tp2": {"model_impl": "native", "on_update": "restart", "tp": 2},
}


@dataclass
class Lab:
    """A store, one generator of each model implementation, alone and tensor-parallel, and two versions of the weights."""

    runner: asyncio.Runner
    store: WeightStore
    generators: dict[str, Any]
    fleet: Fleet
    models: dict[int, Path]
    publisher: WeightPublisher
    commits: dict[int, Commit] = field(default_factory=dict)

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(asyncio.wait_for(work, 120))

    async def publish(self, version: int) -> None:
        state = titan_names(load_file(self.models[version] / "model.safetensors"))
        self.commits[version] = Commit(version, (await self.publisher.publish(version, state),))

    async def generate(
        self, impl: str, sampling: SamplingParams, prompts: Sequence[tuple[int, ...]] = PROMPTS
    ) -> list[Completion]:
        requests = [GenerationRequest(token_ids=prompt, sampling=sampling) for prompt in prompts]
        return await self.pool(impl).generate(requests)

    def pool(self, impl: str) -> GeneratorPool:
        return GeneratorPool([self.generators[impl].slice(procs=0)], max_num_seqs=256)


def titan_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A Hugging Face state dict under the trainer's names."""
    renames = {
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

    def rename(name: str) -> str:
        for theirs, ours in renames.items():
            name = name.replace(theirs, ours)
        return name

    return {rename(name): value for name, value in state.items()}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    models = {version: folder / f"v{version}" for version in (1, 2)}
    for version, path in models.items():
        create_model(path, RECIPE, seed=version)
    config = load_config("configs/quickstart.yaml")
    with asyncio.Runner() as runner:

        async def start() -> tuple[Lab, Fleet, Supervisor]:
            supervisor = Supervisor()
            fleet = Fleet(folder, supervisor)
            procs = fleet.spawn("store", this_host(), 1, worker_environment(), ("titanrl.weights.store",))
            store = await spawn_store(procs)
            generators = {}
            for impl, options in IMPLEMENTATIONS.items():
                environment = generator_environment(config, DEVICES["cpu"], 0)
                settings = config.generator.model_copy(update=options)
                procs = fleet.spawn(impl, this_host(), settings.tp, environment, ("titanrl.generator.actor",))
                if settings.tp > 1:
                    await join_process_group(procs, one_machine=True)
                setup = GeneratorSetup(
                    model_dir=models[1],
                    config=settings,
                    device=DEVICES["cpu"],
                    max_len=256,
                    stop_ids=(1,),
                    reader=WeightReader("lab", store),
                )
                generators[impl] = procs.spawn("generator", Generator, setup)
            await asyncio.gather(*(start_one(generator) for generator in generators.values()))
            lab = Lab(runner, store, generators, fleet, models, WeightPublisher("lab", 0, store, torch.float32, ["arena"]))
            for version in models:
                await lab.publish(version)
            return lab, fleet, supervisor

        async def stop() -> None:
            supervisor.expect_deaths()
            await fleet.stop(20)

        lab, fleet, supervisor = runner.run(start())
        yield lab
        runner.run(stop())


async def start_one(generator: Any) -> None:
    await generator.start.call()


@pytest.fixture(params=IMPLEMENTATIONS)
def impl(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0, seed=None)
SAMPLED = SamplingParams(max_new_tokens=24, temperature=0.7, seed=5)


def reference(model_dir: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


def test_it_serves_nothing_before_it_has_pulled_and_after_a_pull_that_failed(lab: Lab, impl: str) -> None:
    with pytest.raises(Exception, match="no valid weights"):
        lab.do(lab.generate(impl, GREEDY))
    with pytest.raises(Exception, match=r"version 9: the manifests of ranks .0. are of another version"):
        lab.do(pull_commit(lab, impl, Commit(9, lab.commits[1].manifests)))
    with pytest.raises(Exception, match="no valid weights: the pull of version 9 failed: version 9: the manifests"):
        lab.do(lab.generate(impl, GREEDY))


async def pull(lab: Lab, impl: str, version: int) -> None:
    await pull_commit(lab, impl, lab.commits[version])


async def pull_commit(lab: Lab, impl: str, commit: Commit) -> None:
    await lab.generators[impl].pull_weights.call(commit)


def test_of_two_pulls_in_a_row_each_gets_its_own_answer_and_the_last_counts(lab: Lab, impl: str) -> None:
    async def scenario() -> tuple[list[Any], Completion]:
        broken = Commit(9, lab.commits[1].manifests)
        pulls = [pull_commit(lab, impl, commit) for commit in (lab.commits[1], broken, lab.commits[2])]
        answers = await asyncio.gather(*pulls, return_exceptions=True)
        return answers, (await lab.generate(impl, GREEDY, PROMPTS[:1]))[0]

    answers, completion = lab.do(scenario())
    assert answers[0] is None
    assert "version 9: the manifests" in str(answers[1])
    assert answers[2] is None
    assert set(completion.versions.tolist()) == {2}


def test_requests_wait_for_weights_that_are_expected(lab: Lab, impl: str) -> None:
    async def scenario() -> Completion:
        leader = lab.generators[impl].slice(procs=0)
        await pull(lab, impl, 1)
        await leader.expect_weights.call_one(10)
        generating = asyncio.create_task(lab.generate(impl, GREEDY, PROMPTS[:1]))
        await leader.stats.call_one()  # the request, sent before, is there when this is answered
        await lab.publish(10)
        await pull(lab, impl, 10)
        await leader.expect_weights.call_one(10)  # too late to hold anything
        return (await generating)[0]

    lab.models[10] = lab.models[2]
    assert set(lab.do(scenario()).versions.tolist()) == {10}
    lab.do(lab.publish(1))
    lab.do(lab.publish(2))


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [((), "has 0 tokens"), ((2,) * 256, "has 256 tokens; this engine takes 1 to 255"), ((2, 10**6), "outside of 0 to")],
    ids=["empty", "too-long", "unknown"],
)
def test_a_prompt_that_would_break_the_engine_is_refused_and_others_are_served(
    lab: Lab, impl: str, prompt: tuple[int, ...], reason: str
) -> None:
    lab.do(pull(lab, impl, 1))
    with pytest.raises(Exception, match=reason):
        lab.do(lab.generate(impl, GREEDY, [prompt]))
    assert len(lab.do(lab.generate(impl, GREEDY, PROMPTS[:1]))[0].token_ids) == 24


@pytest.mark.parametrize("versions", [(1,), (1, 2), (2, 1)])
def test_pulled_weights_take_effect_and_greedy_answers_are_those_of_transformers(
    lab: Lab, impl: str, versions: tuple[int, ...]
) -> None:
    for version in versions:
        lab.do(pull(lab, impl, version))
    policy = reference(lab.models[version])
    for prompt, completion in zip(PROMPTS, lab.do(lab.generate(impl, GREEDY)), strict=True):
        input_ids = torch.tensor([prompt])
        output = policy.generate(input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=24, do_sample=False)
        assert completion.token_ids.tolist() == output[0, len(prompt) :].tolist()
        assert set(completion.versions.tolist()) == {version}


def test_log_probabilities_are_those_of_the_sampling_distribution(lab: Lab, impl: str) -> None:
    lab.do(pull(lab, impl, 1))
    policy = reference(lab.models[1])
    for prompt, completion in zip(PROMPTS, lab.do(lab.generate(impl, SAMPLED)), strict=True):
        tokens = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad():
            logits = policy(tokens).logits[0, len(prompt) - 1 : -1] / SAMPLED.temperature
        expected = logits.log_softmax(-1).gather(-1, tokens[0, len(prompt) :, None])[:, 0]
        np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=2e-5)


def test_the_same_seed_draws_the_same_completion_and_another_seed_another(lab: Lab, impl: str) -> None:
    lab.do(pull(lab, impl, 1))
    first, again = (lab.do(lab.generate(impl, SAMPLED)) for _ in range(2))
    assert [c.token_ids.tolist() for c in first] == [c.token_ids.tolist() for c in again]
    other = lab.do(lab.generate(impl, SamplingParams(max_new_tokens=24, temperature=0.7, seed=6)))
    assert [c.token_ids.tolist() for c in first] != [c.token_ids.tolist() for c in other]


@pytest.mark.parametrize("impl", ["titan", "native"])
def test_tensor_parallel_ranks_answer_as_one_alone(lab: Lab, impl: str) -> None:
    for version in (1, 2):
        answers = []
        for name in (impl, f"{impl}-tp2"):
            lab.do(pull(lab, name, version))
            answers.append(lab.do(lab.generate(name, GREEDY)))
        for alone, parallel in zip(*answers, strict=True):
            assert parallel.token_ids.tolist() == alone.token_ids.tolist()
            np.testing.assert_allclose(parallel.logprobs, alone.logprobs, atol=1e-5)


def test_a_pull_that_fails_on_one_rank_fails_on_all_and_the_next_one_counts(lab: Lab) -> None:
    leader, follower = (lab.generators["titan-tp2"].slice(procs=rank) for rank in (0, 1))
    broken = Commit(9, lab.commits[2].manifests)

    async def scenario() -> list[Any]:
        pulls = [rank.pull_weights.call_one(commit) for rank, commit in ((leader, lab.commits[2]), (follower, broken))]
        return await asyncio.gather(*map(waited_for, pulls), return_exceptions=True)

    lab.do(pull(lab, "titan-tp2", 1))
    told = "version 9: the manifests of ranks .0. are of another version"
    for answer, text in zip(lab.do(scenario()), (f"rank 1: {told}", told), strict=True):
        assert re.search(text, str(answer))
    with pytest.raises(Exception, match=f"no valid weights: the pull of version 2 failed: rank 1: {told}"):
        lab.do(lab.generate("titan-tp2", GREEDY))
    lab.do(pull(lab, "titan-tp2", 2))
    assert set(lab.do(lab.generate("titan-tp2", GREEDY))[0].versions.tolist()) == {2}


async def waited_for(call: Any) -> Any:
    return await call


def scored_by(model_dir: Path, prompt: tuple[int, ...], completion: Completion, temperature: float) -> np.ndarray:
    """Log-probability of each token of a completion after all tokens before it."""
    tokens = torch.tensor([[*prompt, *completion.token_ids]])
    with torch.no_grad():
        logits = reference(model_dir)(tokens).logits[0, len(prompt) - 1 : -1] / temperature
    scores: np.ndarray = logits.log_softmax(-1).gather(-1, tokens[0, len(prompt) :, None])[:, 0].numpy()
    return scores


def update_in_mid_generation(lab: Lab, impl: str, sampling: SamplingParams) -> list[Completion]:
    """Version 2 arrives while long completions of version 1 are under way."""

    async def scenario() -> list[Completion]:
        await pull(lab, impl, 1)
        generating = asyncio.create_task(lab.generate(impl, sampling, PROMPTS))
        await asyncio.sleep(0)
        # Requests decode in step with each other: when short ones that came later have ended, the long ones are under way.
        await lab.generate(impl, SamplingParams(max_new_tokens=8, temperature=1.0, seed=9), PROMPTS[:1])
        await pull(lab, impl, 2)
        return await generating

    completions: list[Completion] = lab.do(scenario())
    return completions


@pytest.mark.parametrize("impl", ["titan", "titan-tp2"])
def test_an_update_in_mid_generation_leaves_tokens_of_both_versions_each_with_its_own_log_probability(
    lab: Lab, impl: str
) -> None:
    sampling = SamplingParams(max_new_tokens=200, temperature=0.7, seed=3)
    completions = update_in_mid_generation(lab, impl, sampling)
    assert any(set(completion.versions.tolist()) == {1, 2} for completion in completions)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert len(completion.versions) == len(completion.token_ids) == len(completion.logprobs)
        assert (np.diff(completion.versions) >= 0).all()
        for version, model_dir in lab.models.items():
            made = completion.versions == version
            expected = scored_by(model_dir, prompt, completion, sampling.temperature)
            np.testing.assert_allclose(completion.logprobs[made], expected[made], atol=5e-5)


@pytest.mark.parametrize("impl", ["native", "native-tp2"])
def test_restarted_completions_are_those_of_the_new_version_alone(lab: Lab, impl: str) -> None:
    sampling = SamplingParams(max_new_tokens=200, temperature=0.7, seed=3)
    restarted = update_in_mid_generation(lab, impl, sampling)
    fresh = lab.do(lab.generate(impl, sampling))
    assert [set(completion.versions.tolist()) for completion in restarted] == [{2}] * len(PROMPTS)
    assert [completion.token_ids.tolist() for completion in restarted] == [c.token_ids.tolist() for c in fresh]


def test_of_spare_completions_only_the_first_to_end_are_kept(lab: Lab, impl: str) -> None:
    async def scenario() -> list[Completion]:
        await pull(lab, impl, 1)
        lengths = (40, 3, 60, 5)
        requests = [
            GenerationRequest(
                token_ids=PROMPTS[0], sampling=SamplingParams(max_new_tokens=length, temperature=1.0, seed=length)
            )
            for length in lengths
        ]
        return await lab.pool(impl).generate(requests, num_kept=2)

    assert all(len(completion.token_ids) <= 5 for completion in lab.do(scenario()))


def test_cached_prompts_are_forgotten_with_the_weights_that_made_them(lab: Lab, impl: str) -> None:
    prompt = tuple(2 + i % 90 for i in range(100))  # longer than a cache block of 32
    answers = {}
    for version in (1, 2):
        lab.do(pull(lab, impl, version))
        answers[version] = [lab.do(lab.generate(impl, GREEDY, [prompt]))[0].token_ids.tolist() for _ in range(2)]
        policy = reference(lab.models[version])
        output = policy.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, 100, dtype=torch.long), max_new_tokens=24, do_sample=False
        )
        assert answers[version] == [output[0, 100:].tolist()] * 2


def test_turns_of_a_session_go_on_where_the_last_one_ended_at_the_same_replica(lab: Lab) -> None:
    leaders = [lab.generators[impl].slice(procs=0) for impl in ("titan", "native-tp2")]
    pool = GeneratorPool(leaders, max_num_seqs=256)
    half = SamplingParams(max_new_tokens=12, temperature=0.0, seed=None)

    async def converse(prompt: tuple[int, ...]) -> list[int]:
        said = prompt
        with pool.session() as session:
            for _ in range(2):
                (completion,) = await session.generate([GenerationRequest(token_ids=said, sampling=half)])
                said += tuple(completion.token_ids.tolist())
        return list(said[len(prompt) :])

    async def scenario() -> tuple[list[list[int]], list[list[int]], list[int]]:
        await asyncio.gather(*(pull(lab, impl, 1) for impl in ("titan", "native-tp2")))
        answers = [completion.token_ids.tolist() for completion in await lab.generate("titan", GREEDY)]
        whole = {prompt: answer for prompt, answer in zip(PROMPTS, answers, strict=True) if len(answer) == 24}
        await asyncio.gather(*(waited_for(leader.stats.call_one()) for leader in leaders))
        spoken = await asyncio.gather(*map(converse, list(whole)[:2]))
        stats = await asyncio.gather(*(waited_for(leader.stats.call_one()) for leader in leaders))
        return spoken, list(whole.values())[:2], [stat.num_tokens for stat in stats]

    spoken, expected, num_tokens = lab.do(scenario())
    assert spoken == expected
    assert num_tokens == [24, 24]


def test_weights_that_do_not_fit_are_refused_by_name(lab: Lab, impl: str) -> None:
    async def scenario() -> None:
        odd = WeightPublisher("lab", 0, lab.store, torch.float32, ["store"])
        manifest = await odd.publish(7, {"norm.weight": torch.ones(128)})
        await pull_commit(lab, impl, Commit(7, (manifest,)))

    with pytest.raises(Exception, match=r"tensors not published: .*tok_embeddings"):
        lab.do(scenario())
    with pytest.raises(Exception, match="no valid weights"):
        lab.do(lab.generate(impl, GREEDY))
