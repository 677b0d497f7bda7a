import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

DRY_RUN = """
import sys
import time
import titanrl.launch.preflight
from rich.console import Console
from titanrl.config import load_config
from titanrl.config.dry_run import print_dry_run
from titanrl.models.directory import model_shape
config = load_config("configs/qwen3_8b_8gpu.yaml")
print_dry_run(config, Console(quiet=True), shape=model_shape(config))
print(sorted({"torch", "vllm", "monarch", "transformers", "torchtitan", "reasoning_gym"} & set(sys.modules)))
print(time.process_time())
"""


def test_dry_run_is_fast_and_imports_no_heavy_package() -> None:
    done = subprocess.run([sys.executable, "-c", DRY_RUN], cwd=ROOT, check=True, capture_output=True, text=True)
    loaded, seconds = done.stdout.splitlines()
    assert loaded == "[]"
    assert float(seconds) < 2  # of processor time, so that a busy machine does not matter
