"""Helper that loads an invalid configuration and returns the error."""

from pathlib import Path

import pytest

from titanrl.config import ConfigError, load_config

GOOD = "name: a\nnum_steps: 3\n"


def complaint(folder: Path, text: str, *overrides: str) -> str:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        load_config(path, overrides)
    assert len(raised.value.messages) == 1, str(raised.value)
    return str(raised.value).replace(str(folder), "configs")
