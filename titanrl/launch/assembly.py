"""Start the processes and actors of a session, connect them, and shut them down.

`assemble` is the entry point. It acquires the hosts, spawns the requested roles, and returns `Parts`, the clients of the
running actors. `Assembly` also spawns the replacements of generators and rollout workers that die later.
"""

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from monarch.actor import ProcMesh

from titanrl.base.choices import TransportName
from titanrl.base.plugins import Plugins
from titanrl.carriers.record import span_bytes
from titanrl.config.device import Device, resolve_device
from titanrl.config.schema import Config
from titanrl.config.sections import GeneratorConfig
from titanrl.config.sizes import microbatch_rows
from titanrl.data.mixture import make_mixture
from titanrl.generator.actor import Generator, GeneratorSetup
from titanrl.hosts.kinds import kind_of
from titanrl.launch.fleet import Fleet, Hosts, acquire_hosts
from titanrl.launch.generators import GeneratorMeshes, Replica, WeightSync
from titanrl.launch.roles import Roles, RunFiles, needed
from titanrl.launch.rollouts import BufferClient, RolloutMesh, Worker
from titanrl.launch.run_lock import RunLock
from titanrl.launch.supervision import OnEvent, Part, SharedContext, Supervisor, Watchdog
from titanrl.launch.trainer_mesh import TrainerMesh
from titanrl.metrics.console import Console
from titanrl.models.directory import export_dtype, open_model
from titanrl.models.family import LOAD_FORMAT
from titanrl.processes.children import Respawns
from titanrl.processes.machine import THREADS
from titanrl.processes.variables import (
    generator_cores,
    generator_device,
    generator_environment,
    role_cores,
    trainer_environment,
    visible,
    worker_cores,
    worker_environment,
)
from titanrl.replay.buffer import BufferActor, ReplayMemory
from titanrl.replay.shards import ShardNews, StorageShard
from titanrl.rollout.workers import RolloutWorker, WorkerSetup
from titanrl.trainer.rank import PolicyTrainer, TrainerSetup
from titanrl.weights.records import WeightManifest
from titanrl.weights.store import IMPORTS, WeightSource, WeightStore, spawn_store

logger = logging.getLogger(__name__)

GRACE_S = 2.0
"""Seconds that stopped processes have to exit before they are killed."""
STOP_AFTER_DEATH_S = 4.0
"""The same after a process has died. It is short, because a rank that waits for the dead one in a collective cannot exit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """Clients of the actors that generate groups and store them."""

    workers: RolloutMesh
    buffer: BufferClient


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Clients of the running actors. `close` stops all of them; `stop_others` keeps the generators."""

    trainer: TrainerMesh | None
    generators: GeneratorMeshes | None
    rollouts: Rollouts | None
    evaluator: GeneratorMeshes | None
    """Generator for background evaluations; None if there is none."""
    weights: WeightSync
    """Weight transfer from the trainer to the generators. It may only be used if the session has both."""
    assembly: "Assembly"
    teachers: list[GeneratorMeshes] = field(default_factory=list)
    teacher_ranks: list[int] = field(default_factory=list)
    """Number of ranks of each teacher, including teachers that are still starting."""

    @property
    def can_keep_generators(self) -> bool:
        """True if the generators can outlive a restart: the session has some but no teachers, and every host is alive."""
        return self.generators is not None and not self.teachers and self.assembly.hosts.are_alive()

    async def stop_others(self) -> "Parts":
        """Stop every process except the generators' processes; return the generators, to be passed to `assemble`."""
        shared = self.assembly.shared
        rollouts, self.assembly.rollouts = self.assembly.rollouts, None  # may belong to a start that failed
        if rollouts is not None:
            rollouts.buffer.close()
            await rollouts.workers.release()
        meshes = [mesh for mesh in (self.generators, self.evaluator) if mesh is not None]
        for mesh in meshes:
            mesh.listeners.clear()
            mesh.catch_up = None
        roles = [part.role for mesh in meshes for part in mesh.parts]
        await shared.supervisor.start_over(roles)
        await self.assembly.fleet.retire_all_but(roles)
        logger.info("stopped all processes except the generators")
        return replace(self, trainer=None, rollouts=None)

    async def close(self, timeout_s: float) -> list[str]:
        """Close every actor, then stop every process; return the errors. Each of the two phases gets half of `timeout_s`.

        The workers close first, so that no completion is pending when the generators close.
        """
        shared = self.assembly.shared
        shared.supervisor.expect_deaths()
        failures: list[str] = []
        if self.rollouts is not None:
            self.rollouts.buffer.close()
            failures += await failures_of(self.rollouts.workers.close())
        meshes = [mesh for mesh in (self.generators, self.evaluator, self.trainer, *self.teachers) if mesh is not None]
        failures += await failures_of(*(mesh.close() for mesh in meshes))
        logger.info("closed the actors; stopping the processes")
        to_stop_s = min(timeout_s / 2, STOP_AFTER_DEATH_S) if shared.supervisor.failure else timeout_s / 2
        return failures + await stop_processes(self.assembly.fleet, shared.supervisor, self.assembly.hosts, to_stop_s)


