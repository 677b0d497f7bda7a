"""Run the same requests with and without decode windows; see `tests.engines`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from titanrl.carriers.types import GenerationRequest, SamplingParams
from titanrl.config.device import DEVICES
from titanrl.config.sections import GeneratorConfig, RecipeConfig
from titanrl.generator import compat
from titanrl.models.directory import open_model
from titanrl.models.recipe import create_model

STOP = 1
MAX_LEN = 128
KV_CACHE_BYTES = 2 << 20
"""Space for 2048 tokens of the tiny model: enough for every case except that of the full cache."""


def requests(count: int, new_tokens: int = 40, temperature: float = 1.0, **options: Any) -> list[GenerationRequest]:
    """Return requests with prompts of different lengths, two for each prompt."""
    prompts = [tuple(2 + (7 * (i // 2) + j) % 90 for j in range(5 + 3 * (i // 2))) for i in range(count)]
    return [
        GenerationRequest(
            token_ids=prompt,
            sampling=SamplingParams(
                max_new_tokens=new_tokens - i, temperature=temperature, seed=100 + i if temperature else None, **options
            ),
        )
        for i, prompt in enumerate(prompts)
    ]


def finish(engine: Any, tickets: list[int], ended: Sequence[Any] = ()) -> list[Any]:
    """Step until all requests have finished; return the completions of these tickets, and the blocks of the prefix cache.

    Some requests may have `ended` in earlier steps.
    """
    ended = list(ended)
    while engine.can_step:
        ended += engine.step()
    completions = {finished.ticket: finished.completion for finished in ended}
    found = [completions[ticket] for ticket in tickets]
    pool = engine._engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    return [*found, len(pool.cached_block_hash_to_block)]


def together(engine: Any) -> list[Any]:
    return finish(engine, [engine.add(request) for request in requests(12)])


def temperatures(engine: Any) -> list[Any]:
    mixed = [*requests(3, temperature=0.7), *requests(3, temperature=0.0), *requests(3, stop_ids=(7, 8, 9))]
    return finish(engine, [engine.add(request) for request in mixed])


def greedy(engine: Any) -> list[Any]:
    return finish(engine, [engine.add(request) for request in requests(4, temperature=0.0)])


def joining(engine: Any) -> list[Any]:
    """Requests join and leave while others decode."""
    tickets = [engine.add(request) for request in requests(6)]
    ended: list[Any] = []
    for step in range(9):
        if step in (3, 7):
            tickets += [engine.add(request) for request in requests(3, new_tokens=20)]
        if step == 5:
            engine.abort(tickets[:2])
        ended += engine.step()
    return finish(engine, tickets[2:], ended)


def new_weights(engine: Any) -> list[Any]:
    """The weights change while requests decode, and are the old ones again at the end."""
    tickets = [engine.add(request) for request in requests(6)]
    ended = [finished for _ in range(5) for finished in engine.step()]

    def halve(engine: Any) -> None:
        for parameter in engine.model.parameters():
            parameter.data *= 0.5

    engine.update_weights(2, halve)
    completions = finish(engine, tickets, ended)
    engine.update_weights(1, restore(engine))
    return completions


def full_cache(engine: Any) -> list[Any]:
    """More tokens than the KV cache holds: vLLM preempts requests."""
    return finish(engine, [engine.add(request) for request in requests(44, new_tokens=100)])


def short_windows(engine: Any) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "MAX_STEPS", 5)
        return finish(engine, [engine.add(request) for request in requests(6)])


def truncated(engine: Any) -> list[Any]:
    return finish(engine, [engine.add(request) for request in [*requests(2), *requests(2, top_k=5, supports=True)]])


CASES: dict[str, Callable[[Any], list[Any]]] = {
    case.__name__: case for case in (together, temperatures, greedy, joining, new_weights, full_cache, short_windows, truncated)
}


def restore(engine: Any) -> Callable[[Any], None]:
    """Return a function that fills the model with its first weights."""

    def fill(engine: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        for parameter in engine.model.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(0, 0.1, generator=generator)
            else:
                parameter.data.fill_(1.0)

    return fill


def completions_of_all(folder: Path) -> dict[str, Any]:
    """Return the completions of every case, without and with windows, and how many steps windows took and refused."""
    from titanrl.generator.engine import Engine

    create_model(folder, RecipeConfig(), seed=0)
    config = GeneratorConfig(kv_cache_bytes=KV_CACHE_BYTES)
    engine = Engine(open_model(folder), config, DEVICES["cpu"], max_len=MAX_LEN, stop_ids=(STOP,))
    engine.update_weights(1, restore(engine))
    decoded: list[Any] = []
    inner = compat.DecodeWindow.step

    def step(opened: compat.DecodeWindow) -> Any:
        decoded.append(inner(opened))
        return decoded[-1]

    compat.DecodeWindow.step = step  # type: ignore[method-assign]
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        completions = []
        for engine._has_windows in (False, True):
            decoded.clear()
            engine.update_weights(1, restore(engine))  # empties the prefix cache
            completions.append(case(engine))
        results[name] = (*completions, len(decoded), decoded.count(None))
    return results
