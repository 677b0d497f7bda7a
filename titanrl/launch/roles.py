"""Roles of a session, and the paths that its processes share."""

from dataclasses import dataclass, field
from pathlib import Path

from titanrl.plugins import Plugins


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """Absolute paths of a run, because other processes use them too."""

    run_dir: Path
    """Folder of everything the run writes."""
    model_dir: Path
    """Hugging Face directory with configuration and tokenizer."""
    stop_ids: tuple[int, ...]
    """Tokens that end a completion."""
    plugins: Plugins = field(default_factory=dict)
    """The user's objects in place of built-in ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The roles to start: a trainer, generators, or both; rollout workers and a buffer beside either of them."""

    trainer: bool = True
    generators: bool = True
    rollouts: bool = False

    def __post_init__(self) -> None:
        assert self.trainer or self.generators or not self.rollouts, "rollouts need a trainer or generators"
