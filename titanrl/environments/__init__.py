"""Environments: multi-turn tasks and tools, which exchange chat messages with the policy.

Environments do not depend on tokens or actors.
Importing this package requires only the standard library. Classes with further dependencies are imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from titanrl.environments.interface import (
    Done,
    Environment,
    EnvironmentDied,
    EnvironmentFailure,
    EnvironmentTimeout,
    Episode,
    InvalidReward,
    JudgesTruncated,
    Limit,
    Message,
    Observation,
    Tool,
    ToolError,
)

if TYPE_CHECKING:
    from titanrl.environments.calculator import Calculator
    from titanrl.environments.factories import SingleTurn, make_environment
    from titanrl.environments.python_tool import Python
    from titanrl.environments.tic_tac_toe import TicTacToe
    from titanrl.environments.tools import ToolEnvironment, Toolset
    from titanrl.environments.worker import EnvironmentPool, Environments, ProcessEnvironment, ProcessOptions

_MODULES = {
    "Calculator": "calculator",
    "EnvironmentPool": "worker",
    "Environments": "worker",
    "ProcessEnvironment": "worker",
    "ProcessOptions": "worker",
    "Python": "python_tool",
    "SingleTurn": "factories",
    "TicTacToe": "tic_tac_toe",
    "ToolEnvironment": "tools",
    "Toolset": "tools",
    "make_environment": "factories",
}

__all__ = [
    "Calculator",
    "Done",
    "Environment",
    "EnvironmentDied",
    "EnvironmentFailure",
    "EnvironmentPool",
    "EnvironmentTimeout",
    "Environments",
    "Episode",
    "InvalidReward",
    "JudgesTruncated",
    "Limit",
    "Message",
    "Observation",
    "ProcessEnvironment",
    "ProcessOptions",
    "Python",
    "SingleTurn",
    "TicTacToe",
    "Tool",
    "ToolEnvironment",
    "ToolError",
    "Toolset",
    "make_environment",
]


def __getattr__(name: str) -> Any:
    """Import a name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'titanrl.environments' has no attribute {name!r}")
    return getattr(importlib.import_module(f"titanrl.environments.{_MODULES[name]}"), name)
