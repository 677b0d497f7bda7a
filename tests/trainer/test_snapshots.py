"""Computing with other versions of the weights, and coming back bit for bit."""

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
def test_an_old_version_computes_what_it_did_and_training_takes_no_notice(layout: str, world: Worlds, tiny_model: Path) -> None:
    size, plan = PLANS[layout]
    assert all(world(size).run(swaps.swap_and_come_back, tiny_model, plan))


@pytest.mark.parametrize("layout", ["one rank", "fsdp"])
def test_uses_that_would_mix_versions_are_refused(layout: str, world: Worlds, tiny_model: Path) -> None:
    size, plan = PLANS[layout]
    assert all(world(size).run(swaps.what_is_refused, tiny_model, plan))


@pytest.mark.parametrize("layout", ["one rank", "fsdp x tp"])
def test_a_snapshot_that_does_not_fit_is_refused_before_a_byte_is_written(layout: str, world: Worlds, tiny_model: Path) -> None:
    size, plan = PLANS[layout]
    assert all(world(size).run(swaps.a_changed_snapshot_is_refused, tiny_model, plan))


def test_access_to_a_gathered_parameter_is_refused_by_name(world: Worlds, untied_model: Path) -> None:
    assert all(world(2).run(swaps.a_gathered_parameter_is_named, untied_model))


def test_set_up_tries_whether_snapshots_work_with_this_torch(world: Worlds, tiny_model: Path) -> None:
    assert all(world(2).run(swaps.a_torch_that_does_not_reshard_is_found_out, tiny_model))


def test_an_intervals_start_stays_the_same_through_its_steps(world: Worlds, tiny_model: Path) -> None:
    assert all(world(2).run(swaps.proximal_logprobs_of_an_interval, tiny_model, {"dp_shard": 2}))
