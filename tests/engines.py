"""A process that has imported vLLM and is forked for each function that needs an engine.

vLLM changes settings of torch for the whole process, so functions with an engine run in processes of their own, and importing
vLLM takes most of such a process's time.
"""

import gc
import os
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from tests.trainer.ranks import FORKED
from titanrl.config import load_config
from titanrl.config.device import DEVICES
from titanrl.processes.variables import generator_environment

DEADLINE_S = 300
MODULES = ("titanrl.generator.engine", "titanrl.generator.titan", "titanrl.generator.native", "vllm.v1.worker.cpu_worker")


class Engines:
    """Calls functions in forks of a process that has imported vLLM."""

    def __init__(self) -> None:
        """Start the process, whose imports may take longer than this call."""
        self._pipe, theirs = FORKED.Pipe()
        self._process = FORKED.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()

    def run(self, function: Callable[..., Any], *args: Any, **environment: str) -> Any:
        """Return the result of a function, importable by name, that a new process calls with these environment variables.

        Raises:
            AssertionError: It raised, exited, or did not return.
        """
        self._pipe.send((function, args, environment))
        assert self._pipe.poll(DEADLINE_S), f"{function.__name__} does not return"
        has_returned, value = self._pipe.recv()
        assert has_returned, f"{function.__name__}:\n{value}"
        return value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.join()


def serve(pipe: Connection) -> None:
    """Import vLLM with a generator's variables, then fork for each request."""
    from titanrl.launch.roles import import_engine

    os.environ |= generator_environment(load_config("configs/quickstart.yaml"), DEVICES["cpu"], 0)
    gc.disable()
    import_engine(MODULES, DEVICES["cpu"])
    gc.freeze()  # forks do not visit what they share
    gc.enable()
    while True:
        function, args, environment = pipe.recv()
        fork = os.fork()
        if fork == 0:
            call(pipe, function, args, environment)
        _, status = os.waitpid(fork, 0)
        if status:
            pipe.send((False, f"its process ended with {os.waitstatus_to_exitcode(status)}"))


def call(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...], environment: Mapping[str, str]) -> None:
    """Send the result of a function, or the traceback of its error, and exit."""
    import torch

    code = 1
    try:
        os.environ |= environment
        torch.compiler.set_stance("force_eager")  # TORCHDYNAMO_DISABLE was set after torch was imported
        try:
            reply = (True, function(*args))
        except Exception:  # sent to the test, which shows it
            reply = (False, traceback.format_exc())
        pipe.send(reply)
        code = 0
    finally:
        os._exit(code)
