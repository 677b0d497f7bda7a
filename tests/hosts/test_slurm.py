"""Slurm: scripts, squeue's output, and checks before a run. `tests/cluster` runs jobs on a cluster."""

import asyncio
import shlex
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from titanrl.config import Config, load_config
from titanrl.hosts.holder import addresses_of
from titanrl.hosts.slurm import (
    JobStatus,
    SlurmError,
    broken_by_slurm,
    cancel_job,
    directives,
    hosts_script,
    job_status,
    parse_status,
    seconds,
    step_command,
    submit_job,
)

# Recorded from Slurm 22.05.8: a job that waits, one that runs, one that was cancelled, and one that reached its limit.
RECORDED = {
    "PENDING|Resources|2026-11-23T09:10:00|1-00:00:00|": JobStatus(
        state="PENDING", reason="Resources", start="2026-11-23T09:10:00", left_s=86400.0
    ),
    "PENDING|Priority|N/A|UNLIMITED|": JobStatus(state="PENDING", reason="Priority"),
    "RUNNING|None|2026-11-23T08:43:15|59:58|n[1-2,4]": JobStatus(
        state="RUNNING", reason="None", start="2026-11-23T08:43:15", left_s=3598.0, nodes="n[1-2,4]"
    ),
    "CANCELLED|None|2026-11-23T08:43:15|UNLIMITED|n[1-2]": JobStatus(
        state="CANCELLED", reason="None", start="2026-11-23T08:43:15", nodes="n[1-2]"
    ),
    "TIMEOUT|TimeLimit|2026-11-23T08:43:15|0:00|n1": JobStatus(
        state="TIMEOUT", reason="TimeLimit", start="2026-11-23T08:43:15", left_s=0.0, nodes="n1"
    ),
}


@pytest.fixture
def config() -> Config:
    overrides = ["hosts.kind=slurm", "hosts.trainer_hosts=2", "trainer.parallelism.dp_shard=2", "device=cuda"]
    return load_config("configs/quickstart.yaml", overrides)


@pytest.mark.parametrize("line", RECORDED)
def test_recorded_squeue_lines_are_parsed(line: str) -> None:
    assert parse_status(f"{line}\n") == RECORDED[line]


def test_state_distinguishes_waiting_and_ended_jobs() -> None:
    states = {line.partition("|")[0]: parse_status(line) for line in RECORDED}
    assert [name for name, status in states.items() if status.is_waiting] == ["PENDING"]
    assert [name for name, status in states.items() if status.has_ended] == ["CANCELLED", "TIMEOUT"]
    assert JobStatus(state="").has_ended
    assert str(parse_status("PENDING|Resources|10:00|1:00|")) == "PENDING (Resources; expected start 10:00)"
    assert str(parse_status("RUNNING|None|10:00|1:00|n1")) == "RUNNING"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0:30", 30.0), ("2:00:00", 7200.0), ("1-02:03:04", 93784.0), ("UNLIMITED", None), ("NOT_SET", None), ("", None)],
)
def test_slurm_durations_are_parsed(text: str, expected: float | None) -> None:
    assert seconds(text) == expected


def test_request_has_the_nodes_and_their_devices(config: Config) -> None:
    lines = directives(config, 3, Path("/runs/a b/slurm_%j.log"), device="cuda")
    assert "#SBATCH --nodes=3" in lines
    assert "#SBATCH --gpus-per-node=8" in lines
    assert "#SBATCH --output='/runs/a b/slurm_%j.log'" in lines
    assert "#SBATCH --exclusive" in lines
    assert not [line for line in lines if "time" in line or "partition" in line]
    assert not [line for line in directives(config, 3, Path("log"), device="cpu") if "gpu" in line]


