"""The keys of the configuration, read off its JSON schema: what exists, what type it has, what it means."""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from titanrl.config.schema import Config

Node = dict[str, Any]
KeyPath = Sequence[str | int]

_BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
_TYPES = {"integer": "an integer", "number": "a number", "boolean": "true or false", "string": "text", "null": "null"}


class _Untitled(GenerateJsonSchema):
    """Leaves out the titles pydantic derives from names: they say nothing the key does not."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


@cache
def json_schema() -> Node:
    """JSON schema of a configuration file, for editors."""
    return {"$schema": GenerateJsonSchema.schema_dialect, **Config.model_json_schema(schema_generator=_Untitled)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionKeys:
    """A section and its keys.

    Example: `SectionKeys(path="rollout", meaning="How completions are sampled and scored.", keys={"group_size": {...}})`
    """

    path: str
    """Dotted path, empty for the top."""
    meaning: str
    """What the section is for."""
    keys: dict[str, Node]
    """JSON schema of each key."""


def sections(path: str = "") -> Iterator[SectionKeys]:
    """The section at `path` and all below it, in the order of the models."""
    section = section_at(path.split(".") if path else ())
    if section is None:
        return
    yield section
    for key, node in section.keys.items():
        if _reference(node):
            yield from sections(f"{path}.{key}".lstrip("."))


def section_at(path: KeyPath) -> SectionKeys | None:
    """The section at a path; None if there is a plain value, or nothing."""
    node = node_at(path)
    if node is None or "properties" not in node:
        return None
    return SectionKeys(path=dotted(path), meaning=node["description"], keys=node["properties"])


def node_at(path: KeyPath) -> Node | None:
    """JSON schema of the value at a path, a section's reference followed; None if there is no such key."""
    node = json_schema()
    for part in path:
        children = node.get("properties", {})
        if isinstance(part, int):
            options = (node, *node.get("anyOf", ()))  # a list that may be null is one of several options
            listed: Node = next((option for option in options if option.get("type") == "array"), {})
            items = listed.get("prefixItems", [listed.get("items")])
            child = items[min(part, len(items) - 1)]
        else:
            child = children.get(part)
        if child is None:
            return None
        node = _resolved(child)
    return node


def _reference(node: Node) -> str | None:
    """Name of the section a key holds, also where the section may be left out."""
    for option in (node, *node.get("anyOf", ())):
        if "$ref" in option:
            return str(option["$ref"]).rpartition("/")[2]
    return None


def _resolved(node: Node) -> Node:
    name = _reference(node)
    if name is None:
        return node
    section: Node = json_schema()["$defs"][name]
    return section


def dotted(path: KeyPath) -> str:
    """A path as it is written: `algorithm.betas[0]`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def type_text(node: Node) -> str:
    """Type and bounds in words: `an integer > 0`, `one of float32, bfloat16`, `a path or null`."""
    if "anyOf" in node:
        return " or ".join(type_text(option) for option in node["anyOf"])
    if "$ref" in node or "properties" in node:
        return "a section"
    if "enum" in node:
        return f"one of {', '.join(map(str, node['enum']))}"
    if "const" in node:
        return str(node["const"])
    if node.get("type") == "array":
        items = node.get("prefixItems")
        return f"a list of {len(items)} numbers" if items else f"a list of {type_text(node['items'])}"
    if node.get("type") == "object":
        return "a mapping"
    if node.get("format") == "path":
        return "a path"
    bounds = " and ".join(f"{sign} {node[name]:g}" for name, sign in _BOUNDS.items() if name in node)
    pattern = f"matching {node['pattern']}" if "pattern" in node else ""
    return " ".join(filter(None, (_TYPES[node["type"]], bounds, pattern)))


def nearest_key(path: KeyPath) -> str | None:
    """The valid key most like an unknown one: in its own section by spelling, else the same name elsewhere."""
    *parent, name = map(str, path)
    section = section_at(parent)
    here = list(section.keys) if section else []
    for guess in difflib.get_close_matches(name, here, n=1):
        return dotted([*parent, guess])
    elsewhere = {f"{other.path}.{key}".lstrip("."): key for other in sections() for key in other.keys}
    same_name = [key for key, last in elsewhere.items() if last == name]
    return same_name[0] if same_name else None
