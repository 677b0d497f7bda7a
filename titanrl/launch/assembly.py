"""All parts of a run, started side by side and wired to each other."""

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from titanrl.config.schema import Config
from titanrl.device import Device
from titanrl.generator.actor import Generator, GeneratorSetup
from titanrl.launch.environment import generator_environment, trainer_environment, worker_environment
from titanrl.launch.fleet import Fleet, join_process_group
from titanrl.launch.hosts import Hosts, acquire_hosts
from titanrl.launch.meshes import BufferClient, GeneratorMeshes, RolloutMesh, TrainerMesh
from titanrl.launch.supervision import Supervisor
from titanrl.replay.actors import ReplayBuffer, StorageShard
from titanrl.rollout.actor import RolloutWorker, WorkerSetup
from titanrl.trainer.actor import PolicyTrainer, TrainerSetup
from titanrl.weights.pull import WeightReader
from titanrl.weights.store import spawn_store
from titanrl.weights.sync import WeightSync
from titanrl.weights.transport import TransportName

logger = logging.getLogger(__name__)

GRACE_S = 2.0
"""Time for stopped processes to disappear before they are killed."""
STOP_AFTER_DEATH_S = 4.0
"""Time for processes to stop when one of them has died: what a rank waits for in a collective with it never comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """Where a run's files are; absolute, because other processes use them too."""

    run_dir: Path
    """Everything the run writes."""
    model_dir: Path
    """Hugging Face directory with config and tokenizer."""
    stop_ids: tuple[int, ...]
    """Tokens that end a completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The running parts, as the loop uses them."""

    trainer: TrainerMesh
    generators: GeneratorMeshes
    workers: RolloutMesh
    buffer: BufferClient
    weights: WeightSync
    supervisor: Supervisor
    fleet: Fleet
    hosts: Hosts

    async def close(self, timeout_s: float) -> list[str]:
        """Close every part, then stop every process, each within half the time; returns what did not go in order.

        Workers come first, so that nobody waits for a completion any more when the generators close.
        """
        self.supervisor.expect_deaths()
        troubles = await troubles_of(self.workers.close())
        troubles += await troubles_of(self.generators.close(), self.trainer.close())
        logger.info("parts closed; stopping processes")
        to_stop_s = min(timeout_s / 2, STOP_AFTER_DEATH_S) if self.supervisor.saw_death else timeout_s / 2
        return troubles + await stop_processes(self.fleet, self.supervisor, self.hosts, to_stop_s)


async def troubles_of(*closing: Awaitable[None]) -> list[str]:
    """What went wrong with any of them; all are awaited."""
    results = await asyncio.gather(*closing, return_exceptions=True)
    return [str(result) for result in results if isinstance(result, BaseException)]


async def stop_processes(fleet: Fleet, supervisor: Supervisor, hosts: Hosts, timeout_s: float) -> list[str]:
    """Stop every process in order, kill what is left, give the machines back; returns what did not go in order."""
    troubles = []
    try:
        await fleet.stop(timeout_s)
    except ExceptionGroup as error:
        troubles.append(str(error))
    killed = await supervisor.reap(GRACE_S)
    if killed:
        troubles.append(f"killed, as they did not end by themselves: {', '.join(killed)}")
    hosts.close()
    logger.info("processes stopped")
    return troubles


async def assemble(config: Config, device: Device, files: RunFiles, first_index: int) -> Parts:
    """Spawn every mesh and actor of a run. Nothing is loaded yet: `start` of each part does that."""
    supervisor, hosts = Supervisor(), acquire_hosts(config)
    fleet = Fleet(files.run_dir / "logs", supervisor)
    try:
        return await _assemble(config, device, files, first_index, supervisor=supervisor, hosts=hosts, fleet=fleet)
    except BaseException:  # an interrupt, too: nothing may be left of a start
        supervisor.expect_deaths()
        await stop_processes(fleet, supervisor, hosts, config.timeouts.close_s / 2)
        raise


async def _assemble(
    config: Config, device: Device, files: RunFiles, first_index: int, *, supervisor: Supervisor, hosts: Hosts, fleet: Fleet
) -> Parts:
    trainer_procs = fleet.spawn(
        "trainer",
        hosts.trainer,
        config.trainer.parallelism.world_size // config.hosts.trainer_hosts,
        trainer_environment(config, device),
        imports=("titanrl.trainer.actor",),
    )
    generator_procs = [
        fleet.spawn(
            f"generator_{replica}",
            host,
            config.generator.tp,
            generator_environment(config, device, replica),
            imports=("titanrl.generator.actor",),
        )
        for replica, host in enumerate(hosts.generators)
    ]
    store_procs = fleet.spawn(
        "store", hosts.local, 1, worker_environment(), imports=("titanrl.weights.store", "titanrl.replay.actors")
    )
    worker_procs = fleet.spawn(
        "rollout", hosts.local, config.rollout.num_workers, worker_environment(), imports=("titanrl.rollout.actor",)
    )

    one_machine = config.hosts.kind != "slurm"
    tensor_parallel = generator_procs if config.generator.tp > 1 else []
    for procs in (trainer_procs, *tensor_parallel):
        await join_process_group(procs, one_machine=one_machine)
    store = await spawn_store(store_procs)
    buffer = store_procs.spawn(
        "buffer", ReplayBuffer, config.num_slots, 1, config.window_groups, config.rollout.dynamic_sampling, first_index
    )
    shards = store_procs.spawn("shards", StorageShard, buffer)
    generator_setup = GeneratorSetup(
        model_dir=files.model_dir,
        config=config.generator,
        device=device,
        max_len=config.data.max_prompt_tokens + config.rollout.max_new_tokens,
        stop_ids=files.stop_ids,
        reader=WeightReader(config.name, store, config.weights.verify),
    )
    generator_meshes = tuple(
        procs.spawn(f"generator_{replica}", Generator, generator_setup) for replica, procs in enumerate(generator_procs)
    )
    trainer_setup = TrainerSetup(
        run=config.name,
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
    timeouts = config.timeouts
    generators = GeneratorMeshes(generator_meshes, supervisor, timeouts)
    worker_setup = WorkerSetup(
        config=config,
        model_dir=files.model_dir,
        run_dir=files.run_dir,
        buffer=buffer,
        shards=shards,
        generators=generators.actors,
    )
    trainer = TrainerMesh(trainer_procs.spawn("trainer", PolicyTrainer, trainer_setup), supervisor, timeouts)
    return Parts(
        trainer=trainer,
        generators=generators,
        workers=RolloutMesh(worker_procs.spawn("rollout", RolloutWorker, worker_setup), supervisor, timeouts),
        buffer=BufferClient(buffer, supervisor, timeouts, config.rollout.starvation_timeout_s),
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


def transports(config: Config) -> Sequence[TransportName]:
    """Ways that weights may take; each generator takes the first that leads to it."""
    if config.weights.transport != "auto":
        return (config.weights.transport,)
    return ("arena", "rdma") if config.hosts.kind == "slurm" else ("arena",)
