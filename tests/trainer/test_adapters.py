"""Several adapters on one base: each trains as if it were alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer import several
from tests.trainer.ranks import World

Worlds = Callable[[int], World]
FSDP, TP = {"parallelism": {"dp_shard": 2}}, {"parallelism": {"tp": 2}}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {"one rank": (1, {}), "fsdp": (2, FSDP), "tp": (2, TP)}
BF16 = {"compute_dtype": "bfloat16"}


@pytest.mark.parametrize("layout", ["one rank", "fsdp"])
def test_interleaved_models_train_bitwise_as_each_alone(layout: str, world: Worlds, tiny_model: Path) -> None:
    """Each has its own moving average, too."""
    size, trainer = LAYOUTS[layout]
    assert all(world(size).run(several.interleaved, tiny_model, trainer, 0.5))


@pytest.mark.parametrize("trainer", [BF16, {"float8": "tensorwise"}, {"dtype": "bfloat16"}], ids=str)
def test_interleaved_models_train_as_alone_in_other_dtypes(trainer: dict[str, Any], world: Worlds, tiny_model: Path) -> None:
    assert all(world(1).run(several.interleaved, tiny_model, trainer))


def test_merged_weights_of_the_own_policy_stay(world: Worlds, tiny_model: Path) -> None:
    assert all(world(2).run(several.merged_weights, tiny_model, FSDP))


def test_padded_adapter_equals_one_of_its_own_rank(world: Worlds, tiny_model: Path) -> None:
    for gradient, logprobs in world(2).run(several.padded, tiny_model, TP):
        assert gradient <= 1e-6
        assert logprobs <= 1e-5  # AdamW divides by the size of the gradient, which magnifies the rounding of small ones


def test_layers_that_a_model_does_not_train_stay_zero(world: Worlds, tiny_model: Path) -> None:
    assert all(world(2).run(several.untrained_layers, tiny_model, TP))


@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_loaded_model_continues_bitwise_on_any_layout(layout: str, world: Worlds, tiny_model: Path, tmp_path: Path) -> None:
    size, trainer = LAYOUTS[layout]
    written = world(size).run(several.saved, tiny_model, trainer, tmp_path / "state")
    for (rest, _), (found, _, kept) in zip(
        written, world(size).run(several.loaded, tiny_model, trainer, tmp_path / "state"), strict=True
    ):
        assert found == rest
        assert kept
    _, expected = written[0]
    for other, rank in {"fsdp": [(1, several.RANK), (1, 3)], "tp": [(2, 4)]}[layout]:
        plan = {1: {}, 2: FSDP}[other]
        for _, adapter, _ in world(other).run(several.loaded, tiny_model, plan, tmp_path / "state", rank):
            assert adapter.keys() == expected.keys()
            for name, value in adapter.items():
                np.testing.assert_allclose(value, expected[name], rtol=0, atol=2e-4, err_msg=name)
    if layout == "fsdp":
        assert all(world(size).run(several.loaded_without_optimizer, tiny_model, trainer, tmp_path / "state"))


def test_failed_pass_affects_only_its_model(world: Worlds, tiny_model: Path) -> None:
    assert all(world(2).run(several.failed_pass, tiny_model, FSDP))


def test_each_model_keeps_its_own_versions(world: Worlds, tiny_model: Path) -> None:
    assert all(world(2).run(several.snapshots, tiny_model, FSDP))


def test_refused_models_name_key_and_fix_and_freeing_releases_memory(world: Worlds, tiny_model: Path) -> None:
    ((unknown, existing, wide, many, gone, freed, target, full),) = world(1).run(several.refused, tiny_model)
    assert existing == "new_model: there is already a model of this name (got 'a'). Choose another, or free it."
    assert wide == "rank: more than that of the trainer's adapters (got 9). Use at most 8, or raise trainer.lora.rank."
    assert many.startswith("new_model: too many models (got trainer.lora.max_models=2). Free a model, or raise")
    assert gone == freed == unknown.replace("'a'", "'b'")
    assert gone == "model: there is no such model (got 'b'). Create it with new_model; it may have been freed."
    assert target.startswith("train_mlp: the mlp layers have no adapters (got True). Pass train_mlp=False, or add mlp to")
    assert full == "new_model: the trainer trains all weights (got trainer.lora=null). Set trainer.lora."
