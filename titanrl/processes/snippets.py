"""Runs code snippets that a model wrote. Each snippet runs in a separate confined process, which is killed afterwards."""

import json
import pickle
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Literal

from titanrl.carriers.scores import RewardSpec
from titanrl.config.sections import FaultsConfig, SandboxConfig
from titanrl.processes.confine import SandboxUnavailable, missing_features
from titanrl.processes.sandbox import SandboxDied, Zygotes, log_respawn
from titanrl.processes.zygote import END, STARTED, Request

MAX_CODE_CHARS = 100_000
"""Maximum length of a snippet."""
_RUNNER = "titanrl.processes.runner:runner"
_JSON_BYTES_PER_CHAR = 12  # a character outside the basic plane is written as two escapes of six characters


@dataclass(frozen=True, slots=True, kw_only=True)
class SnippetResult:
    """The result of running a snippet.

    Example: `SnippetResult(status="ok", output="6\\n")` for `print(2 * 3)` and for `2 * 3`
    """

    status: Literal["ok", "error", "timeout", "crash"]
    """`error`: the code raised; `timeout`: it took too long; `crash`: its process died, for example out of memory."""
    output: str = ""
    """Printed text, followed by the value of the last statement if it is an expression. The model controls this text."""
    error: str = ""
    """Traceback; empty unless the status is `error`."""


class SnippetPool:
    """Runs snippets, several at the same time. The pool belongs to the event loop that starts it."""

    def __init__(self, config: SandboxConfig, modules: Sequence[str] = ()) -> None:
        """Keep the settings; `start` starts the processes.

        Args:
            config: Limits per snippet, and the number of processes.
            modules: Modules to import in advance, so that importing them in a snippet costs nothing.
        """
        self._config = config
        self._spec = RewardSpec(name="python", factory=_RUNNER, kwargs={"modules": tuple(modules)}, returns_text=True)
        self._zygotes: Zygotes | None = None

    async def start(self) -> None:
        """Start the processes.

        Raises:
            SandboxUnavailable: This machine cannot confine a process.
            ValueError: A module cannot be imported.
        """
        assert self._zygotes is None, "the pool has already been started"
        if missing := missing_features():
            raise SandboxUnavailable(
                f"model-written code runs only in confined processes, and this machine lacks {'; and '.join(missing)}. "
                "Use a machine that has it: there is no unconfined mode."
            )
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.close)
            self._zygotes = Zygotes([self._spec], self._config, FaultsConfig(), log_respawn)
            await self._zygotes.start()
            stack.pop_all()

    async def run(self, code: str, *, max_output_chars: int) -> SnippetResult:
        """Run a snippet. Wait while `num_processes` others are running.

        Args:
            code: Python source.
            max_output_chars: Maximum length of the output, and of the error. Longer output loses its end, longer errors their
                start.

        Raises:
            SandboxDied: The pool is closed.
            RespawnLimitError: The zygote died too often.
        """
        if self._zygotes is None:
            raise SandboxDied("the snippet pool is closed or was never started")

        async def parse(reply: bytes) -> SnippetResult | None:
            result = _parse(reply.removeprefix(STARTED).removesuffix(END), max_output_chars)
            return None if result.status == "crash" else result

        request: Request = (0, {"max_output_chars": max_output_chars}, (code,), (0,), ("stop",), (), ())
        max_bytes = 2 * _JSON_BYTES_PER_CHAR * _limit(max_output_chars)
        result = await self._zygotes.request(pickle.dumps(request), self._config.timeout_s, max_bytes, parse)
        return SnippetResult(status=result) if isinstance(result, str) else result

    async def close(self) -> None:
        """Kill all processes and wait until they have exited. The pool can be started again."""
        zygotes, self._zygotes = self._zygotes, None
        if zygotes is not None:
            await zygotes.stop()


def _parse(reply: bytes, max_output_chars: int) -> SnippetResult:
    """Parse a reply. It is untrusted, because the code may have written it."""
    try:
        parsed = json.loads(reply)
    except (ValueError, RecursionError):
        return SnippetResult(status="crash")
    limit = _limit(max_output_chars)
    match parsed:
        case {"text": {"output": str(output), "error": str(error)}}:
            return SnippetResult(status="error" if error else "ok", output=output[:limit], error=error[:limit])
        case {"error": str(error)}:  # an exception that `runner` could not catch
            return SnippetResult(status="error", error=error[:limit])
    return SnippetResult(status="crash")


def _limit(max_output_chars: int) -> int:
    """Return the maximum length of the output, or of the error, with room for a note about dropped characters."""
    return max_output_chars + 100
