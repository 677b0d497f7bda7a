"""Order of the tests for several workers (`pytest -n 2 --dist loadfile`), and the profile of hypothesis."""

from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("any machine", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("any machine")

HEAVY = ("tests/e2e/", "tests/launch/", "tests/docs/")
"""Tests that start whole runs. They go first, so that no worker is left with them at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the tests that take longest."""
    items.sort(key=lambda item: not item.nodeid.startswith(HEAVY))


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty directory, from which modules can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
