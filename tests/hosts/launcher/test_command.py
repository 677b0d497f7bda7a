"""Commands started by a launcher: real processes on loopback, with a controller that trains nothing."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ports import free_port

REPO = Path(__file__).parents[2]
PROGRAM = """\
import os, sys
from titanrl.config.errors import ConfigError
from titanrl.config.load import validate
from titanrl.config.source import read_source
from titanrl.hosts.launcher.command import run_launched, tell_failure

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
    code = run_launched(config, source, controller)
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
        assert stdout is not None
        assert any(text in line for line in iter(stdout.readline, "")), f"no {text!r} in the output of rank {rank}"


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    for process in ranks.processes.values():
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.parametrize("code", [0, 1, 143])
def test_all_ranks_end_with_the_code_of_rank_0(ranks: Ranks, code: int) -> None:
    ranks.start(1)
    ranks.start(0, controller=f"return {code}")
    assert ranks.codes() == [code, code]


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


@pytest.mark.parametrize("wrong", [0, 1])
def test_wrong_value_on_one_rank_ends_all_with_2(ranks: Ranks, wrong: int) -> None:
    ranks.start(wrong, "num_steps=no")
    ranks.start(1 - wrong)
    assert ranks.codes() == [2, 2]
    if wrong:
        assert "(rank 1): " in ranks.output(0)


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
    assert ranks.processes[1].wait(10) == 1


def test_missing_rank_is_named(ranks: Ranks) -> None:
    ranks.start(0, "timeouts.start_s=5", "timeouts.close_s=2")
    assert ranks.codes() == [1]
    assert "rank 1 has not connected" in ranks.output(0)


def test_signal_ends_a_waiting_rank_immediately(ranks: Ranks) -> None:
    ranks.start(1)
    ranks.start(0, controller="print('running', flush=True); import signal; signal.sigwait([signal.SIGUSR1])")
    ranks.read_until(0, "running")
    ranks.processes[1].send_signal(signal.SIGTERM)  # is passed on; the controller decides when it ends
    ranks.processes[0].kill()
    assert ranks.processes[1].wait(10) == 143
