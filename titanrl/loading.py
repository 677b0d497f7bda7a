"""Imports: of objects that the configuration names, and of heavy packages at less cost."""

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def loading() -> Iterator[None]:
    """Switch the garbage collector off while the body imports packages, then freeze the imported objects.

    Importing torch and vLLM would otherwise trigger a dozen full collections, which take seconds. Use it for imports only: an
    engine that was built inside decoded a twentieth slower.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def import_object(path: str, *, key: str) -> Any:
    """Import the object that `package.module:name` names.

    Args:
        path: Import path, as the configuration gives it.
        key: Configuration key of the path, for the error message.

    Raises:
        ValueError: The module cannot be imported, or has no such attribute.
    """
    module, _, name = path.partition(":")
    if not (module and name):
        raise ValueError(f"{key}: not an import path (got {path!r}). Write it as `package.module:name`.")
    try:
        imported = importlib.import_module(module)
    except Exception as error:  # the module is the user's and may raise anything
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(f"{key}: importing {module} raised {cause} (got {path!r}). Correct the path or the module.") from error
    if name not in vars(imported):
        raise ValueError(f"{key}: module {module} has no attribute {name!r} (got {path!r}). Correct the name after the colon.")
    return vars(imported)[name]
