"""Slurm nodes as hosts of a run: submit a job, wait in the queue, watch the nodes, and release them when the run ends.

Slurm is controlled by the commands sbatch, squeue, scancel and srun, with options that exist since Slurm 22.05. `squeue --json`
is not used: its fields differ between versions, and 22.05 ignores the requested job id. This module must not import Monarch.
"""

import asyncio
import logging
import os
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from titanrl.base.errors import TitanRLError
from titanrl.config.device import DeviceKind
from titanrl.config.errors import BrokenRule
from titanrl.config.schema import Config
from titanrl.hosts.holder import (
    READY,
    START,
    AcquiredHosts,
    Controller,
    Host,
    Order,
    broken_by_name,
    broken_by_remote_hosts,
    holder_command,
)
from titanrl.processes.children import run_program

logger = logging.getLogger(__name__)

REPLY_S = 30.0
"""Limit for a reply of Slurm's controller, in seconds."""
IN_ALLOCATION = "TITANRL_IN_ALLOCATION"
"""Environment variable set for a controller that runs inside the allocation of its hosts (`titanrl submit`)."""
NOTICE_SIGNAL = "USR1"
"""Signal to the script of `titanrl submit` before its time limit. `scancel` and preemption send SIGTERM."""
POLL_S = 5.0
"""Seconds between two queries of a queued job's state. Slurm has no notification for other programs."""
ATTEMPTS = 6
"""Consecutive queries of a job's state that may fail."""
STATUS_S = 2.0
"""Limit in seconds for querying the job's state after a host was lost, so that the report is not delayed."""
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_FORMAT = "%T|%r|%S|%L|%N"


class SlurmError(TitanRLError):
    """Slurm refused a request, ended the job, or did not reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """State of a job, from `squeue`."""

    state: str
    """Slurm's name of the state; empty if Slurm no longer knows the job."""
    reason: str = ""
    """Reason why the job is pending, or why it ended."""
    start: str = ""
    """Expected or actual start, in the cluster's time; empty if unknown."""
    left_s: float | None = None
    """Seconds until its time limit; None without one."""
    nodes: str = ""
    """Nodes of the job, in Slurm's short notation, such as `gpu[07-09]`."""

    @property
    def is_waiting(self) -> bool:
        """True if the job is in the queue."""
        return self.state in _WAITING

    @property
    def has_ended(self) -> bool:
        """True if the job has ended or is completing."""
        return not self.is_waiting and self.state not in ("RUNNING", "SUSPENDED", "SIGNALING", "STOPPED", "RESIZING")

    def __str__(self) -> str:
        details = [] if self.reason in ("", "None") else [self.reason]
        if self.is_waiting and self.start:
            details.append(f"expected start {self.start}")
        return (self.state or "unknown to Slurm") + (f" ({'; '.join(details)})" if details else "")


def parse_status(line: str) -> JobStatus:
    """Parse a line of `squeue` with the format that `job_status` requests."""
    state, reason, start, left, nodes = line.strip().split("|")
    return JobStatus(
        state=state, reason=reason.strip("()"), start="" if start == "N/A" else start, left_s=seconds(left), nodes=nodes
    )


def seconds(text: str) -> float | None:
    """Parse a Slurm duration, such as `1-02:03:04` or `59:59`; return seconds, or None if the text is not a duration."""
    days, _, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdecimal() for part in [*parts, *([days] if days else [])]):  # UNLIMITED, NOT_SET, INVALID, N/A
        return None
    total = 0
    for part in parts:
        total = total * 60 + int(part)
    return float(total + 86_400 * int(days or 0))


async def job_status(job_id: str) -> JobStatus:
    """Return the state of a job; raise `SlurmError` if Slurm does not reply."""
    code, output, errors = await _run("squeue", "--noheader", "--states=all", f"--jobs={job_id}", f"--format={_FORMAT}")
    if output.strip():
        return parse_status(output.splitlines()[0])
    if code and "Invalid job id" not in errors:
        raise SlurmError(
            f"hosts.slurm: squeue failed ({errors.strip() or f'exit code {code}'}). Check the state of the cluster."
        )
    return JobStatus(state="")


async def submit_job(script: str) -> str:
    """Submit a script and return the job id; raise `SlurmError` if Slurm refuses the job."""
    code, output, errors = await _run("sbatch", "--parsable", text=script)
    job_id = output.strip().partition(";")[0]
    if code or not job_id.isdecimal():
        reason = errors.strip() or output.strip() or f"exit code {code}"
        raise SlurmError(f"hosts.slurm: sbatch refused the job ({reason}). Correct hosts.slurm, or ask for fewer hosts.")
    return job_id


