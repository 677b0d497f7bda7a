"""The ranks that tests run functions on: a rank that exits is named, and a failed call does not change later ones."""

import os
import signal
from pathlib import Path

import pytest

from tests.trainer.ranks import World


def kill_the_second() -> None:
    """Kill rank 1 by a signal; rank 0 then waits for it in a collective."""
    import torch.distributed as dist

    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def rank() -> int:
    import torch.distributed as dist

    return dist.get_rank()


def interrupt(pid: int) -> str:
    """Interrupt the process that waits for the reply."""
    os.kill(pid, signal.SIGUSR1)
    return "late"


def test_rank_that_exits_is_named_with_its_exit_code(tmp_path: Path) -> None:
    with World(2, tmp_path) as world:
        for _ in range(2):
            with pytest.raises(AssertionError, match=r"ranks of 2 exited; their exit codes: \{.*1: -11"):
                world.run(kill_the_second)
        assert world.run(rank) == [0, 1]


def test_reply_of_an_interrupted_call_is_not_taken_for_the_next_one(tmp_path: Path) -> None:
    def stop(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with World(1, tmp_path) as world:
            with pytest.raises(TimeoutError) as raised:
                world.run(interrupt, os.getpid())
            assert raised.value.__notes__ == ["rank 0 of 1 has not replied"]
            assert world.run(rank) == [0]
    finally:
        signal.signal(signal.SIGUSR1, before)
