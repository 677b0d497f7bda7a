"""Runs whose directory becomes full or read-only, or vanishes: one last line names path and cause; checkpoints stay intact."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import REPO
from titanrl.metrics.reading import read_metrics
from titanrl.run.checkpoints import resumable

HOOKS = """
import shutil

import titanrl


class FullCheckpoint(titanrl.Hook):
    def after_checkpoint(self, run, folder):
        if folder.name == "step-1":
            full = run.run_dir / "full"  # a real folder would be deleted before the checkpoint is written
            full.mkdir()
            (full / "__0_0.distcp").symlink_to("/dev/full")
            (folder.parent / "step-2").symlink_to(full)


class FullExport(titanrl.Hook):
    def after_checkpoint(self, run, folder):
        if folder.name == "step-3":
            (folder.parent / "final.partial").symlink_to("/dev/full")


class FailingEvents(titanrl.Hook):
    def after_step(self, run, metrics):
        events = run.recorder.directory.events
        events.unlink(missing_ok=True)
        events.symlink_to("/dev/full")  # a checkpoint flushes the file first, and fsync fails, as on a failing disk


class Deleted(titanrl.Hook):
    def after_step(self, run, metrics):
        shutil.rmtree(run.run_dir)
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the initial model, which all runs share."""
    return tmp_path_factory.mktemp("cache")


def fine_tune(folder: Path, cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `titanrl sft` on a tiny random model, with three steps and a checkpoint after each."""
    (folder / "breaking.py").write_text(HOOKS)
    small = (
        "model.recipe.num_layers=1",
        "num_steps=3",
        "sft.batch_size=4",
        "checkpoint.every_steps=1",
        "evaluation.num_prompts=8",
    )
    start = ("--config", "sft_quickstart", *small, "logging.console=plain", f"cache_dir={cache}")
    arguments = arguments if "--resume" in arguments else (*start, f"output_dir={folder}/runs", *arguments)
    command = [sys.executable, "-m", "titanrl.commands", "sft", *arguments]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120, check=False)


def last_line(finished: subprocess.CompletedProcess[str]) -> str:
    assert finished.returncode == 1, finished.stdout + finished.stderr
    assert "Traceback" not in finished.stdout + finished.stderr
    return finished.stderr.splitlines()[-1]


def test_full_disk_at_a_checkpoint_keeps_the_one_before(cache: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "sft_quickstart"
    last = last_line(fine_tune(tmp_path, cache, f"hooks=[{tmp_path}/breaking.py:FullCheckpoint]"))
    assert last.startswith(f"error: StorageError: cannot save a checkpoint in {run_dir}/checkpoints: ")
    assert "No space left on device" in last or "file write failed" in last
    assert resumable(run_dir).state.step == 1
    resumed = fine_tune(tmp_path, cache, "--resume", str(run_dir), "hooks=[]")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "continuing from step 1, the newest intact checkpoint (step-2: commit.json is missing" in resumed.stderr
    assert [row["step"] for row in read_metrics(run_dir / "metrics.jsonl") if "loss/train" in row] == [1, 2, 3]
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["final", "step-2", "step-3", "unusable-2"]


@pytest.mark.parametrize(
    ("hook", "file", "cause"),
    [
        ("Deleted", "metrics.jsonl", "FileNotFoundError: [Errno 2] deleted while the run was writing to it"),
        pytest.param("FailingEvents", "events.jsonl", "OSError: [Errno 22] Invalid argument", marks=pytest.mark.slow),
        pytest.param("FullExport", "checkpoints/final", "StorageError: cannot export the model", marks=pytest.mark.slow),
    ],
)
def test_last_line_names_lost_directory_or_full_disk(hook: str, file: str, cause: str, cache: Path, tmp_path: Path) -> None:
    last = last_line(fine_tune(tmp_path, cache, f"hooks=[{tmp_path}/breaking.py:{hook}]"))
    assert last.startswith(f"error: {cause}")
    assert str(tmp_path / "runs" / "sft_quickstart" / file) in last
