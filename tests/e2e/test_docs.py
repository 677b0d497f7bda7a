"""What the documentation tells people to run does run."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.e2e.conftest import REPO, Finished

README = (REPO / "README.md").read_text()


def test_the_notebook_runs_from_top_to_bottom(plain_run: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(REPO / "docs/notebooks/quickstart.ipynb", as_version=4)
    (load,) = (cell for cell in notebook.cells if "load_config" in cell.source)
    places = [f"output_dir={tmp_path}", f"cache_dir={plain_run.run_dir.parents[1] / 'cache'}", "warm_start=null"]
    places += [f"model.path={plain_run.run_dir / 'checkpoints/final'}", "evaluation.num_prompts=32"]
    load.source = load.source.replace('["name=notebook",', f'["name=notebook", {", ".join(map(repr, places))},')
    monkeypatch.chdir(REPO)
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert "'final'" in outputs[-1]["data"]["text/plain"]


def commands() -> list[str]:
    """Every `python -m` command of the README, without its comment."""
    lines = [line.strip().split(" #")[0].strip() for line in README.splitlines()]
    return [line for line in lines if line.startswith("python -m titanrl")]


def test_the_readme_has_commands() -> None:
    assert len(commands()) >= 3


@pytest.mark.parametrize("command", commands())
def test_each_command_of_the_readme_runs(command: str, plain_run: Finished, tmp_path: Path) -> None:
    arguments = shlex.split(command)[1:]
    stdin = None
    if "titanrl.grpo" in command and "--dry-run" not in command:
        cache = plain_run.run_dir.parents[1] / "cache"
        small = ["warm_start.num_steps=60", "warm_start.num_long_only_steps=40", "evaluation.num_prompts=16", "num_steps=1"]
        arguments += [f"output_dir={tmp_path}", f"cache_dir={cache}", *small]
    if "titanrl.chat" in command:
        arguments[arguments.index("runs/quickstart")] = str(plain_run.run_dir)
        stdin = "State the final answer to the following arithmetic problem: 7 + 5 - 3 =\n"
    result = subprocess.run(
        [sys.executable, *arguments], cwd=REPO, input=stdin, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    if stdin is not None:
        assert "<answer>" in result.stdout


def test_the_files_the_readme_points_to_are_there() -> None:
    links = [target for target in re.findall(r"\]\(([^)#]+)\)", README) if not target.startswith("http")]
    missing = [target for target in links if not (REPO / target).exists()]
    assert missing == []
    assert len(links) >= 8


def test_the_tree_in_the_readme_names_every_part_of_the_package() -> None:
    parts = {path.name for path in (REPO / "titanrl").iterdir() if not path.name.startswith("__") and path.name != "py.typed"}
    tree = README.split("## The house")[1]
    assert {part for part in parts if not re.search(rf"^\s+{re.escape(part)}/?\s", tree, re.MULTILINE)} == set()
