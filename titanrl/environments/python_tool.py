"""A Python tool. It runs the policy's code in the confined processes of the sandbox (docs/sandbox.md)."""

import importlib.util
from collections.abc import Sequence
from typing import Any

from titanrl.config.sections import SandboxConfig
from titanrl.environments.interface import ToolError, readable_text
from titanrl.environments.servers import forget, shared
from titanrl.environments.tools import ToolEnvironment
from titanrl.processes.sandbox import MAX_CODE_CHARS, SandboxDied, SnippetPool


class Python:
    """A tool that runs Python code. Every call runs in a new process, so variables do not persist between calls."""

    def __init__(
        self,
        *,
        timeout_s: float = 5.0,
        memory_bytes: int = 1 << 30,
        num_processes: int = 8,
        modules: Sequence[str] = (),
        max_output_chars: int = 4000,
    ) -> None:
        """Keep the limits.

        Args:
            timeout_s: Time limit of a call, in seconds.
            memory_bytes: Limit of a call's address space.
            num_processes: Maximum number of concurrent calls, over all episodes of a rollout worker.
            modules: Modules to import in advance, such as numpy. The code can also import others, but more slowly.
            max_output_chars: Maximum number of output characters that the policy sees.

        Raises:
            ValueError: A module is not installed, or a limit is out of range.
        """
        for module in modules:
            if importlib.util.find_spec(module) is None:
                raise ValueError(f"modules: not installed (got {module!r}). Install it, or remove it from the list.")
        self._config = SandboxConfig(timeout_s=float(timeout_s), memory_bytes=memory_bytes, num_processes=num_processes)
        self._modules = tuple(modules)
        self._max_output_chars = max_output_chars

    async def python(self, code: str) -> str:
        """Run Python code; return what it prints and the value of its last line.

        Args:
            code: Complete code. Variables from earlier calls are gone. There is no access to files or the network.
        """
        if len(code) > MAX_CODE_CHARS:
            raise ToolError(f"The code is longer than {MAX_CODE_CHARS} characters.")
        pool = await shared((self._config, self._modules), self._started)
        try:
            result = await pool.run(code, max_output_chars=self._max_output_chars)
        except SandboxDied:
            await forget((self._config, self._modules), pool)  # the next call starts another one
            raise
        match result.status:
            case "timeout":
                raise ToolError(f"The code was stopped after {self._config.timeout_s:g} s.")
            case "crash":
                raise ToolError("The process running the code died, for example because it ran out of memory.")
        return readable_text(f"{result.output}{result.error}") or "(no output)"

    async def _started(self) -> SnippetPool:
        """Start a pool, which takes a tenth of a second, so that all episodes of an event loop share it."""
        pool = SnippetPool(self._config, self._modules)
        await pool.start()
        return pool


def python(*, system_prompt: str | None = None, max_calls: int = 16, **options: Any) -> ToolEnvironment:
    """Return a `ToolEnvironment` whose only tool is `Python`, which gets the `options`."""
    return ToolEnvironment(Python(**options), system_prompt=system_prompt, max_calls=max_calls)
