"""TitanRL: reinforcement-learning post-training of language models, from a laptop CPU to a cluster.

Importing this package loads none of torch, vllm or monarch; the names below load what they need when they are first used.
"""

import os
from typing import TYPE_CHECKING, Any

# Both are read by torchmonarch when it is imported. Without the first a dead process is noticed after 10 s only; the
# second is what torchstore would otherwise set, too late and with a warning, so that large messages may be sent.
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "1s")
os.environ.setdefault("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", "910737418240")

if TYPE_CHECKING:
    from titanrl.config import Config, load_config
    from titanrl.grpo import GRPO

__all__ = ["GRPO", "Config", "load_config"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name == "GRPO":
        from titanrl.grpo import GRPO

        return GRPO
    if name in ("Config", "load_config"):
        import titanrl.config

        return vars(titanrl.config)[name]
    raise AttributeError(f"module 'titanrl' has no attribute {name!r}")
