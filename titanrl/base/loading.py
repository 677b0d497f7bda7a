"""Import of objects named by the configuration, and faster import of heavy packages."""

import gc
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any


@contextmanager
def loading() -> Iterator[None]:
    """Suspend garbage collection while the body imports packages, then freeze the imported objects.

    Importing torch and vLLM would otherwise trigger a dozen full collections, which take seconds. Use this for imports only: an
    engine built inside the context decoded 5 % slower.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def import_object(path: str, *, key: str) -> Any:
    """Import the object at `package.module:name` or `file.py:name`.

    A file is executed once per process, and can import modules in its folder, as a script can.

    Args:
        path: Import path from the configuration.
        key: Configuration key of the path, for error messages.

    Raises:
        ValueError: The module cannot be imported, or has no such attribute.
    """
    module, _, name = path.rpartition(":")
    if not (module and name):
        raise ValueError(f"{key}: not an import path (got {path!r}). Write it as `package.module:name` or `file.py:name`.")
    is_file = module.endswith(".py")
    if is_file and not os.path.isfile(module):
        places = "the current directory or the configuration file"
        raise ValueError(f"{key}: no such file (got {path!r}). Correct its path, which is relative to {places}.")
    try:
        imported = _import_file(Path(module)) if is_file else importlib.import_module(module)
    except Exception as error:  # user code may raise anything
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(f"{key}: importing {module} raised {cause} (got {path!r}). Correct the path or the module.") from error
    if name not in vars(imported):
        raise ValueError(f"{key}: module {module} has no attribute {name!r} (got {path!r}). Correct the name after the colon.")
    return vars(imported)[name]


def _import_file(file: Path) -> ModuleType:
    """Import a file as a module whose name is unique to its path."""
    file = file.resolve()
    name = f"{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module during execution
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:  # the next import must not find a partially executed module
        del sys.modules[name]
        raise
    return module
