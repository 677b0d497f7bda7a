"""Packages that the processes of each role need, imported once by the template of the role.

Nothing here may import Monarch, whose threads a fork would lack. An import that is missing here costs time, nothing else.
"""

import importlib
from collections.abc import Callable
from functools import partial

from titanrl.config.schema import Config
from titanrl.config.sections import GeneratorConfig
from titanrl.device import Device
from titanrl.launch.environment import generator_environment, trainer_environment, worker_environment
from titanrl.launch.roles import Roles


def needed(config: Config, device: Device, roles: Roles) -> dict[str, tuple[dict[str, str], Callable[[], None]]]:
    """Return the templates that some roles need: by name, the variables and the function that imports the packages."""
    templates: dict[str, tuple[dict[str, str], Callable[[], None]]] = {"store": (worker_environment(), import_for_store)}
    if roles.trainer:
        templates["trainer"] = (trainer_environment(config, device), partial(import_for_trainer, device))
    if roles.rollouts:
        templates["rollout"] = (worker_environment(), import_for_worker)
    if roles.generators:
        load = partial(import_for_generator, config.generator, device)
        templates["generator"] = (generator_environment(config, device, 0), load)
    return templates


def import_for_trainer(device: Device) -> None:
    """Import torchtitan and the learner."""
    _import_titan(device)
    _import("trainer.agreement", "trainer.checkpoint", "trainer.collate", "trainer.datums", "trainer.hf", "trainer.learner")
    _import("models.directory", "trainer.kept", "trainer.model")


def import_for_generator(config: GeneratorConfig, device: Device) -> None:
    """Import vLLM, and torchtitan if the engine runs its model."""
    _import_titan(device)
    _import("generator.engine", f"generator.{config.model_impl}")


def import_for_worker() -> None:
    """Import tokenizer, environments and rewards."""
    _import("data.tokenizer", "rollout.evaluating", "rollout.tasks")


def import_for_store() -> None:
    """Import what torchstore imports, except Monarch."""
    importlib.import_module("torch.distributed.tensor")
    _import("replay.buffer", "replay.memory", "replay.saved")


def _import_titan(device: Device) -> None:
    from titanrl.models.titan import prepare_torchtitan

    prepare_torchtitan(device)


def _import(*modules: str) -> None:
    for module in modules:
        importlib.import_module(f"titanrl.{module}")
