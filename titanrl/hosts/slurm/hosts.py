"""Slurm nodes as hosts of a run: submit a job, wait in the queue, watch the nodes, and release them when the run ends."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path

from monarch.actor import HostMesh, enable_transport

from titanrl.base.choices import DeviceKind
from titanrl.config.schema import Config
from titanrl.hosts.host_meshes import attach_meshes, first_rank
from titanrl.hosts.identities import new_identities
from titanrl.hosts.leases import Host, Leases, OnLost, Say
from titanrl.hosts.patience import match_timeouts_to_leases
from titanrl.hosts.slurm.jobs import (
    IN_ALLOCATION,
    JobStatus,
    SlurmError,
    cancel_job,
    clean_environment,
    directives,
    hosts_script,
    job_status,
    step_command,
    submit_job,
)
from titanrl.hosts.slurm.node import CONTROLLER, IDENTITIES, TOKEN
from titanrl.processes.private_sockets import private_sockets

logger = logging.getLogger(__name__)

POLL_S = 5.0
"""Seconds between two queries of a queued job's state. Slurm has no notification for other programs."""
ATTEMPTS = 6
"""Consecutive queries of a job's state that may fail."""
STATUS_S = 2.0
"""Limit in seconds for querying the job's state after a host was lost, so that the report is not delayed."""


