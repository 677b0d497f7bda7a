"""The end of a run's process, and of one that is cancelled before its run starts."""

import io
import os
import queue
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import rich.console

from titanrl.run.command import start_watchdog


@pytest.mark.parametrize(
    ("code", "cause", "message", "status"),
    [
        (0, "", "error: writing the report took more than 0.01 s\n", 1),
        (130, "interrupted", "error: interrupted (writing the report took more than 0.01 s)\n", 130),
    ],
)
def test_end_that_hangs_is_named_and_ends(
    code: int, cause: str, message: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    exits: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(os, "_exit", exits.put)
    err = rich.console.Console(file=io.StringIO(), soft_wrap=True)
    start_watchdog(code, cause, err, 0.01, "writing the report")
    assert exits.get(timeout=10) == status
    assert err.file.getvalue() == message  # type: ignore[attr-defined]


def test_end_in_time_is_not_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    exits: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(os, "_exit", exits.put)
    watchdog = start_watchdog(0, "", rich.console.Console(), 0.2, "closing")
    watchdog.cancel()
    watchdog.join(10)
    assert exits.empty()


ENDED = """
import os, signal
from pathlib import Path
from titanrl.config import load_config
from titanrl.run.command import run

class Ended:
    is_training, num_unsaved_steps, run_dir = False, 0, Path("run")

    def __init__(self, config, *, console, **others):
        self.config, self.console = config, console

    async def start_and_train(self): ...
    async def stop(self, **end): ...
    def summarize(self, **end): os.kill(os.getpid(), signal.SIGINT)

Ended.for_config = lambda config: Ended
print("exit code", run(Ended, load_config("quickstart", ["logging.console=off"]), None, None))
"""
"""A run that gets a signal while it writes its report."""


def test_ctrl_c_while_the_report_is_written_ends_the_process_at_once(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", ENDED], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
def test_ctrl_c_during_the_checks_says_that_nothing_was_started(flags: list[str], tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\nopen('imported', 'w').close()\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "titanrl.grpo", "--config", "quickstart", "data.rewards={slow: 'slow.py:score'}"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(
        [*command, *flags], cwd=tmp_path, env=environment, text=True, start_new_session=True, **pipes
    ) as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "imported").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, errors = process.communicate(timeout=30)
    errors = errors.removeprefix("checking the model, the data and the rewards ...\n")  # of a dry run, if it took long
    assert (process.returncode, errors) == (130, "cancelled; nothing was started\n")
    assert not (tmp_path / "runs").exists()
