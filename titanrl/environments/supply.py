"""Creates the environments of a run, in this process or in separate ones."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from titanrl.base.plugins import Plugins
from titanrl.environments.interface import Environment
from titanrl.environments.python_tool import close_pools
from titanrl.environments.registry import load_factory
from titanrl.environments.worker import EnvironmentPool, ProcessOptions


class Environments:
    """Creates an environment for each episode, and owns the processes that environments share.

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
            options: Keyword arguments of the function.
            plugins: User-defined objects; the one under `data.environment.function` takes precedence over `function`.
            processes: Options for running each environment in a separate process; None runs them in this process.

        Raises:
            ValueError: The environment cannot be loaded, or does not implement the interface.
        """
        self._pool = None if processes is None else EnvironmentPool(function, options, plugins, processes=processes)
        self._make: Callable[[], Environment] = (
            load_factory(function, options, plugins) if self._pool is None else self._pool.make
        )

    async def start(self) -> None:
        """Start one process, if environments run in separate processes, to check that the environment can be loaded.

        Raises:
            EnvironmentFailure: The environment cannot be loaded in the process.
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
