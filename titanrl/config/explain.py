"""Error messages for mistakes in a configuration: location, key, value, rule and fix."""

import difflib
import re
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from titanrl.config.errors import BrokenRule, BrokenRules, inline, message
from titanrl.config.keys import Node, dotted, nearest_key, node_at, section_at, type_text
from titanrl.config.source import Source

Location = tuple[str | int, ...]


def explain(error: ValidationError, source: Source) -> Iterator[str]:
    """Yield one message per mistake that pydantic found."""
    yield from dict.fromkeys(_messages(error, source))  # pydantic reports a value once for each type that it could have


def _messages(error: ValidationError, source: Source) -> Iterator[str]:
    for details in error.errors(include_url=False):
        cause = details.get("ctx", {}).get("error")
        if isinstance(cause, BrokenRules):
            yield from (explain_rule(broken, source, details["loc"]) for broken in cause.broken)
        else:
            yield _explain_value(details, source)


def explain_rule(broken: BrokenRule, source: Source | None = None, section: Location = ()) -> str:
    """Format a broken rule. The message starts with the location of the first key that was set; other keys add their own.

    Args:
        broken: Rule and values.
        source: Source of the configuration. Without it, the message contains no line numbers.
        section: Path of the section that the keys are relative to.
    """
    paths = {(*section, *map(_part, key.split("."))): value for key, value in broken.values.items()}
    if source is None:
        return message("config", ", ".join(_written(path, value) for path, value in paths.items()), broken.rule, broken.fix)
    locations = {path: source.where(path) for path in paths}
    main = next((path for path, where in locations.items() if where is not None), next(iter(paths)))
    also = {
        path: f" ({where or _unwritten(path, source)})" for path, where in locations.items() if path != main or where is None
    }
    what = ", ".join(_written(path, value) + also.get(path, "") for path, value in paths.items())
    return message(source.nearest(main), what, broken.rule, broken.fix)


def _part(name: str) -> str | int:
    """Return a component of a dotted key. A number is an index into a list."""
    return int(name) if re.fullmatch("[0-9]{1,9}", name) else name


def _unwritten(path: Location, source: Source) -> str:
    """Return the origin of a value that the user did not set."""
    return "default" if source.where((*path[:-1], "preset")) is None else "preset or default"


def _written(path: Location, value: Any) -> str:
    return f"{dotted(path)}={inline(value)}"


def _explain_value(details: ErrorDetails, source: Source) -> str:
    path, value = details["loc"], details["input"]
    if details["type"] in ("extra_forbidden", "invalid_key"):
        return _explain_unknown_key(path, value, source)
    if details["type"] == "missing" and isinstance(path[-1], str):
        meaning = (node_at(path) or {}).get("description", "")
        return message(
            source.nearest(path), f"{dotted(path)} is missing", "this key is required", f"add `{path[-1]}: ...`. {meaning}"
        )
    if path[-1] == "[key]":  # where pydantic reports a key of a free-form mapping
        what, rule = f"{dotted(path[:-2])} has the key {inline(value)}", "its keys must be strings"
        return message(source.nearest(path[:-2]), what, rule, "put the key in quotes")
    if details["type"] == "missing":  # a list that is too short is reported as a whole
        path = path[:-1]
    while len(path) > 1 and node_at(path) is None and node_at(path[:-1]) is not None:  # the type that the value could have
        path = path[:-1]
    node = node_at(path) or {}
    return message(source.nearest(path), _written(path, value), f"must be {type_text(node)}", _fix(path, value, node))


def _explain_unknown_key(path: Location, value: Any, source: Source) -> str:
    section = section_at(path[:-1])
    keys = ", ".join(section.keys) if section else ""
    name = dotted(path[:-1])
    where, of = (f"in {name}", f"of {name}") if name else ("at the top level", "at the top level")
    guess = nearest_key(path)
    hint = f"did you mean {guess}? " if guess else "remove it. "
    return message(source.nearest(path), _written(path, value), f"no such key {where}", f"{hint}Keys {of}: {keys}")


def _fix(path: Location, value: Any, node: Node) -> str:
    section = section_at(path)
    if section is not None:
        return f"write its keys below it, or remove it. Keys of {dotted(path)}: {', '.join(section.keys)}"
    choices = [choice for option in (node, *node.get("anyOf", ())) for choice in option.get("enum", ())]
    if choices:
        guesses = difflib.get_close_matches(inline(value).strip('"'), list(map(str, choices)), n=1)
        return f"did you mean {guesses[0]}?" if guesses else "choose one of them"
    key = node_at(path if isinstance(path[-1], str) else path[:-1]) or {}
    default = f"the default is {inline(key['default'])}. " if "default" in key else ""
    return f"{_quoting_hint(value, node)}{default}{key.get('description', '')}"


def _quoting_hint(value: Any, node: Node) -> str:
    if (
        node.get("type") in ("integer", "number")
        and isinstance(value, str)
        and re.fullmatch(r"[-+]?[\d._]+([eE][-+]?\d+)?", value)
    ):
        return "remove the quotes. "
    return "put it in quotes. " if node.get("type") == "string" and isinstance(value, int | float) else ""