async def failures_of(*closing: Awaitable[None]) -> list[str]:
    """Await all of them; return their errors."""
    results = await asyncio.gather(*closing, return_exceptions=True)
    return [str(result) for result in results if isinstance(result, BaseException)]


async def stop_processes(fleet: Fleet, supervisor: Supervisor, hosts: Hosts, timeout_s: float) -> list[str]:
    """Stop every process, kill the ones that do not exit, and release the hosts; return the errors."""
    failures = []
    try:
        await fleet.stop(timeout_s)
    except ExceptionGroup as error:
        failures.append(str(error))
    killed = await supervisor.reap(GRACE_S)
    if killed:
        failures.append(f"killed because they did not exit: {', '.join(killed)}")
    await hosts.close()
    logger.info("stopped all processes")
    return failures


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSetup:
    """Arguments of a session."""

    config: Config
    """Configuration. A session without rollouts uses the sections of model, trainer, generator, hosts and weights."""
    run_dir: Path
    """Absolute path of the folder for logs, states and exported models."""
    console: Console
    roles: Roles
    plugins: Plugins
    on_event: OnEvent | None = None
    """Callback that records faults, stalls and replacements."""
    first_index: int = 0
    """First position in the prompt stream, for the rollouts."""
    respawns: Respawns | None = None
    """Replacements by earlier sessions of the run, which count toward the limit."""
    kept: Parts | None = None
    """Generators of an earlier session of the run, from `Parts.stop_others`. They keep their callbacks, and outlive a failed
    start."""
    lock: RunLock | None = None
    """Lock of the run directory, for a session that is not part of a run; closing the session releases lock and console."""


async def assemble(setup: SessionSetup, files: RunFiles) -> Parts:
    """Spawn the processes and actors of a session. They load nothing until the `start` method of each client is called."""
    config, kept, warn = setup.config, setup.kept, setup.console.warn
    if kept is not None:
        assembly = kept.assembly
    else:
        device, kind, logs = resolve_device(config.device), kind_of(config), files.run_dir / "logs"
        supervisor = Supervisor(setup.on_event, Watchdog(config.faults, files.run_dir, warn))
        hosts = await acquire_hosts(config, device.kind, logs, supervisor, say=setup.console.note, warn=warn)
        fleet = Fleet(
            logs,
            supervisor,
            faults=config.faults,
            warn=warn,
            own_children=config.hosts.kind == "local",
            have_names=kind is None or kind.have_names,
            span_bytes=span_bytes(config),
        )
        respawns, start_s = setup.respawns or Respawns(config.faults), config.timeouts.start_s
        shared = SharedContext(supervisor=supervisor, retire=fleet.retire, respawns=respawns, warn=warn, start_s=start_s)
        assembly = Assembly(config, device, files, shared, fleet, hosts)
    shared = assembly.shared
    try:
        starting = assembly.parts(setup.roles, setup.first_index, kept)
        return await shared.supervisor.ask("start of the processes", starting, config.timeouts.start_s)
    except BaseException:  # including interrupts: only kept processes may outlive a failed start
        if kept is not None:
            await kept.stop_others()
            raise
        shared.supervisor.expect_deaths()
        await stop_processes(assembly.fleet, shared.supervisor, assembly.hosts, config.timeouts.close_s / 2)
        raise


