"""The processes of a run: spawned with the environment their role needs, and stopped together."""

import asyncio
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from monarch.actor import HostMesh, ProcMesh, default_bootstrap_cmd
from monarch.spmd import setup_torch_elastic_env_async

from titanrl.actors import set_up_process


class Fleet:
    """Process meshes, by the order they were spawned in."""

    def __init__(self, log_dir: Path) -> None:
        """Processes log to `log_dir`."""
        self._log_dir = log_dir
        self._meshes: list[ProcMesh] = []

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
        mesh = host.spawn_procs(
            per_host={"procs": num_procs},
            bootstrap=partial(set_up_process, role, self._log_dir, imports),
            bootstrap_command=default_bootstrap_cmd().with_env(dict(environment)),
            name=role,
        )
        self._meshes.append(mesh)
        return mesh

    def dead_processes(self) -> list[str]:
        """Processes of this machine that have ended, as `<role>_<rank>`."""
        ended = []
        for file in sorted(self._log_dir.glob("*.pid")):
            pid, host = file.read_text().split()
            if host == socket.gethostname() and not is_alive(int(pid)):
                ended.append(f"{file.stem} (process {pid})")
        return ended

    async def stop(self, timeout_s: float) -> None:
        """Stop every process; torchmonarch kills those that do not end by themselves."""
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


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
