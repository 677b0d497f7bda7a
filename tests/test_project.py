"""Requirements, layers, layout and figures are consistent everywhere they are written down."""

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks import table
from titanrl.config.device import packages

ROOT = Path(__file__).parents[1]
LISTS = ("cpu", "cuda", "dev", "docs", "npu")
HEAVY = ("monarch", "reasoning_gym", "torch", "torchstore", "torchtitan", "transformers", "vllm")
PIN = re.compile(r"([a-z0-9-]+)==([a-z0-9.]+)")


def read_project() -> dict[str, list[str]]:
    """Return the requirements of pyproject.toml by extra; the core requirements have an empty name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {"": project["dependencies"], **project["optional-dependencies"]}


def read_pins(name: str) -> dict[str, str]:
    """Return the version of each package in a list; fail on a line that is not a pin, such as an index."""
    pins = {}
    for line in (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        match = PIN.fullmatch(line)
        assert match, f"requirements/{name}.txt: not a pin: {line}"
        pins[match[1]] = match[2]
    return pins


def read_inputs(name: str) -> list[str]:
    """Return the requirements of a `.in` file and of the files it includes."""
    requirements = []
    for line in (ROOT / "requirements" / f"{name}.in").read_text(encoding="utf-8").splitlines():
        if line.startswith("-r "):
            requirements += read_inputs(line.removeprefix("-r ").removesuffix(".in"))
        elif line and not line.startswith(("#", "-c ")):
            requirements.append(line)
    return requirements


def assert_fulfilled(requirements: list[str], pins: dict[str, str]) -> None:
    for requirement in map(Requirement, requirements):
        name = requirement.name.lower()
        assert name in pins, f"{name} is in no list: run make requirements"
        assert pins[name] in requirement.specifier, f"{requirement} is pinned to {pins[name]}"


def test_importing_the_package_imports_no_heavy_library() -> None:
    program = f"import sys, titanrl; print(sorted(set({HEAVY}) & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert loaded == "[]\n"


@pytest.mark.parametrize("name", LISTS)
def test_list_has_only_pins_and_every_requirement(name: str) -> None:
    assert_fulfilled(read_inputs(name), read_pins(name))


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_lists_satisfy_declared_dependencies(device: str) -> None:
    assert_fulfilled(read_project()[""], read_pins(device))


def test_every_device_has_the_same_torch() -> None:
    match = re.fullmatch(r"torch==([\d.]+)\+cpu\n", (ROOT / "requirements/torch-cpu.txt").read_text())
    assert match
    assert match[1] == read_pins("cuda")["torch"] == read_pins("npu")["torch-npu"]
    printed = subprocess.run(["make", "--dry-run", "venv", "VENV=unmade"], cwd=ROOT, check=True, capture_output=True, text=True)
    assert f"torch=={match[1]}+cpu" in printed.stdout


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_required_packages_match_the_list(device: str) -> None:
    pins = read_pins(device) | ({} if device == "cuda" else {"torch": read_pins("cuda")["torch"] + "+cpu"})
    required = {package.name: package.required for package in packages(device)}
    assert required.keys() >= {"torch", "torchmonarch", "torchstore", "torchtitan", "transformers", "pydantic"}
    assert {name for name, version in required.items() if version not in (None, pins[name])} == set()


def test_package_ships_the_configs_and_the_lists() -> None:
    for folder in ("configs", "requirements"):
        assert (ROOT / "titanrl" / folder).readlink() == Path("..") / folder


def imported_packages(path: Path) -> set[str]:
    """Return the top-level packages that a file imports, at its top or in a function."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"titanrl"}


def test_commands_start_with_only_the_declared_dependencies() -> None:
    # Before `titanrl doctor --install`, a command must get as far as naming what is missing.
    declared = {canonicalize_name(Requirement(requirement).name) for requirement in read_project()[""]}
    distributions = importlib.metadata.packages_distributions()
    undeclared = {
        package
        for package in set[str]().union(*map(imported_packages, (ROOT / "titanrl").rglob("*.py")))
        if not declared & {canonicalize_name(name) for name in distributions.get(package, ())}
    }
    # The cores of pydantic and transformers; and Monarch requires the interface of OpenTelemetry.
    undeclared -= {"pydantic_core", "tokenizers", "opentelemetry"}
    assert undeclared >= {"httpx", "torch", "torchtitan", "vllm"}
    program = f"""
import importlib, sys

class Hiding:
    def __init__(self, finder):
        self.find_spec = lambda name, *rest: None if name.partition(".")[0] in {undeclared} else finder.find_spec(name, *rest)

sys.meta_path[:] = map(Hiding, sys.meta_path)
for path, _ in importlib.import_module("titanrl.commands.__main__").COMMANDS.values():
    importlib.import_module(path.partition(":")[0])
"""
    started = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert started.returncode == 0, started.stderr


