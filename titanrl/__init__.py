"""TitanRL: reinforcement-learning post-training of language models, from a laptop CPU to a cluster.

Importing this package loads none of torch, vllm or monarch; the names below load what they need when they are first used.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# All are read by torchmonarch when it is imported. Without the first a dead process is noticed after 10 s only; the
# second is what torchstore would otherwise set, too late and with a warning, so that large messages may be sent.
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "1s")
os.environ.setdefault("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", "910737418240")
os.environ.setdefault("MONARCH_FILE_LOG", "error")  # all runs of a user share this log, which would grow by 100 kB per run

if sys.argv[:1] == ["-m"]:  # `python -m titanrl.grpo`: the imports take a second, in which Ctrl-C would print a traceback
    from titanrl.terminal import end_quietly

    end_quietly()

if TYPE_CHECKING:
    from titanrl.algorithms.advantages import group_advantages
    from titanrl.algorithms.contracts import GroupRewards, LossInputs, policy_loss
    from titanrl.config import Config, load_config
    from titanrl.config.errors import ConfigError
    from titanrl.data.curriculum import Outcome
    from titanrl.datums import Datum, batches, sampled_datum, supervised_datum
    from titanrl.distill import Distill
    from titanrl.errors import FaultError, TitanRLError
    from titanrl.grpo import GRPO
    from titanrl.hooks import Hook
    from titanrl.rewards import Reward, TokenRewards, group_reward
    from titanrl.rollout.filters import ScoredGroup
    from titanrl.session import Session, connect
    from titanrl.sft import SFT
    from titanrl.types import AdamParams

_MODULES = {
    "AdamParams": "types",
    "Config": "config",
    "ConfigError": "config.errors",
    "Datum": "datums",
    "Distill": "distill",
    "FaultError": "errors",
    "GRPO": "grpo",
    "GroupRewards": "algorithms.contracts",
    "Hook": "hooks",
    "LossInputs": "algorithms.contracts",
    "Outcome": "data.curriculum",
    "Reward": "rewards",
    "SFT": "sft",
    "ScoredGroup": "rollout.filters",
    "Session": "session",
    "TitanRLError": "errors",
    "TokenRewards": "rewards",
    "batches": "datums",
    "connect": "session",
    "group_advantages": "algorithms.advantages",
    "group_reward": "rewards",
    "load_config": "config",
    "policy_loss": "algorithms.contracts",
    "sampled_datum": "datums",
    "supervised_datum": "datums",
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
    "ScoredGroup",
    "Session",
    "TitanRLError",
    "TokenRewards",
    "batches",
    "connect",
    "group_advantages",
    "group_reward",
    "load_config",
    "policy_loss",
    "sampled_datum",
    "supervised_datum",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'titanrl' has no attribute {name!r}")
    return getattr(importlib.import_module(f"titanrl.{_MODULES[name]}"), name)
