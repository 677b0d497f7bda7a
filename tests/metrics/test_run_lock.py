"""Locks on run directories, with several processes."""

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.foreign import ROOT_ONLY, USER, nobody_does, shared_folder
from titanrl.config import ConfigError
from titanrl.metrics.run_directory import claim_new_run, claim_run

HOLD = (
    "import sys; from pathlib import Path; from titanrl.metrics.run_directory import {name}; lock = {name}(Path(sys.argv[1])); "
)


def hold(path: Path, name: str) -> "subprocess.Popen[str]":
    program = HOLD.format(name=name) + "print(lock.path, flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program, str(path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line(process: "subprocess.Popen[str]") -> str:
    return process.stdout.readline().strip()


def test_runs_that_start_together_get_different_directories(tmp_path: Path) -> None:
    holders = [hold(tmp_path / "run", "claim_new_run") for _ in range(4)]
    try:
        with ThreadPoolExecutor() as pool:
            paths = set(pool.map(line, holders))
        assert paths == {str(tmp_path / name) for name in ("run", "run-2", "run-3", "run-4")}
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


def test_live_run_is_refused_with_its_process_until_it_is_killed(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    holder = hold(tmp_path, "claim_run")
    assert line(holder) == str(tmp_path)
    with pytest.raises(ConfigError, match=rf"--resume: the run is still active in process {holder.pid} on .* Wait until"):
        claim_run(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    claim_run(tmp_path).release()


def test_only_directories_without_a_run_are_reused(tmp_path: Path) -> None:
    first = claim_new_run(tmp_path / "a" / "run")
    assert first.path == tmp_path / "a" / "run"
    first.release()
    second = claim_new_run(tmp_path / "a" / "run")  # nothing was written
    assert second.path == first.path
    (second.path / "config.yaml").touch()
    second.release()
    (tmp_path / "a" / "run-7").mkdir()
    assert claim_new_run(tmp_path / "a" / "run").path.name == "run-8"


@pytest.mark.parametrize("kind", ["folder", "fifo", "link", "socket"])
def test_lock_that_is_no_file_is_refused_with_its_path(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, victim = tmp_path / "run", tmp_path / "victim"
    run.mkdir()
    victim.write_text("precious")
    monkeypatch.chdir(run)  # the path of a socket must be short
    match kind:
        case "folder":
            (run / "run.lock").mkdir()
        case "fifo":
            os.mkfifo(run / "run.lock")
        case "link":
            (run / "run.lock").symlink_to(victim)
        case "socket":
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind("run.lock")
    for claim in (claim_new_run, claim_run):
        with pytest.raises(ConfigError, match=rf"^output_dir: .* must be a regular file \(got {run}/run.lock\)\. Delete it"):
            claim(run)
    assert victim.read_text() == "precious"


@ROOT_ONLY
def test_new_run_does_not_start_in_a_directory_of_another_user() -> None:
    with shared_folder() as shared:
        nobody_does((shared / "run").mkdir)
        with pytest.raises(ConfigError, match=rf"^output_dir: .*\({shared}/run belongs to the user {USER}\)\. Choose another"):
            claim_new_run(shared / "run")
        claim_new_run(shared / "mine").release()
