"""A short version of `python -m tests.fuzz`: hostile overrides, files, lines, models and checkpoints exit with 0, 1 or 2."""

from pathlib import Path
from random import Random

import pytest

from tests.fuzz.targets import TARGETS

NUM_INPUTS = {"overrides": 75, "files": 30, "jsonl": 20, "models": 30, "checkpoints": 50, "records": 30, "commands": 2}


@pytest.mark.parametrize("target", TARGETS)
def test_hostile_inputs_exit_with_a_message(target: str, tmp_path: Path) -> None:
    codes = set()
    for number in range(NUM_INPUTS[target]):
        folder = tmp_path / f"case-{number}"
        folder.mkdir()
        codes.add(TARGETS[target](Random(f"{target} {number}"), folder))
    assert codes <= {0, 1, 2}
