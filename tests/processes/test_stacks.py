"""Processes of a run, found by their open files, and their stacks."""

import asyncio
import fcntl
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from titanrl.base.control import LOCK_FILE
from titanrl.base.errors import TitanRLError
from titanrl.commands.runs import steer
from titanrl.processes.children import processes_of, stacks_of

WAITS = """
import sys
def waits_for_input():
    print("ready", file=sys.stderr, flush=True)
    sys.stdin.read()
waits_for_input()
"""


@contextmanager
def waiting(stdout: Path, *, passed: tuple[int, ...] = ()) -> Iterator[int]:
    """Yield the id of a process that writes to a file and waits."""
    with stdout.open("w") as file:
        pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen([sys.executable, "-c", WAITS], stdout=file, pass_fds=passed, **pipes)  # type: ignore[call-overload]
        with process:
            try:
                assert process.stderr.readline() == b"ready\n"
                yield process.pid
            finally:
                process.kill()


def test_processes_of_a_run_are_found_by_their_open_files(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    for each in (run, other):
        (each / "logs").mkdir(parents=True)
        (each / LOCK_FILE).write_text("1 host\n")  # names a process, but does not make it one of the run
    link = tmp_path / "link"
    link.symlink_to(run)
    with (run / LOCK_FILE).open("a") as lock, waiting(run / "logs/trainer_0.log") as trainer, waiting(other / "logs/b_0.log"):
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert [(each.name, each.pid) for each in processes_of(link)] == [("trainer_0", trainer)]
        with waiting(tmp_path / "console.txt", passed=(lock.fileno(),)) as controller:
            found = [(each.name, each.pid) for each in processes_of(run)]
            assert found == [("controller", controller), ("trainer_0", trainer)]
            text = asyncio.run(stacks_of(run))
    assert f"== controller (process {controller}), alive" in text
    assert text.count("waits_for_input (<string>:") == 2, text


def test_without_processes_there_are_no_stacks(tmp_path: Path) -> None:
    with pytest.raises(TitanRLError, match="no process of the run on this host"):
        asyncio.run(stacks_of(tmp_path))


def test_command_prints_stacks_as_text_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    with pytest.raises(SystemExit) as ended:
        steer([str(tmp_path), "stacks"])
    assert (ended.value.code, "no process of the run on this host" in capsys.readouterr().err) == (2, True)
    with waiting(tmp_path / "logs/trainer_0.log"):
        steer([str(tmp_path), "stacks"])
        assert "waits_for_input" in capsys.readouterr().out
        steer([str(tmp_path), "stacks", "--json"])
    assert "waits_for_input" in json.loads(capsys.readouterr().out)["text"]
