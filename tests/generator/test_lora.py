"""Adapters in vLLM's own model: products by hand, and log-probabilities of the real engine against merged transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.engines import Engines
from tests.generator.lora_cases import requests, samples
from titanrl.carriers.types import Completion
from titanrl.generator.native import add_products, tokens_by_slot


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory, engines: Engines) -> tuple[Path, dict[str, Any]]:
    """Folder of the models, and the samples by case."""
    folder = tmp_path_factory.mktemp("adapters") / "models"
    return folder, engines.run(samples, folder)


def worst(model_dir: Path, completions: Sequence[Completion], prompts: Sequence[tuple[int, ...]], first: int = 0) -> float:
    """Return the largest difference to the log-probabilities of transformers, of the tokens from index `first` on."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    differences = []
    for completion, prompt in zip(completions, prompts, strict=True):
        tokens = torch.tensor([*prompt, *completion.token_ids.tolist()])
        with torch.no_grad():
            logprobs = model(tokens[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(1, tokens[len(prompt) :, None])[:, 0].numpy()
        differences.append(np.abs(expected - completion.logprobs)[first:].max(initial=0.0))
    return float(max(differences))


def prompts_of(count: int) -> list[tuple[int, ...]]:
    return [request.token_ids for request in requests(count)]


@pytest.mark.parametrize(("version", "case"), [(1, "policy False"), (2, "policy True")], ids=["steps", "windows"])
def test_policy_with_adapter_has_the_logprobs_of_merged_weights(cases: Any, version: int, case: str) -> None:
    models, found = cases
    assert all(set(completion.versions.tolist()) == {version} for completion in found[case])
    assert worst(models / f"merged-{version}", found[case], prompts_of(8)) < 1e-5
    assert worst(models / "base", found[case], prompts_of(8)) > 0.1


def test_running_requests_continue_with_the_adapter_of_the_next_version(cases: Any) -> None:
    models, found = cases
    for completion in found["changed"]:
        assert completion.versions.tolist() == [2] * 5 + [3] * (len(completion.versions) - 5)
    assert worst(models / "merged-3", found["changed"], prompts_of(4), first=5) < 1e-5


def test_base_moves_once_and_again_if_it_changes(cases: Any) -> None:
    models, found = cases
    assert found["kept first"] == [False, True, True]
    assert found["kept other"] == [False]
    assert worst(models / "merged-4", found["other base"], prompts_of(4)) < 1e-5


MIXED = {"base": (0, 4), "held-2": (1, 5), "held-3": (2, 6), "merged-3": (3, 7)}
"""Places of the requests of each model in a batch."""


@pytest.mark.parametrize("case", ["mixed False", "mixed True"], ids=["steps", "windows"])
@pytest.mark.parametrize("model", MIXED)
def test_base_and_adapters_in_one_batch_have_the_logprobs_of_their_models(cases: Any, model: str, case: str) -> None:
    models, found = cases
    completions, prompts = found[case], prompts_of(8)
    places = MIXED[model]
    assert worst(models / model, [completions[place] for place in places], [prompts[place] for place in places]) < 1e-5
    versions = {"base": 0, "merged-3": 3}.get(model, 7)
    assert all(set(completions[place].versions.tolist()) == {versions} for place in places)


def test_held_adapters_give_identical_tokens_after_three_more(cases: Any) -> None:
    _, found = cases
    for before, after in zip(found["mixed True"], found["after three saves"], strict=True):
        np.testing.assert_array_equal(before.token_ids, after.token_ids)
        np.testing.assert_array_equal(before.logprobs, after.logprobs)


def test_more_adapters_than_slots_wait_for_a_slot(cases: Any) -> None:
    models, found = cases
    completions, prompts = found["more than slots"], prompts_of(12)
    for offset, name in enumerate(("held-2", "held-3", "held-4", "held-5", "held-6", "base")):
        assert worst(models / name, completions[offset::6], prompts[offset::6]) < 1e-5


def test_dropped_adapter_and_changed_base_are_refused(cases: Any) -> None:
    _, found = cases
    assert found["refused"] == "adapter: not held by this generator (got 3). It has been released."
    assert found["other base while held"].startswith("the base changed while 4 adapters on it are held.")


def test_products_of_each_slot_are_added_to_its_tokens_only() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(5, 4, generator=generator), torch.randn(5, 7, generator=generator)
    a = [torch.randn(2, 1, 3, 4, generator=generator) for _ in range(2)]
    b = [torch.randn(2, 1, width, 3, generator=generator) for width in (5, 2)]
    slots = torch.tensor([1, -1, 0, 1, -1])
    expected = y.clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[row] += torch.cat([b[part][slot, 0] @ a[part][slot, 0] @ x[row] for part in range(2)])
    wrapper: Any = type("Wrapper", (), {})()
    wrapper.groups = tokens_by_slot(slots)
    add_products(wrapper, y, x, a, b, 1.0, (5, 2))
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize(("slots", "expected"), [([-1, -1], []), ([0, 0], [(0, None)])], ids=["none", "one"])
def test_batch_of_one_kind_needs_no_indices(slots: list[int], expected: Any) -> None:
    assert tokens_by_slot(torch.tensor(slots)) == expected
