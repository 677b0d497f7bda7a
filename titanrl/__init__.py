"""TitanRL: reinforcement-learning post-training of language models, from a laptop CPU to a cluster.

Importing this package loads none of torch, vllm or monarch; the names below load what they need when they are first used.
"""

from typing import TYPE_CHECKING, Any

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
