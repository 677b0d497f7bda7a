"""The keys of the configuration with their types and descriptions, derived from the JSON schema."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from titanrl.config.schema import USED_BY_SFT, Config
from titanrl.config.section import meanings

Node = dict[str, Any]
KeyPath = Sequence[str | int]

_BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
_TYPES = {"integer": "an integer", "number": "a number", "boolean": "true or false", "string": "a string", "null": "null"}


class _Described(GenerateJsonSchema):
    """A schema generator that describes keys by their docstrings, and omits titles, because they only repeat the key."""

    def model_schema(self, schema: core_schema.ModelSchema) -> Node:
        node = super().model_schema(schema)
        for key, meaning in meanings(schema["cls"]).items():
            node["properties"][key]["description"] = meaning
        return node

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


@cache
def json_schema() -> Node:
    """Return the JSON schema of a configuration file."""
    return {"$schema": GenerateJsonSchema.schema_dialect, **Config.model_json_schema(schema_generator=_Described)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionKeys:
    """A section and its keys.

    Example: `SectionKeys(path="rollout", meaning="Sampling of completions.", keys={"group_size": {...}})`
    """

    path: str
    """Dotted path; empty for the root."""
    meaning: str
    """Description of the section."""
    keys: dict[str, Node]
    """JSON schema of each key."""
    is_optional: bool = False
    """True if the section is null by default."""


def sections(path: str = "") -> Iterator[SectionKeys]:
    """Yield the section at `path` and all sections below it, in the order of the models."""
    section = section_at(path.split(".") if path else ())
    if section is None:
        return
    yield section
    for key, node in section.keys.items():
        if _reference(node):
            yield from sections(f"{path}.{key}".lstrip("."))
        elif _reference(_named(node)):
            yield from sections(f"{path}.{key}.<name>".lstrip("."))


def live_keys(config: Config) -> dict[str, Any]:
    """Return the keys that can be changed during a run of this configuration, with their current values."""
    values: dict[str, Any] = {}
    for section in sections():
        for key in (key for key, node in section.keys.items() if is_live(node)):
            for path in _paths(config, section.path.split(".") if section.path else []):
                if config.sft is None or path.partition(".")[0] not in USED_BY_SFT:
                    values[f"{path}.{key}"] = config.value_of(f"{path}.{key}")
    return values


def is_live(node: Node) -> bool:
    """Return True for the schema of a key that can be changed during the run."""
    return node.get("live") is True


def _paths(section: Any, pattern: Sequence[str], prefix: str = "") -> Iterator[str]:
    """Yield the paths of the sections that exist in a configuration, where `<name>` in the pattern is any name."""
    if not pattern:
        yield prefix
        return
    name, *rest = pattern
    for each in section if name == "<name>" else [name]:
        child = section[each] if isinstance(section, Mapping) else getattr(section, each)
        if child is not None:
            yield from _paths(child, rest, f"{prefix}.{each}".lstrip("."))


def section_at(path: KeyPath) -> SectionKeys | None:
    """Return the section at a path; None if the path is not a section."""
    node = node_at(path)
    if node is None or "properties" not in node:
        return None
    keys = (_child(node_at(path[:length]) or {}, part) or {} for length, part in enumerate(path))
    is_optional = any("anyOf" in key for key in keys)
    return SectionKeys(path=dotted(path), meaning=node["description"], keys=node["properties"], is_optional=is_optional)


def node_at(path: KeyPath) -> Node | None:
    """Return the JSON schema of the value at a path, with references resolved; None if there is no such key."""
    node = json_schema()
    for part in path:
        options = (node, *node.get("anyOf", ()))  # a nullable list is one of the options
        listed: Node = next((option for option in options if option.get("type") == "array"), {})
        if isinstance(part, int) and listed:
            items = listed.get("prefixItems", [listed.get("items")])
            child = items[min(part, len(items) - 1)]
        else:  # a number is an invalid name in a mapping with arbitrary keys
            child = _child(node, part)
        if not child:
            return None
        node = json_schema()["$defs"][name] if (name := _reference(child)) else child
    return node


def _child(node: Node, part: str | int) -> Node:
    """Return the JSON schema of a key; empty if the section has no such key."""
    return node.get("properties", {}).get(part) or _named(node)


def _named(node: Node) -> Node:
    """Return the JSON schema of the values of a mapping with arbitrary keys; empty for other nodes, or if any value is
    allowed."""
    values = node.get("additionalProperties")
    return values if isinstance(values, dict) else {}


def _reference(node: Node) -> str | None:
    """Return the name of the section type of a key, also if it is nullable; None for a plain value."""
    for option in (node, *node.get("anyOf", ())):
        if "$ref" in option:
            return str(option["$ref"]).rpartition("/")[2]
    return None


def dotted(path: KeyPath) -> str:
    """Format a path as `algorithm.betas[0]`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def type_text(node: Node) -> str:
    """Describe type and bounds: `an integer >= 1`, `one of float32, bfloat16`, `a path or null`."""
    if "anyOf" in node:
        return " or ".join(dict.fromkeys(type_text(option) for option in node["anyOf"]))
    if "$ref" in node or "properties" in node:
        return "a section"
    if "enum" in node:
        return f"one of {', '.join(map(str, node['enum']))}"
    if "const" in node:
        return str(node["const"])
    if node.get("type") == "array":
        items = node.get("prefixItems")
        return f"a list of {len(items)} numbers" if items else f"a list of {_plural(type_text(node['items']))}"
    if node.get("type") == "object":
        return "a mapping"
    if node.get("format") == "path":
        return "a path"
    if node.get("format") == "import-path":
        return "an import path"
    bounds = " and ".join(f"{sign} {_number(node[name])}" for name, sign in _BOUNDS.items() if name in node)
    pattern = f"matching `{node['pattern']}`" if "pattern" in node else ""
    return " ".join(filter(None, (_TYPES[node["type"]], bounds, pattern)))


def _plural(text: str) -> str:
    """Return the plural of a type: `integers >= 1` for `an integer >= 1`."""
    return re.sub(r"(^| or )an? (import path|\w+)", r"\1\2s", text).replace("one of ", "values from ")


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if value >= 1e6 else f"{value:g}"
