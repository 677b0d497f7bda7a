"""reasoning-gym is imported only as far as a task needs it."""

import subprocess
import sys

import reasoning_gym
from reasoning_gym.factory import DATASETS

from titanrl.data.gym import subpackage_of

IMPORTS = """
import sys
from titanrl.data.gym import import_task
import_task("chain_sum")
import_task("basic_arithmetic")
assert not {"matplotlib", "sympy"} & sys.modules.keys(), "the whole package was imported"
from reasoning_gym.factory import DATASETS
assert len(DATASETS) < 40 and "chain_sum" in DATASETS
import_task("rotate_matrix")
assert "rotate_matrix" in DATASETS and "sympy" not in sys.modules
import reasoning_gym
assert reasoning_gym.create_dataset("chain_sum", seed=1, size=2)[0]["answer"]
assert len(DATASETS) > 100 and "composite" in DATASETS
import_task("no_such_task")
"""


def test_only_the_subpackages_of_the_tasks_are_imported_until_a_missing_name_is_used() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


FIRST = """
import os, sys
from titanrl.data.streams import make_gym_dataset
for task in sys.argv[1:]:  # each in a process that has imported nothing of the package
    if os.fork() == 0:
        make_gym_dataset(task, {}, seed=0, size=1)
        os._exit(0)
    assert os.wait()[1] == 0, task
"""


def test_a_task_of_every_subpackage_can_be_the_first() -> None:
    """The modules of reasoning-gym import each other, so the order matters."""
    tasks = {dataset.__module__.split(".")[1]: task for task, (dataset, _) in DATASETS.items() if task != "composite"}
    done = subprocess.run([sys.executable, "-c", FIRST, *tasks.values()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_task_is_found_in_its_subpackage() -> None:
    """`composite`, which combines others, has none: the whole package is imported."""
    expected = {task: ".".join(dataset.__module__.split(".")[:2]) for task, (dataset, _) in DATASETS.items()}
    expected["composite"] = None  # type: ignore[assignment]
    assert {task: subpackage_of(reasoning_gym, task) for task in DATASETS} == expected
