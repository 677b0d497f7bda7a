"""Start the processes and actors of a session, connect them, and shut them down.

`assemble` is the entry point. It acquires the hosts, spawns the requested roles, and returns `Parts`, the clients of the
running actors. `Assembly` also spawns the replacements of generators and rollout workers that die later.

`acquire_hosts` returns `Hosts`, which maps roles to this machine, hosts emulated on it, Slurm nodes, hosts of a launcher, or
Kubernetes pods. A `Fleet` holds the process meshes on them: spawned with the environment of their role, watched, and
stopped together.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.config import reload_config_from_env
from monarch._src.job.service_identity import allocate_service_proc_ids  # importing monarch.job would load a web server
from monarch.actor import HostMesh, ProcMesh, attach_to_workers, default_bootstrap_cmd, enable_transport
from monarch.config import configure
from monarch.spmd import setup_torch_elastic_env_async
from monarch.tools.network import AddrType

from titanrl.base import terminal
from titanrl.base.errors import FaultError, TitanRLError
from titanrl.base.ownership import receive_own
from titanrl.base.plugins import Plugins
from titanrl.carriers.record import span_bytes
from titanrl.config.device import Device, DeviceKind, resolve_device
from titanrl.config.schema import Config
from titanrl.config.sections import FaultsConfig, GeneratorConfig, TransportName
from titanrl.config.sizes import HostPlace, host_counts, microbatch_rows, replica_place, store_place, worker_place
from titanrl.data.mixture import make_mixture
from titanrl.generator.actor import Generator, GeneratorSetup
from titanrl.hosts.holder import LOST_S, LeasedHosts, Order, Provider, Say, is_loopback
from titanrl.hosts.kinds import EmulatedHosts, kind_of
from titanrl.hosts.launcher import Crew, LauncherError, LauncherHosts
from titanrl.launch.generators import BufferClient, GeneratorMeshes, Replica, RolloutMesh, WeightSync, Worker
from titanrl.launch.roles import Roles, RunFiles, needed
from titanrl.launch.supervision import OnEvent, Part, SharedContext, Supervisor, Watchdog
from titanrl.launch.trainer_mesh import TrainerMesh
from titanrl.metrics.console import Console
from titanrl.metrics.run_directory import RunLock
from titanrl.models.directory import export_dtype, open_model
from titanrl.models.family import LOAD_FORMAT
from titanrl.processes.actors import LOOPBACK, ProcessVariables, set_up_process
from titanrl.processes.bootstrap import ANNOUNCEMENTS, NAME, PARENT, TEMPLATE
from titanrl.processes.children import RespawnLimitError, Respawns
from titanrl.processes.machine import CORES, THREADS, Cores
from titanrl.processes.templates import BASE, Template, shared_template
from titanrl.processes.temporary import private_folder, private_sockets
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

POLL = "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY"
"""Environment variable with the interval of torchmonarch's polls; `configure` does not know it."""
POLL_S = 5
"""Interval of the polls in seconds. A shorter one notices a dead process earlier, but each poll leaves 10 kB per mesh in the
controller's memory."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """Assignment of roles to the acquired hosts."""

    config: Config
    local: HostMesh
    """The controller's host."""
    provider: Provider | None
    """The allocation; None if the run only uses this machine directly."""
    meshes: Mapping[str, HostMesh] = field(default_factory=dict)
    """Host meshes by name (`trainers`, `generators`); empty if the controller's host is the only one."""

    @property
    def trainer(self) -> HostMesh:
        """Hosts of the trainer ranks."""
        return self.meshes.get("trainers", self.local)

    @property
    def store(self) -> HostMesh:
        """Host of the replay buffer and the weight store."""
        return self._first_alive([store_place(self.config)], "store")

    def of_generator(self, replica: int) -> HostMesh:
        """Return the host for a replica's processes. If it is lost, return the host of the next replica."""
        return self._first_alive(self._replica_places(replica), f"generator_{replica}")

    def of_worker(self, worker: int) -> HostMesh:
        """Return the host for a rollout worker's process. If it is lost, return the host of a generator replica."""
        return self._first_alive([worker_place(self.config, worker), *self._replica_places(worker)], f"rollout_{worker}")

    def _replica_places(self, first: int) -> list[HostPlace]:
        count = self.config.generator.replicas if self.config.num_generator_ranks else 0
        return [replica_place(self.config, (first + step) % count) for step in range(count)]

    def _first_alive(self, places: Sequence[HostPlace | None], role: str) -> HostMesh:
        """Return the first host that is not lost; raise `FaultError` if all are."""
        for place in places:
            if place is None or not self.meshes:
                return self.local
            mesh, number = place
            ranks = [(name, index) for name, count in host_counts(self.config).items() for index in range(count)]
            if self.provider is None or not self.provider.has_ended(ranks.index(place)):
                return self.meshes[mesh].slice(hosts=number)
        raise FaultError("all hosts for this role are lost", role)

    def are_alive(self) -> bool:
        """Return True if every host is known to be alive."""
        ranks = range(sum(host_counts(self.config).values()))
        return self.provider is None or not any(map(self.provider.has_ended, ranks))

    async def close(self) -> None:
        """Release the allocation, and kill torchmonarch's host processes, which would otherwise outlive the controller."""
        if self.provider is not None:
            await self.provider.kill()


