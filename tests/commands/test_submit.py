"""`titanrl submit`: the job script, and the run directory that it resumes. `tests/cluster` submits jobs."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from titanrl.base.files import commit_folder
from titanrl.commands.jobs import prepare, script, submit
from titanrl.config import Config, ConfigError, load_config
from titanrl.metrics.run_directory import RunLock
from titanrl.run.checkpoints import FIRST, JOB_SCRIPT, RunState, resumable


def config(tmp_path: Path, *overrides: str) -> Config:
    hosts = ["hosts.kind=slurm", "hosts.trusted_network=true", "device=cpu", "hosts.generator_hosts=2", "generator.replicas=2"]
    return load_config("configs/quickstart.yaml", [*hosts, f"output_dir={tmp_path}", "name=job", *overrides])


def test_script_requests_nodes_for_all_roles_and_a_notice(tmp_path: Path) -> None:
    text = script(config(tmp_path, "hosts.slurm.notice_s=300"), tmp_path / "job")
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert "#SBATCH --nodes=3\n" in text
    assert "#SBATCH --signal=B:USR1@300\n" in text
    assert f"train --resume {tmp_path}/job & controller=$!" in text
    assert "#SBATCH --no-requeue\n" in text
    assert "scontrol" not in text


def test_job_is_requeued_only_while_running(tmp_path: Path) -> None:
    text = script(config(tmp_path, "hosts.slurm.requeue=true"), tmp_path / "job")
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert "#SBATCH --requeue\n" in text
    assert "= RUNNING ]; then\n  scontrol requeue $SLURM_JOB_ID" in text


@pytest.mark.parametrize(("state", "requeued"), [("RUNNING", True), ("CANCELLED", False)])
def test_notice_reaches_controller_and_requeues_job(tmp_path: Path, state: str, requeued: bool) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in {"squeue": f"echo {state}", "scontrol": f"echo $1 $2 > {tmp_path}/requeued"}.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    text = script(config(tmp_path, "hosts.slurm.requeue=true"), tmp_path / "job")
    controller = (
        "import os, signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); "
        "os.kill(os.getppid(), signal.SIGUSR1); signal.pause(); signal.pause()"
    )
    start = f"{sys.executable} -c '{controller}' & controller=$!"
    lines = [start if "& controller=" in line else line for line in text.splitlines()]
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "12"}
    # The signal can come before bash has set the trap, as it cannot in a job, so it is set first.
    lines.insert(1, "trap 'ending=1; sleep 0.5; kill -TERM $controller' USR1")
    # The controller may exit before the script looks for it again.
    lines = [line.replace("kill -TERM $controller'", "kill -TERM $controller; sleep 0.5'") for line in lines]
    done = subprocess.run(["bash", "-c", "\n".join(lines)], env=environment, timeout=60, check=False)
    assert done.returncode == 143
    assert (tmp_path / "requeued").exists() == requeued


def test_submitted_run_starts_without_a_checkpoint(tmp_path: Path) -> None:
    run_dir = prepare(config(tmp_path), None)
    assert run_dir == tmp_path / "job"
    assert resumable(run_dir).state == FIRST
    assert load_config(run_dir / "config.yaml") == config(tmp_path, f"cache_dir={Path.cwd()}/cache")  # paths are absolute
    (run_dir / JOB_SCRIPT).unlink()
    with pytest.raises(ConfigError, match="no intact checkpoint"):
        resumable(run_dir)


def test_resume_is_checked_against_the_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = prepare(config(tmp_path), None)
    folder, before = run_dir / "checkpoints" / "step-3", (run_dir / "config.yaml").read_text()
    folder.mkdir(parents=True)
    (folder / "controller.json").write_text(json.dumps(asdict(RunState(step=3, version=3, next_index=24))))
    (folder / ".metadata").touch()
    commit_folder(folder, {})
    for flags in (["--dry-run"], []):
        with pytest.raises(SystemExit, match=r"^2$"):
            submit(["--resume", str(run_dir), *flags, "algorithm.optimizer=muon"])
        assert 'rule: the checkpoint of step 3 was saved with "adamw"' in capsys.readouterr().err
    assert (run_dir / "config.yaml").read_text() == before


def test_each_submission_has_a_new_directory(tmp_path: Path) -> None:
    assert prepare(config(tmp_path), None) != prepare(config(tmp_path), None)


def test_running_run_cannot_be_submitted_again(tmp_path: Path) -> None:
    run_dir = prepare(config(tmp_path), None)
    lock = RunLock(run_dir)
    with pytest.raises(ConfigError, match="the run is still active"):
        prepare(config(tmp_path), run_dir)
    lock.release()


def test_only_slurm_hosts_can_be_submitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        submit(["--config", "configs/quickstart.yaml", f"output_dir={tmp_path}"])
    assert "hosts.kind" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
