"""Functions that templates call in `test_template.py`; this module must not import Monarch."""

import logging
import os
import tempfile
import threading

import numpy  # noqa: F401 - the forks draw random numbers

loader: int | None = None
"""Id of the process in which `note` ran."""


def note() -> None:
    """Record the process id."""
    global loader
    loader = os.getpid()


def say() -> None:
    """Write to both streams, like packages that warn when they are imported."""
    note()
    print("imports")
    logging.getLogger("say").error("a warning")


again: tuple[int, str | None] | None = None
"""Id of the process in which `note_again` ran, and a variable of its environment."""


def note_again() -> None:
    """Record the process id of the template of a role, which must have the modules of its base."""
    global again
    again = (os.getpid(), os.environ.get("COLOUR"))


def load_torch() -> None:
    """Import torch, as the base of a run does."""
    import torch  # noqa: F401


def read_temporary_folder() -> None:
    """Read TMPDIR, like a package that writes a cache."""
    tempfile.gettempdir()


def fail() -> None:
    """Fail like a package that is not installed."""
    raise ModuleNotFoundError("no module named vllm")


def crash() -> None:
    """Crash like a library that was built for another processor."""
    os.write(2, b"illegal instruction in libtorch\n")
    os.abort()


def start_thread() -> None:
    """Leave a thread behind, like a package with a background thread."""
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def use_ending() -> None:
    """Let forks run the module `ending` instead of Monarch's program."""
    from titanrl.processes import bootstrap

    bootstrap.MONARCH = "ending"