class Assembly:
    """Spawns the processes and actors of each role, both at startup and to replace dead ones."""

    def __init__(
        self, config: Config, device: Device, files: RunFiles, shared: SharedContext, fleet: Fleet, hosts: Hosts
    ) -> None:
        self._source: WeightSource | None = None
        self.rollouts: Rollouts | None = None
        self.config, self.device, self.files, self.shared, self.fleet, self.hosts = config, device, files, shared, fleet, hosts

    async def parts(self, roles: Roles, first_index: int, kept: Parts | None = None) -> Parts:
        """Spawn the processes and actors of some roles and connect them; reuse the generators in `kept`."""
        config, shared, timeouts = self.config, self.shared, self.config.timeouts
        for kind, (environment, load) in needed(config, self.device, roles).items():
            self.fleet.prepare(kind, environment, load)
        imports = (*IMPORTS, "titanrl.replay.buffer")
        template = await self.fleet.template("store")
        cores = role_cores(config.placement.cpus.store, 0, 1)
        store_procs = self.fleet.spawn("store", self.hosts.store, 1, worker_environment(), imports, template, cores)
        trainer_procs = None
        if roles.trainer:
            num_procs = config.trainer.parallelism.world_size // config.hosts.trainer_hosts
            imports, template = ("titanrl.trainer.rank", *IMPORTS), await self.fleet.template("trainer")
            cores = role_cores(config.placement.cpus.trainer, 0, num_procs)
            environment = trainer_environment(config, self.device)
            trainer_procs = self.fleet.spawn("trainer", self.hosts.trainer, num_procs, environment, imports, template, cores)
        replicas = range(config.generator.replicas if roles.generators else 0)
        store = await spawn_store(store_procs)
        if "store" in transports(config):
            await store.client()  # imports torch, which would interrupt the controller when it deletes the first version
        self._source = WeightSource(config.name, store, config.weights.verify) if roles.trainer else None
        generators, evaluator = await self._generators(roles, kept)
        rollouts = None
        trainer = TrainerMesh(None, shared.supervisor, timeouts)
        if roles.rollouts:
            if trainer_procs is not None:  # before the workers, which announce their shards
                trainer.shard_news = trainer_procs.spawn("trainer_shards", ShardNews)
            self.rollouts = rollouts = self._rollouts(store_procs, trainer, generators, first_index)
            if evaluator is not None:
                evaluator.listeners.append(rollouts.workers.abandon_evaluation)
            await rollouts.workers.spawn()
        if trainer_procs is not None:
            await self.fleet.join_process_group(
                trainer_procs, one_machine=not config.hosts.across_machines, interface=config.placement.interface
            )
            shape = open_model(self.files.model_dir, config.model.family).shape
            trainer.rows_per_microbatch = microbatch_rows(config, shape)
            setup = TrainerSetup(
                run=config.name,
                seed=config.seed,
                config=config.trainer.model_copy(update={"rows_per_microbatch": trainer.rows_per_microbatch}),
                algorithm=config.algorithm,
                temperature=config.rollout.temperature,
                generator_dtype=config.generator.dtype,
                transports=transports(config) if roles.generators else (),
                verify=config.weights.verify,
                device=self.device,
                checkpoint_dir=self.files.run_dir / "checkpoints",
                keep_checkpoints=config.checkpoint.keep_last,
                store=store,
                export_dtype=export_dtype(config, self.files.model_dir),
                family=config.model.family,
                publishes_adapters=config.publishes_adapters,
                plugins=self.files.plugins,
                faults=config.faults,
                record_bytes=config.logging.record_bytes,
            )
            trainer.mesh = trainer_procs.spawn("trainer", PolicyTrainer, setup)
        weights = WeightSync(
            partial(delete_watched, store, shared.supervisor, timeouts.sync_s),
            push=trainer.push_weights if roles.generators else _push_nothing,
            expect=generators.expect_weights,
            pulls=[partial(generators.pull_weights, replica) for replica in replicas],
            num_listed=config.staleness_bound + 100,
        )
        generators.catch_up = weights.catch_up if roles.trainer else None
        return Parts(
            trainer=trainer if roles.trainer else None,
            generators=generators if roles.generators or roles.rollouts else None,
            evaluator=evaluator,
            rollouts=rollouts,
            weights=weights,
            assembly=self,
        )

    async def _generators(self, roles: Roles, kept: Parts | None) -> tuple[GeneratorMeshes, GeneratorMeshes | None]:
        """Spawn the generators and the background evaluator, or reset kept ones for the restarted run."""
        config, shared, timeouts = self.config, self.shared, self.config.timeouts
        if kept is not None:
            assert kept.generators is not None
            meshes = [mesh for mesh in (kept.generators, kept.evaluator) if mesh is not None]
            await asyncio.gather(*(mesh.start_over(self._source) for mesh in meshes))
            return kept.generators, kept.evaluator
        replicas = range(config.generator.replicas if roles.generators else 0)
        spawns = {f"generator_{replica}": partial(self._spawn_generator, replica=replica) for replica in replicas}
        generators, evaluator = GeneratorMeshes(spawns, shared, timeouts), None
        await generators.spawn()
        if roles.rollouts and config.num_evaluator_ranks:
            first = generator_device(config, config.generator.replicas)  # its devices follow those of the generators
            evaluator = GeneratorMeshes({"evaluator": partial(self._spawn_generator, first_device=first)}, shared, timeouts)
            await evaluator.spawn()
        return generators, evaluator

    def _rollouts(self, store_procs: ProcMesh, trainer: TrainerMesh, generators: GeneratorMeshes, first_index: int) -> Rollouts:
        """Spawn the buffer; return its client and the client of the workers, which are not spawned yet."""
        config, rollout = self.config, self.config.rollout
        num_replayed = config.replay.num_replayed(rollout.groups_per_step)
        actor = store_procs.spawn(
            "store_buffer",
            BufferActor,
            partial(make_mixture, config, self.files.plugins),
            num_slots=config.num_slots,
            dynamic_sampling=rollout.dynamic_sampling,
            window=1 if rollout.replay is not None else config.window_groups,
            first_index=first_index,
            memory=ReplayMemory(config.replay, num_replayed, config.seed) if config.replay.fraction else None,
        )
        supervisor, timeouts = self.shared.supervisor, config.timeouts
        buffer = BufferClient(actor, supervisor, timeouts, rollout.starvation_timeout_s, rollout.groups_per_step)
        workers = RolloutMesh(
            {f"rollout_{n}": partial(self._spawn_worker, n, actor, generators) for n in range(rollout.num_workers)},
            self.shared,
            timeouts,
            buffer=buffer,
            trainer=trainer,
            generators=generators,
            in_rounds=config.max_staleness == 0,
        )
        return Rollouts(workers=workers, buffer=buffer)

    async def _spawn_worker(self, number: int, buffer: Any, generators: GeneratorMeshes, part: Part) -> Worker:
        """Spawn a process with two actors: a rollout worker and its storage shard."""
        config, files, fleet = self.config, self.files, self.fleet
        host, imports = self.hosts.of_worker(number), ("titanrl.rollout.workers",)
        template, cores = await fleet.template("rollout"), worker_cores(config, number)
        procs = fleet.spawn(part.role, host, 1, worker_environment(), imports, template, cores)
        shard = procs.spawn(f"{part.role}_shard", StorageShard, number, config.replay.shard_memory_bytes, files.run_dir)
        save, replay = (None if path is None else path.resolve() for path in (config.rollout.save, config.rollout.replay))
        setup = WorkerSetup(
            number=number,
            life=part.num_lives,
            config=config,
            model_dir=files.model_dir,
            run_dir=files.run_dir,
            buffer=buffer,
            generators=generators.serving,
            plugins=files.plugins,
            notes=None if self.rollouts is None else self.rollouts.workers.notes,
            save=save,
            replay=replay,
        )
        return Worker(procs.spawn(part.role, RolloutWorker, setup), shard)

    async def _spawn_generator(self, part: Part, replica: int = 0, first_device: int | None = None) -> Replica:
        """Spawn a generator replica, or with `first_device` the background evaluator, with the current source of weights."""
        setup = generator_setup(self.config, self.device, self.files, self.config.model.family, self._source)
        return await self._engine(part, self.config, setup, replica, first_device)

    async def _engine(
        self, part: Part, config: Config, setup: GeneratorSetup, replica: int = 0, first_device: int | None = None
    ) -> Replica:
        """Spawn the processes of an engine on the replica's host, one per tensor-parallel rank, and their actors."""
        fleet, tp = self.fleet, setup.config.tp
        environment = generator_environment(config, self.device, replica)
        if first_device is not None:
            environment |= visible(self.device, range(first_device, first_device + tp))
            environment[THREADS] = "1"  # evaluates while the other processes run
        imports, host = (*IMPORTS, "titanrl.weights.transfer", "titanrl.generator.actor"), self.hosts.of_generator(replica)
        template, cores = await fleet.template("generator"), generator_cores(self.config, replica)
        procs = fleet.spawn(part.role, host, tp, environment, imports, template, cores)
        if tp > 1:
            await fleet.join_process_group(
                procs, one_machine=not config.hosts.across_machines, interface=config.placement.interface
            )
        return Replica.of(procs.spawn(part.role, Generator, setup))

    async def spawn_teacher(self, parts: Parts, engine: GeneratorConfig, files: RunFiles) -> GeneratorMeshes:
        """Start one generator replica with the frozen weights of `files.model_dir`; `parts.close` closes it.

        Its devices follow those of the generators and earlier teachers.
        """
        name = f"teacher_{len(parts.teacher_ranks)}"
        first = generator_device(self.config, self.config.generator.replicas) + sum(parts.teacher_ranks)
        parts.teacher_ranks.append(engine.tp)
        config = self.config.model_copy(update={"generator": engine})
        setup = generator_setup(config, self.device, files, None, None)
        spawn = partial(self._engine, config=config, setup=setup, first_device=first)
        teacher = GeneratorMeshes({name: spawn}, self.shared, config.timeouts)
        parts.teachers.append(teacher)
        await teacher.spawn()
        await teacher.start()
        return teacher


