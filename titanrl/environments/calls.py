"""Parses the arguments of tool calls, which the policy wrote.

This module imports no third-party library.
"""

import json
import math
from typing import Any

MAX_CALL_DEPTH = 32
"""Maximum nesting of lists and mappings in the arguments of a call."""


class NotAnObject(ValueError):
    """Raised for text that is not a JSON object."""


def parse_object(text: str) -> dict[str, Any]:
    """Parse a JSON object strictly. The messages of the exceptions continue a sentence, such as "its arguments ...".

    Raises:
        NotAnObject: The text is not a JSON object.
        ValueError: The object has NaN, an infinite number, an integer of more than 4300 digits, a duplicate key, or too deep
            nesting.
    """
    try:
        parsed = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("are nested too deeply") from None
    except json.JSONDecodeError as error:
        raise NotAnObject(f"are not JSON ({error})") from None
    if not isinstance(parsed, dict):
        raise NotAnObject("are not a JSON object")
    arguments: dict[str, Any] = readable(parsed)
    return arguments


def readable(value: Any, depth: int = MAX_CALL_DEPTH) -> Any:
    """Return a copy of a JSON value in which every string is valid text: U+FFFD replaces NUL and unpaired surrogates.

    Raises:
        ValueError: A number is not finite, or the value is nested too deeply.
    """
    if depth < 0:
        raise ValueError("are nested too deeply")
    match value:
        case str():
            return readable_text(value)
        case float() if not math.isfinite(value):
            raise ValueError("have a number that is not finite")
        case dict():
            return {readable_text(str(name)): readable(item, depth - 1) for name, item in value.items()}
        case list():
            return [readable(item, depth - 1) for item in value]
    return value


def readable_text(text: str) -> str:
    """Return the text with U+FFFD in place of NUL and unpaired surrogates, as in text decoded from invalid bytes."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").replace("\0", "\ufffd")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    parsed = dict(pairs)
    if len(parsed) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"have the key {next(name for name in parsed if names.count(name) > 1):.60} twice")
    return parsed


def _refuse(constant: str) -> Any:
    raise ValueError(f"have {constant}, which is not JSON")
