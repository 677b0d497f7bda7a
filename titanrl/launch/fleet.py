"""Process meshes of a run: spawned with the environment of their role, watched, and stopped together."""

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monarch.actor import HostMesh, ProcMesh, default_bootstrap_cmd
from monarch.spmd import setup_torch_elastic_env_async
from monarch.tools.network import AddrType

from titanrl.base.ownership import receive_own
from titanrl.config.sections import FaultsConfig
from titanrl.launch.supervision import Supervisor
from titanrl.processes.actors import ProcessVariables, set_up_process
from titanrl.processes.bootstrap import ANNOUNCEMENTS, NAME, PARENT, TEMPLATE
from titanrl.processes.children import RespawnLimitError, Respawns
from titanrl.processes.machine import CORES, Cores
from titanrl.processes.templates import Template, shared_template
from titanrl.processes.temporary import private_folder

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_PROGRAM = "from titanrl.processes.bootstrap import main; main()"
RETIRE_S = 5.0
"""Seconds that the processes of a part have to stop before the part is respawned."""
logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_LOOPBACK_VARIABLES = {
    "TORCHELASTIC_USE_AGENT_STORE": "True",  # otherwise rank 0 starts a store, which listens on all interfaces
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
    ) -> None:
        """Start without processes.

        Args:
            log_dir: folder of the processes' logs and pid files.
            supervisor: watches the processes.
            faults: limit on replacements of templates.
            warn: called with a message for the user about such a replacement.
            own_children: True if this process starts all processes, so that they are tied to its life.
            have_names: False if hosts cannot resolve each other's names, like Kubernetes pods.
        """
        self._log_dir = log_dir
        self._supervisor = supervisor
        self._address = None if have_names else AddrType.IPv4
        self._parent = {PARENT: str(os.getpid())} if own_children else {}
        self._meshes: dict[str, ProcMesh] = {}  # by role
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._stores: dict[int, TCPStore] = {}  # by `id` of the mesh
        self._announcements = _Announcements(supervisor)
        self._templates: dict[str, Template] = {}  # by kind
        self._replaced: list[Template] = []  # stopped by a signal, but with forks that run
        self._replacing: set[asyncio.Task[None]] = set()
        self._respawns, self._warn = Respawns(faults or FaultsConfig()), warn
        self._shared: dict[str, str] = {}  # socket paths of shared templates, by kind

    def prepare(self, kind: str, environment: Mapping[str, str], load: Callable[[], None]) -> None:
        """Start a template for processes of this machine, unless one is running or other hosts start the processes.

        Args:
            kind: name of the template, such as `generator`.
            environment: variables that the packages read when they are imported.
            load: function that imports the packages.
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
        template = self._templates[kind] = Template(environment, load, self._log_dir / f"template_{kind}.log")
        on_fault = partial(self._on_template_fault, kind, template, environment, load)
        self._supervisor.attend(f"template_{kind}_0", template.pid, on_fault)
        return template

    def _on_template_fault(
        self, kind: str, template: Template, environment: Mapping[str, str], load: Callable[[], None], cause: str
    ) -> None:
        """Replace a template that was killed, and with it its forks, or stopped. A stopped one stays, for its forks."""
        is_stopped = not template.has_ended
        if template is not self._templates.get(kind) or not (is_stopped or template.was_killed):
            return
        self._supervisor.record("fault", cause=cause)
        try:
            self._respawns.add(f"template_{kind}", cause)
        except RespawnLimitError as error:
            self._warn(f"{error}. Later processes import their packages themselves.")
            return
        if is_stopped and template.has_forked:
            self._replaced.append(template)
        else:
            template.close()
        new = self._start_template(kind, environment, load)
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
        """Start processes on each host of a mesh, in the background.

        Args:
            role: name of the mesh, and prefix of its log and pid files.
            host: hosts of the processes.
            num_procs: processes on each host.
            environment: variables set before the interpreter starts.
            imports: modules of the actors that will be spawned; see `set_up_process`.
            template: socket path of the template to fork; without it, the processes import everything themselves.
            cores: CPU cores of these processes on their host; None binds nothing.
        """
        for stale in self._log_dir.glob(f"{role}_*.pid"):  # left by a killed run in this directory
            stale.unlink()
        variables = {**environment, **self._parent, ANNOUNCEMENTS: self._announcements.path}
        if template is not None:
            variables[TEMPLATE] = template
        command = type(default_bootstrap_cmd())(sys.executable, None, ["-c", _PROGRAM], variables)
        mesh = host.spawn_procs(
            per_host={"procs": num_procs},
            bootstrap=partial(set_up_process, role, self._log_dir, imports, [os.path.abspath(entry) for entry in sys.path]),
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

        Args:
            procs: processes of the ranks.
            one_machine: True if all ranks are on this machine; they then communicate over loopback only.
            interface: network interface between hosts; None lets each library choose.
        """
        if not one_machine:
            await setup_torch_elastic_env_async(procs, use_ipaddr=self._address)
            if interface is not None:
                names: Any = procs.spawn("interface", ProcessVariables)
                await names.set.call(dict.fromkeys(_INTERFACE_VARIABLES, interface))
            return
        store = _loopback_store()
        self._stores[id(procs)] = store
        await setup_torch_elastic_env_async(procs, store.host, store.port)
        variables: Any = procs.spawn("loopback", ProcessVariables)
        await variables.set.call(_LOOPBACK_VARIABLES)

    async def retire(self, role: str) -> None:
        """Stop the processes of a role, most of which have exited, and forget the role."""
        self._watches[role].cancel()
        await asyncio.gather(self._watches.pop(role), return_exceptions=True)
        mesh = self._meshes.pop(role)
        self._stores.pop(id(mesh), None)
        with contextlib.suppress(Exception):  # the mesh or its host may be dead; the supervisor has seen the processes exit
            await asyncio.wait_for(mesh.stop().as_asyncio(), RETIRE_S)

    async def retire_all_but(self, kept: Collection[str]) -> None:
        """Stop and forget every role outside `kept`. The supervisor has already killed the processes."""
        await asyncio.gather(*(self.retire(role) for role in self._meshes.keys() - set(kept)))

    async def stop(self, timeout_s: float) -> None:
        """Stop every process; torchmonarch kills the ones that do not exit.

        Raises:
            ExceptionGroup: Processes did not stop in time.
        """
        for watch in self._watches.values():
            watch.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)  # they have failed if the start failed
        meshes, self._meshes = self._meshes, {}
        stops = [asyncio.wait_for(mesh.stop().as_asyncio(), timeout_s) for mesh in meshes.values()]
        results = await asyncio.gather(*stops, return_exceptions=True)
        self._announcements.close()
        self._stores.clear()
        for task in self._replacing:
            task.cancel()
        for template in (*self._templates.values(), *self._replaced):
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


def _loopback_store() -> "TCPStore":
    """Start a store for a process group of this machine. By default, torch's stores listen on all interfaces."""
    from torch.distributed import TCPStore

    with socket.socket() as listener:
        listener.bind((_LOOPBACK, 0))
        port = listener.getsockname()[1]
        return TCPStore(_LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
