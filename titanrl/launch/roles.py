"""Roles of a session, the paths shared by its processes, and the packages that the template of each role imports once.

This module must not import Monarch, because a fork would lack its threads. A missing import only costs startup time.
"""

import importlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from titanrl.base.plugins import Plugins
from titanrl.config.device import Device
from titanrl.config.schema import Config
from titanrl.data.gym import import_task
from titanrl.processes.templates import BASE
from titanrl.processes.variables import PASSIVE_THREADS, generator_environment, trainer_environment, worker_environment


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Roles to start: a trainer, generators, or both; with either of them, optionally rollout workers and a buffer."""

    trainer: bool = True
    generators: bool = True
    rollouts: bool = False

    def __post_init__(self) -> None:
        assert self.trainer or self.generators or not self.rollouts, "rollouts need a trainer or generators"


def needed(config: Config, device: Device, roles: Roles) -> dict[str, tuple[dict[str, str], Callable[[], None]]]:
    """Return the templates that some roles need, by name: environment variables, and a function that imports the packages.

    The first one is the base of the others.
    """
    shared = ("torch.distributed.checkpoint", "torch.distributed.tensor", "titanrl.models.decoder", "titanrl.weights.transport")
    # torch reads the policy when it is imported; it matters only for the trainer, which has more than one thread.
    templates: dict[str, tuple[dict[str, str], Callable[[], None]]] = {
        BASE: ({**worker_environment(), **PASSIVE_THREADS}, partial(import_modules, shared, device)),
        "store": (worker_environment(), partial(import_modules, ("titanrl.replay.groups", "titanrl.replay.prioritized"))),
    }
    if roles.trainer:
        learner = ("agreement", "checkpoint", "collate", "passes", "snapshots", "learner", "model")
        modules = ["titanrl.data.mixture", "titanrl.models.directory", "titanrl.replay.groups"]
        modules += [f"titanrl.trainer.{name}" for name in learner]
        templates["trainer"] = (trainer_environment(config, device), partial(import_modules, modules, device))
    if roles.rollouts:
        modules = [f"titanrl.{name}" for name in ("data.tokenizer", "models.directory", "replay.groups", "rollout.open_tasks")]
        tasks = sorted({task.task for task in config.data.tasks.values() if task.source == "reasoning_gym"})
        templates["rollout"] = (worker_environment(), partial(import_modules, modules, tasks=tasks))
    if roles.generators:
        modules = ["titanrl.generator.compat", "titanrl.generator.engine"]
        if device.kind == "cpu":  # both implementations, so that the runs of a machine can share the template
            modules += ["vllm.v1.worker.cpu_worker", "vllm.model_executor.layers.quantization.online.base"]
            modules += ["titanrl.generator.native", "titanrl.generator.titan"]
        else:
            modules.append(f"titanrl.generator.{config.generator.model_impl}")
        templates["generator"] = (generator_environment(config, device, 0), partial(import_engine, modules, device))
    return templates


def import_engine(modules: Sequence[str], device: Device) -> None:
    """Import the modules of a generator, and on a CPU let vLLM replace its kernels."""
    import_modules(modules, device)
    if device.kind == "cpu":
        from titanrl.generator.compat import replace_kernels

        replace_kernels()


def import_modules(modules: Sequence[str], device: Device | None = None, tasks: Sequence[str] = ()) -> None:
    """Import modules, with `device` after the preparation of torchtitan for it, and tasks of reasoning-gym."""
    if device is not None:
        from titanrl.models.preparation import prepare_torchtitan

        prepare_torchtitan(device)
    for module in modules:
        importlib.import_module(module)
    for task in tasks:
        with suppress(ModuleNotFoundError):  # the checks before the start report it
            import_task(task)
