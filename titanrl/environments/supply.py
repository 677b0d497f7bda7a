"""The environments of a run."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from titanrl.environments.interface import Environment
from titanrl.environments.python_tool import close_pools
from titanrl.environments.registry import load_factory
from titanrl.environments.worker import EnvironmentPool, ProcessOptions
from titanrl.plugins import Plugins


class Environments:
    """Makes an environment for each episode, and owns the processes that environments share.

    Example:
        environments = Environments("calculator", {"max_calls": 4})
        await environments.start()
        environment = environments.make()
        ...
        await environments.close()
    """

    def __init__(
        self,
        function: object,
        options: Mapping[str, Any] = MappingProxyType({}),
        plugins: Plugins = MappingProxyType({}),
        *,
        processes: ProcessOptions | None = None,
    ) -> None:
        """Load the environment.

        Args:
            function: Name of a built-in environment, import path, class or function.
            options: Keywords of the function.
            plugins: Objects of the user; `data.environment.function` replaces `function`.
            processes: Run each environment in a process of its own; None runs them in this process.

        Raises:
            ValueError: It cannot be loaded, or does not fit the interface.
        """
        self._pool = None if processes is None else EnvironmentPool(function, options, plugins, processes=processes)
        self._make: Callable[[], Environment] = (
            load_factory(function, options, plugins) if self._pool is None else self._pool.make
        )

    async def start(self) -> None:
        """Start one of the processes, if environments have their own.

        Raises:
            EnvironmentFailure: The environment cannot be loaded in it.
        """
        if self._pool is not None:
            await self._pool.start()

    def make(self) -> Environment:
        """Return an environment for one episode."""
        return self._make()

    async def close(self) -> None:
        """Stop the processes that the environments share."""
        if self._pool is not None:
            await self._pool.close()
        await close_pools()
