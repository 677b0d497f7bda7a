"""Configuration keys, metrics and exceptions that the pages name exist."""

import re
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, ROOT
from titanrl.config.data import REWARD_OPTIONS, REWARDS
from titanrl.config.load import sections

PARAMETERS = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
KEYS = {f"{section.path}.{key}".lstrip(".") for section in sections() for key in section.keys}
SECTIONS = {section.path for section in sections() if section.path}
METRICS = (ROOT / "docs/metrics.md").read_text()
SOURCE = "\n".join(path.read_text() for path in (ROOT / "titanrl").rglob("*.py"))
USERS = re.compile(r"reward/[a-z_]+(/[a-z_]+)?")
"""Metrics of rewards, which users name."""
METHODS = {"weights.publish", "weights.pushed"}
"""Names in docs/architecture.md that look like keys."""
FAMILIES = "buffer|correction|curriculum|eval|grad|group|loss|mismatch|optim|perf|policy|reward|staleness|sync|task|time|tokens"


@PARAMETERS
def test_named_configuration_keys_exist(page: Path) -> None:
    text = page.read_text()
    if page.name == "coming_from.md":
        text = re.sub("^[|][^|]*[|]", "|", text, flags=re.MULTILINE)  # the first column has the keys of other programs
    named = re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)+)(?:[:=][^`]*)?`", text)
    known = {name for name in named if name.split(".")[0] in {section.split(".")[0] for section in SECTIONS}}
    files = re.compile(r"\.(?:yaml|jsonl?|html|py|md|safetensors)$")
    free = re.compile(r"(?:generator\.vllm|data\.task_config)\.")
    wrong = {name for name in known - KEYS - SECTIONS - METHODS if not files.search(name) and not free.match(name)}
    assert wrong == set()


@PARAMETERS
def test_named_metrics_are_in_the_reference(page: Path) -> None:
    named = set(re.findall(rf"`((?:{FAMILIES})/[a-z_0-9/<>]+)`", page.read_text()))
    assert {name for name in named if f"`{name}`" not in METRICS and not USERS.fullmatch(name)} == set()


@PARAMETERS
def test_named_exceptions_exist(page: Path) -> None:
    named = set(re.findall(r"`([A-Z]\w*(?:Error|Died|Unavailable))`", page.read_text()))
    assert {name for name in named if not re.search(rf"\b{name}\b", SOURCE)} == set()


def test_page_of_the_built_in_rewards_has_every_reward_and_option() -> None:
    tables = re.split(r"^Options of `(\w+)`:$", (ROOT / "docs/howto/built_in_rewards.md").read_text(), flags=re.MULTILINE)
    named = {
        name: set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| ([^|]*) \|", text, re.MULTILINE))))
        for name, text in zip(tables[1::2], tables[2::2], strict=True)
    }
    assert named == {name: set(options.model_fields) for name, options in REWARD_OPTIONS.items()}
    assert set(re.findall(r"^\| `(\w+)` \|", tables[0], re.MULTILINE)) - {"function"} == set(REWARDS)
