"""The measured results of the examples and of the distillation, at full length."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import REPO, Finished

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parent of all runs, with one cache of warm-started models."""
    return tmp_path_factory.mktemp("examples")


def output_of(*arguments: str, folder: Path) -> str:
    """Run a command to completion, and return its output."""
    places = (f"output_dir={folder}", f"cache_dir={folder}/cache", "logging.console=plain")
    done = subprocess.run([sys.executable, *arguments, *places], cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def heldout(output: str) -> list[float]:
    """Return the held-out rewards of the policy, in order."""
    return [float(value) for value in re.findall(r"^held-out reward ([\d.]+)", output, re.MULTILINE)]


@pytest.fixture(scope="module")
def teacher(folder: Path) -> Path:
    """Model trained by the REINFORCE example."""
    before, after = heldout(output_of("examples/reinforce/reinforce.py", folder=folder))
    assert before < 0.25
    assert after >= 0.85
    return folder / "reinforce/checkpoints/final"


def test_students_come_within_a_twentieth_of_the_teacher(folder: Path, teacher: Path) -> None:
    path = f"distill.teacher.path={teacher}"
    output = output_of("examples/distillation/distillation.py", path, folder=folder)
    (of_teacher,) = (float(value) for value in re.findall(r"held-out reward of the teacher ([\d.]+)", output))
    assert of_teacher >= 0.85
    before, after = heldout(output)
    assert before < 0.25
    assert after >= of_teacher - 0.05
    output_of("-m", "titanrl.commands", "distill", "--config", "distill_quickstart", path, folder=folder)
    by_command = Finished(0, "", folder / "distill_quickstart").evaluations()
    assert by_command[-1] >= of_teacher - 0.05


def test_dpo_raises_margin_and_reward(folder: Path) -> None:
    output = output_of("examples/dpo/dpo.py", folder=folder)
    (margin,) = (float(value) for value in re.findall(r"held-out margin (\S+),", output))
    assert margin > 0.5
    before, after = heldout(output)
    assert after > before + 0.2


def test_grpo_continues_from_a_fine_tuning(folder: Path) -> None:
    output_of("examples/sft_then_grpo/sft_then_grpo.py", folder=folder)
    after_tuning, *_, last = Finished(0, "", folder / "grpo_stage").evaluations()
    assert last > after_tuning
    assert last >= 0.85
