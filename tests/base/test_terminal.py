"""Standard streams that are closed, full or ASCII, and signals before a run has started."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from titanrl.base import terminal

ROOT = Path(__file__).parents[2]
PRINT = r"from titanrl.base import terminal; terminal.prepare(); print('first \u2192 line'); print('second'); "
ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


def shell(script: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = ["bash", "-c", script, "bash", sys.executable]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("redirection", "cause"),
    [("> /dev/full", "No space left on device"), (">&-", None), ("> /dev/null 2> /dev/full", None), ("0<&- >&- 2>&-", None)],
)
def test_command_continues_after_output_fails(redirection: str, cause: str | None, tmp_path: Path) -> None:
    program = PRINT + f"open({str(tmp_path / 'done')!r}, 'w')"
    result = shell(f'"$1" -c "{program}" {redirection}')
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "done").exists()
    assert result.stderr == (f"warning: stdout: {cause}; the command continues without it\n" if cause else "")


def test_closed_pipe_does_not_stop_the_command(tmp_path: Path) -> None:
    until_closed = "import os, stat, time\nwhile stat.S_ISFIFO(os.fstat(1).st_mode):\n print('third')\n time.sleep(0.01)\n"
    program = PRINT + until_closed + "print('fourth')"
    result = shell(f'set -o pipefail; "$1" -c "{program}" | head -n 1')
    assert result.returncode == 0
    assert result.stdout == "first → line\n"
    assert result.stderr == "warning: stdout: Broken pipe; the command continues without it\n"


def test_unencodable_characters_are_replaced() -> None:
    result = shell(f'"$1" -c "{PRINT}"', **ASCII)
    assert (result.returncode, result.stdout, result.stderr) == (0, "first ? line\nsecond\n", "")


def test_dry_run_works_in_an_ascii_locale(tmp_path: Path) -> None:
    result = shell('"$1" -m titanrl.grpo --config configs/quickstart.yaml --dry-run', **ASCII)
    assert result.returncode == 0, result.stderr
    assert "Ready to start" in result.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_early_signal_exits_without_traceback(number: signal.Signals) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "titanrl.grpo", "--config", "quickstart"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "titanrl.config" not in process.stderr.readline():  # the program is importing
            pass
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert "Traceback" not in errors


def test_deleted_working_directory_exits_with_2(tmp_path: Path) -> None:
    program = 'mkdir here && cd here && rmdir ../here && "$1" -m titanrl.commands configs'
    command = ["bash", "-c", program, "bash", sys.executable]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stderr.endswith("(No such file or directory). Change to an existing one: cd ~\n")
    assert "Traceback" not in ended.stderr


def test_command_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(terminal, "QUIET_S", 0.05)
    with terminal.announcing("importing"):
        while not (written := capfd.readouterr().err):
            time.sleep(0.01)
    assert written + capfd.readouterr().err == "importing ...\n"
    monkeypatch.setattr(terminal, "QUIET_S", 0.5)
    with terminal.announcing("importing"):
        pass
    time.sleep(0.8)
    assert capfd.readouterr().err == ""
