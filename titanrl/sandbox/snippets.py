"""Code of a model, run in confined processes: each snippet in one of its own, which is then killed."""

import json
import pickle
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Literal

from titanrl.config.sections import SandboxConfig
from titanrl.sandbox.client import SandboxDied, ZygoteClient
from titanrl.sandbox.confine import SandboxUnavailable, missing_features
from titanrl.sandbox.scores import RewardSpec
from titanrl.sandbox.zygote import END, STARTED, Request

MAX_CODE_CHARS = 100_000
"""Longest snippet."""
_RUNNER = "titanrl.sandbox.runner:runner"


@dataclass(frozen=True, slots=True, kw_only=True)
class SnippetResult:
    """The result of a snippet.

    Example: `SnippetResult(status="ok", output="6\\n")` for `print(2 * 3)` and for `2 * 3`
    """

    status: Literal["ok", "error", "timeout", "crash"]
    """`error`: the code raised; `timeout`: it took too long; `crash`: its process died, for example without memory."""
    output: str = ""
    """Text that was printed and, after it, the value of a last line that is an expression. It may hold anything."""
    error: str = ""
    """Traceback; empty unless the status is `error`."""


class SnippetPool:
    """Runs snippets, several at once. The pool belongs to the event loop that starts it."""

    def __init__(self, config: SandboxConfig, modules: Sequence[str] = ()) -> None:
        """Keep the settings; `start` starts the processes.

        Args:
            config: Limits of a snippet, and number of processes.
            modules: Modules that are imported before the code runs, so that each snippet imports them at no cost.
        """
        self._config = config
        self._spec = RewardSpec(name="python", factory=_RUNNER, kwargs={"modules": tuple(modules)}, returns_text=True)
        self._zygote: ZygoteClient | None = None

    async def start(self) -> None:
        """Start the processes.

        Raises:
            SandboxUnavailable: This machine cannot confine a process.
            ValueError: A module cannot be imported.
        """
        assert self._zygote is None, "the pool is started"
        if missing := missing_features():
            raise SandboxUnavailable(
                f"code of a model runs in confined processes only, and this machine lacks {'; and '.join(missing)}. Use a "
                "machine that has it: there is no unconfined mode."
            )
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.close)
            self._zygote = ZygoteClient([self._spec], self._config)
            await self._zygote.load()
            stack.pop_all()

    async def run(self, code: str, *, max_output_chars: int) -> SnippetResult:
        """Run a snippet. Wait while `num_processes` others are running.

        Raises:
            SandboxDied: The processes of the pool died.
        """
        if self._zygote is None:
            raise SandboxDied("the pool of snippets is closed, or was never started")
        zygote, timeout_s = self._zygote, self._config.timeout_s
        request: Request = (0, {"max_output_chars": max_output_chars}, (code,), (0,), ("stop",), ())
        pickled = pickle.dumps(request)
        async with zygote.slots:
            reply: bytes | None = b""
            while reply == b"":  # something else killed the process before it read the code: retry
                process = await zygote.take()
                try:
                    reply = await process.ask(pickled, timeout_s)
                finally:
                    zygote.give_back(process)
        if reply is None:
            return SnippetResult(status="timeout")
        result = _parse(reply.removeprefix(STARTED).removesuffix(END), max_output_chars)
        if result.status == "crash":
            await zygote.check()
        return result

    async def close(self) -> None:
        """Kill every process and wait until they have exited. The pool can be started again."""
        if self._zygote is not None:
            zygote, self._zygote = self._zygote, None
            await zygote.stop()


def _parse(reply: bytes, max_output_chars: int) -> SnippetResult:
    """Parse a reply, which may hold any bytes, because the code may have written it."""
    try:
        parsed = json.loads(reply)
    except (ValueError, RecursionError):
        return SnippetResult(status="crash")
    limit = max_output_chars + 100  # the note about lost characters
    match parsed:
        case [{"text": {"output": str(output), "error": str(error)}}]:
            return SnippetResult(status="error" if error else "ok", output=output[:limit], error=error[:limit])
        case [{"error": str(error)}]:  # raised by the code in a way that `runner` cannot catch
            return SnippetResult(status="error", error=error[:limit])
    return SnippetResult(status="crash")
