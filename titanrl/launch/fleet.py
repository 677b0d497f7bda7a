"""The processes of a run: spawned with the environment their role needs, and stopped together."""

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
    """Process meshes, by the order they were spawned in."""

    def __init__(self, log_dir: Path, supervisor: Supervisor) -> None:
        """Processes log to `log_dir`; the supervisor is told of those of this machine."""
        self._log_dir = log_dir
        self._supervisor = supervisor
        self._meshes: list[ProcMesh] = []
        self._watches: dict[str, asyncio.Task[None]] = {}

    def spawn(
        self, role: str, host: HostMesh, num_procs: int, environment: Mapping[str, str], imports: Sequence[str]
    ) -> ProcMesh:
        """Start processes on each host of a mesh; torchmonarch does so in the background.

        Args:
            role: what log files are named after.
            host: where.
            num_procs: processes on each host.
            environment: variables set before their interpreter starts.
            imports: modules of the actors that will live there; see `set_up_process`.
        """
        for stale in self._log_dir.glob(f"{role}_*.pid"):  # of a run in this directory that was killed
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
        """Have the supervisor watch a mesh's processes, as far as `set_up_process` has told who they are."""
        for file in sorted(self._log_dir.glob(f"{role}_*.pid")):
            pid, host = file.read_text().split()
            if host == socket.gethostname():
                self._supervisor.watch(file.stem, int(pid))
            else:
                self._supervisor.trust_reports()

    async def stop(self, timeout_s: float) -> None:
        """Stop every process; torchmonarch kills those that do not end by themselves."""
        for role, watch in self._watches.items():
            if watch.cancel():  # it was still starting; what there is of it must end, too
                self._watch(role)
        await asyncio.gather(*self._watches.values(), return_exceptions=True)  # what failed there fails every call, too
        meshes, self._meshes = self._meshes, []
        stops = [asyncio.wait_for(mesh.stop().as_asyncio(), timeout_s) for mesh in meshes]
        results = await asyncio.gather(*stops, return_exceptions=True)
        for file in self._log_dir.glob("*.pid"):
            file.unlink()
        failures = [result for result in results if isinstance(result, Exception)]
        if failures:
            raise ExceptionGroup("processes did not stop in order; they end with the controller", failures)


async def join_process_group(procs: ProcMesh, *, one_machine: bool) -> None:
    """Give every rank what torch.distributed needs to meet the others; on one machine only through loopback."""
    if one_machine:
        await setup_torch_elastic_env_async(procs, "127.0.0.1", free_port())
    else:
        await setup_torch_elastic_env_async(procs)


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
