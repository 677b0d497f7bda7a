"""Trainer ranks for tests: processes forked from one that has imported torchtitan, joined by gloo, asked to run functions.

A world lives as long as the test session; many checks run in it, so that its start is paid for once.
"""

import contextlib
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

DEADLINE_S = 240


class World:
    """Some ranks that can be asked to call a function, each in its own process."""

    def __init__(self, size: int, folder: Path) -> None:
        """Start the ranks; they meet on a free port."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.trainer.preload"])
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self.size = size
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, rank, size, port, folder), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What the function returns on each rank; it must be importable by name."""
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(DEADLINE_S), f"rank {rank} of {self.size} does not answer"
            answers.append(pipe.recv())
        for rank, (ok, value) in enumerate(answers):
            assert ok, f"rank {rank} of {self.size}:\n{value}"
        return [value for _, value in answers]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(None)
        for process in self._processes:
            process.join(10)
            process.kill()


def serve(pipe: Connection, rank: int, size: int, port: int, folder: Path) -> None:
    """Join the world and run what is asked for until there is nothing more."""
    import torch
    from torchtitan.config import CommConfig
    from torchtitan.distributed.utils import init_distributed

    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    torch.set_num_threads(1)
    init_distributed(CommConfig(), base_folder=str(folder))
    while (request := pipe.recv()) is not None:
        function, args = request
        try:
            pipe.send((True, function(*args)))
        except Exception:  # whatever it is, the test is to show it
            pipe.send((False, traceback.format_exc()))
    torch.distributed.destroy_process_group()
