"""Slurm jobs, controlled by the commands sbatch, squeue, scancel and srun, with options that exist since Slurm 22.05.

`squeue --json` is not used: its fields differ between versions, and 22.05 ignores the requested job id.
"""

import asyncio
import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from titanrl.base.choices import DeviceKind
from titanrl.base.errors import TitanRLError
from titanrl.config.schema import Config

REPLY_S = 30.0
"""Limit for a reply of Slurm's controller, in seconds."""
IN_ALLOCATION = "TITANRL_IN_ALLOCATION"
"""Environment variable set for a controller that runs inside the allocation of its hosts (`titanrl submit`)."""
NOTICE_SIGNAL = "USR1"
"""Signal to the script of `titanrl submit` before its time limit. `scancel` and preemption send SIGTERM."""
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_FORMAT = "%T|%r|%S|%L|%N"


class SlurmError(TitanRLError):
    """Slurm refused a request, ended the job, or did not reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """State of a job, from `squeue`.

    Example: `JobStatus(state="PENDING", reason="Resources", start="2026-01-05T10:00:00", left_s=3600.0, nodes="")`
    """

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
        """Return the state for display, such as `PENDING (Resources; expected start 2026-01-05T10:00:00)`."""
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
    """Return the state of a job.

    Raises:
        SlurmError: Slurm does not reply.
    """
    code, output, errors = await _run("squeue", "--noheader", "--states=all", f"--jobs={job_id}", f"--format={_FORMAT}")
    if output.strip():
        return parse_status(output.splitlines()[0])
    if code and "Invalid job id" not in errors:
        raise SlurmError(
            f"hosts.slurm: squeue failed ({errors.strip() or f'exit code {code}'}). Check the state of the cluster."
        )
    return JobStatus(state="")


async def submit_job(script: str) -> str:
    """Submit a script; return the job id.

    Raises:
        SlurmError: Slurm refused the job.
    """
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
    """Return the `#SBATCH` lines of a script, which request the nodes.

    Args:
        config: configuration of the run.
        num_hosts: number of nodes.
        output: file for the job's output; Slurm replaces `%j` by the job id.
        device: kind of the hosts' devices.
    """
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


def step_command(config: Config, program: str = "titanrl.hosts.slurm.node") -> list[str]:
    """Return the command that runs a Python module on each node. If a node fails, the others continue."""
    options = ["--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=0", "--no-kill", "--cpu-bind=none", "--mpi=none"]
    return ["srun", *options, sys.executable, "-m", program, str(config.hosts.slurm.port)]


def hosts_script(header: Sequence[str], command: Sequence[str], variables: Mapping[str, str]) -> str:
    """Return the script of a job that runs hosts for a controller on another machine."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    fixed = ["#SBATCH --no-requeue", "#SBATCH --no-kill"]  # the controller handles the loss of a node
    return "\n".join(["#!/bin/bash", *header, *fixed, *exports, f"exec {shlex.join(command)}", ""])


async def _run(*command: str, text: str = "") -> tuple[int, str, str]:
    """Run a Slurm command; return its exit code, output and errors."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=clean_environment(),
        )
    except OSError as error:
        raise SlurmError(
            f"hosts.slurm: {command[0]} cannot be run ({error}). Start the run where Slurm is installed."
        ) from None
    try:
        output, errors = await asyncio.wait_for(process.communicate(text.encode()), REPLY_S)
    except TimeoutError:
        raise SlurmError(f"hosts.slurm: {command[0]} did not reply within {REPLY_S:g} s. Check the cluster.") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    assert process.returncode is not None
    return process.returncode, output.decode(errors="replace"), errors.decode(errors="replace")
