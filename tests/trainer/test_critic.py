"""A critic's values, loss and gradient do not depend on the layout, and a checkpoint continues it bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.tiny import write_model
from tests.trainer import critics
from tests.trainer.ranks import World
from titanrl.models.decoder import PARTS

Worlds = Callable[[int], World]
LAYOUTS: dict[str, tuple[int, critics.Plan]] = {
    "one rank": (1, {}),
    "fsdp 2": (2, {"parallelism": {"dp_shard": 2}}),
    "tp 2": (2, {"parallelism": {"tp": 2}}),
    "cp 2": (2, {"parallelism": {"cp": 2}}),
    "lora": (1, {"lora": {"rank": 4}}),
}
EXPERTS: dict[str, tuple[int, critics.Plan]] = {
    "fsdp 2, ep 2": (2, {"parallelism": {"dp_shard": 2, "ep": 2}}),
    "tp 2, ep 2": (2, {"parallelism": {"tp": 2, "ep": 2}}),
    "replayed": (1, {"routing": "replayed"}),  # the generator's experts are those of the policy
}
TOLERANCE = 5e-6


@pytest.fixture(scope="module")
def reference(world: Worlds, tiny_model: Path) -> Any:
    return world(1).run(critics.learn, tiny_model, {}, 100, False)[0]


@pytest.mark.parametrize(("layout", "rows_per_microbatch"), [("one rank", 4), *((layout, 1) for layout in LAYOUTS)])
def test_losses_gradient_and_values_do_not_depend_on_layout_or_packing(
    layout: str, rows_per_microbatch: int, world: Worlds, tiny_model: Path, reference: Any
) -> None:
    size, trainer = LAYOUTS[layout]
    losses, gradient, values = world(size).run(critics.learn, tiny_model, trainer, rows_per_microbatch, True)[0]
    assert losses == pytest.approx(reference[0], abs=TOLERANCE)
    assert losses[1] < losses[0], "the critic learns"
    assert gradient.keys() == reference[1].keys()
    assert max(np.abs(part).max() for part in reference[1].values()) > 1e-2
    assert max(np.abs(part - reference[1][name]).max() for name, part in gradient.items()) <= TOLERANCE
    assert values.keys() == reference[2].keys()
    for handle, (own, last) in values.items():
        assert own == pytest.approx(reference[2][handle][0], abs=1e-5)
        assert last == pytest.approx(reference[2][handle][1], abs=1e-5)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts with small weights: larger ones amplify the rounding of partial sums."""
    return write_model("qwen3_moe", tmp_path_factory.mktemp("experts") / "model", std=0.02)


@pytest.fixture(scope="module")
def reference_of_experts(world: Worlds, experts: Path) -> Any:
    return world(1).run(critics.learn, experts, {}, 100, False)[0]


@pytest.mark.parametrize("layout", EXPERTS)
def test_critic_with_experts_does_not_depend_on_layout(
    layout: str, world: Worlds, experts: Path, reference_of_experts: Any
) -> None:
    size, trainer = EXPERTS[layout]
    expected_losses, expected, expected_values = reference_of_experts
    losses, gradient, values = world(size).run(critics.learn, experts, trainer, 2, True)[0]
    assert losses == pytest.approx(expected_losses, abs=TOLERANCE)
    assert losses[1] < losses[0]
    assert gradient.keys() == expected.keys()
    for part in PARTS:
        assert max(np.abs(expected[name]).max() for name in expected if name.endswith(part)) > 0.0, "experts are trained"
    largest = max(float(np.abs(value).max()) for value in expected.values())
    assert max(float(np.abs(value - expected[name]).max()) for name, value in gradient.items()) <= TOLERANCE * largest
    for handle, (own, last) in expected_values.items():
        assert values[handle] == (pytest.approx(own, abs=1e-5), pytest.approx(last, abs=1e-5))


def test_critic_with_experts_continues_from_a_checkpoint(world: Worlds, experts: Path, tmp_path: Path) -> None:
    size, trainer = EXPERTS["fsdp 2, ep 2"]
    losses = world(size).run(critics.save_and_continue, experts, trainer, tmp_path / "checkpoints")[0]
    assert world(size).run(critics.load_and_continue, experts, trainer, tmp_path / "checkpoints")[0] == (losses, 1)


def test_loss_of_first_step_is_that_by_hand(world: Worlds, tiny_model: Path) -> None:
    ((found, expected),) = world(1).run(critics.first_loss, tiny_model)
    assert found == pytest.approx(expected, rel=1e-6)


def test_checkpoint_continues_bit_for_bit_and_on_another_layout(world: Worlds, tiny_model: Path, tmp_path: Path) -> None:
    size, trainer = LAYOUTS["tp 2"]
    losses = world(size).run(critics.save_and_continue, tiny_model, trainer, tmp_path / "checkpoints")[0]
    assert world(size).run(critics.load_and_continue, tiny_model, trainer, tmp_path / "checkpoints")[0] == (losses, 1)
    found, _ = world(1).run(critics.load_and_continue, tiny_model, {}, tmp_path / "checkpoints")[0]
    assert found == pytest.approx(losses, abs=TOLERANCE)


def test_checkpoint_without_critic_is_refused_with_key_and_fix(world: Worlds, tiny_model: Path, tmp_path: Path) -> None:
    (error,) = world(1).run(critics.load_without, tiny_model, tmp_path / "checkpoints")
    assert error.startswith("algorithm.advantage: step-1 was saved without a critic")


@pytest.mark.parametrize("layout", ["one rank", "fsdp 2"])
def test_critic_starts_over_from_the_policy(layout: str, world: Worlds, tiny_model: Path) -> None:
    size, trainer = LAYOUTS[layout]
    assert all(world(size).run(critics.start_over, tiny_model, trainer))
