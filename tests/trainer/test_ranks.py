"""The ranks that tests run functions on: a rank that exits is named, and fails later calls, too."""

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


def test_rank_that_exits_is_named_with_its_exit_code(tmp_path: Path) -> None:
    with World(2, tmp_path) as world:
        for _ in range(2):
            with pytest.raises(AssertionError, match=r"ranks of 2 exited; their exit codes: \{.*1: -11"):
                world.run(kill_the_second)
