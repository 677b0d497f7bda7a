"""Test order for parallel workers (`pytest -n 2 --dist loadfile`), and the hypothesis profile."""

from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("any machine", deadline=None)  # tests must not fail on a busy machine
hypothesis.settings.load_profile("any machine")

HEAVY = ("tests/e2e/", "tests/launch/", "tests/docs/")
"""Tests that start complete runs. They run first, so that no worker is left with a long test at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first."""
    items.sort(key=lambda item: not item.nodeid.startswith(HEAVY))


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty directory, from which modules can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