async def _push_nothing(version: int) -> Sequence[WeightManifest]:
    """Publish no weights, because there are no generators to pull them."""
    return ()


def generator_setup(
    config: Config, device: Device, files: RunFiles, family: str | None, source: WeightSource | None
) -> GeneratorSetup:
    """Return the setup of a generator. Without a source, it loads the weights in the directory into vLLM's native model."""
    generator = config.generator
    if source is None:
        options = {"model_impl": "native", "vllm": {**generator.vllm, "load_format": LOAD_FORMAT}}
        generator = generator.model_copy(update=options)
    limit = open_model(files.model_dir, family).shape.max_positions
    return GeneratorSetup(
        model_dir=files.model_dir,
        config=generator,
        device=device,
        max_len=min(config.max_sampled_tokens + 1, limit),  # one more, for the log-probabilities of a complete sequence
        stop_ids=files.stop_ids,
        source=source,
        family=family,
        lora=config.trainer.lora if source is not None and config.publishes_adapters else None,
        num_held=config.weights.held_adapters if source is not None else 0,
        has_expert_bias=source is not None and config.trainer.expert_bias_rate > 0,
    )


def transports(config: Config) -> Sequence[TransportName]:
    """Return the transports on which the trainer offers weights; each generator uses the first that reaches it."""
    if config.weights.transport != "auto":
        return (config.weights.transport,)
    return ("arena",) if config.hosts.kind == "local" else ("arena", "rdma")


async def delete_watched(store: WeightStore, supervisor: Supervisor, timeout_s: float, key: str) -> None:
    """Delete a key of the weight store in a supervised request, which fails if the run has failed."""
    await supervisor.ask("store.delete", store.delete(key), timeout_s)
