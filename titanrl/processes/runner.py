"""Execution of a code snippet inside a confined process.

This module imports only the standard library, because each snippet runs in a fork of the process that loads it.
"""

import ast
import importlib
import io
import linecache
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_FILE = "<code>"
_MAX_TRACEBACK_LINES = 12


def runner(modules: Sequence[str]) -> Callable[[str, Mapping[str, Any]], dict[str, str]]:
    """Import `modules` and some standard ones, and return the function that runs a snippet in a confined process."""
    for module in ("collections", "datetime", "decimal", "fractions", "functools", "itertools", "math", "random", "re",
                   "statistics", "string", *modules):  # fmt: skip
        importlib.import_module(module)

    def run(code: str, entry: Mapping[str, Any]) -> dict[str, str]:
        output = _Bounded(entry["max_output_chars"])
        sys.stdout = sys.stderr = output
        try:
            _execute(code)
            error = ""
        except SystemExit:
            error = ""
        except BaseException as raised:  # the code may raise anything
            error = _traceback(raised)
        return {"output": output.text(), "error": error[-entry["max_output_chars"] :]}

    return run


def _execute(code: str) -> None:
    """Execute code. If the last statement is an expression, print its value, as the interactive interpreter does."""
    linecache.cache[_FILE] = (len(code), None, code.splitlines(keepends=True), _FILE)
    tree = ast.parse(code, _FILE)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(tree, _FILE, "exec"), scope)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), _FILE, "eval"), scope)
        if value is not None:
            print(repr(value))


def _traceback(error: BaseException) -> str:
    """Return the end of a traceback, without the frames of this module."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename != _FILE:
        frame = frame.tb_next
    lines = "".join(traceback.format_exception(type(error), error, frame)).splitlines()
    return "\n".join(lines[-_MAX_TRACEBACK_LINES:])


class _Bounded(io.TextIOBase):
    """A text stream that keeps at most `max_chars` characters and counts the rest."""

    def __init__(self, max_chars: int) -> None:
        self._parts: list[str] = []
        self._room = max_chars
        self._num_lost = 0

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        kept = text[: self._room]
        self._parts.append(kept)
        self._room -= len(kept)
        self._num_lost += len(text) - len(kept)
        return len(text)

    def text(self) -> str:
        return "".join(self._parts) + (f"... ({self._num_lost} more characters)" if self._num_lost else "")
