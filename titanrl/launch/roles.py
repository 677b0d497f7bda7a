"""Roles of a session, and the paths shared by its processes."""

from dataclasses import dataclass, field
from pathlib import Path

from titanrl.base.plugins import Plugins


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """Files of a run. Paths are absolute, because other processes also use them."""

    run_dir: Path
    """Folder of everything the run writes."""
    model_dir: Path
    """Hugging Face directory with configuration and tokenizer."""
    stop_ids: tuple[int, ...]
    """Tokens that end a completion."""
    plugins: Plugins = field(default_factory=dict)
    """User-defined objects that replace built-in ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Roles to start: a trainer, generators, or both; with either of them, optionally rollout workers and a buffer."""

    trainer: bool = True
    generators: bool = True
    rollouts: bool = False

    def __post_init__(self) -> None:
        assert self.trainer or self.generators or not self.rollouts, "rollouts need a trainer or generators"
