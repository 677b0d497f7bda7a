"""A critic's values, loss and gradient do not depend on the layout, and a checkpoint continues it bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer import critics
from tests.trainer.ranks import World

Worlds = Callable[[int], World]
LAYOUTS: dict[str, tuple[int, critics.Plan]] = {
    "one rank": (1, {}),
    "fsdp 2": (2, {"parallelism": {"dp_shard": 2}}),
    "tp 2": (2, {"parallelism": {"tp": 2}}),
    "cp 2": (2, {"parallelism": {"cp": 2}}),
    "lora": (1, {"lora": {"rank": 4}}),
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


def test_loss_of_first_step_is_that_by_hand(world: Worlds, tiny_model: Path) -> None:
    ((found, expected),) = world(1).run(critics.first_loss, tiny_model)
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("layout", ["fsdp 2", "tp 2"])
def test_checkpoint_continues_bit_for_bit_and_on_another_layout(
    layout: str, world: Worlds, tiny_model: Path, tmp_path: Path
) -> None:
    size, trainer = LAYOUTS[layout]
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
