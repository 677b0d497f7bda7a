"""TitanRL: reinforcement-learning post-training of language models, from a laptop CPU to a cluster.

Importing this package does not import torch, vLLM or Monarch; each public name imports its dependencies on first use.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from titanrl.base.ownership import protect_monarch_log

__version__ = "0.1.0"

# torchmonarch reads these variables at import. Each poll of the first leaves 10 kB in the controller's memory. On one machine,
# pidfds report dead processes earlier; runs over several hosts poll every few seconds (`launch/fleet.py`). The second
# permits large messages; torchstore sets the same value, but too late and with a warning.
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "1h")
os.environ.setdefault("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", "910737418240")
os.environ.setdefault("MONARCH_FILE_LOG", "error")  # a user's runs share this log, which would otherwise grow by 100 kB each
protect_monarch_log()

if sys.argv[:1] == ["-m"]:  # `python -m titanrl.grpo`: imports take a second, during which Ctrl-C would print a traceback
    from titanrl.base.terminal import exit_on_signals

    exit_on_signals()

if TYPE_CHECKING:
    from titanrl.algorithms.advantages import group_advantages
    from titanrl.algorithms.contracts import GroupRewards, LossInputs, policy_loss
    from titanrl.base.errors import FaultError, TitanRLError
    from titanrl.carriers.datums import Datum, batches, sampled_datum, supervised_datum
    from titanrl.carriers.rewards import Reward, TokenRewards, group_reward
    from titanrl.carriers.types import AdamParams
    from titanrl.config import Config, load_config
    from titanrl.config.errors import ConfigError
    from titanrl.data.mixture import Outcome
    from titanrl.distill import Distill
    from titanrl.grpo import GRPO
    from titanrl.metrics.hooks import Hook
    from titanrl.metrics.reading import RunRecord, open_run
    from titanrl.rollout.group import ScoredGroup
    from titanrl.run.explanation import explain
    from titanrl.session.session import Session, connect
    from titanrl.sft import SFT

_MODULES = {
    "AdamParams": "carriers.types",
    "Config": "config",
    "ConfigError": "config.errors",
    "Datum": "carriers.datums",
    "Distill": "distill",
    "FaultError": "base.errors",
    "GRPO": "grpo",
    "GroupRewards": "algorithms.contracts",
    "Hook": "metrics.hooks",
    "LossInputs": "algorithms.contracts",
    "Outcome": "data.mixture",
    "Reward": "carriers.rewards",
    "RunRecord": "metrics.reading",
    "SFT": "sft",
    "ScoredGroup": "rollout.group",
    "Session": "session.session",
    "TitanRLError": "base.errors",
    "TokenRewards": "carriers.rewards",
    "batches": "carriers.datums",
    "connect": "session.session",
    "explain": "run.explanation",
    "group_advantages": "algorithms.advantages",
    "group_reward": "carriers.rewards",
    "load_config": "config",
    "open_run": "metrics.reading",
    "policy_loss": "algorithms.contracts",
    "sampled_datum": "carriers.datums",
    "supervised_datum": "carriers.datums",
}

__all__ = [
    "GRPO",
    "SFT",
    "AdamParams",
    "Config",
    "ConfigError",
    "Datum",
    "Distill",
    "FaultError",
    "GroupRewards",
    "Hook",
    "LossInputs",
    "Outcome",
    "Reward",
    "RunRecord",
    "ScoredGroup",
    "Session",
    "TitanRLError",
    "TokenRewards",
    "batches",
    "connect",
    "explain",
    "group_advantages",
    "group_reward",
    "load_config",
    "open_run",
    "policy_loss",
    "sampled_datum",
    "supervised_datum",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'titanrl' has no attribute {name!r}")
    return getattr(importlib.import_module(f"titanrl.{_MODULES[name]}"), name)
