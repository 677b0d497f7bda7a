"""Roles of a session, the paths shared by its processes, and the packages that the template of each role imports once.

This module must not import Monarch, because a fork would lack its threads. A missing import only costs startup time.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from titanrl.base.plugins import Plugins
from titanrl.config.device import Device
from titanrl.config.schema import Config
from titanrl.processes.variables import generator_environment, trainer_environment, worker_environment


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


def needed(config: Config, device: Device, roles: Roles) -> dict[str, tuple[dict[str, str], Callable[[], None]]]:
    """Return the templates that some roles need, by name: environment variables, and a function that imports the packages."""
    templates: dict[str, tuple[dict[str, str], Callable[[], None]]] = {"store": (worker_environment(), import_for_store)}
    if roles.trainer:
        templates["trainer"] = (trainer_environment(config, device), partial(import_for_trainer, device))
    if roles.rollouts:
        is_gym = any(task.source == "reasoning_gym" for task in config.data.tasks.values())
        templates["rollout"] = (worker_environment(), partial(import_for_worker, is_gym=is_gym))
    if roles.generators:
        load = partial(import_for_generator, config.generator.model_impl, device)
        templates["generator"] = (generator_environment(config, device, 0), load)
    return templates


def import_for_trainer(device: Device) -> None:
    """Import torchtitan and the learner."""
    _import_titan(device)
    importlib.import_module("torchtitan.trainer")
    _import("data.mixture", "models.directory", "replay.groups")
    _import("trainer.agreement", "trainer.checkpoint", "trainer.collate", "trainer.passes", "trainer.hf", "trainer.snapshots")
    _import("trainer.learner", "trainer.model")


def import_for_generator(model_impl: Literal["titan", "native"], device: Device) -> None:
    """Import vLLM, and torchtitan if the engine runs its model."""
    _import_titan(device)
    _import("generator.compat", "generator.engine", f"generator.{model_impl}")
    if model_impl == "titan":
        importlib.import_module("torchtitan.trainer")
    if device.kind == "cpu":
        importlib.import_module("vllm.v1.worker.cpu_worker")


def import_for_worker(*, is_gym: bool) -> None:
    """Import tokenizer, environments and rewards, and reasoning-gym if the run uses its tasks."""
    _import("data.tokenizer", "models.directory", "replay.buffer", "replay.payloads", "rollout.open_tasks")
    if is_gym:
        importlib.import_module("reasoning_gym")


def import_for_store() -> None:
    """Import torchstore's dependencies, except Monarch."""
    importlib.import_module("torch.distributed.checkpoint")
    importlib.import_module("torch.distributed.tensor")
    _import("replay.buffer")


def _import_titan(device: Device) -> None:
    from titanrl.models.titan import prepare_torchtitan

    prepare_torchtitan(device)


def _import(*modules: str) -> None:
    for module in modules:
        importlib.import_module(f"titanrl.{module}")
