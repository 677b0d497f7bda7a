"""The checks of a start, which `--dry-run` makes too: new runs and runs to resume."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from titanrl import ConfigError, grpo
from titanrl.base.files import commit_folder
from titanrl.config import dump_config, load_config
from titanrl.grpo import GRPO
from titanrl.launch.run_lock import LOCK_FILE, RunLock, check_idle, claim_new_run, claim_run
from titanrl.run.progress import FIRST, RunState
from titanrl.sft import SFT

pytestmark = pytest.mark.usefixtures("scratch")

QUICK = ["device=cpu", "warm_start=null", "data.source=jsonl", "data.path=sums.jsonl", "evaluation.num_prompts=0"]


def write_run(steps: int) -> Path:
    """Write a run directory with the controller's part of a checkpoint, and return it."""
    Path("sums.jsonl").write_text("".join(json.dumps({"prompt": f"{i} =", "answer": "1"}) + "\n" for i in range(50)))
    run_dir = Path("runs/quickstart")
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text(dump_config(load_config("quickstart", QUICK)))
    if steps:
        folder = run_dir / "checkpoints" / f"step-{steps}"
        folder.mkdir(parents=True)
        state = RunState(step=steps, version=steps, next_index=8 * steps)
        (folder / "controller.json").write_text(json.dumps(asdict(state)))
        (folder / ".metadata").touch()
        commit_folder(folder, {})
    return run_dir


def files(folder: Path) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def dry_run(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> tuple[object, str, str]:
    before = files(Path())
    with pytest.raises(SystemExit) as ended:
        grpo.main(["--resume", str(run_dir), "--dry-run"])
    assert files(Path()) == before
    shown = capsys.readouterr()
    return ended.value.code, shown.out, shown.err


def test_dry_run_of_a_resume_names_the_step_it_continues_after(capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(steps=3)
    (run_dir / "checkpoints" / "step-5").mkdir()
    code, out, _ = dry_run(run_dir, capsys)
    assert code == 0
    assert "Ready to start, continuing after step 3; step-5 cannot be used: commit.json is missing" in out


def test_dry_run_refuses_what_a_resume_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(steps=0)
    code, _, err = dry_run(run_dir, capsys)
    assert code == 2
    with pytest.raises(ConfigError, match="no intact checkpoint") as raised:
        GRPO(load_config(run_dir / "config.yaml"), resume=run_dir)
    assert err.endswith(f"{raised.value}\n")
    lock = RunLock(run_dir)
    owner = (run_dir / LOCK_FILE).read_text()
    code, _, err = dry_run(run_dir, capsys)
    assert code == 2
    assert f"--resume: the run is still active in process {os.getpid()} on " in err
    with pytest.raises(ConfigError, match="still active") as raised:
        claim_run(run_dir)
    assert err.endswith(f"{raised.value}\n")
    assert (run_dir / LOCK_FILE).read_text() == owner
    lock.release()
    check_idle(run_dir)


@pytest.mark.parametrize(
    ("folder", "problem"),
    [
        ("nowhere", r"the run directory does not exist \(got nowhere\)"),
        ("sums.jsonl", "the run directory is not a directory"),
        ("/proc/self", r"must be writable, but /proc/self is not \("),
    ],
)
def test_unusable_run_directory_is_refused_before_it_is_locked(folder: str, problem: str) -> None:
    write_run(steps=0)
    for check in (claim_run, check_idle):
        with pytest.raises(ConfigError, match=problem):
            check(Path(folder))


def test_name_taken_by_a_file_counts_as_taken() -> None:
    Path("runs").mkdir()
    Path("runs/a").touch()
    lock = claim_new_run(Path("runs/a"))
    assert lock.path == Path("runs/a-2")
    lock.release()


def test_check_returns_the_state_before_the_first_step() -> None:
    write_run(steps=0)
    assert GRPO.check(load_config("quickstart", QUICK)).state == FIRST


def test_dry_run_refuses_a_lock_that_is_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    write_run(steps=0).rename("runs/other")
    (Path("runs/quickstart") / LOCK_FILE).mkdir(parents=True)
    with pytest.raises(SystemExit) as ended:
        grpo.main(["--config", "quickstart", *QUICK, "--dry-run"])
    assert ended.value.code == 2
    with pytest.raises(ConfigError, match="in the directory of a run must be a regular file") as raised:
        claim_new_run(Path("runs/quickstart"))
    assert capsys.readouterr().err.endswith(f"{raised.value}\n")


@pytest.mark.parametrize("config", ["quickstart", {"name": "a"}, None])
def test_anything_but_a_config_is_refused_with_how_to_load_one(config: Any) -> None:
    for kind in (GRPO, SFT):
        with pytest.raises(TypeError, match=rf"^{kind.__name__}: expected a Config .* Load it: {kind.__name__}\(load_config"):
            kind(config)
