"""Trainer ranks for tests: processes that are forked after importing torchtitan, joined by gloo, and run functions.

A world lives as long as the tests of a folder, so that its start-up time is paid only once.
"""

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.ports import free_port

FORKED = multiprocessing.get_context("forkserver")
"""Starts processes that have imported torch and torchtitan. A test process has only one fork server, which all tests share."""
FORKED.set_forkserver_preload(["tests.trainer.preload"])


class World:
    """Ranks in separate processes that call functions on request."""

    def __init__(self, size: int, folder: Path) -> None:
        """Start no ranks before the first call of `run`."""
        self.size = size
        self._folder = folder
        self._pipes: list[Connection] = []
        self._processes: list[ForkServerProcess] = []

    def _start(self) -> None:
        """Start the ranks, which rendezvous on a free port."""
        port = free_port()
        for rank in range(self.size):
            ours, theirs = FORKED.Pipe()
            process = FORKED.Process(target=serve, args=(theirs, rank, self.size, port, self._folder), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a function, importable by name, on all ranks and return their results.

        The time limit of the test is that of the call. After it, or if a rank exits, the next call starts new ranks, because
        the old ones would answer it with replies to this one.

        Raises:
            AssertionError: A rank raised or exited.
        """
        if not self._processes:
            self._start()
        replies: list[tuple[bool, Any]] = []
        try:
            for pipe in self._pipes:
                with contextlib.suppress(BrokenPipeError):  # `_reply` names the rank that exited
                    pipe.send((function, args))
            for rank in range(self.size):
                replies.append(self._reply(rank))
        except BaseException as error:  # including the time limit
            error.add_note(f"rank {len(replies)} of {self.size} has not replied")
            self._kill()
            raise
        for rank, (ok, value) in enumerate(replies):
            assert ok, f"rank {rank} of {self.size}:\n{value}"
        return [value for _, value in replies]

    def _reply(self, rank: int) -> tuple[bool, Any]:
        """Wait for the reply of a rank; the others wait for a rank that exited, so name it immediately."""
        wait([self._pipes[rank], *(process.sentinel for process in self._processes)])
        self._check_running()
        try:
            reply: tuple[bool, Any] = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):  # it is exiting, and its exit code is about to arrive
            self._processes[rank].join(10)
            self._check_running()
            raise
        return reply

    def _check_running(self) -> None:
        exited = {number: process.exitcode for number, process in enumerate(self._processes) if process.exitcode is not None}
        assert not exited, f"ranks of {self.size} exited; their exit codes: {exited}"

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._pipes, self._processes = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()

    def end(self) -> None:
        """End the ranks; the next call of `run` starts new ones."""
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(None)
        for process in self._processes:
            process.join(10)
        self._kill()


def serve(pipe: Connection, rank: int, size: int, port: int, folder: Path) -> None:
    """Join the world and run the requested functions until the pipe sends None."""
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
    share_meshes()
    while (request := pipe.recv()) is not None:
        function, args = request
        try:
            pipe.send((True, function(*args)))
        except Exception:  # sent to the test, which shows it
            pipe.send((False, traceback.format_exc()))
    torch.distributed.destroy_process_group()


def share_meshes() -> None:
    """Let all models of a process with equal degrees of parallelism share their meshes.

    Groups of processes live as long as the process, and each group has a gloo thread that wakes 100 times per second.
    """
    from torchtitan.distributed import ParallelDims

    create, created = ParallelDims.from_config, dict[str, ParallelDims]()

    def from_config(*args: Any) -> ParallelDims:
        dims = create(*args)
        return created.setdefault(repr(dims), dims)

    ParallelDims.from_config = from_config  # type: ignore[method-assign, assignment]