async def acquire_hosts(
    config: Config, device: DeviceKind, log_dir: Path, supervisor: Supervisor, *, say: Say, warn: Say
) -> Hosts:
    """Acquire the hosts that a configuration requests; wait in the scheduler's queue if necessary.

    The supervisor replaces the roles on a lost host, or fails the run. `say` is called with what startup is waiting for, `warn`
    when the scheduler terminates the hosts.
    """
    hosts, meshes = config.hosts, host_counts(config)
    if not hosts.across_machines:
        wait_for_stopped_processes()
        local = local_host()
        if hosts.kind == "local":
            return Hosts(config, local, None)
        emulated = EmulatedHosts(meshes)
        acquired = await start_hosts(emulated, meshes)
        return Hosts(config, local, emulated, acquired)
    provider: LeasedHosts
    kind = kind_of(config)
    if kind is not None and (make := kind.make) is not None:
        provider = make(Order(config, device, log_dir, say))
    elif Crew.current is not None:
        provider = LauncherHosts(Crew.current, config.timeouts.start_s, say)
    else:
        raise LauncherError(
            "hosts.kind: only the commands train, sft and distill run under a launcher (got launcher). "
            "Set it to local, process, slurm or kubernetes."
        )
    provider.on_ending = partial(_end_with_hosts, supervisor, hosts.kind, warn)
    provider.on_lost = partial(supervisor.lose_host, is_replaceable=device == "cpu")  # other hosts have no free accelerators
    try:
        # Before the first use of Monarch. If all hosts are on this machine, none needs to listen on the network.
        on_this_machine = isinstance(provider, LauncherHosts) and is_loopback(provider.crew.address)
        enable_transport("ipc" if on_this_machine else "tcp")
        match_timeouts_to_leases()
        acquired = await start_hosts(provider, meshes)
    except BaseException:  # including interrupts: no allocation may outlive a failed start
        await provider.kill()
        raise
    return Hosts(config, local_host(), provider, acquired)


async def start_hosts(provider: Provider, counts: Mapping[str, int]) -> dict[str, HostMesh]:
    """Start the hosts, given their number per mesh; attach to them, and return the meshes, which are ranges in rank order."""
    identities = [str(identity) for identity in allocate_service_proc_ids(sum(counts.values()))]  # as Monarch's job classes do
    addresses, meshes = iter(await provider.start(identities)), {}
    with private_sockets():
        for name, count in counts.items():
            workers = list(itertools.islice(addresses, count))
            meshes[name] = attach_to_workers(name=name, ca="trust_all_connections", workers=workers)
    return meshes


def match_timeouts_to_leases() -> None:
    """Make torchmonarch report a lost host as early as its lease does, and keep this process alive despite lost messages.

    By default, torchmonarch reports a lost host a minute later, when its roles have already been replaced. It also terminates
    this process 30 s after a message to a dead host, although the run has continued without that host.

    Only torchmonarch notices the death of a process on another host, so it polls these processes.
    """
    configure(get_proc_state_max_idle=f"{LOST_S}s", get_actor_state_max_idle=f"{LOST_S}s", message_delivery_timeout="30d")
    if os.environ.get(POLL) == "1h":  # the user has not set another interval than `titanrl` does
        os.environ[POLL] = f"{POLL_S}s"
        reload_config_from_env()