class SlurmHosts:
    """Hosts in a separate Slurm job, or in the allocation in which the controller runs (`titanrl submit`)."""

    def __init__(
        self,
        config: Config,
        device: DeviceKind,
        meshes: dict[str, int],
        log_dir: Path,
        say: Say,
        *,
        leases: Leases | None = None,
        program: str = "titanrl.hosts.slurm.node",
    ) -> None:
        """Request nothing yet.

        Args:
            config: configuration of the run.
            device: kind of the hosts' devices.
            meshes: number of hosts by mesh name.
            log_dir: folder for the job's output.
            say: called with a message for the user about what startup is waiting for.
            leases: leases that hold the hosts; by default, leases that report lost hosts to the run.
            program: module to run on each host.
        """
        self._config, self._device, self._meshes, self._log_dir, self._say = config, device, meshes, log_dir, say
        self._leases = leases or Leases(sum(meshes.values()), self._on_lost, self._on_ending)
        self._step_command = step_command(config, program)
        self._job_id = ""
        self._is_inside = os.environ.get(IN_ALLOCATION) == "1"
        self._step: asyncio.subprocess.Process | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._notice: asyncio.TimerHandle | None = None
        self.on_lost: OnLost = lambda name, cause: None
        """Called when a host is lost."""
        self.on_ending: Callable[[str], None] = lambda cause: None
        """Called with the cause when Slurm terminates the job or is about to."""

    async def start(self) -> dict[str, HostMesh]:
        """Request the hosts, wait for them, and return their meshes.

        Raises:
            SlurmError: Slurm refused or ended the job, or the hosts did not start.
        """
        count = sum(self._meshes.values())
        identities = new_identities(count)
        try:
            enable_transport("tcp")  # before the first use of Monarch; by default, hosts cannot connect to this process
            match_timeouts_to_leases()
            await self.acquire({IDENTITIES: " ".join(identities)})
            with private_sockets():
                return self._attach(identities)
        except BaseException:  # including interrupts: no allocation may outlive a failed start
            self.kill()
            raise

    async def acquire(self, variables: Mapping[str, str]) -> None:
        """Request the hosts, and wait until they hold their leases. The caller must call `kill`, even if this fails.

        Args:
            variables: additional environment variables for the hosts' programs.

        Raises:
            SlurmError: Slurm refused or ended the job, or the hosts did not start.
        """
        address = await self._leases.open(socket.gethostname())
        variables = {CONTROLLER: address, TOKEN: self._leases.token, **variables}
        if self._is_inside:
            await self._start_step(variables)
        else:
            await self._submit(sum(self._meshes.values()), variables)
        await self._wait()

    def _attach(self, identities: list[str]) -> dict[str, HostMesh]:
        port, nodes = self._config.hosts.slurm.port, [self._leases.hosts[rank].node for rank in range(len(identities))]
        addresses = [f"{identity}@tcp://{node}:{port}" for identity, node in zip(identities, nodes, strict=True)]
        meshes = attach_meshes(self._meshes, addresses)
        self._say(f"Slurm job {self._job_id}: {len(nodes)} hosts ({', '.join(nodes)})")
        return meshes

    def kill(self) -> None:
        """Kill every process on the hosts, and release them. A second call does nothing."""
        self._leases.close()
        if self._notice is not None:
            self._notice.cancel()
        for task in self._tasks:
            task.cancel()
        job_id, self._job_id = self._job_id, ""
        if job_id and not self._is_inside and (problem := cancel_job(job_id)):
            logger.warning("scancel %s: %s; its hosts exit without it", job_id, problem)
        if self._step is not None and self._step.returncode is None:
            self._step.send_signal(signal.SIGTERM)  # srun would wait for nodes that do not answer

    def has_ended(self, mesh: str, number: int) -> bool:
        """Return True if a host exited or became unreachable."""
        return first_rank(self._meshes, mesh) + number in self._leases.lost

    def are_alive(self) -> bool:
        """Return True if every host holds its lease."""
        return bool(self._job_id) and not self._leases.lost

    async def _submit(self, count: int, variables: Mapping[str, str]) -> None:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        header = directives(self._config, count, self._log_dir / "slurm_%j.log", device=self._device)
        # On cancellation, the job may already be in the queue, so wait for its id to be able to cancel it.
        submitting = asyncio.ensure_future(submit_job(hosts_script(header, self._step_command, variables)))
        try:
            self._job_id = await asyncio.shield(submitting)
        except asyncio.CancelledError:
            self._job_id = await submitting
            raise

    async def _start_step(self, variables: Mapping[str, str]) -> None:
        """Start the hosts in the allocation in which this process runs."""
        self._job_id = os.environ["SLURM_JOB_ID"]
        with (self._log_dir / "slurm_hosts.log").open("ab") as log:
            environment = clean_environment() | dict(variables)
            environment.pop(IN_ALLOCATION)
            self._step = await asyncio.create_subprocess_exec(
                *self._step_command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )

    async def _wait(self) -> None:
        """Wait in the queue and then for the hosts; inform the user whenever the job's state changes."""
        loop, notice_s = asyncio.get_running_loop(), self._config.hosts.slurm.notice_s
        held = asyncio.create_task(self._leases.all_held())
        since, running_since, said = loop.time(), None, ""
        try:
            while True:
                status = await self._status()
                if str(status) != said:
                    said = str(status)
                    self._say(f"waiting for Slurm job {self._job_id}: {said}{self._of_hosts(status)}")
                if status.state == "RUNNING" and running_since is None:
                    running_since = loop.time()
                self._check(status, since, running_since)
                if (await asyncio.wait({held}, timeout=POLL_S))[0]:
                    break
        finally:
            held.cancel()
        if not self._is_inside and status.left_s is not None:
            self._notice = loop.call_later(max(0.0, status.left_s - notice_s), self._notice_end)

    async def _status(self) -> JobStatus:
        """Return the job's state; retry, because Slurm's controller may be restarting."""
        for _ in range(ATTEMPTS - 1):
            try:
                return await job_status(self._job_id)
            except SlurmError as error:
                self._say(f"{error} Retrying.")
                await asyncio.sleep(POLL_S)
        return await job_status(self._job_id)

    def _of_hosts(self, status: JobStatus) -> str:
        if status.is_waiting:
            return f"; {sum(self._meshes.values())} nodes requested"
        return f" on {status.nodes}; its hosts are starting"

    def _check(self, status: JobStatus, since: float, running_since: float | None) -> None:
        """Raise if the job ended, or if the hosts take too long."""
        now, limits = asyncio.get_running_loop().time(), self._config.hosts.slurm
        logs = f"{self._log_dir}/slurm_{'hosts' if self._is_inside else self._job_id}.log"
        if status.has_ended or (self._step is not None and self._step.returncode is not None):
            raise SlurmError(f"hosts.slurm: job {self._job_id} ended before its hosts started (got {status}). Read {logs}.")
        if running_since is None and limits.queue_limit_s is not None and now - since > limits.queue_limit_s:
            raise SlurmError(
                f"hosts.slurm.queue_limit_s: job {self._job_id} was still in the queue after {limits.queue_limit_s:g} s "
                f"(got {status}). Raise the limit, or ask for fewer hosts."
            )
        if running_since is not None and now - running_since > self._config.timeouts.start_s:
            raise SlurmError(
                f"timeouts.start_s: hosts {', '.join(map(str, self._leases.missing))} of job {self._job_id} on {status.nodes} "
                f"have not connected to {socket.gethostname()} (got {self._config.timeouts.start_s:g}). Read {logs}."
            )

    def _on_lost(self, host: Host) -> None:
        self._later(self._report_lost(host))

    async def _report_lost(self, host: Host) -> None:
        text = ""
        try:
            text = f"; Slurm job {self._job_id} is {await asyncio.wait_for(job_status(self._job_id), STATUS_S)}"
        except (SlurmError, TimeoutError) as error:
            logger.warning("the state of job %s is unknown: %r", self._job_id, error)
        self.on_lost(host.name, f"host {host.node} exited or is unreachable{text}")

    def _on_ending(self, host: Host) -> None:
        """Report Slurm's termination signal once, although every host receives it."""
        if not self._tasks:
            self._later(self._report_ending())

    async def _report_ending(self) -> None:
        self.on_ending(f"Slurm terminates job {self._job_id} ({await job_status(self._job_id)})")

    def _notice_end(self) -> None:
        self._later(self._check_end())

    async def _check_end(self) -> None:
        """Report that the time limit is near, or check again later if it was extended."""
        left_s, notice_s = (await job_status(self._job_id)).left_s, self._config.hosts.slurm.notice_s
        if left_s is None:
            return
        if left_s > notice_s + 1:
            self._notice = asyncio.get_running_loop().call_later(left_s - notice_s, self._notice_end)
        else:
            self.on_ending(f"the time limit of Slurm job {self._job_id} is {left_s:g} s away")

    def _later(self, work: Coroutine[object, object, None]) -> None:
        async def report() -> None:
            try:
                await work
            except SlurmError as error:
                logger.warning("%s", error)

        task = asyncio.create_task(report())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
