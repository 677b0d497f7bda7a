"""Run a configuration as one Slurm job: `titanrl submit`.

The controller runs on the first node of the job, so the allocation always ends with the run.
"""

import asyncio
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from titanrl.base import terminal
from titanrl.checks.preflight import parse_run, preflight, read_examples, source_of
from titanrl.config import Config, ConfigError, recorded_config
from titanrl.config.device import device_kind
from titanrl.config.errors import BrokenRule, refusing
from titanrl.config.load import explain_rule, validate
from titanrl.config.sizes import host_counts
from titanrl.data.selection import Selection, check_recorded, record_data
from titanrl.hosts.slurm import IN_ALLOCATION, NOTICE_SIGNAL, SlurmError, directives, submit_job
from titanrl.launch.run_lock import claim_new_run, claim_run
from titanrl.metrics.run_directory import JOB_SCRIPT

_BODY = """\
cd {folder}
export {inside}=1
{command} & controller=$!
ending=
trap 'ending=1; kill -TERM $controller' {signal}
trap : TERM INT  # the controller gets these signals itself
while wait $controller; kill -0 $controller 2>/dev/null; do :; done  # signals interrupt `wait`
wait $controller; code=$?  # bash keeps the status of a process that has exited
"""
_REQUEUE = """\
# A job that was cancelled is no longer running.
if [ -n "$ending" ] && [ "$(squeue --noheader --jobs=$SLURM_JOB_ID --format=%T)" = RUNNING ]; then
  scontrol requeue $SLURM_JOB_ID
fi
"""


def main(argv: Sequence[str] | None = None, *, prog: str = "titanrl submit") -> None:
    """Check the configuration, prepare the run directory, and submit the job."""
    terminal.prepare()
    purpose = "Submit a configuration as one Slurm job, with the controller on its first node."
    does = "check everything, print the job script, and submit nothing"
    arguments = parse_run(argv, prog=prog, purpose=purpose, dry_run_help=does)
    with refusing():
        source = source_of(arguments)
        config = validate(source)
        if config.hosts.kind != "slurm":
            rule, fix = "titanrl submit needs hosts that Slurm starts", "set hosts.kind to slurm"
            raise ConfigError(explain_rule(BrokenRule(values={"hosts.kind": config.hosts.kind}, rule=rule, fix=fix), source))
        with terminal.announcing("checking the data, the model and the rewards"):
            selections: Sequence[Selection] = preflight(config, source, rollouts=config.sft is None)
            if config.example_set is not None:
                selections = (*selections, *read_examples(config, source).selections)
        remarks = [text for found in selections for text in found.messages()]
        if arguments.resume:
            remarks += check_recorded(arguments.resume, selections, accepts_changes=arguments.accept_changed_data)
        for text in remarks:
            print(f"note: {text}", file=sys.stderr)
        if arguments.dry_run:
            print(script(config, arguments.resume or config.run_dir), end="")
            return
        run_dir = prepare(config, arguments.resume)
        record_data(run_dir, selections)
    try:
        job_id = asyncio.run(submit_job((run_dir / JOB_SCRIPT).read_text(encoding="utf-8")))
    except SlurmError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    print(f"Slurm job {job_id}; output in {run_dir}/logs/slurm_{job_id}.log")


def prepare(config: Config, resume: Path | None) -> Path:
    """Write the configuration and the job script into the run directory, and return its path.

    The script always resumes the run, so that a requeued job continues where it stopped.

    Raises:
        ConfigError: Another process uses the run directory.
    """
    lock = claim_new_run(config.run_dir) if resume is None else claim_run(resume)
    run_dir = lock.path.resolve()
    (run_dir / "logs").mkdir(exist_ok=True)
    (run_dir / "config.yaml").write_text(recorded_config(config), encoding="utf-8")
    (run_dir / JOB_SCRIPT).write_text(script(config, run_dir), encoding="utf-8")
    lock.release()
    return run_dir


def script(config: Config, run_dir: Path) -> str:
    """Return the job script."""
    hosts, run_dir = config.hosts, run_dir.resolve()
    device = device_kind(config.device)
    num_hosts = sum(host_counts(config).values())
    header = directives(config, num_hosts, run_dir / "logs" / "slurm_%j.log", device=device)
    header.append(f"#SBATCH --signal=B:{NOTICE_SIGNAL}@{hosts.slurm.notice_s:.0f}")
    header.append("#SBATCH --requeue" if hosts.slurm.requeue else "#SBATCH --no-requeue")
    body = _BODY.format(
        folder=shlex.quote(os.getcwd()),
        inside=IN_ALLOCATION,
        command=shlex.join([sys.executable, "-m", "titanrl.cli", config.program, "--resume", str(run_dir)]),
        signal=NOTICE_SIGNAL,
    )
    ending = _REQUEUE if hosts.slurm.requeue else ""
    return "\n".join(["#!/bin/bash", *header, body + ending + "exit $code", ""])
