"""Placement of each role on hosts, the rows of the dry run, and errors for invalid placements."""

from typing import Any

from tests.config.test_dry_run import dry_run_text, make_config, placement
from titanrl.config import Config
from titanrl.config.schema import device_shortage
from titanrl.config.sizes import (
    host_counts,
    replica_hosts,
    replica_place,
    replica_slot,
    store_place,
    worker_hosts,
    worker_place,
)
from titanrl.processes.variables import generator_device, worker_cores

SLURM = {"kind": "slurm", "trainer_hosts": 2, "generator_hosts": 2}


def spread_out(**sections: Any) -> Config:
    """Two trainer hosts with two ranks each, two generator hosts with two replicas each, four workers."""
    defaults: dict[str, Any] = {
        "device": "cpu",
        "trainer": {"parallelism": {"dp_shard": 4}},
        "generator": {"replicas": 4},
        "rollout": {"num_workers": 4},
        "hosts": SLURM,
    }
    return make_config(**{**defaults, **sections})


def rows(config: Config, **options: Any) -> set[tuple[str, ...]]:
    """Return host, role and number of processes of each row of the dry run."""
    known = ("trainer", "generator", "this machine")
    table = [[cell.strip() for cell in row] for row in placement(dry_run_text(config, **options))]
    found = set()
    for row in table:
        if row[0].startswith(known) and "received weights" not in row:
            number = next(place for place, cell in enumerate(row) if place and cell.isdecimal())
            found.add((row[0], row[number - 1], row[number]))
    return found


def test_default_runs_workers_on_generator_hosts_and_store_with_controller() -> None:
    config = spread_out()
    assert host_counts(config) == {"trainers": 2, "generators": 2}
    assert [replica_place(config, replica) for replica in range(4)] == [("generators", host) for host in (0, 1, 0, 1)]
    assert [worker_place(config, worker) for worker in range(4)] == [("generators", host) for host in (0, 1, 0, 1)]
    assert store_place(config) is None
    assert store_place(spread_out(weights={"transport": "store"})) == ("trainers", 0)
    assert rows(config) == {
        ("trainer hosts (2)", "trainer rank", "2"),
        ("generator hosts (2)", "generator rank", "2"),
        ("generator hosts (2)", "rollout", "2"),
        ("generator hosts (2)", "sandbox", "16"),
        ("this machine", "store", "1"),
        ("this machine", "controller", "1"),
    }


def test_local_run_ignores_placement() -> None:
    config = make_config(placement={"generator": "trainers", "rollout": "trainers", "store": "generators"})
    assert {host for host, _, _ in rows(config)} == {"this machine"}


def test_replicas_and_workers_per_host_make_blocks() -> None:
    config = spread_out(
        placement={"rollout": "trainers", "replicas_per_host": [3, 1], "workers_per_host": [1, 3], "store": "generators"}
    )
    assert (replica_hosts(config), worker_hosts(config)) == ([0, 0, 0, 1], [0, 1, 1, 1])
    assert [replica_slot(config, replica) for replica in range(5)] == [0, 1, 2, 0, 3]
    assert worker_place(config, 3) == ("trainers", 1)
    assert store_place(config) == ("generators", 0)
    assert rows(config) >= {
        ("generator host 0", "generator rank", "3"),
        ("generator host 1", "generator rank", "1"),
        ("trainer host 0", "rollout", "1"),
        ("trainer host 1", "rollout", "3"),
        ("generator host 0", "store", "1"),
    }


def test_generators_on_trainer_hosts_use_the_remaining_devices() -> None:
    config = spread_out(placement={"generator": "trainers"}, hosts={**SLURM, "devices_per_host": 4}, device="cuda")
    assert host_counts(config) == {"trainers": 2}
    assert replica_place(config, 1) == worker_place(config, 1) == ("trainers", 1)
    assert [generator_device(config, replica) for replica in range(4)] == [2, 2, 3, 3]
    text = dry_run_text(config, device="cuda")
    assert [cell.strip() for cell in placement(text)[1]][:4] == ["trainer hosts (2)", "cuda 2-3", "generator rank", "2"]
    shared = spread_out(placement={"generator": "trainers"}, hosts={**SLURM, "share_devices": True})
    assert [generator_device(shared, replica) for replica in range(4)] == [0, 0, 1, 1]


def test_cpu_cores_are_assigned_on_each_host() -> None:
    config = spread_out(placement={"cpus": {"rollout": "split", "trainer": "0-3"}})
    text = dry_run_text(config)
    assert "cpu cores 0-3" in text
    assert "cores split" in text
    cores = [worker_cores(config, worker) for worker in range(4)]
    assert [each.text(0) for each in cores if each is not None] == ["split 0 2", "split 0 2", "split 1 2", "split 1 2"]


def test_uneven_replicas_need_devices_for_the_fullest_host() -> None:
    config = spread_out(placement={"replicas_per_host": [3, 1]}, hosts={**SLURM, "devices_per_host": 2})
    (broken,) = device_shortage(config)
    assert "which is 3" in broken.rule
    beside = spread_out(placement={"generator": "trainers"}, hosts={**SLURM, "devices_per_host": 3})
    (broken,) = device_shortage(beside)
    assert "which is 4" in broken.rule


def test_generator_hosts_need_memory_for_two_received_versions() -> None:
    def received(**sections: Any) -> list[str]:
        table = placement(dry_run_text(spread_out(model={"path": "nowhere/Qwen3-8B"}, **sections)))
        return [cell.strip() for row in table if row[1].strip() == "received weights" for cell in row]

    # 8.19 billion parameters in float32, twice; beside the trainer only the half that another trainer host has.
    assert received() == ["generator hosts (2)", "received weights", "65.5 GB shared"]
    assert received(placement={"generator": "trainers"})[2] == "32.8 GB shared"
    assert received(hosts={"kind": "local"}) == []
