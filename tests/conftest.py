"""Test order for parallel workers (`pytest -n 2 --dist loadfile`), the hypothesis profile, and fixtures of many folders."""

import asyncio
import gc
import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import hypothesis
import pytest

from tests.engines import Engines
from tests.trainer.ranks import World
from tests.workers import Looped, common_folder, warm_templates
from titanrl.processes.templates import SHARED

gc.disable()  # until all tests are imported, which creates a million objects and hardly any garbage
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported; other processes need the cores
os.environ["TINKER_TELEMETRY"] = "0"  # of tinker's client; set for all tests, because templates depend on the variables
os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])  # scripts must not import another checkout, which may be installed

hypothesis.settings.register_profile("any machine", deadline=None)  # tests must not fail on a busy machine
hypothesis.settings.load_profile("any machine")

if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup, whose processes would ignore the signals of tests
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

HEAVY = (
    *("tests/launch/", "tests/docs/", "tests/generator/", "tests/trainer/", "tests/hosts/"),
    *("tests/launch/test_preflight.py", "tests/commands/test_doctor.py", "tests/metrics/test_trackers.py"),
    *("tests/processes/test_templates.py", "tests/commands/test_cli.py", "tests/test_gpu.py", "tests/test_sft.py"),
)
"""Folders and files with long tests. They run before the others, so that no worker is left with a long one at the end."""
FIRST = ("tests/hosts/test_pods.py", "tests/e2e/", HEAVY)
"""Files and folders that run first. Pods have no complete runs: one worker tests them while another makes the shared run."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first."""
    items.sort(key=lambda item: [not item.nodeid.startswith(names) for names in FIRST])


def pytest_collection_finish() -> None:
    """Leave what was imported out of garbage collections. Compute with one thread.

    The workers share the cores, and threads of tiny operations mostly wait for each other.
    """
    gc.freeze()
    gc.enable()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, in the event loop of the actors that it is given or in its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    actors = next((value for value in given.values() if isinstance(value, Looped)), None)
    (actors.do if actors else asyncio.run)(pyfuncitem.obj(**given))
    return True


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty directory, from which modules can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture(scope="session")
def shared_templates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let runs fork from shared templates, as `titanrl warm` offers them.

    Most of a small run's time is spent on imports. Runs with other environment variables or another working directory than this
    process still import everything themselves, and so do runs with an empty SHARED.
    """
    with warm_templates(common_folder(tmp_path_factory)) as templates, pytest.MonkeyPatch.context() as patch:
        patch.setenv(SHARED, templates)
        yield


@pytest.fixture(scope="session")
def engines() -> Iterator[Engines]:
    """A process that has imported vLLM and calls functions in forks."""
    with Engines() as engines:
        yield engines


WORLDS: dict[int, World] = {}
"""Trainer ranks by the size of their world."""


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], World]]:
    """Function that returns the trainer ranks of a world of a given size, which all tests share."""
    with ExitStack() as stack:

        def of_size(size: int) -> World:
            if size not in WORLDS:
                WORLDS[size] = stack.enter_context(World(size, tmp_path_factory.mktemp(f"world{size}")))
            return WORLDS[size]

        yield of_size


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End all trainer ranks after the last test of a folder, because their idle threads still need CPU time."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        for ranks in WORLDS.values():
            ranks.end()
