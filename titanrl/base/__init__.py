"""Errors, files, imports and user-defined objects, which every other room uses."""

import os
import sys

__version__ = "0.1.0"


def refuse_hiding(folder: str, error: BaseException | None = None) -> None:
    """Exit with code 2 if a file in the first folder of `sys.path` hides a module of the standard library.

    After a failed import, `error` is its cause. Then exit if a file hides a package, or if a package is not installed. This
    module imports only what Python has loaded at its start, because any other module may be hidden.
    """
    text, fix = "", "Rename it, or start the command in another directory."
    if error is None:
        found = ((file, name) for name in sys.stdlib_module_names for file in _files(folder, name) if os.path.isfile(file))
        for file, name in found:
            text = f"{file}: hides the module {name} of Python's standard library. {fix}"
    else:
        if isinstance(error, ModuleNotFoundError) and error.name is not None and not error.name.startswith("titanrl"):
            text = f"{error.name}: the package is not installed. Reinstall TitanRL with its dependencies."
        for name, loaded in sys.modules.items():
            origin = loaded.__spec__.origin if type(loaded) is type(sys) and loaded.__spec__ else None
            if name != "titanrl" and origin in _files(folder, name):
                text = f"{origin}: hides the package {name}, which TitanRL needs. {fix}"
    if text:
        print(text, file=sys.stderr)
        sys.exit(2)


def _files(folder: str, name: str) -> tuple[str, str]:
    """Return the files that the module of a name can have in a folder."""
    return f"{folder}/{name}.py", f"{folder}/{name}/__init__.py"
