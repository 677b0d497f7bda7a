"""Devices and threads of each role's processes."""

from typing import Any

import pytest

from titanrl.config import Config
from titanrl.config.device import DEVICES
from titanrl.processes.machine import THREADS
from titanrl.processes.variables import generator_environment, trainer_environment

BEHIND = {"hosts": {"devices_per_host": 16}}
SHARED = {"hosts": {"share_devices": True}}
SLURM = {"hosts": {"kind": "slurm", "generator_hosts": 2}}


@pytest.mark.parametrize(
    ("sections", "devices"),
    [
        (BEHIND, ["2,3", "4,5", "6,7", "8,9"]),  # after the trainer's two
        (SHARED, ["0,1", "2,3", "4,5", "6,7"]),
        (SLURM, ["0,1", "0,1", "2,3", "2,3"]),  # replicas alternate between the two hosts
    ],
)
def test_replicas_get_separate_adjacent_devices(sections: dict[str, Any], devices: list[str]) -> None:
    trainer = {"parallelism": {"dp_shard": 2}}
    config = Config(name="a", num_steps=1, trainer=trainer, generator={"replicas": 4, "tp": 2}, **sections)
    environments = [generator_environment(config, DEVICES["cuda"], replica) for replica in range(4)]
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in environments] == devices


@pytest.mark.parametrize(("max_staleness", "threads"), [(0, "4"), (1, "2")])
def test_trainer_leaves_cores_to_concurrent_generators(
    max_staleness: int, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    trainer, generator = {"parallelism": {"dp_shard": 2}}, {"replicas": 3}
    config = Config(name="a", num_steps=1, trainer=trainer, generator=generator, max_staleness=max_staleness)
    assert trainer_environment(config, DEVICES["cpu"])["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(
    ("sections", "threads"),
    [
        ({}, "2"),  # the trainer waits
        ({"max_staleness": 1}, "1"),
        ({"max_staleness": 1, "hosts": {"kind": "slurm", "generator_hosts": 2}}, "4"),  # two replicas on a host of their own
        ({"max_staleness": 1, "hosts": {"kind": "slurm"}, "placement": {"generator": "trainers"}}, "1"),
    ],
)
def test_generators_use_the_cores_that_no_trainer_needs(
    sections: dict[str, Any], threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    config = Config(name="a", num_steps=1, generator={"replicas": 4}, **sections)
    assert generator_environment(config, DEVICES["cpu"], 0)[THREADS] == threads
