import re
from pathlib import Path
from typing import get_args

import pytest

from tests.config.test_dry_run import dry_run_text
from titanrl.config import load_config, read_source
from titanrl.config.__main__ import reference_text
from titanrl.config.algorithm import (
    ADVANTAGES,
    ALGORITHM_PRESETS,
    CORRECTION_PRESETS,
    LOSSES,
    AlgorithmConfig,
    CorrectionConfig,
    KLConfig,
)
from titanrl.config.dry_run import misfits
from titanrl.config.sizes import derive
from titanrl.models.directory import model_shape

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def test_documented_runs_have_configs() -> None:
    names = {path.stem for path in CONFIGS}
    assert names >= {"quickstart", "qwen3_0.6b_1gpu", "qwen3_0.6b_2gpu", "qwen3_0.6b_npu", "qwen3_8b_8gpu", "qwen3_32b_4hosts"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_config_loads_fits_and_names_its_command(path: Path) -> None:
    config = load_config(path)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[1] == f"# titanrl {config.program} --config {path.stem}"
    assert "# yaml-language-server: $schema=schema.json" in lines
    assert config.name == path.stem
    assert list(misfits(config, derive(config, model_shape(config)).memory)) == []
    assert "# Sizes\n" in dry_run_text(config, read_source(path))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_first_line_describes_the_config_in_one_sentence(path: Path) -> None:
    assert re.match(r"# [A-Z].{20,110}\.\n", path.read_text(encoding="utf-8"))


def test_quickstart_is_the_measured_recipe() -> None:
    config = load_config(ROOT / "configs" / "quickstart.yaml")
    assert config.warm_start is not None
    assert config.data.task_config == {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 1}
    assert (config.algorithm.learning_rate, config.algorithm.num_warmup_steps) == (5e-5, 5)
    # Two sequences of at most 58 tokens fit a row of 128, so 32 rows, 16 at once.
    assert derive(config, model_shape(config)).max_microbatches == 2


def test_every_choice_of_the_objective_is_documented() -> None:
    text = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    correction, kl = CorrectionConfig.model_fields, KLConfig.model_fields
    literals = [get_args(AlgorithmConfig.model_fields[key].annotation) for key in ("proximal", "reduction")]
    choices = [ADVANTAGES, LOSSES, *literals]
    names = [*ALGORITHM_PRESETS, *CORRECTION_PRESETS, *correction, *kl, *(choice for group in choices for choice in group)]
    assert len(names) > 45
    assert [name for name in names if name not in text] == []


def test_every_key_has_a_description() -> None:
    rows = [line for line in reference_text().splitlines() if line.startswith("| `")]
    assert len(rows) > 80
    assert not [row for row in rows if row.endswith("|  |")]
