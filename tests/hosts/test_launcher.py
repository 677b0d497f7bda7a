"""Launchers: variables as torchrun, Open MPI, Hydra and srun set them, and commands as real processes on loopback."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ports import free_port
from titanrl.config.errors import BrokenRules, ConfigError
from titanrl.config.load import explain_rule, load_config, read_source
from titanrl.config.schema import Config
from titanrl.hosts.holder import is_loopback
from titanrl.hosts.launcher import (
    World,
    broken_by_launcher,
    broken_by_world,
    drop_variables,
    first_node,
    own_address,
    run_launched,
    world_for,
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
    assert list(broken_by_world(config, world(3))) == []
    (broken,) = broken_by_world(config, world(2))
    assert dict(broken.values) == {"hosts.trainer_hosts": 2, "hosts.generator_hosts": 1}
    assert "3 in total, but it started 2" in broken.rule


def test_generators_on_trainer_hosts_need_no_extra_processes() -> None:
    config = configured("hosts.trainer_hosts=2", "trainer.parallelism.dp_shard=2", "placement.generator=trainers")
    (broken,) = broken_by_world(config, world(3))
    assert dict(broken.values) == {"hosts.trainer_hosts": 2}
    assert "2 in total, but it started 3" in broken.rule


def test_plain_shell_is_refused() -> None:
    (broken,) = broken_by_world(configured(), None)
    assert "RANK, OMPI_COMM_WORLD_RANK, PMI_RANK, SLURM_PROCID" in broken.rule
    assert "torchrun, srun or mpirun" in broken.fix


@pytest.mark.parametrize(("variables", "found"), [({}, "requires a program"), ({"RANK": "x"}, "must set the rank")])
def test_wrong_processes_are_reported_with_the_other_rules(
    variables: dict[str, str], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = configured("hosts.trusted_network=false")
    with pytest.raises(ConfigError) as raised:
        world_for(config, read_source("quickstart"), *broken_by_launcher(config))
    about_world, about_trust = raised.value.messages
    assert found in about_world
    assert "can execute code as you" in about_trust


def test_wrong_processes_are_reported_after_what_the_checks_find(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    config, source = configured("hosts.trusted_network=false"), read_source("quickstart")
    trust = [explain_rule(rule, source) for rule in broken_by_launcher(config)]

    def check() -> None:
        raise ConfigError("model.path: no such model", *trust)

    with pytest.raises(ConfigError) as raised:
        run_launched(config, source, lambda: 0, check)
    about_model, about_trust, about_world = raised.value.messages
    assert (about_model, about_trust) == ("model.path: no such model", *trust)
    assert "requires a program" in about_world
    with pytest.raises(ConfigError, match="requires a program") as raised:
        run_launched(config, source, lambda: 0, lambda: None)
    assert len(raised.value.messages) == 2


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


REPO = Path(__file__).parents[2]
PROGRAM = """\
import os, sys
from titanrl.config.errors import ConfigError
from titanrl.config.load import validate
from titanrl.config.load import read_source
from titanrl.hosts.launcher import run_launched, tell_failure

def controller():
    # CONTROLLER
    return 0

source = None
try:
    source = read_source("quickstart", sys.argv[1:])
    config = validate(source)
except ConfigError as error:
    tell_failure(source, str(error))
    sys.exit(2)
try:
    code = run_launched(config, source, controller, lambda: None)
except ConfigError as error:
    print(error)
    code = 2
os._exit(code)
"""
OPTIONS = ("device=cpu", "hosts.kind=launcher", "hosts.trusted_network=true", "timeouts.start_s=60")


class Ranks:
    """Processes of a platform that sets four variables."""

    def __init__(self) -> None:
        self.port = free_port()
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def start(self, rank: int, *overrides: str, size: int = 2, controller: str = "pass") -> None:
        variables = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port}
        self.processes[rank] = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.replace("# CONTROLLER", controller), *OPTIONS, *overrides],
            cwd=REPO,
            env=os.environ | {name: str(value) for name, value in variables.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def codes(self, timeout_s: float = 90) -> list[int]:
        for process in self.processes.values():
            process.wait(timeout_s)
        return [process.returncode for _, process in sorted(self.processes.items())]

    def output(self, rank: int) -> str:
        return self.processes[rank].communicate(timeout=10)[0]

    def read_until(self, rank: int, text: str) -> None:
        stdout = self.processes[rank].stdout
        assert any(text in line for line in iter(stdout.readline, "")), f"no {text!r} in the output of rank {rank}"


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    for process in ranks.processes.values():
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_all_ranks_end_with_the_code_of_rank_0(ranks: Ranks) -> None:
    ranks.start(1)
    ranks.start(0, controller="return 143")
    assert ranks.codes() == [143, 143]


def test_single_process_needs_no_other(ranks: Ranks) -> None:
    ranks.start(0, "train=false", size=1)
    assert ranks.codes() == [2]  # the quick start has a generator host, too
    assert "2 in total, but it started 1" in ranks.output(0)


def test_missing_file_of_rank_0_ends_all_ranks_with_2(ranks: Ranks) -> None:
    ranks.start(1)
    ranks.start(0, controller="raise ConfigError('model.path: not found')")
    assert ranks.codes() == [2, 2]
    assert "model.path: not found" in ranks.output(0)


def test_failed_controller_ends_all_ranks_with_1(ranks: Ranks) -> None:
    ranks.start(1)
    ranks.start(0, controller="raise RuntimeError('broken')")
    assert ranks.codes() == [1, 1]


def test_wrong_value_on_rank_0_ends_all_with_2(ranks: Ranks) -> None:
    """`tests/commands/test_doctor.py` has a wrong value on another rank."""
    ranks.start(0, "num_steps=no")
    ranks.start(1)
    assert ranks.codes() == [2, 2]


def test_device_missing_on_all_hosts_ends_all_with_2(ranks: Ranks) -> None:
    for rank in (0, 1):
        ranks.start(rank, "device=npu", "hosts.devices_per_host=8")
    assert ranks.codes() == [2, 2]
    assert "must be usable on every host" in ranks.output(1)


def test_killed_controller_ends_the_others(ranks: Ranks) -> None:
    ranks.start(1)
    ranks.start(0, controller="print('running', flush=True); import time; time.sleep(60)")
    ranks.read_until(0, "running")
    ranks.processes[0].kill()
    assert ranks.processes[1].wait(60) == 1


def test_missing_rank_is_named(ranks: Ranks) -> None:
    ranks.start(0, "timeouts.start_s=1", "timeouts.close_s=1")
    assert ranks.codes() == [1]
    assert re.search("rank (0, )?1 has not connected", ranks.output(0))  # its own host may take longer than the limit


def test_signal_ends_a_waiting_rank_immediately(ranks: Ranks) -> None:
    ranks.start(1)
    ranks.start(0, controller="print('running', flush=True); import signal; signal.sigwait([signal.SIGUSR1])")
    ranks.read_until(0, "running")
    ranks.processes[1].send_signal(signal.SIGTERM)  # is passed on; the controller decides when it ends
    ranks.processes[0].kill()
    assert ranks.processes[1].wait(60) == 143
