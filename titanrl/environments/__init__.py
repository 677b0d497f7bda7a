"""Environments: multi-turn tasks and tools, which exchange chat messages with the policy.

Environments do not depend on tokens or actors.
Importing this package requires only the standard library. Classes with further dependencies are imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from titanrl.environments.interface import Done as Done
from titanrl.environments.interface import Environment as Environment
from titanrl.environments.interface import EnvironmentDied as EnvironmentDied
from titanrl.environments.interface import EnvironmentFailure as EnvironmentFailure
from titanrl.environments.interface import EnvironmentTimeout as EnvironmentTimeout
from titanrl.environments.interface import Episode as Episode
from titanrl.environments.interface import InvalidReward as InvalidReward
from titanrl.environments.interface import JudgesTruncated as JudgesTruncated
from titanrl.environments.interface import Limit as Limit
from titanrl.environments.interface import Message as Message
from titanrl.environments.interface import Observation as Observation
from titanrl.environments.interface import Prepares as Prepares
from titanrl.environments.interface import Tool as Tool
from titanrl.environments.interface import ToolError as ToolError

if TYPE_CHECKING:
    from titanrl.environments.factories import SingleTurn as SingleTurn
    from titanrl.environments.factories import make_environment as make_environment
    from titanrl.environments.python_tool import Python as Python
    from titanrl.environments.tic_tac_toe import TicTacToe as TicTacToe
    from titanrl.environments.tools import Calculator as Calculator
    from titanrl.environments.tools import ToolEnvironment as ToolEnvironment
    from titanrl.environments.tools import Toolset as Toolset
    from titanrl.environments.worker import EnvironmentPool as EnvironmentPool
    from titanrl.environments.worker import Environments as Environments
    from titanrl.environments.worker import ProcessEnvironment as ProcessEnvironment
    from titanrl.environments.worker import ProcessOptions as ProcessOptions

_NAMES = {
    "factories": "SingleTurn make_environment",
    "python_tool": "Python",
    "tic_tac_toe": "TicTacToe",
    "tools": "Calculator ToolEnvironment Toolset",
    "worker": "EnvironmentPool Environments ProcessEnvironment ProcessOptions",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'titanrl.environments' has no attribute {name!r}")
    return getattr(importlib.import_module(f"titanrl.environments.{_MODULES[name]}"), name)