def test_options_of_the_configuration_are_passed_on(config: Config) -> None:
    slurm = {
        "partition": "gpu",
        "time_limit": "2-12",
        "exclusive": False,
        "memory_per_host": "200G",
        "options": ["--reservation=x"],
    }
    hosts = config.hosts.model_validate({"kind": "slurm", "slurm": slurm})
    lines = directives(config.model_copy(update={"hosts": hosts}), 1, Path("log"), device="cpu")
    for text in ("--partition=gpu", "--time=2-12", "--mem=200G", "--reservation=x"):
        assert f"#SBATCH {text}" in lines
    assert "#SBATCH --exclusive" not in lines


def test_bash_accepts_the_script(config: Config) -> None:
    script = hosts_script(directives(config, 2, Path("log"), device="cpu"), step_command(), {"TITANRL_TOKEN": "a'b"})
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert f"export TITANRL_TOKEN={shlex.quote(chr(97) + chr(39) + chr(98))}" in script
    assert script.splitlines()[-1].startswith("exec srun ")
    assert script.splitlines()[-1].endswith("-m titanrl.hosts.holder connect")


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a folder for fake Slurm commands first on PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def program(folder: Path, name: str, text: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


def test_refused_job_raises_the_reason(fake_slurm: Path) -> None:
    program(fake_slurm, "sbatch", "cat > /dev/null; echo 'sbatch: error: invalid partition specified: gpu' >&2; exit 1")
    with pytest.raises(SlurmError, match=r"invalid partition specified: gpu\). Correct hosts\.slurm"):
        asyncio.run(submit_job("#!/bin/sh\n"))


def test_id_of_a_submitted_job_is_returned(fake_slurm: Path) -> None:
    program(fake_slurm, "sbatch", "cat > /dev/null; echo '4711;cluster'")
    assert asyncio.run(submit_job("#!/bin/sh\n")) == "4711"


def test_job_unknown_to_slurm_has_ended(fake_slurm: Path) -> None:
    program(fake_slurm, "squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert asyncio.run(job_status("7")).has_ended


def test_failing_squeue_does_not_end_the_job(fake_slurm: Path) -> None:
    program(fake_slurm, "squeue", "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1")
    with pytest.raises(SlurmError, match="Unable to contact slurm controller"):
        asyncio.run(job_status("7"))


def test_missing_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmError, match="squeue cannot be run"):
        asyncio.run(job_status("7"))
    assert "scancel" in cancel_job("7")


def rules(*overrides: str) -> list[str]:
    config = load_config(
        "configs/quickstart.yaml", ["hosts.kind=slurm", "hosts.trusted_network=true", "device=cpu", *overrides]
    )
    return [rule.rule for rule in broken_by_slurm(config)]


@pytest.fixture
def login_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("titanrl.hosts.holder.addresses_of", lambda name: ["127.0.1.1", "10.0.0.7"])


@pytest.mark.usefixtures("login_node")
def test_login_node_can_start_a_run() -> None:
    assert rules() == []


@pytest.mark.usefixtures("login_node")
def test_device_of_the_nodes_must_be_given() -> None:
    (rule,) = rules("device=auto")
    assert "the nodes may have a different one" in rule


@pytest.mark.usefixtures("login_node")
@pytest.mark.parametrize(
    ("addresses", "found"), [(["127.0.1.1", "::1"], "it resolves to 127.0.1.1, ::1"), ([], "it does not resolve")]
)
def test_name_that_others_cannot_reach_is_reported(monkeypatch: pytest.MonkeyPatch, addresses: list[str], found: str) -> None:
    monkeypatch.setattr("titanrl.hosts.holder.addresses_of", lambda name: addresses)
    (rule,) = rules()
    assert rule.endswith(found)


@pytest.mark.usefixtures("login_node")
def test_commands_that_a_run_needs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name in ("scancel", "srun") else name)
    assert rules() == ["slurm requires commands that are not on PATH: scancel, srun"]


def test_addresses_of_names_are_found() -> None:
    assert "127.0.0.1" in addresses_of("127.0.0.1")
    assert addresses_of("no-such-host.invalid") == []
