"""TitanRL: reinforcement-learning post-training of language models, from a laptop CPU to a cluster.

Importing this package does not import torch, vLLM or Monarch; each public name imports its dependencies on first use.
"""

import os
import sys

# `python -m titanrl.grpo`, not a module of the user that imports this package. The imports take a second.
if sys.argv[:1] == ["-m"] and any(each.removeprefix("-m").partition(".")[0] == "titanrl" for each in sys.orig_argv):
    from titanrl.base import refuse_hiding

    if not sys.flags.safe_path:  # the working directory is the first folder of `sys.path`
        refuse_hiding(sys.path[0])

        def _refuse(kind: "type[BaseException]", error: BaseException, trace: "TracebackType | None") -> None:
            refuse_hiding(sys.path[0], error)
            sys.__excepthook__(kind, error, trace)

        sys.excepthook = _refuse  # until `terminal.prepare`

    from titanrl.base.terminal import exit_on_signals

    exit_on_signals()  # Ctrl-C would print a traceback

import importlib
from typing import TYPE_CHECKING, Any

from titanrl.base import __version__ as __version__
from titanrl.base.ownership import protect_monarch_log

# torchmonarch reads these variables at import. Each poll of the first leaves 10 kB in the controller's memory. On one machine,
# pidfds report dead processes earlier; runs over several hosts poll every few seconds (`launch/assembly.py`). The second
# permits large messages; torchstore sets the same value, but too late and with a warning.
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "1h")
os.environ.setdefault("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", "910737418240")
os.environ.setdefault("MONARCH_FILE_LOG", "error")  # a user's runs share this log, which would otherwise grow by 100 kB each
protect_monarch_log()

if TYPE_CHECKING:
    from types import TracebackType

    from titanrl.algorithms.advantages import group_advantages as group_advantages
    from titanrl.algorithms.contracts import GroupRewards as GroupRewards
    from titanrl.algorithms.contracts import LossInputs as LossInputs
    from titanrl.algorithms.contracts import policy_loss as policy_loss
    from titanrl.base.errors import FaultError as FaultError
    from titanrl.base.errors import TitanRLError as TitanRLError
    from titanrl.carriers.rewards import Reward as Reward
    from titanrl.carriers.rewards import TokenRewards as TokenRewards
    from titanrl.carriers.rewards import group_reward as group_reward
    from titanrl.carriers.types import AdamParams as AdamParams
    from titanrl.carriers.types import Datum as Datum
    from titanrl.carriers.types import batches as batches
    from titanrl.carriers.types import sampled_datum as sampled_datum
    from titanrl.carriers.types import supervised_datum as supervised_datum
    from titanrl.config import Config as Config
    from titanrl.config import ConfigError as ConfigError
    from titanrl.config import load_config as load_config
    from titanrl.data.mixture import Outcome as Outcome
    from titanrl.distill import Distill as Distill
    from titanrl.grpo import GRPO as GRPO
    from titanrl.metrics.reading import RunRecord as RunRecord
    from titanrl.metrics.reading import open_run as open_run
    from titanrl.metrics.trackers import Hook as Hook
    from titanrl.rollout.group import ScoredGroup as ScoredGroup
    from titanrl.run.explanation import explain as explain
    from titanrl.session.session import Session as Session
    from titanrl.session.session import connect as connect
    from titanrl.sft import SFT as SFT

_NAMES = {
    "algorithms.advantages": "group_advantages",
    "algorithms.contracts": "GroupRewards LossInputs policy_loss",
    "base.errors": "FaultError TitanRLError",
    "carriers.rewards": "Reward TokenRewards group_reward",
    "carriers.types": "AdamParams Datum batches sampled_datum supervised_datum",
    "config": "Config ConfigError load_config",
    "data.mixture": "Outcome",
    "distill": "Distill",
    "grpo": "GRPO",
    "metrics.reading": "RunRecord open_run",
    "metrics.trackers": "Hook",
    "rollout.group": "ScoredGroup",
    "run.explanation": "explain",
    "session.session": "Session connect",
    "sft": "SFT",
}
"""Public names by module."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'titanrl' has no attribute {name!r}")
    return getattr(importlib.import_module(f"titanrl.{_MODULES[name]}"), name)
