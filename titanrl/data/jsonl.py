"""Read JSONL files, with errors that name file and line."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from titanrl.config.errors import BrokenRule, BrokenRules, inline

T = TypeVar("T")

_MAX_NESTING = 100
"""Maximum nesting of a line. Entries are pickled, which fails for values nested a few hundred levels deep."""


class BadLine(Exception):
    """Raised for a line that cannot be used."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem, fix)
        self.problem = problem
        self.fix = fix


def read_jsonl(path: Path, key: str, convert: Callable[[dict[str, Any]], T]) -> list[T]:
    """Read a JSONL file, and return the result of `convert` for each line. Empty lines are skipped.

    Args:
        path: JSONL file.
        key: Configuration key of the path, for error messages.
        convert: Function of a line's object. It raises `BadLine` if it cannot use the object.

    Raises:
        BrokenRules: The file cannot be read, or a line is invalid.
    """
    if not os.path.isfile(path):
        raise _broken(path, key, "file not found", "correct the path, which is relative to the current directory")
    try:
        with path.open("rb") as file:
            return [_convert(path, key, number, line, convert) for number, line in enumerate(file, start=1) if line.strip()]
    except OSError as error:
        raise _broken(path, key, f"must be readable ({error.strerror})", "change its permissions") from None


def text_of(content: dict[str, Any], key: str, keys: str) -> str:
    """Return the string `content[key]`.

    Args:
        content: Object of a line.
        key: Key of the string.
        keys: Keys that every line must have, for the error message.

    Raises:
        BadLine: The value is missing, blank, or not a string.
    """
    if key not in content:
        raise BadLine(f"{key} is missing", f"add it; every line must have {keys}")
    text = content[key]
    if not isinstance(text, str):
        raise BadLine(f"{key} must be a string, got {inline(text)}", "put it in quotes")
    if not text.strip():
        raise BadLine(f"{key} is empty", "fill it in, or delete the line")
    return text


def _convert(path: Path, key: str, number: int, line: bytes, convert: Callable[[dict[str, Any]], T]) -> T:
    try:
        return convert(_parse(line))
    except BadLine as error:
        raise _broken(path, key, f"{path}:{number}: {error.problem}", error.fix) from error


def _parse(line: bytes) -> dict[str, Any]:
    nesting = BadLine(f"must not be nested deeper than {_MAX_NESTING} levels", "flatten the object")
    try:
        content = json.loads(line)
    except RecursionError:
        raise nesting from None
    except ValueError as error:
        raise BadLine(f"must be valid JSON ({error})", "write one JSON object per line") from error
    if not isinstance(content, dict):
        raise BadLine(f"must be a JSON object, got {type(content).__name__}", "write one JSON object per line")
    if _is_nested(content, _MAX_NESTING):
        raise nesting
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        found = f"U+{ord(error.object[error.start]):04X}"
        raise BadLine(f"must be valid Unicode, but contains the lone surrogate {found}", "remove or replace it") from None
    return content


def _is_nested(value: Any, levels: int) -> bool:
    """Return True if a JSON value is nested deeper than `levels`."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 or any(_is_nested(child, levels - 1) for child in children)


def _broken(path: Path, key: str, rule: str, fix: str) -> BrokenRules:
    return BrokenRules(BrokenRule(values={key: str(path)}, rule=rule, fix=fix))
