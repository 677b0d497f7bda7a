"""The wheel in a new environment outside the repository: the documented commands, with packages from the registries."""

import venv
from pathlib import Path

import pytest

from tests.e2e.conftest import SMALL
from tests.installed import Environment, build, copy_repository, unpack

QUESTION = "State the final answer to the following arithmetic problem: 7 + 5 - 3 =\n"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's folder, outside the repository."""
    return tmp_path_factory.mktemp("project")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Environment:
    """Environment with only pip, in which the commands of docs/installation.md were run."""
    scratch = tmp_path_factory.mktemp("installation")
    sdist = build("sdist", copy_repository(scratch / "repository"), scratch)
    wheel = build("wheel", unpack(sdist, scratch), scratch)
    venv.create(scratch / "env", with_pip=True, symlinks=True)
    environment = Environment(scratch / "env")
    installed = environment.run("pip", "install", str(wheel), cwd=folder, timeout_s=1200)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    checked = environment.run("pip", "check", cwd=folder)
    assert checked.returncode == 0, checked.stdout
    refused = environment.run("titanrl", "train", "--config", "quickstart", cwd=folder)
    assert refused.returncode == 2
    assert "titanrl doctor cpu --install" in refused.stderr
    completed = environment.run("titanrl", "doctor", "--install", cwd=folder, timeout_s=1800)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "\nReady." in completed.stdout
    return environment


def test_installed_configs_match_the_wheel(environment: Environment, folder: Path) -> None:
    listed = environment.run("titanrl", "configs", cwd=folder)
    assert "\nquickstart " in listed.stdout
    where = environment.run("python", "-c", "import titanrl; print(titanrl.__file__)", cwd=folder)
    assert where.stdout.startswith(str(environment.packages))


def test_installed_command_trains_a_policy_that_chats(environment: Environment, folder: Path) -> None:
    trained = environment.run("titanrl", "train", "--config", "quickstart", *SMALL, cwd=folder, timeout_s=600)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert (folder / "runs/quickstart/report.html").is_file()
    answered = environment.run("titanrl", "chat", "runs/quickstart", cwd=folder, stdin=QUESTION)
    assert answered.returncode == 0, answered.stderr
    assert "<answer>" in answered.stdout


def test_installed_command_fine_tunes_a_model_that_chats(environment: Environment, folder: Path) -> None:
    tuned = environment.run("titanrl", "sft", "--config", "sft_quickstart", "num_steps=20", cwd=folder, timeout_s=600)
    assert tuned.returncode == 0, tuned.stdout + tuned.stderr
    assert "Loss: held-out " in tuned.stdout
    answered = environment.run("titanrl", "chat", "runs/sft_quickstart", cwd=folder, stdin=QUESTION)
    assert answered.returncode == 0, answered.stderr
    assert answered.stdout.strip()


def test_installed_command_distills_the_trained_policy(environment: Environment, folder: Path) -> None:
    small = ("num_steps=2", "warm_start=null", "evaluation.num_prompts=8")
    distilled = environment.run("titanrl", "distill", "--config", "distill_quickstart", *small, cwd=folder, timeout_s=600)
    assert distilled.returncode == 0, distilled.stdout + distilled.stderr
    assert (folder / "runs/distill_quickstart/checkpoints/final/config.json").is_file()


# Each further subcommand that trains has a test here: `environment.run("titanrl", "<name>", "--config", "<shipped>", ...)`.
