"""Functions that templates call, for `test_template.py`; nothing here may import Monarch."""

import os
import threading

import numpy  # noqa: F401 - the forks draw random numbers

loader: int | None = None
"""Process in which `note` ran."""


def note() -> None:
    """Note the process."""
    global loader
    loader = os.getpid()


def fail() -> None:
    """Fail like a package that is not installed."""
    raise ModuleNotFoundError("no module named vllm")


def start_thread() -> None:
    """Leave a thread behind, like a package with a background thread."""
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def use_ending() -> None:
    """Let forks run the module `ending` instead of Monarch's program."""
    from titanrl.launch.templates import bootstrap

    bootstrap.MONARCH = "ending"