def _end_with_hosts(supervisor: Supervisor, kind: str, warn: Say, cause: str) -> None:
    """End the run like a signal, so that it can save. A session in another program has no signal handler, so it fails."""
    if terminal.is_ending():  # most schedulers also signal this process, and a second signal would end it immediately
        return
    warn(cause)
    if callable(signal.getsignal(signal.SIGTERM)):
        signal.raise_signal(signal.SIGTERM)
    else:
        supervisor.fail(TitanRLError(f"hosts.{kind}: {cause}"))


def wait_for_stopped_processes() -> None:
    """Turn off torchmonarch's timeouts for suspended or busy processes; for runs on this machine only.

    If all processes are suspended together (Ctrl-Z), each would conclude that the others are dead. On one machine the timeouts
    are unnecessary: no process outlives the controller, and pidfds report exits. The watchdog reports a stopped process, which
    torchmonarch would treat as crashed after 30 s.
    """
    patience = {"supervision_watchdog_timeout": "30d", "message_delivery_timeout": "30d", "get_actor_state_max_idle": "30d"}
    configure(mesh_orphan_timeout="30d", **patience)


def local_host() -> HostMesh:
    """Return this machine as a host. Only the current user can connect to its processes; see `private_sockets`."""
    with private_sockets():
        return monarch.actor.this_host()


_PROGRAM = "from titanrl.processes.bootstrap import main; main()"
RETIRE_S = 5.0
"""Seconds that the processes of a part have to stop before the part is respawned."""
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_LOOPBACK_VARIABLES = {
    "TORCHELASTIC_USE_AGENT_STORE": "True",  # otherwise torch starts a store, which listens on all interfaces
    **dict.fromkeys(_INTERFACE_VARIABLES, "lo"),
}