def test_core_has_at_most_eight_dependencies() -> None:
    assert len(read_project()[""]) <= 8


def test_project_file_names_the_development_tools() -> None:
    assert read_project()["dev"] == read_inputs("dev")


@pytest.mark.parametrize("name", ["cpu", "cuda", "npu"])
@pytest.mark.parametrize("tools", ["dev", "docs"])
def test_tool_requirements_match_every_list(name: str, tools: str) -> None:
    pins, extra = read_pins(name), read_pins(tools)
    assert not [package for package in pins.keys() & extra.keys() if pins[package] != extra[package]]


def test_tool_lists_agree() -> None:
    dev, docs = read_pins("dev"), read_pins("docs")
    assert not [package for package in dev.keys() & docs.keys() if dev[package] != docs[package]]


def test_cpu_list_excludes_torch() -> None:
    assert not {"torch", "torchvision", "torchaudio"} & read_pins("cpu").keys()
    assert not [name for name in read_pins("cpu") if name.startswith("nvidia")]


def test_figures_in_docs_match_the_baselines() -> None:
    subprocess.run([sys.executable, "-m", "benchmarks.table", "--check"], cwd=ROOT, check=True)


def test_wrong_figure_is_reported_and_corrected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "benchmarks/baselines").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "benchmarks/baselines/quickstart.json", tmp_path / "benchmarks/baselines")
    text = (ROOT / "docs/first_run.md").read_text()
    (tmp_path / "docs/first_run.md").write_text(text.replace("| step, median |", "| step, guessed |"))
    monkeypatch.setattr(table, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["table", "--check"])
    with pytest.raises(SystemExit, match=r"docs/first_run\.md: the figures are outdated"):
        table.main()
    monkeypatch.setattr(sys, "argv", ["table"])
    table.main()
    assert (tmp_path / "docs/first_run.md").read_text() == text


def layers() -> dict[str, int]:
    """Return the layer of each module of the package; layer 0 imports nothing above it."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    rows: list[str] = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    return {name: layer for layer, row in enumerate(reversed(rows)) for name in re.findall(r"\w+", row)}


def test_readme_tree_has_every_module_with_its_layer() -> None:
    tree = (ROOT / "README.md").read_text().split("## Code layout")[1].split("## ")[0]
    listed = {match[1]: int(match[2]) for match in re.finditer(r"^  (\w+)(?:\.py|/) +(\d+)  \S", tree, re.MULTILINE)}
    modules = {path.parent.name for path in (ROOT / "titanrl").glob("*/__init__.py")}
    modules |= {path.stem for path in (ROOT / "titanrl").glob("*.py")} - {"__init__"}
    assert listed == layers()
    assert listed.keys() == modules


def test_contributing_lists_every_layer() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## Layers")[1]
    rows = re.findall(r"^\| (\d+) \| ([^|]*) \|", section, re.MULTILINE)
    assert {name: int(layer) for layer, names in rows for name in re.findall(r"\w+", names)} == layers()


def test_folders_in_readme_tree_exist() -> None:
    tree = (ROOT / "README.md").read_text().split("## Code layout")[1].split("## ")[0]
    for folder in re.findall(r"^(\w+)/ ", tree, re.MULTILINE):
        assert (ROOT / folder).is_dir(), folder


def test_paths_in_the_guides_exist() -> None:
    for guide in ("CONTRIBUTING.md", "AGENTS.md"):
        for path in re.findall(r"`((?:titanrl|tests|docs|benchmarks|configs|\.ci)/[\w./]*)`", (ROOT / guide).read_text()):
            assert (ROOT / path).exists(), f"{guide}: {path}"


def test_llms_txt_lists_every_page() -> None:
    text = (ROOT / "docs/llms.txt").read_text()
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert set(re.findall(r"\]\(([^)]+)\)", text)) == pages


def test_every_marker_is_used_and_documented() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    markers = {line.partition(":")[0] for line in options["markers"]}
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert {marker for marker in markers if f"@pytest.mark.{marker}" not in tests or f"`{marker}`" not in contributing} == set()
