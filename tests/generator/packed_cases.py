"""Sample with packed linear layers, then with the weights; see `tests.engines`."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from titanrl.carriers.types import GenerationRequest, SamplingParams
from titanrl.config import sizes
from titanrl.config.device import DEVICES
from titanrl.config.sections import Dtype, GeneratorConfig, RecipeConfig
from titanrl.models.directory import open_model
from titanrl.models.recipe import create_model


def fill(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1, generator=generator) if parameter.ndim > 1 else parameter.data.fill_(1.0)


def sample(engine: Any, version: int) -> tuple[list[list[int]], np.ndarray[Any, Any]]:
    """Return the tokens and log-probabilities of a few requests."""
    engine.update_weights(version, lambda engine: fill(engine.model, version))
    for seed in range(5):
        prompt = tuple(2 + (7 * seed + place) % 90 for place in range(4 + seed))
        engine.add(GenerationRequest(token_ids=prompt, sampling=SamplingParams(max_new_tokens=12, temperature=1.0, seed=seed)))
    ended = []
    while engine.can_step:
        ended += engine.step()
    completions = [finished.completion for finished in sorted(ended, key=lambda finished: finished.ticket)]
    return [c.token_ids.tolist() for c in completions], np.concatenate([c.logprobs for c in completions])


def compare_all(dtype: Dtype, folder: Path) -> tuple[list[float], int]:
    """Return the differences between both kinds of layers, for each model, and the number of threads."""
    sizes.LARGE_BYTES, sizes.PACKED_BYTES = 0, {dtype: 0}
    create_model(folder, RecipeConfig(), seed=0)
    found = []
    for impl in ("titan", "native"):
        config = GeneratorConfig.model_validate({"kv_cache_bytes": 2 << 20, "dtype": dtype, "model_impl": impl})
        found += compare(config, folder)
    return found, torch.get_num_threads()


def compare(config: GeneratorConfig, folder: Path) -> list[float]:
    """Return the difference to the samples of the same layers after removing the packed copies, for each of two versions."""
    from titanrl.generator.compat import keep_weight
    from titanrl.generator.engine import Engine

    engine = Engine(open_model(folder), config, DEVICES["cpu"], max_len=64, stop_ids=())
    assert engine._linears is not None
    layers = [*engine._linears._torchtitan, *engine._linears._vllm]
    assert len(layers) > 4, len(layers)
    first, second = sample(engine, 1), sample(engine, 2)
    assert first[0] != second[0], "the copies were not replaced"
    engine._linears = None
    for layer in layers:
        vars(layer).pop("forward", None)
        keep_weight(layer, False)
    differences = []
    for packed, version in ((first, 1), (second, 2)):
        tokens, logprobs = sample(engine, version)
        assert tokens == packed[0]
        differences.append(float(np.abs(logprobs - packed[1]).max()))
    return differences