def cancel_job(job_id: str) -> str:
    """Cancel a job; return an error message, or an empty string on success. A job that has already ended is not an error."""
    try:
        done = subprocess.run(
            ["scancel", job_id], capture_output=True, text=True, timeout=REPLY_S, check=False, env=clean_environment()
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 or "already" in done.stderr else done.stderr.strip()


def clean_environment() -> dict[str, str]:
    """Return the environment for Slurm's commands, without variables that name folders of this machine only."""
    return {name: value for name, value in os.environ.items() if name not in ("TMPDIR", "XDG_RUNTIME_DIR")}


def directives(config: Config, num_hosts: int, output: Path, *, device: DeviceKind) -> list[str]:
    """Return the `#SBATCH` lines of a script, which request the nodes. Slurm replaces `%j` in `output` by the job id."""
    slurm = config.hosts.slurm
    options: dict[str, object] = {
        "job-name": f"titanrl-{config.name}",
        "nodes": num_hosts,
        "ntasks-per-node": 1,
        "output": output,
        "open-mode": "append",
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "time": slurm.time_limit,
        "cpus-per-task": slurm.cpus_per_host,
        "mem": slurm.memory_per_host,
        "gpus-per-node": None if device == "cpu" else config.hosts.devices_per_host,
    }
    texts = [f"--{name}={shlex.quote(str(value))}" for name, value in options.items() if value is not None]
    return [f"#SBATCH {text}" for text in [*texts, *["--exclusive"] * slurm.exclusive, *slurm.options]]


def step_command() -> list[str]:
    """Return the command that holds each node. If a node fails, the others continue."""
    options = ["--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=0", "--no-kill", "--cpu-bind=none", "--mpi=none"]
    return ["srun", *options, *holder_command()]


def hosts_script(header: Sequence[str], command: Sequence[str], variables: Mapping[str, str]) -> str:
    """Return the script of a job that runs hosts for a controller on another machine."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    fixed = ["#SBATCH --no-requeue", "#SBATCH --no-kill"]  # the controller handles the loss of a node
    return "\n".join(["#!/bin/bash", *header, *fixed, *exports, f"exec {shlex.join(command)}", ""])


async def _run(*command: str, text: str = "") -> tuple[int, str, str]:
    """Run a Slurm command; return its exit code, output and errors."""
    try:
        return await run_program(*command, limit_s=REPLY_S, text=text, environment=clean_environment())
    except TimeoutError:  # an OSError, too
        raise SlurmError(f"hosts.slurm: {command[0]} did not reply within {REPLY_S:g} s. Check the cluster.") from None
    except OSError as error:
        raise SlurmError(
            f"hosts.slurm: {command[0]} cannot be run ({error}). Start the run where Slurm is installed."
        ) from None


def broken_by_slurm(config: Config) -> Iterator[BrokenRule]:
    """Yield the rules that a run breaks on this machine."""
    yield from broken_by_remote_hosts(config, "nodes")
    if missing := [command for command in ("sbatch", "squeue", "scancel", "srun") if shutil.which(command) is None]:
        rule = f"slurm requires commands that are not on PATH: {', '.join(missing)}"
        yield BrokenRule({"hosts.kind": "slurm"}, rule, "start the run on a Slurm login node")
    fix = "correct /etc/hosts or the name server, or start the run with titanrl submit on a node of the cluster"
    yield from broken_by_name(config, "nodes", fix)


class SlurmHosts(AcquiredHosts):
    """Hosts in a separate Slurm job, or in the allocation in which the controller runs (`titanrl submit`)."""

    def __init__(self, order: Order) -> None:
        super().__init__(order)
        self._num_hosts = sum(self._meshes.values())
        self._job_id = ""
        self._is_inside = os.environ.get(IN_ALLOCATION) == "1"
        self._step: asyncio.subprocess.Process | None = None
        self._is_ending = False

    async def start(self, identities: Sequence[str]) -> list[str]:
        """Request the hosts, and start Monarch's hosts on them; see `Provider`."""
        self._identities = identities
        await self.acquire()
        hosts = [self.leases.hosts[rank] for rank in range(self._num_hosts)]
        self._say(f"Slurm job {self._job_id}: {len(hosts)} hosts ({', '.join(host.node for host in hosts)})")
        return [self._address(host) for host in hosts]

    async def acquire(self) -> None:
        """Submit the job, or start a step in the allocation, and wait for its hosts; see `AcquiredHosts`."""
        variables = Controller(await self.leases.open(socket.gethostname()), self.leases.token).variables
        if self._is_inside:
            self._job_id = os.environ["SLURM_JOB_ID"]
            environment = clean_environment() | variables
            environment.pop(IN_ALLOCATION)
            with (self._log_dir / "slurm_hosts.log").open("ab") as log:
                self._step = await asyncio.create_subprocess_exec(
                    *step_command(), stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=environment
                )
        else:
            await self._submit(variables)
        await self._wait()

    async def kill(self) -> None:
        """Kill every process on the hosts, and release them. A second call does nothing."""
        self.leases.end(0)
        self.close()
        job_id, self._job_id = self._job_id, ""
        if job_id and not self._is_inside and (problem := cancel_job(job_id)):
            logger.warning("scancel %s: %s; its hosts exit without it", job_id, problem)
        if self._step is not None and self._step.returncode is None:
            self._step.send_signal(signal.SIGTERM)  # srun would wait for nodes that do not answer

    async def _submit(self, variables: Mapping[str, str]) -> None:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        header = directives(self._config, self._num_hosts, self._log_dir / "slurm_%j.log", device=self._device)
        # On cancellation, the job may already be in the queue, so wait for its id to be able to cancel it.
        submitting = asyncio.ensure_future(submit_job(hosts_script(header, step_command(), variables)))
        try:
            self._job_id = await asyncio.shield(submitting)
        except asyncio.CancelledError:
            self._job_id = await submitting
            raise

    async def _wait(self) -> None:
        """Wait in the queue and then for the hosts; inform the user whenever the job's state changes."""
        loop = asyncio.get_running_loop()
        held = asyncio.create_task(self.leases.all_held())
        since, running_since, said = loop.time(), None, ""
        try:
            while True:
                status = await self._status()
                if str(status) != said:
                    said = str(status)
                    queued, running = f"; {self._num_hosts} nodes requested", f" on {status.nodes}; its hosts are starting"
                    self._say(f"waiting for Slurm job {self._job_id}: {said}{queued if status.is_waiting else running}")
                if status.state == "RUNNING" and running_since is None:
                    running_since = loop.time()
                self._check(status, since, running_since)
                if (await asyncio.wait({held}, timeout=POLL_S))[0]:
                    break
        finally:
            held.cancel()
        if not self._is_inside and status.left_s is not None:
            self._later(self._notice_end(status.left_s))

    async def _status(self) -> JobStatus:
        """Return the job's state; retry, because Slurm's controller may be restarting."""
        for _ in range(ATTEMPTS - 1):
            try:
                return await job_status(self._job_id)
            except SlurmError as error:
                self._say(f"{error} Retrying.")
                await asyncio.sleep(POLL_S)
        return await job_status(self._job_id)

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
                f"timeouts.start_s: hosts {', '.join(map(str, self.leases.missing))} of job {self._job_id} on {status.nodes} "
                f"have not connected to {socket.gethostname()} (got {self._config.timeouts.start_s:g}). Read {logs}."
            )

    def _address(self, host: Host) -> str:
        return f"{self._identities[host.rank]}@tcp://{host.node}:{self._config.hosts.slurm.port}"

    def _on_line(self, host: Host, line: bytes) -> None:
        if line == READY:  # Monarch starts while other hosts have not connected yet
            self.leases.send(host.rank, f"{START} {self._address(host)}")

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
        if not self._is_ending:
            self._is_ending = True
            self._later(self._report_ending())

    async def _report_ending(self) -> None:
        self.on_ending(f"Slurm terminates job {self._job_id} ({await job_status(self._job_id)})")

    async def _notice_end(self, left_s: float | None) -> None:
        """Report that the time limit is near, as soon as it is. It may be extended, also without a limit (None)."""
        notice_s = self._config.hosts.slurm.notice_s
        while left_s is not None and left_s > notice_s + 1:
            await asyncio.sleep(left_s - notice_s)
            left_s = (await job_status(self._job_id)).left_s
        if left_s is not None:
            self.on_ending(f"the time limit of Slurm job {self._job_id} is {left_s:g} s away")
