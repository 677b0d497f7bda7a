"""Computing with other versions of the weights and restoring the live ones bit for bit."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trainer import swaps
from tests.trainer.ranks import World

Worlds = Callable[[int], World]
PLANS = {
    "one rank": (1, {}),
    "fsdp": (2, {"dp_shard": 2}),
    "fsdp, always resharded": (2, {"dp_shard": 2, "fsdp_reshard_after_forward": "always"}),
    "fsdp, never resharded": (2, {"dp_shard": 2, "fsdp_reshard_after_forward": "never"}),
    "fsdp x tp": (4, {"dp_shard": 2, "tp": 2}),
    "fsdp x tp, always resharded": (4, {"dp_shard": 2, "tp": 2, "fsdp_reshard_after_forward": "always"}),
    "fsdp x tp, never resharded": (4, {"dp_shard": 2, "tp": 2, "fsdp_reshard_after_forward": "never"}),
    "hsdp": (4, {"dp_replicate": 2, "dp_shard": 2}),
    "hsdp, always resharded": (4, {"dp_replicate": 2, "dp_shard": 2, "fsdp_reshard_after_forward": "always"}),
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


def test_check_detects_torch_that_does_not_reshard(world: Worlds, tiny_model: Path) -> None:
    assert all(world(2).run(swaps.torch_without_reshard, tiny_model))


def test_interval_start_is_constant_over_its_steps(world: Worlds, tiny_model: Path) -> None:
    assert all(world(2).run(swaps.interval_logprobs, tiny_model, {"dp_shard": 2}))
