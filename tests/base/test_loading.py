"""Garbage collection during imports, and imports of configured objects."""

import gc
import json
import re

import pytest

from titanrl.base.loading import import_object, loading


@pytest.fixture(autouse=True)
def thaw() -> object:
    yield
    gc.unfreeze()


def test_imports_run_without_garbage_collection_then_freeze() -> None:
    with loading():
        assert not gc.isenabled()
        kept = [[] for _ in range(5000)]  # enough to trigger a collection otherwise
    assert gc.isenabled()
    assert gc.get_freeze_count() >= len(kept)
    assert not any(item is kept[0] for item in gc.get_objects())


def test_failed_import_enables_garbage_collection_again() -> None:
    with pytest.raises(RuntimeError, match="no model"), loading():
        raise RuntimeError("no model")
    assert gc.isenabled()


def test_import_object_returns_the_named_attribute() -> None:
    assert import_object("json:dumps", key="data.source") is json.dumps


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("json", "data.source: not an import path (got 'json'). Write it as `package.module:name` or `file.py:name`."),
        (
            "no_such_module:f",
            "data.source: importing no_such_module raised ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("json:no_such_name", "data.source: module json has no attribute 'no_such_name' (got 'json:no_such_name')."),
    ],
    ids=["no-colon", "no-module", "no-attribute"],
)
def test_import_error_names_key_and_path(path: str, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        import_object(path, key="data.source")
