"""Access to a running run by other users of the machine and by a second controller."""

import os
import signal

import pytest

from tests.e2e.conftest import Finished, Start
from tests.listeners import exposed, listeners, reachable_by_nobody

RANKS = ("trainer.parallelism.dp_shard=2", "generator.tp=2", "generator.model_impl=native", "rollout.num_workers=2")


@pytest.mark.parametrize("kind", ["local", pytest.param("process", marks=pytest.mark.slow)])
def test_live_run_admits_no_other_user_and_no_second_controller(start_run: Start, plain_run: Finished, kind: str) -> None:
    command = start_run(f"secure-{kind}", *plain_run.as_start, f"hosts.kind={kind}", *RANKS, "num_steps=100000")
    command.wait_for_step(1)
    processes = command.pids()
    assert len(listeners(processes)) > 10, "the sockets of at least ten processes were found"
    assert exposed(processes) == set()
    if os.geteuid() == 0:  # only root can start a process of another user
        assert reachable_by_nobody(processes) == set()
    second = start_run(f"secure-{kind}", resume=True).finish(timeout_s=120)
    assert second.code == 2
    assert f"the run is still active in process {command.process.pid} on " in second.output
    command.process.send_signal(signal.SIGHUP)
    finished = command.finish(timeout_s=90)
    assert finished.code == 129, finished.output
    assert command.leftovers() == []
