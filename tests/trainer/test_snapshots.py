"""Computing with other versions of the weights and restoring the live ones bit for bit."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.trainer import averages, swaps
from tests.trainer.ranks import World
from titanrl.carriers.tables import SequencePlan
from titanrl.carriers.types import GroupHandle
from titanrl.trainer.snapshots import KeptLogprobs, MovingAverage

Worlds = Callable[[int], World]
PLANS = {
    "one rank": (1, {}),
    "fsdp": (2, {"dp_shard": 2}),
    "fsdp, always resharded": (2, {"dp_shard": 2, "fsdp_reshard_after_forward": "always"}),
    "fsdp, never resharded": (2, {"dp_shard": 2, "fsdp_reshard_after_forward": "never"}),
    "fsdp x tp": (4, {"dp_shard": 2, "tp": 2}),
    "hsdp, never resharded": (4, {"dp_replicate": 2, "dp_shard": 2, "fsdp_reshard_after_forward": "never"}),
}


@pytest.mark.parametrize("layout", PLANS)
def test_swap_to_old_version_is_exact_and_does_not_affect_training(layout: str, world: Worlds, tiny_model: Path) -> None:
    size, plan = PLANS[layout]
    assert all(world(size).run(swaps.swap_and_restore, tiny_model, plan))


@pytest.mark.parametrize("layout", ["one rank", "fsdp"])
def test_calls_that_would_mix_versions_are_refused(layout: str, world: Worlds, tiny_model: Path) -> None:
    size, plan = PLANS[layout]
    assert all(world(size).run(swaps.refused_calls, tiny_model, plan))


@pytest.mark.parametrize("layout", ["one rank", "fsdp x tp"])
def test_mismatched_snapshot_is_refused_before_any_write(layout: str, world: Worlds, tiny_model: Path) -> None:
    size, plan = PLANS[layout]
    assert all(world(size).run(swaps.mismatched_snapshots, tiny_model, plan))


def test_error_names_gathered_parameter(world: Worlds, untied_model: Path) -> None:
    assert all(world(2).run(swaps.gathered_parameter, untied_model))


@pytest.mark.parametrize("layout", ["fsdp", "fsdp, never resharded"])
def test_passes_leave_no_parameter_gathered(layout: str, world: Worlds, untied_model: Path) -> None:
    size, plan = PLANS[layout]
    assert all(world(size).run(swaps.nothing_gathered, untied_model, plan))


def test_check_detects_torch_that_does_not_reshard(world: Worlds, tiny_model: Path) -> None:
    assert all(world(2).run(swaps.torch_without_reshard, tiny_model))


def test_interval_start_is_constant_over_its_steps(world: Worlds, tiny_model: Path) -> None:
    assert all(world(2).run(swaps.interval_logprobs, tiny_model, {"dp_shard": 2}))


FSDP = {"dp_shard": 2}
LAYOUTS = {
    "replicas": (2, {"parallelism": {"dp_replicate": 2}}),
    "fsdp x tp": (4, {"parallelism": {"dp_shard": 2, "tp": 2}}),
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
    ],
    ids=["one rank", "fsdp", "adapters"],
)
def test_swap_to_average_is_exact_and_restores_weights(
    size: int, trainer: averages.Trainer, world: Worlds, tiny_model: Path
) -> None:
    assert all(world(size).run(averages.swap, tiny_model, trainer))


def test_skipped_step_and_unchanged_weights_keep_the_average(world: Worlds, tiny_model: Path) -> None:
    assert all(world(1).run(averages.steps_without_update, tiny_model))


def test_error_without_average_names_configuration_key(world: Worlds, tiny_model: Path) -> None:
    assert all(world(1).run(averages.without_average, tiny_model))


def test_resume_continues_average_bitwise(world: Worlds, tiny_model: Path, tmp_path: Path) -> None:
    """The checkpoint is written in the background, while the average that it should contain changes."""
    trainer, folder = {"parallelism": FSDP}, tmp_path / "checkpoints"
    uninterrupted = world(2).run(averages.save_and_continue, tiny_model, trainer, folder)
    resumed = world(2).run(averages.load_and_continue, tiny_model, trainer, folder)
    assert [own for own, _ in resumed] == uninterrupted
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


def sequence(location: int, length: int, serial: int = 1, num_shared: int = 0) -> SequencePlan:
    handle = GroupHandle(shard=0, location=location, serial=serial)
    return SequencePlan(handle=handle, segment=2, length=length, advantage=1.0, weight=1.0, num_shared=num_shared)


def test_get_returns_values_in_layout_of_requested_rows() -> None:
    kept = KeptLogprobs()
    kept.put(3, [(sequence(0, 2), sequence(1, 3))], torch.tensor([[-1.0, -2.0, -3.0, -4.0, -5.0, -9.0]]))
    assert kept.get(3, [(sequence(1, 3),), (sequence(0, 2),)], 4).tolist() == [[-3, -4, -5, 0], [-1, -2, 0, 0]]
    assert kept.get(3, [], 4).tolist() == [[0, 0, 0, 0]]


def test_shared_prompt_is_kept_once() -> None:
    kept, row = KeptLogprobs(), (sequence(0, 3), sequence(1, 4, num_shared=2), sequence(2, 1))
    kept.put(3, [row], torch.tensor([[-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]]))
    assert kept.get(3, [row], 7).tolist() == [[-1, -2, -3, -4, -5, -6, 0]]


def test_other_version_or_reused_slot_raises_key_error() -> None:
    kept = KeptLogprobs()
    kept.put(3, [(sequence(0, 2),)], torch.zeros(1, 2))
    with pytest.raises(KeyError, match="no log-probabilities of version 4"):
        kept.get(4, [(sequence(0, 2),)], 2)
    with pytest.raises(KeyError, match="no log-probabilities of version 3"):
        kept.get(3, [(sequence(0, 2, serial=2),)], 2)
    kept.put(3, [(sequence(0, 1, serial=2),)], torch.ones(1, 1))
    assert kept.get(3, [(sequence(0, 1, serial=2),)], 1).tolist() == [[1]]
    kept.drop(3)
    with pytest.raises(KeyError):
        kept.get(3, [(sequence(0, 1, serial=2),)], 1)


def test_values_fit_rows_with_different_prompt_sharing() -> None:
    kept, alone, behind = KeptLogprobs(), sequence(1, 4), sequence(1, 4, num_shared=2)
    kept.put(3, [(sequence(0, 3), behind)], torch.tensor([[-1.0, -2.0, -3.0, -4.0, -5.0]]))
    # The shared part of a prompt has no sampled token, so its values do not matter.
    assert kept.get(3, [(alone,)], 5).tolist() == [[0, 0, -4, -5, 0]]
    kept.put(3, [(alone,)], torch.tensor([[-6.0, -7.0, -8.0, -9.0]]))
    assert kept.get(3, [(sequence(0, 3), behind)], 5).tolist() == [[-1, -2, -3, -8, -9]]


def test_values_can_be_added_and_dropped_by_version() -> None:
    first, second = KeptLogprobs(), KeptLogprobs()
    first.put(3, [(sequence(0, 2),)], torch.ones(1, 2))
    first.put(4, [(sequence(0, 2),)], torch.zeros(1, 2))
    second.add(first.of(3))
    assert second.get(3, [(sequence(0, 2),)], 2).tolist() == [[1, 1]]
    with pytest.raises(KeyError):
        second.get(4, [(sequence(0, 2),)], 2)
    first.drop_all_but([4])
    with pytest.raises(KeyError):
        first.get(3, [(sequence(0, 2),)], 2)
    assert first.get(4, [(sequence(0, 2),)], 2).tolist() == [[0, 0]]
