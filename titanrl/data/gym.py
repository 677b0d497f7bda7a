"""Import reasoning-gym for one task. Importing the whole package also imports matplotlib and sympy, which takes a second.

The package's `__init__` imports all tasks. `import_task` imports the subpackage of one task instead. The rest follows when a
name of the package is used that is not there yet, such as `reasoning_gym.create_dataset`.
"""

import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

PACKAGE = "reasoning_gym"


class _Partial(ModuleType):
    """The package before its `__init__` has run."""

    def __getattr__(self, name: str) -> Any:
        complete(self)
        return getattr(self, name)


def import_task(task: str) -> None:
    """Import a task, so that it is in `reasoning_gym.factory.DATASETS`; import the whole package if the task is not found."""
    factory = sys.modules.get(f"{PACKAGE}.factory")
    if factory is not None and task in factory.DATASETS:
        return
    if PACKAGE not in sys.modules and (spec := importlib.util.find_spec(PACKAGE)) is not None:
        sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
        sys.modules[PACKAGE].__class__ = _Partial
    package = importlib.import_module(PACKAGE)
    if isinstance(package, _Partial):
        subpackage = subpackage_of(package, task)
        if subpackage is None:
            complete(package)
        else:
            importlib.import_module(f"{PACKAGE}.coaching")  # first, as in `__init__`, because the modules import each other
            importlib.import_module(subpackage)
    if task not in importlib.import_module(f"{PACKAGE}.factory").DATASETS:
        complete(package)


def complete(package: ModuleType) -> None:
    """Run the package's `__init__`, unless it has run or is running."""
    if isinstance(package, _Partial):
        spec = package.__spec__
        assert spec is not None
        assert spec.loader is not None
        package.__class__ = ModuleType  # type: ignore[assignment]
        spec.loader.exec_module(package)


def subpackage_of(package: ModuleType, task: str) -> str | None:
    """Return the name of the subpackage that defines a task, from the text of its files; None if there is none."""
    pattern = re.compile(rf'^DATASET_NAME = "{re.escape(task)}"$', re.MULTILINE)
    root = Path(package.__path__[0])
    files = sorted(root.glob("*/**/*.py"), key=lambda file: (file.stem != task, file))  # most have the name of their task
    file = next((file for file in files if pattern.search(file.read_text(encoding="utf-8"))), None)
    return None if file is None else f"{PACKAGE}.{file.relative_to(root).parts[0]}"


def create_dataset(task: str, task_config: Mapping[str, Any], seed: int, size: int) -> "ProceduralDataset":
    """Create a reasoning-gym dataset, which can also score answers. `streams.make_gym_dataset` also checks the options."""
    import_task(task)
    from reasoning_gym.factory import create_dataset

    options = dict(task_config)
    if task == "composite":
        from reasoning_gym.composite import DatasetSpec

        options["datasets"] = [DatasetSpec(**spec) for spec in options.get("datasets", [])]
    return create_dataset(task, seed=seed, size=size, **options)
