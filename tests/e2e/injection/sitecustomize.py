"""Inject faults into the processes of a run. Python imports this module at startup if its folder is on `PYTHONPATH`.

`command.json` in the folder of `fault_reward` requests one fault at the start of an endpoint. The first process that reaches
the endpoint takes the file, writes `hit.json`, and causes the fault in itself or sends a signal to another process.
"""

import functools
import importlib.abc
import importlib.util
import sys
from typing import Any

MODULE = "titanrl.actors"


class Finder(importlib.abc.MetaPathFinder):
    """Import hook that adds fault injection to the module of all endpoints."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        plain = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            plain(module)
            module.replying = with_faults(module.replying)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def with_faults(replying: Any) -> Any:
    """Wrap the endpoint decorator so that each call first checks for a requested fault."""
    from fault_reward import at

    def decorate(method: Any) -> Any:
        @functools.wraps(method)
        async def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
            at(f"{type(self).__name__}.{method.__name__}")
            return await method(self, *args, **kwargs)

        return replying(checked)

    return decorate


sys.meta_path.insert(0, Finder())
