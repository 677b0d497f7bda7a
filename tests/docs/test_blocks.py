"""Code blocks of the pages: configurations, commands and generated files."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.blocks import PAGES, ROOT, Block, all_blocks, blocks_of, indented_blocks, shell_lines
from titanrl import load_config
from titanrl.commands import __main__ as cli
from titanrl.config.load import parse_run

COMMANDS = [(block, line) for block in all_blocks("sh") for line in shell_lines(block)]
TRAINS = re.compile(r"(\.venv/bin/)?titanrl (?P<name>train|sft|distill) ")
COPIES = re.compile(r"titanrl configs\b")
GENERATES = re.compile(r"\.venv/bin/python (.+) > (\S+)")
KNOWN = re.compile(
    rf"{TRAINS.pattern}|{COPIES.pattern}|{GENERATES.pattern}|make [a-z-]+"
    r"|(python -m titanrl\.|titanrl )chat "  # tests/e2e/test_docs.py
    r"|titanrl evaluate "  # tests/commands/test_evaluate.py
    r"|titanrl board\b"  # tests/commands/test_board.py
    r"|titanrl compare "  # tests/metrics/test_comparison.py
    r"|titanrl timeline "  # tests/metrics/test_timeline.py
    r"|titanrl explain "  # tests/run/test_explanation.py
    r"|titanrl steer "  # tests/e2e/test_steering.py
    r"|titanrl serve |curl -s http://127\.0\.0\.1:8000/|\(umask 077; openssl "  # tests/e2e/test_serve.py
    r"|pip install 'titanrl\[tinker\]'$|\(umask 077; echo tml-"  # tests/e2e/test_tinker.py
    r"|(TINKER_\w+=\S+ )+python -m tinker_cookbook\."  # tests/e2e/test_tinker_recipes.py
    r"|titanrl warm --config quickstart$"  # tests/conftest.py
    r"|\.venv/bin/python -m benchmarks\.table$"  # tests/test_project.py
    r"|\.venv/bin/python -m tests\.e2e\.fault_matrix "  # tests/test_fault_matrix.py
    r"|python examples/"  # tests/e2e/test_docs.py, tests/e2e/test_rewards.py
    r"|pip install \.$|titanrl doctor( --install)?$"  # tests/e2e/test_installation.py
    r"|titanrl doctor --config quickstart device=cpu$"  # tests/commands/test_doctor.py
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Working directory for commands, laid out like a checkout with a finished run."""
    for name in ("configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("quickstart", "sft_quickstart"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").write_text((ROOT / f"configs/{name}.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if not name.startswith(("titanrl", "torch", "reasoning_gym", "numpy")):
            sys.modules.pop(name)


def write_files(page: Path, folder: Path) -> None:
    """Write the files that a page shows and the files that its commands copy."""
    for block in blocks_of(page):
        if block.title:
            (folder / block.title).write_text(block.text)
        for line in shell_lines(block) if block.language == "sh" else ():
            if COPIES.match(line):
                cli.main(shlex.split(line)[1:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_code_block_names_its_language(page: Path) -> None:
    blocks_of(page)
    assert list(indented_blocks(page)) == []


def test_every_shell_command_is_one_the_tests_run() -> None:
    assert [f"{block}: {line}" for block, line in COMMANDS if not KNOWN.match(line)] == []
    assert sum(bool(TRAINS.match(line)) for _, line in COMMANDS) > 5


def training_commands(*, is_dry: bool) -> list[tuple[Block, str]]:
    """Return each different training command once, with or without `--dry-run`."""
    commands = {line.removeprefix(".venv/bin/"): block for block, line in COMMANDS if TRAINS.match(line)}
    return [(block, line) for line, block in commands.items() if ("--dry-run" in line) == is_dry]


def program_of(line: str) -> str:
    """Return the subcommand that a training command runs."""
    match = TRAINS.match(line)
    assert match
    return match["name"]


@pytest.mark.parametrize(("block", "line"), training_commands(is_dry=True), ids=str)
def test_documented_dry_run_succeeds(block: Block, line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = import_module(cli.COMMANDS[program_of(line)][0].removesuffix(":main"))
    write_files(block.page, folder)
    with pytest.raises(SystemExit) as ended:
        program.main(shlex.split(TRAINS.sub("", line)))
    assert ended.value.code == 0, capsys.readouterr()


@pytest.mark.parametrize(("block", "line"), training_commands(is_dry=False), ids=str)
def test_training_command_has_a_valid_configuration(block: Block, line: str, folder: Path) -> None:
    write_files(block.page, folder)
    arguments = parse_run(shlex.split(TRAINS.sub("", line)), prog="titanrl train", purpose="")
    config = load_config(arguments.config or arguments.resume / "config.yaml", arguments.overrides)
    assert config.program == program_of(line)


def test_documented_script_exists() -> None:
    scripts = {line.split()[1] for _, line in COMMANDS if line.startswith("python examples/")}
    assert {script for script in scripts if not (ROOT / script).is_file()} == set()
    assert len(scripts) > 3


@pytest.mark.parametrize("target", sorted({line.split()[1] for _, line in COMMANDS if line.startswith("make ")}))
def test_documented_make_target_exists(target: str) -> None:
    assert re.search(rf"^{target}: .*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("block", all_blocks("yaml"), ids=str)
def test_yaml_block_is_a_valid_override_of_the_quick_start(block: Block, tmp_path: Path) -> None:
    base = {} if block.title else yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text())
    changed = tmp_path / "changed.yaml"
    changed.write_text(yaml.safe_dump(merged(base, yaml.safe_load(block.text))))
    load_config(changed)


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the keys of `change` into `base` by section; a new task drops the old task's options."""
    base = dict(base)
    if "task" in change:
        base.pop("task_config", None)
    sections = {key: merged(base[key], value) for key, value in change.items() if isinstance(value, dict) and key in base}
    return base | dict(change) | sections


@pytest.mark.parametrize("block", all_blocks("json"), ids=str)
def test_json_block_is_json(block: Block) -> None:
    try:
        json.loads(block.text)
    except ValueError:
        assert [json.loads(line) for line in block.text.splitlines()]


def test_every_python_block_compiles() -> None:
    flags = 0x2000  # ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    for block in all_blocks("python"):
        compile(block.text, str(block), "exec", flags=flags)


@pytest.mark.parametrize("line", [line for _, line in COMMANDS if GENERATES.match(line)])
def test_generated_file_is_up_to_date(line: str) -> None:
    match = GENERATES.fullmatch(line)
    assert match
    printed = subprocess.run([sys.executable, *shlex.split(match[1])], cwd=ROOT, check=True, capture_output=True, text=True)
    assert (ROOT / match[2]).read_text() == printed.stdout, f"run: {line}"
