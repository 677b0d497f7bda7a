"""Hand a run to a cluster: `titanrl submit` for Slurm, and `titanrl manifest` for Kubernetes.

The controller of a Slurm job runs on its first node, so the allocation always ends with the run. `kubectl apply` of a manifest
starts the run: Monarch's operator creates the pods of trainers and generators, and the controller's Job discovers them, trains,
and deletes them.
"""

import argparse
import asyncio
import os
import secrets
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from titanrl.base import terminal
from titanrl.base.files import replace_text
from titanrl.config import Config, ConfigError, recorded_config
from titanrl.config.device import device_kind
from titanrl.config.errors import refusing
from titanrl.config.load import dump, explain_rule, parse_run, read_source, source_of, validate
from titanrl.config.sizes import host_counts
from titanrl.data.entries import Selection, check_recorded, record_data
from titanrl.hosts.kubernetes import Json, broken_by_pods, controller, mesh, mesh_name
from titanrl.hosts.slurm import IN_ALLOCATION, NOTICE_SIGNAL, SlurmError, directives, submit_job
from titanrl.launch.preflight import preflight, read_examples
from titanrl.metrics.run_directory import JOB_SCRIPT, claim_new_run, claim_run
from titanrl.run.run import resumable_with

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


def submit(argv: Sequence[str] | None = None, *, prog: str = "titanrl submit") -> None:
    """Check the configuration, prepare the run directory, and submit the job."""
    purpose = "Submit a configuration as one Slurm job, with the controller on its first node."
    does = "check everything, print the job script, and submit nothing"
    arguments = parse_run(argv, prog=prog, purpose=purpose, dry_run_help=does)
    with refusing():
        source = source_of(arguments)
        config = validate(source)
        if config.hosts.kind != "slurm":
            broken = config.broken("hosts.kind", "titanrl submit needs hosts that Slurm starts", "set hosts.kind to slurm")
            raise ConfigError(explain_rule(broken, source))
        if arguments.resume:  # the job cannot check this, because `prepare` replaces the configuration of the checkpoint
            resumable_with(config, arguments.resume, source)
        with terminal.announcing("checking the data, the model and the rewards"):
            rollouts, resumed = config.sft is None, arguments.resume
            selections: Sequence[Selection] = preflight(config, source, rollouts=rollouts, run_dir=resumed)
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

    The script always resumes the run, so that a requeued job continues where it stopped. Raise `ConfigError` if another process
    uses the run directory.
    """
    lock = claim_new_run(config.run_dir) if resume is None else claim_run(resume)
    run_dir = lock.path.resolve()
    (run_dir / "logs").mkdir(exist_ok=True)
    replace_text(run_dir / "config.yaml", recorded_config(config))
    replace_text(run_dir / JOB_SCRIPT, script(config, run_dir))
    lock.release()
    return run_dir


def script(config: Config, run_dir: Path) -> str:
    """Return the job script."""
    slurm, run_dir = config.hosts.slurm, run_dir.resolve()
    log, num_hosts = run_dir / "logs" / "slurm_%j.log", sum(host_counts(config).values())
    header = directives(config, num_hosts, log, device=device_kind(config.device))
    header.append(f"#SBATCH --signal=B:{NOTICE_SIGNAL}@{slurm.notice_s:.0f}")
    header.append("#SBATCH --requeue" if slurm.requeue else "#SBATCH --no-requeue")
    body = _BODY.format(
        folder=shlex.quote(os.getcwd()),
        inside=IN_ALLOCATION,
        command=shlex.join([sys.executable, "-m", "titanrl.commands", config.program, "--resume", str(run_dir)]),
        signal=NOTICE_SIGNAL,
    )
    return "\n".join(["#!/bin/bash", *header, body + (_REQUEUE if slurm.requeue else "") + "exit $code", ""])


def manifest(argv: Sequence[str] | None = None, *, prog: str = "titanrl manifest") -> None:
    """Check everything that needs no access to cluster, image or volumes, and print the objects of the run."""
    parser = argparse.ArgumentParser(
        prog=prog, description="Print the Kubernetes objects of a run as YAML, for kubectl apply. No cluster is needed."
    )
    help_text = "YAML file of the run, or the name of a shipped configuration"
    parser.add_argument("--config", type=terminal.path, required=True, help=help_text)
    help_text = "run directory in the pods, to continue from its newest checkpoint"
    parser.add_argument("--resume", metavar="RUN_DIR", help=help_text)
    help_text = "print only the pods of the hosts, or only the controller, which then creates those pods itself"
    parser.add_argument("--only", choices=("meshes", "controller"), help=help_text)
    help_text = "print a controller that checks the hosts of the run instead of training"
    parser.add_argument("--doctor", action="store_true", help=help_text)
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="values that override the file's")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.doctor and (arguments.resume or arguments.only):
        parser.error("--doctor cannot be combined with --resume or --only")
    with refusing():
        source = read_source(arguments.config, arguments.overrides)
        config = validate(source)
        if config.hosts.kind == "kubernetes":
            broken = list(broken_by_pods(config))
        else:
            broken = [config.broken("hosts.kind", "titanrl manifest needs pods", "set hosts.kind to kubernetes")]
        if broken:
            raise ConfigError("\n".join(explain_rule(rule, source) for rule in broken))
    text = dump(source.values)
    if arguments.doctor:
        printed = controller(config, text, _namespace(config), examines=True)
    else:
        printed = objects(config, text, arguments.resume, arguments.only)
    print(text_of(printed), end="")


def objects(config: Config, text: str, resume: str | None = None, only: str | None = None) -> list[Json]:
    """Return the Kubernetes objects of a run: one MonarchMesh per role, and the controller's objects.

    `text` is the configuration as written; its relative paths, and `resume`, refer to files in the pods.
    """
    device, namespace, token = device_kind(config.device), _namespace(config), secrets.token_hex(16)
    meshes = [
        mesh(config, device, role, mesh_name(config.name, role), token, namespace=namespace) for role in host_counts(config)
    ]
    others = controller(config, text, namespace, resume)
    return [*(meshes if only != "controller" else ()), *(others if only != "meshes" else ())]


def _namespace(config: Config) -> str:
    return config.hosts.kubernetes.namespace or "default"


def text_of(manifest: Sequence[Json]) -> str:
    """Return objects as YAML documents, with multi-line strings as literal blocks."""
    return yaml.dump_all(manifest, Dumper=_Dumper, sort_keys=False, width=128)


class _Dumper(yaml.SafeDumper):
    """Dumper that writes multi-line strings as literal blocks."""


_Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)
)
