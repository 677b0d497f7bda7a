"""Sample before and after a change of one expert; see `tests.engines`."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.generator.lab import titan_names
from tests.generator.lora_cases import MAX_LEN, STOP, requests, sample
from tests.weights.processes import MemoryStore
from titanrl.carriers.types import Completion
from titanrl.config.device import DEVICES
from titanrl.config.sections import GeneratorConfig
from titanrl.models.directory import open_model

PARTS = {"gate_proj": "w1_EFD", "up_proj": "w3_EFD", "down_proj": "w2_EDF"}


def published_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a Hugging Face state dict as the trainer publishes it: one tensor for all experts of a layer."""
    renamed = titan_names({name: value for name, value in state.items() if ".mlp." not in name})
    layers = {int(name.split(".")[2]) for name in state if ".mlp." in name}
    for layer in layers:
        renamed[f"layers.{layer}.moe.router.gate.weight"] = state[f"model.layers.{layer}.mlp.gate.weight"]
        for theirs, ours in PARTS.items():
            names = [name for name in state if f"layers.{layer}.mlp.experts." in name and theirs in name]
            experts = [state[name] for name in sorted(names, key=lambda name: int(name.split(".")[5]))]
            renamed[f"layers.{layer}.moe.routed_experts.inner_experts.{ours}"] = torch.stack(experts)
    return renamed


def samples(folder: Path, impl: str) -> dict[str, Any]:
    """Publish the models `before` and `after`, sample from each, and return the samples and the published elements by name."""
    return asyncio.run(sample_versions(folder, impl))


async def sample_versions(folder: Path, impl: str) -> dict[str, Any]:
    from titanrl.generator.engine import Engine, Puller
    from titanrl.weights.records import ByteLayout, Commit, layout_key
    from titanrl.weights.store import WeightSource
    from titanrl.weights.transport import WeightPublisher

    store: Any = MemoryStore()
    config = GeneratorConfig.model_validate({"model_impl": impl, "kv_cache_bytes": 2 << 20})
    source = open_model(folder / "before")
    engine = Engine(source, config, DEVICES["cpu"], max_len=MAX_LEN, stop_ids=(STOP,))
    assert bool(engine.plain_experts) == (impl == "native")
    publisher = WeightPublisher("run", 0, store, torch.float32, ["arena"])
    puller = Puller(WeightSource("run", store), source, config, 0, has_adapters=False)
    results: dict[str, Any] = {}
    for version, name in enumerate(("before", "after", "before"), start=1):
        state = published_names(load_file(folder / name / "model.safetensors"))
        manifest = await publisher.publish(version, state)
        layout: ByteLayout = await store.get(layout_key("run", manifest.layout_id))
        counts = Counter[str]()
        for entry in layout.entries:
            counts[entry.name] += entry.box.numel
        results["counts"] = (dict(counts), {key: value.numel() for key, value in state.items()})
        fill = await puller.fetch(Commit(version, (manifest,)))
        engine.update_weights(version, fill)
        found: list[Completion] = sample(engine, requests(6))
        results[f"{version} {name}"] = found
    return results
