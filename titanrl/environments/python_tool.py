"""Python as a tool: code of the policy, run in the confined processes of the sandbox (docs/sandbox.md)."""

import asyncio
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from titanrl.config.sections import SandboxConfig
from titanrl.environments.errors import ToolError
from titanrl.environments.tools import ToolEnvironment
from titanrl.sandbox.client import SandboxDied
from titanrl.sandbox.snippets import MAX_CODE_CHARS, SnippetPool

_Key = tuple[SandboxConfig, tuple[str, ...]]

_pools: dict[asyncio.AbstractEventLoop, dict[_Key, asyncio.Task[SnippetPool]]] = {}
"""Started pools by event loop and settings. Episodes share them, because the start of one takes a tenth of a second."""


class Python:
    """Python as a tool. Every call runs in a new process, so variables do not last from one call to the next."""

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
            timeout_s: Time limit of a call.
            memory_bytes: Limit of the address space of a call.
            num_processes: Calls that run at once, of all episodes in a rollout worker.
            modules: Modules that are imported in advance, such as numpy. Others can be imported by the code, more slowly.
            max_output_chars: Characters of the output that the policy sees.

        Raises:
            ValueError: A module is not installed, or a limit is out of its range.
        """
        for module in modules:
            if importlib.util.find_spec(module) is None:
                raise ValueError(f"modules: not installed (got {module!r}). Install it, or remove it from the list.")
        config = SandboxConfig(timeout_s=float(timeout_s), memory_bytes=memory_bytes, num_processes=num_processes)
        self._key: _Key = (config, tuple(modules))
        self._max_output_chars = max_output_chars

    async def python(self, code: str) -> str:
        """Run Python code; return what it prints and the value of its last line.

        Args:
            code: Complete code. Variables of earlier calls are gone. There are no files and no network.
        """
        if len(code) > MAX_CODE_CHARS:
            raise ToolError(f"The code is longer than {MAX_CODE_CHARS} characters.")
        try:
            result = await (await shared_pool(*self._key)).run(code, max_output_chars=self._max_output_chars)
        except SandboxDied:
            await _forget(self._key)  # the next call starts another pool
            raise
        config, _ = self._key
        match result.status:
            case "timeout":
                raise ToolError(f"The code was stopped after {config.timeout_s:g} s.")
            case "crash":
                raise ToolError("The process of the code died, for example because it ran out of memory.")
        return f"{result.output}{result.error}" or "(no output)"


def python(*, system_prompt: str | None = None, max_calls: int = 16, **options: Any) -> ToolEnvironment:
    """Return an environment with Python as its only tool; `options` are those of `Python`."""
    return ToolEnvironment(Python(**options), system_prompt=system_prompt, max_calls=max_calls)


async def shared_pool(config: SandboxConfig, modules: tuple[str, ...]) -> SnippetPool:
    """Return the started pool of this event loop with these settings.

    Raises:
        SandboxUnavailable: This machine cannot confine a process.
        ValueError: A module cannot be imported.
    """
    for loop in [loop for loop in _pools if loop.is_closed()]:
        del _pools[loop]
    pools = _pools.setdefault(asyncio.get_running_loop(), {})
    key = (config, modules)
    if key not in pools:
        pools[key] = asyncio.create_task(_started(config, modules))
    try:
        return await asyncio.shield(pools[key])
    except Exception:  # of any kind: the next call starts another pool
        pools.pop(key, None)
        raise


async def close_pools() -> None:
    """Stop the pools of this event loop."""
    for key in list(_pools.get(asyncio.get_running_loop(), {})):
        await _forget(key)


async def _started(config: SandboxConfig, modules: tuple[str, ...]) -> SnippetPool:
    pool = SnippetPool(config, modules)
    await pool.start()
    return pool


async def _forget(key: _Key) -> None:
    """Stop a pool of this event loop."""
    pools: Mapping[_Key, asyncio.Task[SnippetPool]] = _pools.get(asyncio.get_running_loop(), {})
    starting = pools.get(key)
    if starting is None:
        return
    del _pools[asyncio.get_running_loop()][key]
    await (await starting).close()
