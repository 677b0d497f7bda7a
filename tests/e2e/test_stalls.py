"""Runs with a stopped or hanging process: the run ends, names the process, and shuts down without delay."""

import signal
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import REPO, Finished, Start


@pytest.mark.slow
def test_interrupt_shuts_down_cleanly_with_a_stopped_process(start_run: Start, plain_run: Finished) -> None:
    command = start_run("interrupted-stopped", "num_steps=100000")
    command.wait_for_step(1)
    command.process_of("generator_0").suspend()
    interrupted = time.monotonic()
    command.process.send_signal(signal.SIGINT)
    finished = command.finish(timeout_s=60)
    assert finished.code == 130
    assert time.monotonic() - interrupted < 20
    assert "killed" not in finished.output
    assert command.leftovers() == []


STUCK_REWARD = """
import itertools, time
calls = itertools.count()

def wait_for_a_server():
    time.sleep(1000)

async def score(text, entry):
    if next(calls) > 300:
        wait_for_a_server()  # blocks the event loop of the rollout worker
    return len(text) % 2
"""


@pytest.mark.slow
def test_rollout_worker_that_hangs_ends_the_run_with_its_stack(start_run: Start, plain_run: Finished, tmp_path: Path) -> None:
    (tmp_path / "stuck_reward.py").write_text(STUCK_REWARD)
    reward = "data.rewards={answer: {function: stuck_reward:score, trusted: true}}"
    overrides = (*plain_run.as_start, "num_steps=100000", "faults.min_stall_s=5", "faults.on_stall=abort", reward)
    finished = start_run("stuck", *overrides, PYTHONPATH=f"{REPO}:{tmp_path}").finish()
    assert finished.code == 1
    assert "no reply to 'buffer.take_batch' for " in finished.output.splitlines()[-1]
    report = (finished.run_dir / "logs" / "stall_1.txt").read_text()
    stacks = {section.split()[0]: section for section in report.split("== ")[1:]}
    assert stacks.keys() == {"generator_0_0", "rollout_0_0", "store_0"}
    assert "wait_for_a_server" in stacks["rollout_0_0"]
    assert "wait_for_a_server" not in stacks["store_0"]
