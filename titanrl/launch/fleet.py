"""The processes of a run, spawned with the environment of their role and stopped together."""

import asyncio
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from monarch.actor import HostMesh, ProcMesh, default_bootstrap_cmd
from monarch.spmd import setup_torch_elastic_env_async

from titanrl.actors import set_up_process
from titanrl.launch.supervision import Supervisor


class Fleet:
    """All process meshes of a run."""

    def __init__(self, log_dir: Path, supervisor: Supervisor) -> None:
        """Start without processes.

        Args:
            log_dir: folder of the processes' logs and pid files.
            supervisor: watches the processes.
        """
        self._log_dir = log_dir
        self._supervisor = supervisor
        self._meshes: list[ProcMesh] = []
        self._watches: dict[str, asyncio.Task[None]] = {}

    def spawn(
        self, role: str, host: HostMesh, num_procs: int, environment: Mapping[str, str], imports: Sequence[str]
    ) -> ProcMesh:
        """Start processes on each host of a mesh, in the background.

        Args:
            role: prefix of log and pid files.
            host: hosts of the processes.
            num_procs: processes on each host.
            environment: variables set before the interpreter starts.
            imports: modules of the actors to be spawned there; see `set_up_process`.
        """
        for stale in self._log_dir.glob(f"{role}_*.pid"):  # left by a killed run in this directory
            stale.unlink()
        mesh = host.spawn_procs(
            per_host={"procs": num_procs},
            bootstrap=partial(set_up_process, role, self._log_dir, imports),
            bootstrap_command=default_bootstrap_cmd().with_env(dict(environment)),
            name=role,
        )
        self._meshes.append(mesh)
        self._watches[role] = asyncio.create_task(self._watch_started(role, mesh))
        return mesh

    async def _watch_started(self, role: str, mesh: ProcMesh) -> None:
        await mesh.initialized
        self._watch(role)

    def _watch(self, role: str) -> None:
        """Watch the processes of a mesh that have written their pid file (`set_up_process`)."""
        for file in sorted(self._log_dir.glob(f"{role}_*.pid")):
            pid, host = file.read_text().split()
            if host == socket.gethostname():
                self._supervisor.watch(file.stem, int(pid))
            else:
                self._supervisor.trust_reports()

    async def stop(self, timeout_s: float) -> None:
        """Stop every process; torchmonarch kills those that do not end.

        Raises:
            ExceptionGroup: processes did not stop in time.
        """
        for role, watch in self._watches.items():
            if watch.cancel():  # still starting; the processes it has must end, too
                self._watch(role)
        await asyncio.gather(*self._watches.values(), return_exceptions=True)  # a failed start has failed every call already
        meshes, self._meshes = self._meshes, []
        stops = [asyncio.wait_for(mesh.stop().as_asyncio(), timeout_s) for mesh in meshes]
        results = await asyncio.gather(*stops, return_exceptions=True)
        for file in self._log_dir.glob("*.pid"):
            file.unlink()
        failures = [result for result in results if isinstance(result, Exception)]
        if failures:
            raise ExceptionGroup("processes did not stop in time; they end with the controller", failures)


async def join_process_group(procs: ProcMesh, *, one_machine: bool) -> None:
    """Set the variables by which torch.distributed ranks find each other; on one machine they use loopback only."""
    if one_machine:
        await setup_torch_elastic_env_async(procs, "127.0.0.1", free_port())
    else:
        await setup_torch_elastic_env_async(procs)


def free_port() -> int:
    """Return an unused TCP port of this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