class Fleet:
    """All process meshes of a run."""

    def __init__(
        self,
        log_dir: Path,
        supervisor: Supervisor,
        *,
        faults: FaultsConfig | None = None,
        warn: Callable[[str], None] = logger.warning,
        own_children: bool = True,
        have_names: bool = True,
        span_bytes: int = 0,
    ) -> None:
        """Start no process.

        `faults` limits the replacements of templates, which are reported to `warn`. With `own_children`, this process starts
        all processes, so that they are tied to its life. `have_names` is False if hosts cannot resolve each other's names, like
        Kubernetes pods. `span_bytes` limits the spans that a process records; with 0 it records none.
        """
        self._log_dir, self._span_bytes = log_dir, span_bytes
        self._supervisor = supervisor
        self._address = None if have_names else AddrType.IPv4
        self._parent = {PARENT: str(os.getpid())} if own_children else {}
        self._meshes: dict[str, ProcMesh] = {}  # by role
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._announcements = _Announcements(supervisor)
        self._templates: dict[str, Template] = {}  # by kind
        self._imports: dict[str, tuple[Mapping[str, str], Callable[[], None]]] = {}  # of these templates
        self._replaced: list[Template] = []  # stopped by a signal, but with forks that run
        self._replacing: set[asyncio.Task[None]] = set()
        self._respawns, self._warn = Respawns(faults or FaultsConfig()), warn
        self._shared: dict[str, str] = {}  # socket paths of shared templates, by kind

    def prepare(self, kind: str, environment: Mapping[str, str], load: Callable[[], None]) -> None:
        """Start a template for processes of this machine, unless one is running or other hosts start the processes.

        The packages that `load` imports read the variables of the environment. The template of the kind BASE must be prepared
        before those that are forked from it.
        """
        template = self._templates.get(kind)
        if not self._parent or (template is not None and not template.has_ended):
            return
        self._shared.pop(kind, None)
        if (shared := shared_template(environment, load)) is not None:
            self._shared[kind] = shared
            return
        if template is not None:
            template.close()
        self._start_template(kind, environment, load)

    def _start_template(self, kind: str, environment: Mapping[str, str], load: Callable[[], None]) -> Template:
        base = self._templates.get(BASE)
        path = None if kind == BASE else base.path if base is not None else self._shared.get(BASE)
        template = self._templates[kind] = Template(environment, load, self._log_dir / f"template_{kind}.log", base=path)
        self._imports[kind] = environment, load
        attending = asyncio.create_task(self._attend_template(kind, template), name=f"attend template_{kind}")
        self._replacing.add(attending)
        attending.add_done_callback(self._replacing.discard)
        return template

    async def _attend_template(self, kind: str, template: Template) -> None:
        """Watch a template as soon as its process exists."""
        on_fault = partial(self._on_template_fault, kind, template)
        if pid := await template.started():
            try:
                self._supervisor.attend(f"template_{kind}_0", pid, on_fault)
            except ProcessLookupError:
                on_fault(f"template_{kind} exited")

    def _on_template_fault(self, kind: str, template: Template, cause: str) -> None:
        """Replace a template that was killed, and with it its forks, or stopped. A stopped one stays, for its forks."""
        is_stopped, base = not template.has_ended, self._templates.get(BASE)
        if template is not self._templates.get(kind) or not (is_stopped or template.was_killed):
            return
        if not is_stopped and base is not None and base is not template and base.has_ended:
            return  # it died with its base, which is replaced together with its forks
        self._supervisor.record("fault", cause=cause)
        try:
            self._respawns.add(f"template_{kind}", cause)
        except RespawnLimitError as error:
            self._warn(f"{error}. Later processes import their packages themselves.")
            return
        is_kept = is_stopped and template.has_forked
        forks = [other for other in self._templates if kind == BASE and other != kind]
        ended = [other for other in forks if not (is_kept and self._templates[other].pid)]  # or not even started
        if is_kept:
            self._replaced.append(template)
        else:
            template.close()
        for other in ended:
            self._templates[other].close()
        new, *_ = [self._start_template(each, *self._imports[each]) for each in (kind, *ended)]
        task = asyncio.create_task(self._report_template(kind, new, cause), name=f"replace template_{kind}")
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _report_template(self, kind: str, template: Template, cause: str) -> None:
        started = time.perf_counter()
        if await template.is_ready():
            seconds = time.perf_counter() - started
            self._supervisor.record("respawn", part=f"template_{kind}", cause=cause, seconds=round(seconds, 3))
            self._warn(f"{cause}; replaced after {seconds:.1f} s")

    async def template(self, kind: str) -> str | None:
        """Wait until a template is ready; return its socket path, or None if it does not exist, has failed or is stopped."""
        if kind in self._shared:
            return self._shared[kind]
        template = self._templates.get(kind)
        return template.path if template is not None and await template.is_ready() else None

    def spawn(
        self,
        role: str,
        host: HostMesh,
        num_procs: int,
        environment: Mapping[str, str],
        imports: Sequence[str],
        template: str | None = None,
        cores: Cores | None = None,
    ) -> ProcMesh:
        """Start `num_procs` processes on each host of a mesh, in the background.

        The role is the mesh's name, and the prefix of its log and pid files. The variables of the environment are set before
        the interpreter starts, or in the fork of the template with this socket path; without a template, the processes import
        everything themselves. `imports` are the modules of the actors that will be spawned; see `set_up_process`.
        """
        for stale in self._log_dir.glob(f"{role}_*.pid"):  # left by a killed run in this directory
            stale.unlink()
        variables = {**environment, **self._parent, ANNOUNCEMENTS: self._announcements.path}
        if template is not None:
            variables[TEMPLATE] = template
        path = [os.path.abspath(entry) for entry in sys.path]
        command = type(default_bootstrap_cmd())(sys.executable, None, ["-c", _PROGRAM], variables)
        mesh = host.spawn_procs(
            per_host={"procs": num_procs},
            bootstrap=partial(set_up_process, role, self._log_dir, imports, path, self._span_bytes),
            bootstrap_command=lambda point: command.with_env(
                {NAME: f"{role}_{point.rank}", **({} if cores is None else {CORES: cores.text(point.rank % num_procs)})}
            ),
            name=role,
        )
        self._meshes[role] = mesh
        self._watches[role] = asyncio.create_task(self._watch_remote(role, mesh))
        return mesh

    async def join_process_group(self, procs: ProcMesh, *, one_machine: bool, interface: str | None = None) -> None:
        """Set the environment variables with which torch.distributed forms a process group.

        Ranks on one machine communicate over loopback only. Without an `interface` between hosts, each library chooses one.
        """
        if not one_machine:
            await setup_torch_elastic_env_async(procs, use_ipaddr=self._address)
            if interface is not None:
                names: Any = procs.spawn("interface", ProcessVariables)
                await names.set.call(dict.fromkeys(_INTERFACE_VARIABLES, interface))
            return
        ranks: Any = procs.spawn("loopback", ProcessVariables)
        first = ranks.slice(**dict.fromkeys(procs.sizes, 0))
        await setup_torch_elastic_env_async(procs, LOOPBACK, await first.open_store.call_one())
        await ranks.set.call(_LOOPBACK_VARIABLES)

    async def retire(self, role: str) -> None:
        """Stop the processes of a role, most of which have exited, and forget the role."""
        self._watches[role].cancel()
        await asyncio.gather(self._watches.pop(role), return_exceptions=True)
        mesh = self._meshes.pop(role)
        with contextlib.suppress(Exception):  # the mesh or its host may be dead; the supervisor has seen the processes exit
            await asyncio.wait_for(mesh.stop().as_asyncio(), RETIRE_S)

    async def retire_all_but(self, kept: Collection[str]) -> None:
        """Stop and forget every role outside `kept`. The supervisor has already killed the processes."""
        await asyncio.gather(*(self.retire(role) for role in self._meshes.keys() - set(kept)))

    async def stop(self, timeout_s: float) -> None:
        """Stop every process; torchmonarch kills the ones that do not exit, and their errors are raised."""
        for watch in self._watches.values():
            watch.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)  # they have failed if the start failed
        meshes, self._meshes = self._meshes, {}
        stops = [asyncio.wait_for(mesh.stop().as_asyncio(), timeout_s) for mesh in meshes.values()]
        results = await asyncio.gather(*stops, return_exceptions=True)
        self._announcements.close()
        for task in self._replacing:
            task.cancel()
        for template in (*reversed(self._templates.values()), *self._replaced):  # the base last, which reaps the others
            template.close()
        self._templates.clear()
        self._replaced.clear()
        for file in self._log_dir.glob("*.pid"):
            file.unlink()
        failures = [result for result in results if isinstance(result, Exception)]
        if failures:
            raise ExceptionGroup("processes did not stop in time; they exit with the controller", failures)

    async def _watch_remote(self, role: str, mesh: ProcMesh) -> None:
        """Register the processes of a mesh with the supervisor, from their pid files (`set_up_process`)."""
        await mesh.initialized
        for file in sorted(self._log_dir.glob(f"{role}_*.pid")):
            pid, host = file.read_text().split()
            self._supervisor.watch(file.stem, int(pid), None if host == socket.gethostname() else host)


