"""Estimates of the trainer's memory against the tensors of real steps."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.memory import peak_bytes
from tests.config.test_sizes import make_config
from tests.models.tiny import OPTIONS, SIZES
from tests.trainer import checks
from tests.trainer.ranks import World
from titanrl.config.device import DEVICES
from titanrl.config.sizes import derive
from titanrl.models.directory import model_shape
from titanrl.processes.variables import trainer_environment
from titanrl.trainer import model as policy_model
from titanrl.trainer.model import ScoringHead


@pytest.mark.parametrize(
    ("family", "checkpointing", "compute_dtype"),
    [
        *(
            (family, checkpointing, "float32")
            for family in ("qwen3", "qwen3_moe")
            for checkpointing in ("none", "selective", "full")
        ),
        ("qwen3", "none", "bfloat16"),
    ],
)
def test_estimate_is_within_15_percent_of_the_peak(
    family: str, checkpointing: str, compute_dtype: str, world: Callable[[int], World], tmp_path: Path
) -> None:
    options = {**SIZES, **OPTIONS[family], "model_type": family, "num_hidden_layers": 4, "intermediate_size": 384}
    (tmp_path / "config.json").write_text(json.dumps(options))
    trainer = {
        "row_tokens": 128, "rows_per_microbatch": 4, "activation_checkpointing": checkpointing,
        "dtype": compute_dtype, "compute_dtype": compute_dtype,
    }  # fmt: skip
    config = make_config(model={"path": str(tmp_path)}, trainer=trainer)
    shape = model_shape(config)
    assert shape is not None
    memory = derive(config, shape).memory
    (peak,) = world(1).run(checks.peak_bytes_of, tmp_path, shape, config.trainer)
    assert memory.trainer.total == pytest.approx(peak, rel=0.15)


def test_peak_of_chunks_is_that_of_one_chunk_though_the_last_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    output, widths = torch.nn.Linear(4, 5000, bias=False), []
    plain = output.forward

    def forward(hidden_BCD: torch.Tensor) -> torch.Tensor:
        widths.append(hidden_BCD.shape[1])
        return plain(hidden_BCD)

    output.forward = forward  # type: ignore[method-assign]
    head = ScoringHead(output, 5000)
    monkeypatch.setattr(policy_model, "LOGITS_BYTES", 100 * 5000 * 4)

    def score(length: int) -> None:
        with head.scoring(torch.zeros(1, length, dtype=torch.int64), 1.0):
            logprobs_BL, _ = output(torch.ones(1, length, 4, requires_grad=True))
        logprobs_BL.sum().backward()
        output.weight.grad = None

    peaks = [peak_bytes(lambda length=length: score(length), torch.device("cpu")) for length in (100, 250)]
    assert widths == [100, 50, 100, 100, 100, 50]
    assert peaks[1] < 1.1 * peaks[0]


FREED = """
import psutil, torch
from titanrl.trainer.checkpoint import return_freed_memory

def private():
    used = psutil.Process().memory_info()
    return used.rss - used.shared

before = private()
tensors = [torch.ones(1 << 20) for _ in range(50)]
del tensors
print(private() - before)
return_freed_memory()
print(private() - before)
"""


def test_a_trainer_returns_the_memory_of_freed_tensors() -> None:
    environment = os.environ | trainer_environment(make_config(), DEVICES["cpu"])
    result = subprocess.run([sys.executable, "-c", FREED], env=environment, capture_output=True, text=True, check=True)
    kept, left = map(int, result.stdout.split())
    assert kept > 100 << 20, "glibc kept less than the trainer's variables let it keep"
    assert left < 50 << 20
