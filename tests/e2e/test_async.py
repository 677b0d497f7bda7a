"""Asynchronous runs, in which training and generation overlap."""

import re

import psutil
import pytest

from tests.e2e.conftest import Command, Finished, Start

ROLES = ("trainer", "generator_0", "rollout_0", "store")


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


def footprint(command: Command) -> dict[str, tuple[int, int]]:
    """Return resident bytes and open files of each role's process and of the controller."""
    processes = {role: command.process_of(role) for role in ROLES}
    processes["controller"] = psutil.Process(command.process.pid)
    return {role: (process.memory_info().rss, process.num_fds()) for role, process in processes.items()}


@pytest.mark.slow
def test_memory_and_open_files_do_not_grow_with_steps(start_run: Start, plain_run: Finished) -> None:
    initial = f"model.path={plain_run.run_dir}/checkpoints/final"
    overlapping = ("max_staleness=1", "rollout.window=0.25", "generator.on_update=continue")
    command = start_run("soak", "num_steps=100000", *overlapping, "warm_start=null", initial, "checkpoint.every_steps=0")
    command.wait_for_step(50, timeout_s=600)
    before = footprint(command)
    command.wait_for_step(200, timeout_s=1200)
    after = footprint(command)
    command.process.terminate()
    command.finish()
    for role, (memory, files) in after.items():
        assert memory < 1.05 * before[role][0], f"{role} grew from {before[role][0]} to {memory} bytes"
        assert files <= before[role][1] + 2, f"{role} has {files} files open, had {before[role][1]}"
