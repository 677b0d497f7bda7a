import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks import table

ROOT = Path(__file__).parents[1]
LISTS = ("cpu", "cuda", "dev", "npu")
HEAVY = ("monarch", "reasoning_gym", "torch", "torchstore", "torchtitan", "transformers", "vllm")
PIN = re.compile(r"([a-z0-9-]+)==([a-z0-9.]+)")


def read_project() -> dict[str, list[str]]:
    """The requirements of pyproject.toml, by extra; the core ones under an empty name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {"": project["dependencies"], **project["optional-dependencies"]}


def read_pins(name: str) -> dict[str, str]:
    """Version by package of a list; a line that is anything but a pin, such as an index, fails."""
    pins = {}
    for line in (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        match = PIN.fullmatch(line)
        assert match, f"requirements/{name}.txt: not a pin: {line}"
        pins[match[1]] = match[2]
    return pins


def read_inputs(name: str) -> list[str]:
    """Requirements of a `.in` file and the files it includes."""
    requirements = []
    for line in (ROOT / "requirements" / f"{name}.in").read_text(encoding="utf-8").splitlines():
        if line.startswith("-r "):
            requirements += read_inputs(line.removeprefix("-r ").removesuffix(".in"))
        elif line and not line.startswith(("#", "-c ")):
            requirements.append(line)
    return requirements


def package_name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9_-]", requirement)[0].lower()


def assert_fulfilled(requirements: list[str], pins: dict[str, str]) -> None:
    for requirement in requirements:
        name = package_name(requirement)
        assert name in pins, f"{name} is in no list: run make requirements"
        if "==" in requirement:
            assert requirement == f"{name}=={pins[name]}"


def test_importing_the_package_loads_nothing_heavy() -> None:
    program = f"import sys, titanrl; print(sorted(set({HEAVY}) & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert loaded == "[]\n"


@pytest.mark.parametrize("name", LISTS)
def test_a_list_holds_pins_alone_and_all_that_is_asked_for(name: str) -> None:
    assert_fulfilled(read_inputs(name), read_pins(name))


@pytest.mark.parametrize("extra", ["cpu", "cuda"])
def test_the_lists_agree_with_the_project_file(extra: str) -> None:
    project = read_project()
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    torch = re.search(r"^TORCH_VERSION := (.*)$", makefile, re.MULTILINE)
    assert torch
    pins = {"torch": torch[1], **read_pins(extra)}
    assert_fulfilled(project[""] + project[extra] + project["tasks"] + project["report"], pins)
    assert pins["torch"] == torch[1]


def test_the_core_is_small() -> None:
    assert len(read_project()[""]) <= 8


def test_the_project_file_names_the_same_development_tools() -> None:
    assert read_project()["dev"] == read_inputs("dev")


@pytest.mark.parametrize("name", ["cpu", "cuda", "npu"])
def test_the_development_list_fits_every_other(name: str) -> None:
    pins, dev = read_pins(name), read_pins("dev")
    assert not [package for package in pins.keys() & dev.keys() if pins[package] != dev[package]]


def test_on_cpu_torch_is_left_to_its_own_step() -> None:
    assert not {"torch", "torchvision", "torchaudio"} & read_pins("cpu").keys()
    assert not [name for name in read_pins("cpu") if name.startswith("nvidia")]


def test_the_figures_in_readme_and_docs_are_those_of_the_baselines() -> None:
    subprocess.run([sys.executable, "-m", "benchmarks.table", "--check"], cwd=ROOT, check=True)


def test_a_figure_that_is_not_its_baselines_is_found_and_put_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "benchmarks/baselines").mkdir(parents=True)
    shutil.copy(ROOT / "benchmarks/baselines/quickstart.json", tmp_path / "benchmarks/baselines")
    text = (ROOT / "README.md").read_text()
    (tmp_path / "README.md").write_text(text.replace("| step, median |", "| step, guessed |"))
    monkeypatch.setattr(table, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["table", "--check"])
    with pytest.raises(SystemExit, match=r"README\.md: the figures are outdated"):
        table.main()
    monkeypatch.setattr(sys, "argv", ["table"])
    table.main()
    assert (tmp_path / "README.md").read_text() == text
