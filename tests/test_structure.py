"""Structure of the package: its size, no import cycles, model families defined in one place."""

import graphlib
import re
import subprocess
import sys

import grimp
import pytest

from tests.size import PACKAGE, figures

CEILINGS = {
    "lines": 68_653,
    "modules": 180,
    "small modules": 2,
    "modules with a shared name": 4,
    "rooms": 24,
    "arrows": 148,
    "floors": 12,
    "modules reached by the loop": 86,
    "functions with one mention": 0.34,
}
"""Largest figures of `tests.size`. Lower them with the code. A change that needs a higher one says why in its message."""


def test_package_is_no_larger_than_its_ceilings() -> None:
    assert {name: value for name, value in figures().items() if value > CEILINGS[name]} == {}


def test_imports_have_no_cycle() -> None:
    # Imports inside functions and under TYPE_CHECKING count, too.
    graph = grimp.build_graph("titanrl", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError with the cycle


@pytest.mark.parametrize(
    "modules",
    [
        "titanrl.algorithms.batch_plan",
        "titanrl.rollout.workers, titanrl.generator.actor",  # of rollout workers, which call generators
        "titanrl.grpo, titanrl.session.session",  # of the controller
    ],
)
def test_planning_rollout_workers_and_the_controller_import_no_torch(modules: str) -> None:
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_only_models_and_shipped_configs_name_a_model_family() -> None:
    named = re.compile(r"qwen|llama|mistral", re.IGNORECASE)
    paths = [path for path in PACKAGE.rglob("*") if path.suffix in {".py", ".j2", ".c", ".pyi"}]
    assert {path.relative_to(PACKAGE).parts[0] for path in paths if named.search(path.read_text())} == {"models"}


@pytest.mark.parametrize("module", ["titanrl.rollout.group", "titanrl.replay.shared", "titanrl.grpo"])
def test_parts_of_numpy_that_threads_use_are_loaded_with_the_modules(module: str) -> None:
    # numpy 2.3 loads them at the first use; two threads that are first at the same time end in a RecursionError.
    code = f"import sys, {module}; sys.exit(not {{'numpy.ma', 'numpy.random'}} <= sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_errors_of_actors_can_be_imported_without_torch() -> None:
    # A reply with an error makes its receiver import the module of the error, and torch takes the controller seconds.
    paths = [path for room in ("trainer", "generator") for path in sorted((PACKAGE / room).glob("*.py"))]
    defining = [path for path in paths if re.search(r"^class \w+Error\(", path.read_text(), re.MULTILINE)]
    modules = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in defining]
    program = f"import sys, {', '.join(['titanrl.base.errors', *modules])}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
