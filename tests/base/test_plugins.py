"""Plugins: user-defined objects by import path, by file and by value; garbage collection during slow imports."""

import gc
import json
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Awaitable
from functools import partial
from pathlib import Path

import pytest

from titanrl.base.plugins import check_call, import_object, loading, plugin_of

LOAD = """
import pickle, sys
plugin = pickle.loads(sys.stdin.buffer.read())
print(plugin.load()(20))
"""


def in_fresh_process(plugin: object) -> str:
    command = [sys.executable, "-c", LOAD]
    done = subprocess.run(command, input=pickle.dumps(plugin), capture_output=True, check=True, cwd=Path.cwd().anchor)
    return done.stdout.decode().strip()


def add_offset(value: int) -> int:
    return value + OFFSET


OFFSET = 3


def test_name_of_built_in_is_not_a_plugin() -> None:
    assert plugin_of("algorithm.loss", "ppo") is None
    assert plugin_of("algorithm.loss", None) is None


def test_script_object_loads_with_globals_in_another_process() -> None:
    plugin = plugin_of("data.rewards", add_offset)
    assert plugin.name == "add_offset"
    assert in_fresh_process(plugin) == "23"


def test_closure_loads_in_another_process() -> None:
    factor = 7
    assert in_fresh_process(plugin_of("data.rewards", lambda value: value * factor)) == "140"


def test_partial_has_function_name_and_loads_in_another_process() -> None:
    def scale(value: int, *, factor: int) -> int:
        return add_offset(value) * factor

    plugin = plugin_of("algorithm.loss", partial(scale, factor=2))
    assert plugin.name.endswith("scale")
    assert in_fresh_process(plugin) == "46"


def test_file_is_imported_once_with_modules_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "beside_plugin.py").write_text("FACTOR = 5\n")
    (tmp_path / "own.py").write_text("import beside_plugin\ncalls = []\ndef scale(x): return x * beside_plugin.FACTOR\n")
    path = f"{tmp_path}/own.py"
    assert in_fresh_process(plugin_of("data.rewards", f"{path}:scale")) == "100"
    assert import_object(f"{path}:calls", key="key") is import_object(f"{path}:calls", key="key")


@pytest.mark.parametrize("helper", ["beside_{0}.py", "beside_{0}/__init__.py"])
def test_helper_that_another_folder_hides_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, helper: str) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    helper, name = helper.format(tmp_path.name), f"beside_{tmp_path.name}"
    for folder, content in {"first": "FACTOR = 5\n", "same": "FACTOR = 5\n", "other": "FACTOR = 6\n"}.items():
        (tmp_path / folder / helper).parent.mkdir(parents=True)
        (tmp_path / folder / helper).write_text(content)
        (tmp_path / folder / f"between_{name}.py").write_text(f"def scale(x):\n    import {name}\n")
        (tmp_path / folder / "own.py").write_text(f"import json, between_{name}\n")
    import_object(f"{tmp_path}/first/own.py:json", key="data.rewards")
    for folder in ("other",) if helper.endswith(f"{name}.py") else ("same", "other"):  # the modules of a package may differ
        with pytest.raises(
            ValueError, match=rf"`import {name}` finds .*/first/.* instead of .*/{folder}/.*; rename one of the two"
        ):
            import_object(f"{tmp_path}/{folder}/own.py:json", key="data.rewards")
    if helper.endswith(f"{name}.py"):
        import_object(f"{tmp_path}/same/own.py:json", key="data.rewards")


def test_missing_file_is_reported_by_name() -> None:
    with pytest.raises(ValueError, match=r"^data\.rewards: no such file \(got 'none\.py:f'\)\. Correct its path,"):
        import_object("none.py:f", key="data.rewards")


def test_unpicklable_object_is_reported_by_name() -> None:
    lock = threading.Lock()
    with pytest.raises(ValueError, match=r"^data\.rewards: cannot be sent to other processes: "):
        plugin_of("data.rewards", lambda: lock)


class Protocol:
    def __call__(self, text: str, entry: dict[str, str], *, seed: int) -> float: ...  # type: ignore[empty-body]


@pytest.mark.parametrize("candidate", [lambda text, entry, seed: 0.0, lambda a, b, *, seed: 0.0, lambda *args, **options: 0.0])
def test_valid_signatures_are_accepted(candidate: object) -> None:
    check_call(candidate, Protocol.__call__, key="key", name="name", expected="def f()")


@pytest.mark.parametrize("candidate", [lambda text: 0.0, lambda text, entry: 0.0, lambda text, entry, other, *, seed: 0.0])
def test_wrong_signature_shows_the_expected_one(candidate: object) -> None:
    with pytest.raises(ValueError, match=r"^key: wrong signature: .* \(got mine\(text.*\)\. Write it as `def f\(text\)`\."):
        check_call(candidate, Protocol.__call__, key="key", name="mine", expected="def f(text)")


def test_non_callable_value_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"^key: not callable \(got mine, of type int\)"):
        check_call(3, Protocol.__call__, key="key", name="mine", expected="def f()")


async def asynchronous(text: str, entry: dict[str, str], *, seed: int) -> float:
    return 0.0


class Asynchronous:
    async def __call__(self, text: str, entry: dict[str, str], *, seed: int) -> float:
        return 0.0


class AwaitedProtocol:
    def __call__(self, text: str, entry: dict[str, str], *, seed: int) -> float | Awaitable[float]:
        return 0.0


@pytest.mark.parametrize("candidate", [asynchronous, partial(asynchronous), Asynchronous()])
def test_async_function_is_rejected_where_nothing_awaits_it(candidate: object) -> None:
    with pytest.raises(ValueError, match=r"^key: must not be async, .* \(got mine\)\. Write it as `def f\(\)`\.$"):
        check_call(candidate, Protocol.__call__, key="key", name="mine", expected="def f()")
    for protocol in (AwaitedProtocol.__call__, Asynchronous.__call__):
        check_call(candidate, protocol, key="key", name="mine", expected="def f()")


@pytest.fixture
def thaw() -> object:
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("thaw")
def test_imports_run_without_garbage_collection_then_freeze() -> None:
    with loading():
        assert not gc.isenabled()
        kept = [[] for _ in range(5000)]  # enough to trigger a collection otherwise
    assert gc.isenabled()
    assert gc.get_freeze_count() >= len(kept)
    assert not any(item is kept[0] for item in gc.get_objects())


@pytest.mark.usefixtures("thaw")
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
