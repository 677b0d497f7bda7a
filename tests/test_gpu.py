"""The check of the trainer on a GPU: its parts run on a CPU with tiny models, and a part that does not end loses nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu


def test_all_parts_run_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--json", out, "--device", "cpu"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    result = json.loads(out.read_text())
    parts = result["parts"]
    assert {name: (part["status"], part.get("why")) for name, part in parts.items()} == {
        part.name: ("ok", None) for part in gpu.SMALL_PARTS
    }
    assert not result["ran_on_gpu"]
    assert f"{len(gpu.SMALL_PARTS)} of {len(gpu.SMALL_PARTS)} parts complete" in shown

    first = parts["limits"]["figures"][0]
    assert {"monarch", "torchstore", "vllm"}.isdisjoint(first["heavy_imports"]), "the parts need a small set of packages only"
    float32, bfloat16 = [figure for figure in parts["numerics"]["figures"] if "compute_dtype" in figure]
    assert float32["within_tolerance"], float32
    assert bfloat16["within_tolerance"], bfloat16
    assert bfloat16["logprobs_mean"] > 0, "bfloat16 was not used"
    (step,) = [figure for figure in parts["step:small"]["figures"] if "step_s" in figure]
    assert step["tokens_per_s"] == pytest.approx(step["tokens"] / step["step_s"])
    assert all(figure["equal"] for figure in parts["weights"]["figures"])
    (invariance,) = parts["invariance"]["figures"]
    assert invariance["others_changed"]["max"] == 0.0
    shares = {name: value for figure in parts["shares"]["figures"] for name, value in figure.items()}
    assert min(shares[name] for name in ("pass_s", "optimizer_s", "attention_s", "head_s", "busy_share")) > 0


def test_part_that_does_not_end_keeps_its_figures(tmp_path: Path) -> None:
    program = "import sys, time; sys.stdin.readline(); open(sys.argv[1], 'w').write(sys.argv[2]); time.sleep(600)"
    file, figure = tmp_path / gpu.records_file("a part"), json.dumps({"figure": {"device": "cpu", "step_s": 1.0}})
    process = subprocess.Popen(
        [sys.executable, "-c", program, file, figure + "\n"], stdin=subprocess.PIPE, start_new_session=True
    )
    why = gpu.finish(process, 5.0)
    gpu.end(process)
    assert process.returncode == -9
    found = gpu.read(file, why)
    assert found == {"status": "not finished", "why": "ended after 5 s", "figures": [{"device": "cpu", "step_s": 1.0}]}


def test_part_whose_process_dies_is_reported(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import os; os._exit(3)"], stdin=subprocess.PIPE, start_new_session=True)
    why = gpu.finish(process, 60.0)
    gpu.end(process)
    assert gpu.read(tmp_path / "nothing", why)["why"] == "its process exited with 3"


def test_names_of_parts_do_not_share_a_file() -> None:
    files = [gpu.records_file(part.name) for part in (*gpu.PARTS, *gpu.SMALL_PARTS)]
    assert len(set(files)) == len(files) - len({part.name for part in gpu.PARTS} & {part.name for part in gpu.SMALL_PARTS})
    assert not any(os.sep in file for file in files)