class _Announcements:
    """Socket on which new processes of this machine announce themselves, so that they are watched from their start."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._folder = private_folder()
        self.path = str(self._folder.path / "announcements")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(self.path)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._receive)

    def _receive(self) -> None:
        message = receive_own(self._socket, 1024)
        if message is None:
            logger.warning("another user sent an announcement, which was ignored")
            return
        pid, host, name = message.decode().split()
        if host == socket.gethostname():  # another host may reach the socket on a shared file system, but its pids differ
            self._supervisor.watch(name, int(pid))

    def close(self) -> None:
        """Stop listening, and delete the socket."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            self._folder.delete()


# The actors of a session

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
            section = config.trainer.model_copy(update={"rows_per_microbatch": trainer.rows_per_microbatch})
            setup = TrainerSetup(
                config=config.model_copy(update={"trainer": section}),
                device=self.device,
                run_dir=self.files.run_dir,
                store=store,
                transports=transports(config) if roles.generators else (),
                export_dtype=export_dtype(config, self.files.model_dir),
                plugins=self.files.plugins,
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
            dynamic_sampling=None if rollout.replay is not None else rollout.dynamic_sampling,
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
        imports, host = (*IMPORTS, "titanrl.weights.transport", "titanrl.generator.actor"), self.hosts.of_generator(replica)
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
