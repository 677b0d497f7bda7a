"""Sample with packed linear layers, then with the weights: `python -m tests.generator.packed_cases DTYPE FOLDER`."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from titanrl.base.choices import Dtype
from titanrl.carriers.types import GenerationRequest, SamplingParams
from titanrl.config import sizes
from titanrl.config.device import DEVICES
from titanrl.config.sections import GeneratorConfig, RecipeConfig
from titanrl.models.directory import open_model
from titanrl.models.preparation import prepare_torchtitan
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


def main(dtype: Dtype, folder: Path) -> None:
    """Compare the samples of both kinds of linear layers, for each implementation of the model."""
    prepare_torchtitan(DEVICES["cpu"])
    sizes.LARGE_BYTES, sizes.PACKED_BYTES = 0, {dtype: 0}
    create_model(folder, RecipeConfig(), seed=0)
    for impl in ("titan", "native"):
        config = GeneratorConfig.model_validate({"kv_cache_bytes": 2 << 20, "dtype": dtype, "model_impl": impl})
        compare(config, folder)
    print(f"{torch.get_num_threads()} threads")


def compare(config: GeneratorConfig, folder: Path) -> None:
    """Compare the samples of packed layers with those of the same layers after removing the packed copies."""
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
    for packed, version in ((first, 1), (second, 2)):
        tokens, logprobs = sample(engine, version)
        assert tokens == packed[0]
        assert np.allclose(logprobs, packed[1], atol=1e-3 if config.dtype == "bfloat16" else 2e-5)
        print("largest difference", np.abs(logprobs - packed[1]).max())


if __name__ == "__main__":
    main("float32" if sys.argv[1] == "float32" else "bfloat16", Path(sys.argv[2]))
