"""Helpers that run the preflight checks on invalid configurations, and return their messages."""

import json
from pathlib import Path
from typing import Any

import pytest

from titanrl.config import ConfigError, read_source
from titanrl.config.errors import BrokenRules
from titanrl.config.load import explain_rule, validate
from titanrl.config.sections import RecipeConfig
from titanrl.launch.preflight import broken_rules, check_data, preflight
from titanrl.models.recipe import create_model

GOOD = "name: a\nnum_steps: 3\ndevice: cpu\n"


def problems(text: str = "", *overrides: str) -> list[str]:
    """Return the messages of all checks except those in child processes, which take a second."""
    path = Path("run.yaml")
    path.write_text(GOOD + text, encoding="utf-8")
    source = read_source(path, overrides)
    return [explain_rule(rule, source) for rule in broken_rules(validate(source))]


def problem(text: str = "", *overrides: str) -> str:
    (found,) = problems(text, *overrides)
    return found


def data_problem(text: str = "", *overrides: str) -> str:
    """Return the message of the check of task and data, run in this process."""
    path = Path("run.yaml")
    path.write_text(GOOD + text, encoding="utf-8")
    source = read_source(path, overrides)
    config = validate(source)
    with pytest.raises(BrokenRules) as raised:
        _ = [check_data(config, {}, name) for name in config.data.tasks]
    (rule,) = raised.value.broken
    return explain_rule(rule, source)


def write_questions(num: int) -> str:
    """Write a JSONL file of questions, and return its configuration."""
    Path("few.jsonl").write_text("".join(json.dumps({"prompt": f"{i} =", "answer": "1"}) + "\n" for i in range(num)))
    return "source: jsonl, path: few.jsonl"


def preflight_error(text: str, *overrides: str) -> str:
    """Return the message of the complete preflight, and check that it writes nothing."""
    path = Path("run.yaml")
    path.write_text(GOOD + text, encoding="utf-8")
    source = read_source(path, overrides)
    before = sorted(Path().iterdir())
    with pytest.raises(ConfigError) as raised:
        preflight(validate(source), source)
    assert [found for found in sorted(Path().iterdir()) if found.name != "__pycache__"] == before
    return str(raised.value)


def write_model(**changes: Any) -> Path:
    """Write the recipe's model as a checkpoint, with changes to its config.json."""
    path = Path("model")
    create_model(path, RecipeConfig(), seed=0)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    return path
