"""Runs from Python with two trainer ranks and two generator processes, compared with transformers."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from tests.e2e.conftest import SMALL, Finished
from titanrl.carriers.types import Completion, GenerationRequest, Prompt, SamplingParams
from titanrl.config import load_config
from titanrl.data.streams import make_stream
from titanrl.data.tokenizer import load_tokenizer
from titanrl.grpo import GRPO
from titanrl.rollout.pool import GeneratorPool

LAYOUTS = {
    "fsdp": (
        "trainer.parallelism.dp_shard=2",
        "generator.tp=2",
        "generator.model_impl=native",
        "rollout.num_workers=2",
        "algorithm.kl.coef=0.1",
        "rollout.min_p=0.02",
    ),
    "tp": (
        "trainer.parallelism.tp=2",
        "generator.replicas=2",
        "trainer.lora={rank: 8}",
        "algorithm.kl={coef: 0.1, reference: ema}",
        "algorithm.ema_decay=0.5",
        "rollout.top_p=0.9",
        "rollout.top_k=20",
    ),
    "cp": (
        "trainer.parallelism.cp=2",
        "algorithm.preset=gspo",
        "algorithm.correction={weight: none, reject_geometric_prox_over_behavior: [0.5, 2.0]}",
        "algorithm.kl.coef=0.1",
        "rollout.min_p=0.02",
    ),
}


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.mark.parametrize("layout", LAYOUTS)
def test_exported_policy_of_two_ranks_equals_the_generators(
    layout: str, runner: asyncio.Runner, plain_run: Finished, tmp_path: Path
) -> None:
    places = (f"name={layout}", f"output_dir={tmp_path}", f"cache_dir={plain_run.run_dir.parents[1] / 'cache'}")
    initial = f"model.path={plain_run.run_dir}/checkpoints/final"
    config = load_config(
        "configs/quickstart.yaml", [*SMALL, *places, *LAYOUTS[layout], initial, "warm_start=null", "logging.console=off"]
    )

    async def scenario() -> tuple[list[Prompt], list[Completion], Path]:
        run = await GRPO(config).start()
        try:
            metrics = [await run.step() for _ in range(2)]
            assert [step.version for step in metrics] == [1, 2]
            for step in metrics:
                assert step.values["mismatch/logprob_abs_max"] < 1e-4, "both normalize over the tokens that truncation left"
                assert 1.0 < step.values["tokens/support_size_mean"] < 20.0
                assert step.values["staleness/max"] == 0
            # The reference is the initial policy, or the average of all versions.
            assert [step.values["policy/kl_ref"] > 0 for step in metrics] == [False, True]
            exported = await run.export()
            prompts = make_stream(config.data, load_tokenizer(exported), config.seed).heldout(24)
            greedy = SamplingParams(max_new_tokens=config.rollout.max_new_tokens, temperature=0.0, seed=None)
            requests = [GenerationRequest(token_ids=prompt.token_ids, sampling=greedy) for prompt in prompts]
            completions = await GeneratorPool(run.session.generators.actors[-1:], config.generator.max_num_seqs).generate(
                requests
            )
            return prompts, completions, exported
        finally:
            await run.close()

    prompts, completions, exported = runner.run(scenario())
    assert all((completion.versions == 2).all() for completion in completions)
    policy = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    for prompt, completion in zip(prompts, completions, strict=True):
        input_ids = torch.tensor([prompt.token_ids])
        output = policy.generate(input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=26, do_sample=False)
        assert output[0, len(prompt.token_ids) :].tolist() == completion.token_ids.tolist()
