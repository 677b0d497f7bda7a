"""Inject faults into the processes of a run. Python imports this module at startup if its folder is on `PYTHONPATH`.

`command.json` in the folder of `fault_reward` requests one fault at the start of an endpoint, or of a worker's delivery to the
buffer. The first process that reaches this point takes the file, writes `hit.json`, and causes the fault in itself or sends a
signal to another process.
"""

import functools
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from typing import Any


class Finder(importlib.abc.MetaPathFinder):
    """Import hook that adds fault injection to a module."""

    def __init__(self, module: str, add_faults: Callable[[Any], None]) -> None:
        self._module, self._add_faults = module, add_faults

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        plain = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            plain(module)
            self._add_faults(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def to_endpoints(actors: Any) -> None:
    """Make each call of an endpoint check for a requested fault first."""
    replying = actors.replying
    actors.replying = lambda method: replying(checked(method))


def to_delivery(outbox: Any) -> None:
    """Make each delivery of a group to the buffer check for a requested fault first."""
    outbox.Outbox.deliver = checked(outbox.Outbox.deliver)


def checked(method: Any) -> Any:
    """Wrap a coroutine method so that each call first checks for a requested fault."""
    from fault_reward import at

    @functools.wraps(method)
    async def check_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        at(f"{type(self).__name__}.{method.__name__}")
        return await method(self, *args, **kwargs)

    return check_first


sys.meta_path[:0] = [Finder("titanrl.processes.actors", to_endpoints), Finder("titanrl.rollout.workers", to_delivery)]
