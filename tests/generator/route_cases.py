"""Sample with recorded experts in the real engine; see `tests.engines`."""

import asyncio
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.generator.expert_cases import published_names
from tests.generator.lora_cases import MAX_LEN, STOP, sample
from tests.weights.processes import MemoryStore
from titanrl.carriers.types import Completion, GenerationRequest, SamplingParams
from titanrl.config.device import DEVICES
from titanrl.config.sections import GeneratorConfig
from titanrl.models.directory import open_model

NUM = 8
PREFIX = tuple(5 + i % 40 for i in range(40))
"""Start of all prompts, which is longer than a block of the KV cache."""


def requests(count: int = NUM, *, experts: bool = True, **options: Any) -> list[GenerationRequest]:
    """Return requests with a common prefix."""
    return [
        GenerationRequest(
            token_ids=(*PREFIX, 60 + i),
            sampling=SamplingParams(max_new_tokens=30, temperature=1.0, seed=i, experts=experts, **options),
        )
        for i in range(count)
    ]


def samples(folder: Path, impl: str, dtype: str) -> dict[str, list[Completion]]:
    """Return the samples of each case; with bfloat16, which a CPU emulates slowly, those of one case."""
    return asyncio.run(sample_cases(folder, impl, dtype))


async def sample_cases(folder: Path, impl: str, dtype: str) -> dict[str, list[Completion]]:
    from titanrl.generator.engine import Engine, Puller
    from titanrl.weights.records import Commit
    from titanrl.weights.store import WeightSource
    from titanrl.weights.transport import WeightPublisher

    store: Any = MemoryStore()
    config = GeneratorConfig.model_validate({"model_impl": impl, "kv_cache_bytes": 8 << 20, "dtype": dtype})
    source = open_model(folder / "model")
    engine = Engine(source, config, DEVICES["cpu"], max_len=MAX_LEN, stop_ids=(STOP,))
    publisher = WeightPublisher("run", 0, store, getattr(torch, dtype), ["arena"])
    puller = Puller(WeightSource("run", store), source, config, 0, has_adapters=False)
    state = published_names(load_file(folder / "model" / "model.safetensors"))

    async def update(version: int) -> None:
        manifest = await publisher.publish(version, state)
        engine.update_weights(version, await puller.fetch(Commit(version, (manifest,))))

    ended: dict[int, Completion] = {}

    def started(sent: list[GenerationRequest]) -> list[int]:
        tickets = [engine.add(request) for request in sent]
        for _ in range(5):
            ended.update({finished.ticket: finished.completion for finished in engine.step()})
        return tickets

    def rest(tickets: list[int]) -> list[Completion]:
        while engine.can_step:
            ended.update({finished.ticket: finished.completion for finished in engine.step()})
        return [ended[ticket] for ticket in tickets]

    await update(1)
    results = {}
    if dtype == "float32":
        results["unrecorded"] = sample(engine, requests(experts=False))
    results["windows"] = sample(engine, requests())  # in float32, the prefix cache has the prompts
    if dtype == "float32":
        results["steps"] = sample(engine, requests(top_p=0.999999))
        results["mixed"] = sample(engine, [*requests(2), *requests(2, experts=False)])
        tickets = started(requests())
        await update(2)  # the same weights: running requests are computed again
        results["continued"] = rest(tickets)
        tickets = started(requests())
        engine.restart()
        results["restarted"] = rest(tickets)
    return results
