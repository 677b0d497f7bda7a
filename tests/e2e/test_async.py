"""Asynchronous runs, in which training and generation overlap."""

import re

import pytest

from tests.e2e.conftest import Finished, Start


def check_overlap(finished: Finished, bound: int) -> None:
    """Check that generation overlapped with training, and that no token was older than the bound."""
    slots = f"B={8 * (bound + 1)} slots, window W=1, P=8 groups per publication"
    assert f"{slots}: no token older than (B + W - 2) // P = {bound}" in finished.output
    assert "idle     trainer" in finished.output
    assert [row["version"] for row in finished.steps] == list(range(1, 9))
    assert {row["staleness/max"] for row in finished.steps} <= set(range(bound + 1))
    stale = [row for row in finished.steps if row["staleness/lag_0_frac"] < 1]
    assert stale
    for row in finished.steps:
        assert row.get("mismatch/numeric/logprob_abs_max", 0.0) < 1e-4
        assert sum(row[key] for key in row if re.fullmatch(r"staleness/lag_\d+_frac", key)) == pytest.approx(1.0)
    assert max(row["mismatch/stale/logprob_abs_max"] for row in stale) > 1e-4


def test_asynchronous_run_overlaps_and_keeps_its_bound(start_run: Start, plain_run: Finished) -> None:
    """With a bound of 3, the trainer publishes a version while a generator drains for the previous one."""
    settings = ("max_staleness=3", "rollout.num_workers=2", "generator.on_update=drain")
    replay = "replay={fraction: 0.5, max_age: 5}"
    finished = start_run("async-drain", *plain_run.as_start, "num_steps=8", *settings, replay).finish()
    assert finished.code == 0, finished.output
    check_overlap(finished, bound=3)
    assert max(row["replay/groups"] for row in finished.steps) >= 1
    assert all(row.get("replay/age_max", 0) <= 5 for row in finished.steps)


def test_interval_start_ratios_start_from_the_published_weights(start_run: Start, plain_run: Finished) -> None:
    initial = f"model.path={plain_run.run_dir}/checkpoints/final"
    decoupled = ("algorithm.proximal=interval_start", "algorithm.correction.weight=token")
    settings = ("algorithm.updates_per_publish=2", *decoupled, "warm_start=null", initial, "checkpoint.every_steps=0")
    finished = start_run("intervals", "num_steps=4", *settings).finish()
    assert finished.code == 0, finished.output
    # Both batches of an interval are sampled by the version it starts with.
    assert [row["staleness/max"] for row in finished.steps] == [0, 0, 0, 0]
    assert [row["staleness/lag_1_frac"] for row in finished.steps] == [0.0, 1.0, 0.0, 1.0]
    assert [bool(row.get("sync/bytes")) for row in finished.steps] == [True, False, True, False]
    # The ratio compares with the weights of the interval's start, which only the first step still has.
    first, second, third, fourth = (row["policy/ratio_max"] for row in finished.steps)
    assert first == third == 1.0
    assert min(second, fourth) > 1.0
    # The same weights sampled, so proximal and generator log-probabilities differ by rounding only.
    assert max(row["mismatch/logprob_abs_max"] for row in finished.steps) < 1e-4
