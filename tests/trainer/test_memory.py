"""Estimates of the trainer's memory against the tensors of real steps."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.config.test_sizes import make_config
from tests.models.tiny import OPTIONS, SIZES
from tests.trainer import checks
from tests.trainer.ranks import World
from titanrl.config.sizes import derive
from titanrl.models.directory import model_shape


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_estimate_is_within_15_percent_of_the_peak(
    family: str, checkpointing: str, world: Callable[[int], World], tmp_path: Path
) -> None:
    options = {**SIZES, **OPTIONS[family], "model_type": family, "num_hidden_layers": 4, "intermediate_size": 384}
    (tmp_path / "config.json").write_text(json.dumps(options))
    trainer = {"row_tokens": 128, "rows_per_microbatch": 4, "activation_checkpointing": checkpointing}
    config = make_config(model={"path": str(tmp_path)}, trainer=trainer)
    shape = model_shape(config)
    assert shape is not None
    memory = derive(config, shape).memory
    assert memory is not None
    (peak,) = world(1).run(checks.peak_bytes_of, tmp_path, shape, config.trainer)
    assert memory.trainer.total == pytest.approx(peak, rel=0.15)
