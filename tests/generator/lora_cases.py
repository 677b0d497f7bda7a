"""Sample with adapters in the real engine; see `tests.engines`."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.generator.lab import titan_names
from tests.weights.processes import MemoryStore
from titanrl.carriers.types import Completion, GenerationRequest, SamplingParams
from titanrl.config.device import DEVICES
from titanrl.config.sections import GeneratorConfig, LoraConfig, RecipeConfig
from titanrl.models.directory import open_model
from titanrl.models.recipe import create_model

STOP = 1
MAX_LEN = 128
RECIPE = RecipeConfig(init_std=0.1)
LORA = LoraConfig(rank=3, alpha=6.0)
"""A rank that vLLM pads, and a scale of 2."""


def requests(count: int) -> list[GenerationRequest]:
    """Return requests with prompts of different lengths, longer than a block of the cache, two for each prompt."""
    prompts = [tuple(2 + (7 * (i // 2) + j) % 90 for j in range(35 + 3 * (i // 2))) for i in range(count)]
    return [
        GenerationRequest(token_ids=prompt, sampling=SamplingParams(max_new_tokens=30 - i, temperature=1.0, seed=i))
        for i, prompt in enumerate(prompts)
    ]


def adapter(state: dict[str, torch.Tensor], seed: int, lora: LoraConfig) -> dict[str, torch.Tensor]:
    """Return a random adapter of each projection in a state dict of the trainer."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in state.items():
        if name.endswith(("wq.weight", "wk.weight", "wv.weight", "wo.weight", "w1.weight", "w2.weight", "w3.weight")):
            stem = name.removesuffix(".weight")
            tensors[f"{stem}.lora_a.weight"] = torch.randn(lora.rank, weight.shape[1], generator=generator) * 0.1
            tensors[f"{stem}.lora_b.weight"] = torch.randn(weight.shape[0], lora.rank, generator=generator) * 0.1
    return tensors


def save_merged(model: Path, found: dict[str, torch.Tensor], lora: LoraConfig, target: Path) -> None:
    """Write a copy of a model with an adapter merged into its weights."""
    state = load_file(model / "model.safetensors")
    ours = {name: next(iter(titan_names({name: value}))) for name, value in state.items()}
    for name, value in state.items():
        stem = ours[name].removesuffix(".weight")
        if f"{stem}.lora_a.weight" in found:
            product = found[f"{stem}.lora_b.weight"].double() @ found[f"{stem}.lora_a.weight"].double()
            state[name] = (value.double() + lora.alpha / lora.rank * product).to(value.dtype)
    target.mkdir()
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text((model / "config.json").read_text())


def sample(engine: Any, sent: Sequence[GenerationRequest]) -> list[Completion]:
    tickets, ended = [engine.add(request) for request in sent], {}
    while engine.can_step:
        ended |= {finished.ticket: finished.completion for finished in engine.step()}
    return [ended[ticket] for ticket in tickets]


def samples(folder: Path) -> dict[str, Any]:
    """Return the samples of two versions of the policy, of which the second replaces the first while requests decode."""
    return asyncio.run(sample_versions(folder))


async def sample_versions(folder: Path) -> dict[str, Any]:
    from titanrl.generator.engine import Engine, HeldPuller, Puller
    from titanrl.weights.records import Commit, HeldAdapter, WeightMismatchError, adapters_run, base_run
    from titanrl.weights.store import WeightSource
    from titanrl.weights.transport import WeightPublisher

    folder.mkdir()
    create_model(folder / "base", RECIPE, seed=1)
    create_model(folder / "other", RECIPE, seed=2)
    store: Any = MemoryStore()
    config = GeneratorConfig(model_impl="native", kv_cache_bytes=2 << 20)
    states = {name: titan_names(load_file(folder / name / "model.safetensors")) for name in ("base", "other")}
    publisher = WeightPublisher("run", 0, store, torch.float32, ["arena"])
    bases = WeightPublisher(base_run("run"), 0, store, torch.float32, ["arena"], num_arenas=1)
    source = open_model(folder / "base")
    engine = Engine(source, config, DEVICES["cpu"], max_len=MAX_LEN, stop_ids=(STOP,), lora=LORA, num_held=6)
    where = WeightSource("run", store)
    puller, held_puller = Puller(where, source, config, 0, has_adapters=True), HeldPuller(where)
    manifests = [await bases.publish(0, states["base"]), await bases.publish(1, states["other"])]
    results: dict[str, Any] = {"kept": []}

    async def publish(version: int, base: int = 0) -> None:
        found = adapter(states["base"], version, LORA)
        save_merged(folder / ("base", "other")[base], found, LORA, folder / f"merged-{version}")
        manifest = replace(await publisher.publish(version, found), base=manifests[base], scale=2.0)
        fill = await puller.fetch(Commit(version, (manifest,)))

        def filled(engine: Any) -> bool:
            results["kept"].append(fill(engine))
            return bool(results["kept"][-1])

        engine.update_weights(version, filled)

    for engine._has_windows in (False, True):
        await publish(len(results["kept"]) + 1)
        results[f"policy {engine._has_windows}"] = sample(engine, requests(8))
    assert engine._has_windows
    tickets = [engine.add(request) for request in requests(4)]
    ended = {finished.ticket: finished.completion for _ in range(5) for finished in engine.step()}
    await publish(3)
    while engine.can_step:
        ended |= {finished.ticket: finished.completion for finished in engine.step()}
    results["changed"] = [ended[ticket] for ticket in tickets]
    results["kept first"] = list(results["kept"])

    async def hold(number: int) -> None:
        lora = LORA if number % 2 else LoraConfig(rank=2, alpha=1.0)
        found = adapter(states["base"], 100 + number, lora)
        save_merged(folder / "base", found, lora, folder / f"held-{number}")
        one = WeightPublisher(adapters_run("run"), 0, store, torch.float32, ["store"], num_arenas=1)
        manifest = replace(await one.publish(number, found), scale=lora.alpha / lora.rank)
        one.close()
        held = HeldAdapter(number=number, version=7, commit=Commit(number, (manifest,)))
        fill = await held_puller.fetch(held)
        engine.hold_adapter(number, 7, fill)

    def named(count: int, adapters: Sequence[int | None]) -> list[GenerationRequest]:
        return [replace(request, adapter=adapters[i % len(adapters)]) for i, request in enumerate(requests(count))]

    for number in (2, 3):
        await hold(number)
    for engine._has_windows in (False, True):
        results[f"mixed {engine._has_windows}"] = sample(engine, named(8, (0, 2, 3, None)))
    for number in (4, 5, 6):
        await hold(number)
    results["after three saves"] = sample(engine, named(8, (0, 2, 3, None)))
    results["more than slots"] = sample(engine, named(12, (2, 3, 4, 5, 6, 0)))
    results["refused"] = ""
    engine.drop_adapters([3])
    try:
        engine.add(named(1, (3,))[0])
    except ValueError as error:
        results["refused"] = str(error)
    try:
        await publish(9, base=1)
    except WeightMismatchError as error:
        results["other base while held"] = str(error)
    engine.drop_adapters(engine.held_adapters)
    results["kept"].clear()
    await publish(4, base=1)
    results["other base"] = sample(engine, requests(4))
    results["kept other"] = results["kept"]
    return results
