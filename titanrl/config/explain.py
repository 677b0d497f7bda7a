"""Error messages for mistakes in a configuration: location, key, value, rule and fix."""

import math
import re
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from titanrl.config.errors import BrokenRule, BrokenRules, inline, message
from titanrl.config.keys import Node, dotted, nearest_keys, node_at, section_at, type_text
from titanrl.config.objective import ALGORITHM_PRESETS
from titanrl.config.source import Source
from titanrl.config.strict_yaml import scalar
from titanrl.config.suggest import did_you_mean, question

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
    # A rule about a single value has no key of its own.
    paths = {(*section, *map(_part, key.split(".") if key else ())): value for key, value in broken.values.items()}
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
    if details["type"] == "invalid_key":  # such as a number, or null
        where, what = source.nearest(path[:-1]), f"{dotted(path[:-1]) or 'the file'} has the key {inline(value)}"
        return message(
            where, what, "keys must be strings", "correct or remove it; a name that YAML reads as another type needs quotes"
        )
    if details["type"] == "extra_forbidden":
        return _explain_unknown_key(path, value, source)
    if details["type"] == "missing" and isinstance(path[-1], str):
        meaning = " ".join((node_at(path) or {}).get("description", "").split())
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
    rule = f"must be {type_text(node)}"
    if isinstance(value, float) and not math.isfinite(value):
        rule = rule.replace("a number", "a finite number")
    return message(source.nearest(path), _written(path, value), rule, _fix(path, value, node))


def _explain_unknown_key(path: Location, value: Any, source: Source) -> str:
    section = section_at(path[:-1])
    keys = ", ".join(section.keys) if section else ""
    name = dotted(path[:-1])
    where, of = (f"in {name}", f"of {name}") if name else ("at the top level", "at the top level")
    last = str(path[-1])
    section_name, _, key = last.rpartition(".")
    if section_name and node_at((*path[:-1], *last.split("."))) is not None:
        hint = f"write `{key}` inside the section `{section_name}`, or on the command line as {last}=... "
    else:
        meant = question(nearest_keys(path))
        hint = f"{meant} " if meant else "remove it. "
    return message(source.nearest(path), _written(path, value), f"no such key {where}", f"{hint}Keys {of}: {keys}")


def _fix(path: Location, value: Any, node: Node) -> str:
    section = section_at(path)
    if section is not None:
        if isinstance(value, str) and value.lower() in ("none", "nil", "null") and section.is_optional:
            return "write null, without quotes, or its keys below it"
        return f"write its keys below it, or remove it. Keys of {dotted(path)}: {', '.join(section.keys)}"
    if hint := _hint(path, value, node):
        hint = f"{hint}. "
    choices = [str(choice) for option in (node, *node.get("anyOf", ())) for choice in option.get("enum", ())]
    if choices and not hint:
        text = value if isinstance(value, str) else inline(value)
        return _where_it_belongs(path, text) or did_you_mean(text, choices) or "choose one of them"
    key = node_at(path if isinstance(path[-1], str) else path[:-1]) or {}
    default = f"the default is {inline(key['default'])}. " if "default" in key else ""
    if hint:
        default = default[:1].upper() + default[1:]
    return f"{hint}{default}{' '.join(key.get('description', '').split())}"


def _where_it_belongs(path: Location, value: str) -> str:
    """Return the fix for a name that is known, but not as a value of this key; empty otherwise.

    Names of algorithms differ by a letter, so a known name must not be taken for a misspelled one.
    """
    key = str(path[-1])
    if path[0] == "algorithm" and (chosen := ALGORITHM_PRESETS.get(value, {}).get(key)) is not None:
        return f"{value} uses {key}={inline(chosen)}: set that, or set algorithm.preset to {value}, which sets all of its keys"
    section = section_at(path[:-1])
    siblings = [sibling for sibling in (section.keys if section else ()) if value in _choices((*path[:-1], sibling))]
    return (
        f"{value} is a value of {dotted((*path[:-1], siblings[0]))}: set it there, and choose one of them for {key}"
        if siblings
        else ""
    )


def _choices(path: Location) -> list[str]:
    """Return the names that a key accepts."""
    node = node_at(path) or {}
    return [str(choice) for option in (node, *node.get("anyOf", ())) for choice in option.get("enum", ())]


def _hint(path: Location, value: Any, node: Node) -> str:
    """Return how to write the value that was probably meant; empty if that is unknown."""
    kinds = {option.get("type") for option in (node, *node.get("anyOf", ()))}
    if isinstance(value, str):
        return _hint_for_text(value, kinds)
    if isinstance(value, float) and not math.isfinite(value):
        return "write a finite number"
    if "integer" in kinds and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if "array" in kinds and isinstance(value, dict):
        return f"set the list as a whole: {dotted(path)}=[...]"
    if "string" in kinds and isinstance(value, int | float):
        return "put it in quotes"
    return ""


def _hint_for_text(value: str, kinds: set[Any]) -> str:
    """Return how to write a value that was given as text."""
    plain, text = scalar(value), value.strip().lower()
    is_number = isinstance(plain, int | float) and not isinstance(plain, bool)
    if "null" in kinds and (plain is None or text in ("none", "nil")):
        return "write null, without quotes"
    if "boolean" in kinds and (isinstance(plain, bool) or text in ("yes", "no", "on", "off")):
        return f"write {'true' if plain is True or text in ('yes', 'on') else 'false'}, without quotes"
    if {"integer", "number"} & kinds:
        number = plain if is_number else _number_in(text)
        if number is not None and not ("integer" in kinds and float(number) != int(number)):
            return "remove the quotes" if is_number else f"write {number:g}" if isinstance(number, float) else f"write {number}"
    if "array" in kinds and "object" not in kinds:
        return f"write it as a list: [{value}]"
    return ""


def _number_in(text: str) -> int | float | None:
    """Return the number that another notation means: `1,000`, `0x10`, `010`, `10k`; None if there is none."""
    if match := re.fullmatch(r"([-+]?)0*(\d{1,3}(?:,\d{3})+|\d+)", text):
        return int(f"{match[1]}{match[2].replace(',', '')}")
    if re.fullmatch(r"0[xob][0-9a-f]+", text):
        try:
            return int(text, 0)
        except ValueError:
            return None
    if match := re.fullmatch(r"(\d+)([km])", text):
        return int(match[1]) * {"k": 1000, "m": 1_000_000}[match[2]]
    return None
