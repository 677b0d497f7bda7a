"""Launchers, detected from variables with the values that torchrun, Open MPI, Hydra and srun set."""

import os

import pytest

from titanrl.config.errors import BrokenRules, ConfigError
from titanrl.config.load import load_config
from titanrl.config.schema import Config
from titanrl.hosts.launcher.world import (
    World,
    broken_by_launcher,
    broken_by_world,
    drop_variables,
    first_node,
    is_loopback,
    num_hosts,
    own_address,
    world_of,
)

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "3",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29511",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SRUN = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "123",
    "SLURM_STEP_ID": "4",
}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}


def configured(*overrides: str) -> Config:
    return load_config("quickstart", ["hosts.kind=launcher", "hosts.trusted_network=true", "device=cpu", *overrides])


def world(size: int, local_size: int = 1) -> World:
    return World(rank=0, size=size, local_size=local_size, address="n1", port=1)


def test_torchrun_is_understood() -> None:
    assert world_of(TORCHRUN) == World(
        rank=1, size=3, local_size=1, address="n1", port=29511, agent_has_store=True, attempt="2"
    )


def test_platform_with_four_variables_is_understood() -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "29511"}
    assert world_of(environment) == World(rank=0, size=2, local_size=1, address="n1", port=29511)


def test_srun_is_understood_without_an_address() -> None:
    assert world_of(SRUN) == World(rank=1, size=2, local_size=1, address="gpu07", port=20_000 + 12_304 % 10_000)


def test_uneven_tasks_of_srun_count_the_fullest_node() -> None:
    found = world_of(SRUN | {"SLURM_STEP_TASKS_PER_NODE": "1(x2),3", "SLURM_STEP_NUM_TASKS": "5"})
    assert found is not None
    assert found.local_size == 3


def test_slurm_batch_script_is_not_a_launcher() -> None:
    assert world_of({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}) is None


def test_open_mpi_inside_an_srun_step_takes_precedence() -> None:
    found = world_of(SRUN | OPEN_MPI)
    assert found == World(rank=0, size=2, local_size=2, address="127.0.0.1", port=29500)


def test_hydra_needs_a_master_address() -> None:
    environment = {"PMI_RANK": "1", "PMI_SIZE": "4"}
    with pytest.raises(BrokenRules, match="does not provide the address of rank 0"):
        world_of(environment)
    found = world_of(environment | {"MASTER_ADDR": "n1"})
    assert found == World(rank=1, size=4, local_size=1, address="n1", port=29500)


@pytest.mark.parametrize(
    "wrong",
    [{"RANK": "1"}, {"RANK": "x", "WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "0", "WORLD_SIZE": "0"}],
)
def test_wrong_ranks_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(BrokenRules, match=r"RANK.*rank of this process .* and the number of processes"):
        world_of(wrong | {"MASTER_ADDR": "n1"})


@pytest.mark.parametrize("port", ["http", "0", "65536"])
def test_wrong_port_is_refused(port: str) -> None:
    with pytest.raises(BrokenRules, match="MASTER_PORT"):
        world_of(TORCHRUN | {"MASTER_PORT": port})


def test_no_variables_mean_no_launcher() -> None:
    assert world_of({"PATH": "/bin", "WORLD_SIZE": "2"}) is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n[1-3]", "n1"), ("gpu[07,09-12]", "gpu07"), ("a,b", "a"), ("r[2-3]-ib,x", "r2-ib"), ("", "")],
)
def test_first_node_of_a_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_variables_of_the_launcher_are_dropped_and_others_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, *SRUN, *OPEN_MPI, "OMPI_MCA_pml", "PMIX_RANK", "ROLE_NAME"):
        monkeypatch.setenv(name, "1")
    drop_variables()
    assert world_of(os.environ) is None
    assert not [name for name in os.environ if name.startswith(("TORCHELASTIC", "OMPI", "PMI", "MASTER", "LOCAL_", "ROLE"))]
    assert os.environ["SLURM_JOB_ID"] == "1"


def test_number_of_processes_equals_number_of_hosts() -> None:
    config = configured("hosts.trainer_hosts=2", "trainer.parallelism.dp_shard=2")
    assert num_hosts(config) == 3
    assert list(broken_by_world(config, world(3))) == []
    (broken,) = broken_by_world(config, world(2))
    assert dict(broken.values) == {"hosts.trainer_hosts": 2, "hosts.generator_hosts": 1}
    assert "3 in total, but it started 2" in broken.rule


def test_generators_on_trainer_hosts_need_no_extra_processes() -> None:
    config = configured("hosts.trainer_hosts=2", "trainer.parallelism.dp_shard=2", "placement.generator=trainers")
    assert num_hosts(config) == 2
    (broken,) = broken_by_world(config, world(3))
    assert dict(broken.values) == {"hosts.trainer_hosts": 2}


def test_plain_shell_is_refused() -> None:
    (broken,) = broken_by_world(configured(), None)
    assert "RANK, OMPI_COMM_WORLD_RANK, PMI_RANK, SLURM_PROCID" in broken.rule
    assert "torchrun, srun or mpirun" in broken.fix


def test_several_processes_per_host_are_allowed_on_cpu() -> None:
    assert list(broken_by_world(configured(), world(2, local_size=2))) == []


@pytest.mark.parametrize("override", ["weights.transport=arena", "hosts.share_devices=true"])
def test_hosts_share_neither_memory_nor_devices(override: str) -> None:
    with pytest.raises(ConfigError, match=r'hosts\.kind="launcher"'):
        configured(override)


def test_network_must_be_trusted() -> None:
    assert list(broken_by_launcher(configured())) == []
    (broken,) = broken_by_launcher(configured("hosts.trusted_network=false"))
    assert "hosts.trusted_network" in broken.values


def test_own_address_follows_the_route_to_rank_0() -> None:
    here = World(rank=0, size=2, local_size=1, address="127.0.0.1", port=1)
    assert own_address(here) == "127.0.0.1"
    assert own_address(World(rank=0, size=2, local_size=1, address="no-such-host.invalid", port=1)) == ""


def test_loopback_is_recognized() -> None:
    assert is_loopback("127.0.1.1")
    assert is_loopback("::1")
    assert not is_loopback("fe80::1%eth0")
