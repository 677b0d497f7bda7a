"""The keys of the configuration with their types and descriptions, derived from the JSON schema."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from titanrl.config.schema import Config
from titanrl.config.suggest import MAX_NAME, MAX_SUGGESTIONS, is_misspelled, is_same_word, words

Node = dict[str, Any]
KeyPath = Sequence[str | int]

_BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
_TYPES = {"integer": "an integer", "number": "a number", "boolean": "true or false", "string": "a string", "null": "null"}

FOREIGN = {
    "adv_estimator": "algorithm.advantage",
    "batch_size": "rollout.groups_per_step",
    "beta": "algorithm.kl.coef",
    "clip_eps": "algorithm.clip_low",
    "clip_range": "algorithm.clip_low",
    "clip_ratio": "algorithm.clip_low",
    "dataset": "data.source",
    "epsilon": "algorithm.clip_low",
    "eval_steps": "evaluation.every_steps",
    "gpu_memory_utilization": "generator.vllm.gpu_memory_utilization",
    "gradient_checkpointing": "trainer.activation_checkpointing",
    "loss_type": "algorithm.loss",
    "lr": "learning_rate",
    "max_completion_length": "rollout.max_new_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_steps": "num_steps",
    "max_tokens": "rollout.max_new_tokens",
    "model.name": "model.path",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "num_generations": "rollout.group_size",
    "reward_fn": "data.rewards",
    "reward_funcs": "data.rewards",
    "save_steps": "checkpoint.every_steps",
    "tensor_parallel_size": "generator.tp",
}
"""Names that other libraries use, with the key of the same meaning, or with its name in any section."""


class _Untitled(GenerateJsonSchema):
    """A schema generator that omits titles, because they only repeat the key."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


@cache
def json_schema() -> Node:
    """Return the JSON schema of a configuration file."""
    return {"$schema": GenerateJsonSchema.schema_dialect, **Config.model_json_schema(schema_generator=_Untitled)}


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


def section_at(path: KeyPath) -> SectionKeys | None:
    """Return the section at a path; None if the path is not a section."""
    node = node_at(path)
    if node is None or "properties" not in node:
        return None
    return SectionKeys(path=dotted(path), meaning=node["description"], keys=node["properties"], is_optional=_is_optional(path))


def _is_optional(path: KeyPath) -> bool:
    """Return True if the section at a path, or one that contains it, is null by default."""
    node: Node = json_schema()
    for part in path:
        child = node.get("properties", {}).get(part) or _named(node)
        if "anyOf" in child:
            return True
        node = _resolved(child)
    return False


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
            child = node.get("properties", {}).get(part) or _named(node) or None
        if child is None:
            return None
        node = _resolved(child)
    return node


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


def _resolved(node: Node) -> Node:
    name = _reference(node)
    if name is None:
        return node
    section: Node = json_schema()["$defs"][name]
    return section


def dotted(path: KeyPath) -> str:
    """Format a path as `algorithm.betas[0]`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def type_text(node: Node) -> str:
    """Describe type and bounds: `an integer >= 1`, `one of float32, bfloat16`, `a path or null`."""
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


def nearest_keys(path: KeyPath) -> list[str]:
    """Return the valid keys that an unknown one probably means, in any section; empty if there is none, or too many.

    A key can be meant if its name and the names of its sections contain every word of the unknown name, except for typos, and
    its name has at most one other word (two in the section of the unknown key). Keys of the same name come first; then keys of
    the same section, keys below it, keys with fewer other words, and keys of sections that are on by default.
    """
    *parent, name = map(str, path)
    if len(name) > MAX_NAME:
        return []
    foreign = FOREIGN.get(".".join([*parent, name]).lower()) or FOREIGN.get(name.lower(), name)
    if "." in foreign:
        return [foreign]
    here, asked = section_at(path[:-1]), words(foreign)
    ranks: dict[str, tuple[bool, int, int, bool]] = {}
    for section in sections():
        is_here = here is not None and section.keys == here.keys
        around = words(section.path.replace("<name>", ""))
        distance = 0 if is_here else 1 if parent and set(words(" ".join(parent))) <= set(around) else 2
        is_off = not is_here and (section.is_optional or "<name>" in section.path or section.path.startswith("hosts."))
        where = dotted(parent) if is_here else section.path
        for key in section.keys:
            others = _num_other_words(asked, words(key), around)
            if others is not None and others <= (2 if is_here else 0 if is_off else 1):
                is_exact = not is_off and words(key) == asked
                ranks[f"{where}.{key}".lstrip(".")] = (not is_exact, distance, others, is_off)
    best = min(ranks.values(), default=None)
    found = [key for key, rank in ranks.items() if rank == best]
    return found if len(found) <= MAX_SUGGESTIONS else []


def _num_other_words(asked: Sequence[str], key: Sequence[str], section: Sequence[str]) -> int | None:
    """Return the number of words of a key that an unknown name lacks; None if the key cannot be meant."""
    if is_misspelled("".join(asked), "".join(key)):
        return 0
    meant = [next((word for word in (*key, *section) if is_same_word(word, name)), None) for name in asked]
    if None in meant or not set(meant) & set(key):
        return None
    return len(set(key) - set(meant))
