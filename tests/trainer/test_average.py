"""The moving average of the weights: values, layouts, checkpoints, and the KL divergence from it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.trainer import averages
from tests.trainer.ranks import World
from titanrl.trainer.average import MovingAverage

Worlds = Callable[[int], World]
FSDP = {"dp_shard": 2}
LAYOUTS = {
    "fsdp": (2, {"parallelism": FSDP}),
    "replicas": (2, {"parallelism": {"dp_replicate": 2}}),
    "fsdp x tp": (4, {"parallelism": {"dp_shard": 2, "tp": 2}}),
    "hsdp": (4, {"parallelism": {"dp_replicate": 2, "dp_shard": 2}}),
}
LORA = {"rank": 4}


def test_average_follows_ema_formula() -> None:
    weights = {"moving": torch.tensor([1.0, -4.0]), "still": torch.tensor([0.1])}
    average = MovingAverage(weights, 0.75)
    weights["moving"].copy_(torch.tensor([5.0, 0.0]))
    average.update()
    assert average.tensors["moving"].tolist() == [2.0, -3.0]  # 0.75 * 1 + 0.25 * 5, 0.75 * -4 + 0.25 * 0
    weights["moving"].copy_(torch.tensor([-2.0, 1.0]))
    average.update()
    assert average.tensors["moving"].tolist() == [1.0, -2.0]  # 0.75 * 2 - 0.25 * 2, 0.75 * -3 + 0.25 * 1
    assert torch.equal(average.tensors["still"], weights["still"])
    average.restart()
    assert average.tensors["moving"].tolist() == [-2.0, 1.0]


def test_average_of_bfloat16_weights_is_float32() -> None:
    weights = {"w": torch.tensor([1.0], dtype=torch.bfloat16)}
    average = MovingAverage(weights, 0.5)
    weights["w"].fill_(1 + 2**-7)  # the next number of bfloat16
    average.update()
    assert average.tensors["w"].tolist() == [1 + 2**-8]
    entry = average.entries()["w"]
    assert entry.layout.dtype == torch.bfloat16
    assert weights["w"].copy_(entry.data).tolist() == [1.0]  # half-way rounds to even


@pytest.mark.parametrize("layout", LAYOUTS)
def test_average_does_not_depend_on_layout(layout: str, world: Worlds, tiny_model: Path) -> None:
    size, trainer = LAYOUTS[layout]
    alone, _ = world(1).run(averages.follow, tiny_model, {})[0]
    for found, expected in world(size).run(averages.follow, tiny_model, trainer):
        assert found.keys() == alone.keys()
        for name, value in found.items():
            np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-6, err_msg=name)
            np.testing.assert_allclose(value, alone[name], rtol=0, atol=1e-4, err_msg=name)  # AdamW divides tiny gradients


def test_lora_averages_only_adapters(world: Worlds, tiny_model: Path) -> None:
    found, expected = world(2).run(averages.follow, tiny_model, {"parallelism": FSDP, "lora": LORA})[0]
    assert found
    assert all(".lora_" in name for name in found)
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("size", "trainer"),
    [
        (1, {}),
        (2, {"parallelism": FSDP}),
        (2, {"parallelism": FSDP, "lora": LORA}),
        (4, LAYOUTS["fsdp x tp"][1]),
    ],
    ids=["one rank", "fsdp", "adapters", "fsdp x tp"],
)
def test_swap_to_average_is_exact_and_restores_weights(
    size: int, trainer: averages.Trainer, world: Worlds, tiny_model: Path
) -> None:
    assert all(world(size).run(averages.swap, tiny_model, trainer))


def test_skipped_step_and_unchanged_weights_keep_the_average(world: Worlds, tiny_model: Path) -> None:
    assert all(world(1).run(averages.steps_without_update, tiny_model))


def test_error_without_average_names_configuration_key(world: Worlds, tiny_model: Path) -> None:
    assert all(world(1).run(averages.without_average, tiny_model))


@pytest.mark.parametrize("in_background", [False, True], ids=["waiting", "in background"])
def test_resume_continues_average_bitwise(in_background: bool, world: Worlds, tiny_model: Path, tmp_path: Path) -> None:
    trainer, folder = {"parallelism": FSDP}, tmp_path / "checkpoints"
    uninterrupted = world(2).run(averages.save_and_continue, tiny_model, trainer, folder, in_background)
    resumed = world(2).run(averages.load_and_continue, tiny_model, trainer, folder)
    assert [own for own, _ in resumed] == uninterrupted
    if not in_background:
        (_, alone) = world(1).run(averages.load_and_continue, tiny_model, {}, folder)[0]
        for name, value in resumed[0][1].items():
            np.testing.assert_allclose(alone[name], value, rtol=0, atol=1e-5, err_msg=name)


def test_checkpoint_without_average_is_rejected_before_any_write(world: Worlds, tiny_model: Path, tmp_path: Path) -> None:
    (errors,) = world(1).run(averages.loads_without_average, tiny_model, tmp_path)
    for name, error in zip(("step-1", "state"), errors, strict=True):
        assert error.startswith(f"algorithm.ema_decay: {name} was saved without a moving average of the weights (got ")
        assert "Set algorithm.ema_decay to null" in error


@pytest.mark.parametrize(("size", "plan"), [(1, {}), (2, FSDP)], ids=["one rank", "fsdp"])
def test_kl_to_average_starts_at_zero_and_stays_below_kl_to_start(
    size: int, plan: averages.Trainer, world: Worlds, tiny_model: Path
) -> None:
    first, second, third = world(size).run(averages.kl_to_average, tiny_model, plan)[0]
    assert first == (0.0, 0.0)
    assert 0.0 < second[0] < second[1]
    assert 0.0 < third[0] < third[1]
