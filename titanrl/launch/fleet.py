"""The hosts of a run, and the process meshes on them: spawned with the environment of their role, watched, stopped together.

`acquire_hosts` returns `Hosts`, which maps roles to this machine, hosts emulated on it, Slurm nodes, hosts of a launcher, or
Kubernetes pods.
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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
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
from titanrl.base.choices import DeviceKind
from titanrl.base.errors import FaultError, TitanRLError
from titanrl.base.ownership import receive_own
from titanrl.config.schema import Config
from titanrl.config.sections import FaultsConfig
from titanrl.config.sizes import HostPlace, host_counts, replica_place, store_place, worker_place
from titanrl.hosts.kinds import EmulatedHosts, kind_of
from titanrl.hosts.launcher import Crew, LauncherError, LauncherHosts
from titanrl.hosts.leases import LOST_S, LeasedHosts, Order, Provider, Say, is_loopback
from titanrl.launch.supervision import Supervisor
from titanrl.processes.actors import LOOPBACK, ProcessVariables, set_up_process
from titanrl.processes.bootstrap import ANNOUNCEMENTS, NAME, PARENT, TEMPLATE
from titanrl.processes.children import RespawnLimitError, Respawns
from titanrl.processes.machine import CORES, Cores
from titanrl.processes.private_sockets import private_sockets
from titanrl.processes.templates import BASE, Template, shared_template
from titanrl.processes.temporary import private_folder

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
logger = logging.getLogger(__name__)

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
            if host == socket.gethostname():
                self._supervisor.watch(file.stem, int(pid))
            else:
                self._supervisor.watch_remote(file.stem, int(pid), host)


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
