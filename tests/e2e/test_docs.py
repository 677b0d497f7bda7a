"""Documented programs that need a trained model: Python blocks, the notebook and the chat."""

import json
import re
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.docs import run_blocks
from tests.docs.blocks import PAGES, all_blocks, blocks_of, shell_lines
from tests.e2e.conftest import REPO, Finished
from titanrl.carriers.record import parts_of, read_lines

NOTEBOOK = REPO / "docs/notebooks/quickstart.ipynb"
NOTEBOOKS = sorted(NOTEBOOK.parent.glob("*.ipynb"))
SCRIPTS = [REPO / f"examples/{name}/{name}.py" for name in run_blocks.SCRIPTS]


def small_run(finished: Finished, folder: Path) -> list[str]:
    """Return overrides that start from a finished run's model and write to a folder."""
    model = finished.run_dir / "checkpoints/final"
    places = [f"output_dir={folder}/runs", f"cache_dir={folder}/cache", f"model.path={model}", "warm_start=null"]
    return [*places, "evaluation.num_prompts=8"]


def test_every_python_block_runs(plain_run: Finished, tmp_path: Path) -> None:
    for name in ("configs", "examples"):
        (tmp_path / name).symlink_to(REPO / name)
    pages = [page for page in PAGES if any(block.language == "python" for block in blocks_of(page))]
    for page in pages:
        for block in blocks_of(page):
            if block.title:
                (tmp_path / block.title).write_text(block.text)
    overrides = json.dumps([*small_run(plain_run, tmp_path), "logging.console=off"])
    command = [sys.executable, "-m", "tests.docs.run_blocks", str(tmp_path), overrides]
    command += map(str, [*pages, *NOTEBOOKS, *SCRIPTS])
    result = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stdout + result.stderr[-5000:]
    expected = [str(block) for block in all_blocks("python") if not block.title]
    expected += [str(block) for notebook in NOTEBOOKS for block in run_blocks.code_of(notebook)]
    expected += [str(script.relative_to(REPO)) for script in SCRIPTS]
    assert [line for line in result.stdout.splitlines() if line.startswith("ran ")] == [f"ran {name}" for name in expected]
    assert len(expected) >= 30
    (margin,) = re.findall(r"held-out margin (\S+),", result.stdout)
    assert float(margin) > 0.0


@pytest.mark.slow  # the test above executes its cells without Jupyter
def test_the_notebook_runs_in_its_own_folder(plain_run: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (load,) = (cell for cell in notebook.cells if "load_config" in cell.source)
    assert "overrides)" in load.source
    load.source = load.source.replace("overrides)", f"overrides + {small_run(plain_run, tmp_path)!r})")
    (train,) = (cell for cell in notebook.cells if "range(19)" in cell.source)
    train.source = train.source.replace("range(19)", "range(2)")
    monkeypatch.chdir(NOTEBOOK.parent)
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
    assert "final" in notebook.cells[-1].outputs[0]["text"]
    assert (tmp_path / "runs/notebook/report.html").is_file()


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_keeps_its_outputs_without_paths_of_a_machine(notebook: Path) -> None:
    cells = [cell for cell in nbformat.read(notebook, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    text = json.dumps([cell.outputs for cell in cells])
    assert sum(bool(cell.outputs) for cell in cells) >= 5
    for path in ("/home/", "/tmp/", str(REPO)):
        assert path not in text
    assert notebook.stat().st_size < 50_000


def test_documented_chat_completes_a_prompt(plain_run: Finished) -> None:
    lines = {line for block in all_blocks("sh") for line in shell_lines(block) if "titanrl chat" in line}
    assert lines == {"titanrl chat runs/quickstart", "titanrl chat http://127.0.0.1:8000"}
    result = subprocess.run(
        [sys.executable, "-m", "titanrl.commands", "chat", str(plain_run.run_dir)],
        cwd=REPO,
        input="State the final answer to the following arithmetic problem: 7 + 5 - 3 =\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "<answer>" in result.stdout


def test_the_documented_rollout_has_the_keys_of_a_recorded_one(plain_run: Finished) -> None:
    (documented,) = (json.loads(block.text) for block in all_blocks("json") if block.page.name == "record.md")
    _, recorded, *_ = read_lines(parts_of(plain_run.run_dir, "rollouts")[0].path)
    assert documented.keys() == recorded.keys()
    assert documented["completions"][0].keys() == recorded["completions"][0].keys()
