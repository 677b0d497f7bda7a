"""Templates of `titanrl warm`, which several runs of this machine share, so that a run starts without importing its packages.

Each template has a socket in a folder, named by a digest of everything that its imports depend on. A run whose environment
variable SHARED names the folder uses the templates with the right digests, and starts its own for the other roles.
"""

import hashlib
import os
import pickle
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from titanrl.base.ownership import is_private
from titanrl.config.errors import BrokenRule

PACKAGE = Path(__file__).parents[2]
"""Folder of TitanRL's source."""
SHARED = "TITANRL_TEMPLATES"
"""Environment variable with the folder of the shared templates."""

_NOT_READ = {
    *(SHARED, "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_RUNTIME_DIR"),  # of a single run
    *("HYPERACTOR_EXECUTION_ID", "MONARCH_CLIENT_TRACE_ID"),  # set by Monarch when it is imported
    *("_", "COLUMNS", "LINES", "OLDPWD", "PWD", "SHLVL", "TERM"),  # of a shell
    *("PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER"),  # of a test
}
"""Environment variables that no import reads."""


def shared_template(environment: Mapping[str, str], load: Callable[[], None]) -> str | None:
    """Return the socket path of the shared template for a role; None if there is none.

    Args:
        environment: variables that the packages read when they are imported, in addition to those of this process.
        load: function that imports the packages.
    """
    folder = os.environ.get(SHARED)
    if not folder or any(broken_by_templates()):
        return None
    path = Path(folder) / digest_of_imports(environment, load)
    return str(path) if path.is_socket() else None


def broken_by_templates() -> Iterator[BrokenRule]:
    """Check that no other user has created the folder of the shared templates, for example after they ended.

    Templates receive the environment of a run, with its keys, and its output.
    """
    folder = os.environ.get(SHARED)
    if folder and os.path.lexists(folder) and not is_private(Path(folder)):
        yield BrokenRule(
            values={SHARED: folder},
            rule="must be a folder of mode 0700 that belongs to you, and no link, because templates in it receive your keys",
            fix="unset the variable, or start `titanrl warm` and export what it prints",
        )


def digest_of_imports(environment: Mapping[str, str], load: Callable[[], None]) -> str:
    """Return a digest of what a template's imports depend on. It changes when TitanRL is edited or a package is installed."""
    inherited = {name: value for name, value in os.environ.items() if name not in _NOT_READ}
    variables = {**inherited, **environment, "OMP_NUM_THREADS": "1"}  # a template imports with one thread
    sources = [(str(file), file.stat().st_mtime_ns) for file in sorted(PACKAGE.rglob("*.py"))]
    packages = Path(sysconfig.get_path("purelib")).stat().st_mtime_ns
    place = (sys.executable, os.getcwd(), sorted(os.sched_getaffinity(0)))
    parts = (place, packages, sources, sorted(variables.items()), pickle.dumps(load))
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()
