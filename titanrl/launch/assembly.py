"""Starts every process and actor of a run and connects them."""

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from monarch.actor import ProcMesh

from titanrl.config.choices import TransportName
from titanrl.config.schema import Config
from titanrl.device import Device
from titanrl.generator.actor import Generator, GeneratorSetup
from titanrl.launch.environment import generator_environment, trainer_environment, worker_environment
from titanrl.launch.fleet import Fleet, join_process_group
from titanrl.launch.hosts import Hosts, acquire_hosts
from titanrl.launch.meshes import BufferClient, GeneratorMeshes, RolloutMesh, TrainerMesh
from titanrl.launch.supervision import OnEvent, Supervisor
from titanrl.replay.actors import ReplayBuffer, StorageShard
from titanrl.rollout.actor import RolloutWorker, WorkerSetup
from titanrl.trainer.actor import PolicyTrainer, TrainerSetup
from titanrl.weights.pull import WeightReader
from titanrl.weights.store import WeightStore, spawn_store
from titanrl.weights.sync import WeightSync

logger = logging.getLogger(__name__)

GRACE_S = 2.0
"""Seconds for stopped processes to end before they are killed."""
STOP_AFTER_DEATH_S = 4.0
"""Seconds for processes to stop when one has died: a rank that waits for it in a collective cannot stop by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """Absolute paths of a run, because other processes use them too."""

    run_dir: Path
    """Folder of everything the run writes."""
    model_dir: Path
    """Hugging Face directory with configuration and tokenizer."""
    stop_ids: tuple[int, ...]
    """Tokens that end a completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Clients of the running actors, and the means to stop them."""

    trainer: TrainerMesh
    generators: GeneratorMeshes
    workers: RolloutMesh
    buffer: BufferClient
    weights: WeightSync
    supervisor: Supervisor
    fleet: Fleet
    hosts: Hosts

    async def close(self, timeout_s: float) -> list[str]:
        """Close every actor, then stop every process, each within half the time; return what failed.

        The workers close first, so that no request for a completion is pending when the generators close.
        """
        self.supervisor.expect_deaths()
        self.buffer.close()
        failures = await failures_of(self.workers.close())
        failures += await failures_of(self.generators.close(), self.trainer.close())
        logger.info("actors closed; stopping processes")
        to_stop_s = min(timeout_s / 2, STOP_AFTER_DEATH_S) if self.supervisor.saw_death else timeout_s / 2
        return failures + await stop_processes(self.fleet, self.supervisor, self.hosts, to_stop_s)


async def failures_of(*closing: Awaitable[None]) -> list[str]:
    """Await all; return the texts of their exceptions."""
    results = await asyncio.gather(*closing, return_exceptions=True)
    return [str(result) for result in results if isinstance(result, BaseException)]


async def stop_processes(fleet: Fleet, supervisor: Supervisor, hosts: Hosts, timeout_s: float) -> list[str]:
    """Stop every process, kill those that do not end, and release the hosts; return what failed."""
    failures = []
    try:
        await fleet.stop(timeout_s)
    except ExceptionGroup as error:
        failures.append(str(error))
    killed = await supervisor.reap(GRACE_S)
    if killed:
        failures.append(f"killed, because they did not end: {', '.join(killed)}")
    hosts.close()
    logger.info("processes stopped")
    return failures


async def assemble(config: Config, device: Device, files: RunFiles, first_index: int, on_event: OnEvent | None = None) -> Parts:
    """Spawn every process and actor of a run. They load nothing yet; the `start` of each client does that.

    Args:
        config: the run.
        device: of trainer and generators.
        files: paths of the run.
        first_index: first position of the prompt stream.
        on_event: records faults and stalls.
    """
    supervisor, hosts = Supervisor(on_event), acquire_hosts(config)
    fleet = Fleet(files.run_dir / "logs", supervisor)
    try:
        processes = spawn_processes(config, device, fleet, hosts)
        return await _connect(config, device, files, first_index, supervisor, processes, fleet, hosts)
    except BaseException:  # an interrupt, too: no process may outlive a failed start
        supervisor.expect_deaths()
        await stop_processes(fleet, supervisor, hosts, config.timeouts.close_s / 2)
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """Process meshes by role."""

    trainer: ProcMesh
    """One process per trainer rank."""
    generators: tuple[ProcMesh, ...]
    """By replica, one process per tensor-parallel rank."""
    store: ProcMesh
    """One process for buffer, storage shard and torchstore."""
    rollout: ProcMesh
    """One process per rollout worker."""


def spawn_processes(config: Config, device: Device, fleet: Fleet, hosts: Hosts) -> Processes:
    """Spawn the processes of all roles, each with the environment it needs."""
    return Processes(
        trainer=fleet.spawn(
            "trainer",
            hosts.trainer,
            config.trainer.parallelism.world_size // config.hosts.trainer_hosts,
            trainer_environment(config, device),
            imports=("titanrl.trainer.actor",),
        ),
        generators=tuple(
            fleet.spawn(
                f"generator_{replica}",
                host,
                config.generator.tp,
                generator_environment(config, device, replica),
                imports=("titanrl.generator.actor",),
            )
            for replica, host in enumerate(hosts.generators)
        ),
        store=fleet.spawn(
            "store", hosts.local, 1, worker_environment(), imports=("titanrl.weights.store", "titanrl.replay.actors")
        ),
        rollout=fleet.spawn(
            "rollout", hosts.local, config.rollout.num_workers, worker_environment(), imports=("titanrl.rollout.actor",)
        ),
    )


async def _connect(
    config: Config,
    device: Device,
    files: RunFiles,
    first_index: int,
    supervisor: Supervisor,
    processes: Processes,
    fleet: Fleet,
    hosts: Hosts,
) -> Parts:
    """Spawn the actors, each with the actors it calls, and wrap them in their clients."""
    one_machine = config.hosts.kind != "slurm"
    tensor_parallel = processes.generators if config.generator.tp > 1 else ()
    for procs in (processes.trainer, *tensor_parallel):
        await join_process_group(procs, one_machine=one_machine)
    store = await spawn_store(processes.store)
    buffer = processes.store.spawn(
        "buffer", ReplayBuffer, config.num_slots, 1, config.window_groups, config.rollout.dynamic_sampling, first_index
    )
    shards = processes.store.spawn("shards", StorageShard, buffer)
    timeouts = config.timeouts
    generators = GeneratorMeshes(_spawn_generators(config, device, files, processes, store), supervisor, timeouts)
    trainer = TrainerMesh(_spawn_trainer(config, device, files, processes, store, shards), supervisor, timeouts)
    worker_setup = WorkerSetup(
        config=config,
        model_dir=files.model_dir,
        run_dir=files.run_dir,
        buffer=buffer,
        shards=shards,
        generators=generators.actors,
    )
    return Parts(
        trainer=trainer,
        generators=generators,
        workers=RolloutMesh(processes.rollout.spawn("rollout", RolloutWorker, worker_setup), supervisor, timeouts),
        buffer=BufferClient(buffer, supervisor, timeouts, config.rollout.starvation_timeout_s, config.rollout.groups_per_step),
        weights=WeightSync(
            config.name,
            store,
            push=trainer.push_weights,
            expect=generators.expect_weights,
            pulls=[partial(generators.pull_weights, replica) for replica in range(config.generator.replicas)],
        ),
        supervisor=supervisor,
        fleet=fleet,
        hosts=hosts,
    )


def _spawn_generators(
    config: Config, device: Device, files: RunFiles, processes: Processes, store: WeightStore
) -> tuple[Any, ...]:
    setup = GeneratorSetup(
        model_dir=files.model_dir,
        config=config.generator,
        device=device,
        max_len=config.data.max_prompt_tokens + config.rollout.max_new_tokens,
        stop_ids=files.stop_ids,
        reader=WeightReader(config.name, store, config.weights.verify),
    )
    return tuple(procs.spawn(f"generator_{replica}", Generator, setup) for replica, procs in enumerate(processes.generators))


def _spawn_trainer(
    config: Config, device: Device, files: RunFiles, processes: Processes, store: WeightStore, shards: Any
) -> Any:
    setup = TrainerSetup(
        run=config.name,
        seed=config.seed,
        config=config.trainer,
        algorithm=config.algorithm,
        temperature=config.rollout.temperature,
        generator_dtype=config.generator.dtype,
        transports=transports(config),
        verify=config.weights.verify,
        device=device,
        checkpoint_dir=files.run_dir / "checkpoints",
        keep_checkpoints=config.checkpoint.keep_last,
        store=store,
        shards=shards,
    )
    return processes.trainer.spawn("trainer", PolicyTrainer, setup)


def transports(config: Config) -> Sequence[TransportName]:
    """Return the transports to offer weights through; each generator takes the first that reaches it."""
    if config.weights.transport != "auto":
        return (config.weights.transport,)
    return ("arena", "rdma") if config.hosts.kind == "slurm" else ("arena",)
