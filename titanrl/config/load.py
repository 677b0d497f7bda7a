"""Load a configuration from YAML and overrides, explain its mistakes, and write it as YAML.

Types and descriptions of keys are those of the JSON schema. A message names location, key, value, rule and fix. A suggested
name was probably meant, and is not merely spelled in a similar way.
"""

import math
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import ErrorDetails, core_schema

from titanrl.base.choices import Program
from titanrl.config.algorithm import ALGORITHM_PRESETS
from titanrl.config.errors import BrokenRule, BrokenRules, ConfigError, inline, message
from titanrl.config.schema import USED_BY_SFT, Config
from titanrl.config.section import Section, meanings
from titanrl.config.source import Override, Source, data_file, dump, read_source, scalar, with_overrides

Location = tuple[str | int, ...]
KeyPath = Sequence[str | int]
Node = dict[str, Any]

MAX_NAME = 100
"""Maximum length of a name for which suggestions are searched. The time of a comparison grows with its square."""
MAX_SUGGESTIONS = 3
"""Maximum number of suggestions. If more names are equally likely, none is suggested."""
SYNONYMS = {
    "bf16": "bfloat16",
    "fp32": "float32",
    "gpu": "cuda",
    "k8s": "kubernetes",
    "mpirun": "launcher",
    "srun": "launcher",
    "torchrun": "launcher",
}
"""Other names of values."""
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
    "report_to": "logging.loggers",
    "save_steps": "checkpoint.every_steps",
    "tensor_parallel_size": "generator.tp",
    "trackers": "logging.loggers",
}
"""Names that other libraries use, with the key of the same meaning, or with its name in any section."""

WHY_FIXED = {
    f"rollout.{name}": f"trainer and generators use one {name}, and tokens sampled with the old one may still be trained on"
    for name in ("top_p", "top_k", "min_p")
}
"""Reasons why keys are not live that a user may expect to be."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read and validate a configuration. Files that it refers to are not read.

    Args:
        path: YAML file, or the name of a shipped configuration.
        overrides: Overrides as `key.path=value`, with the value in YAML; later ones win.

    Raises:
        ConfigError: The configuration is invalid. The error lists all mistakes.
    """
    return validate(read_source(path, overrides))


def validate(source: Source) -> Config:
    """Build the configuration from a source; raise `ConfigError` with all mistakes."""
    try:
        return Config.model_validate(source.values, context={"folder": source.path.parent})
    except ValidationError as error:
        messages: list[str] = []
        for details in error.errors(include_url=False):
            cause = details.get("ctx", {}).get("error")
            if isinstance(cause, BrokenRules):
                messages += (explain_rule(broken, source, details["loc"]) for broken in cause.broken)
            else:
                messages.append(_explain_value(details, source))
        # pydantic reports a value once for each type that it could have
        raise ConfigError(*dict.fromkeys(messages)) from None


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return the configuration with other values of keys that can be changed during a run; raise `ConfigError` for others.

    All rules are checked, between all keys. `values` are by dotted key, as YAML or JSON has them.
    """
    if not values:
        return config
    overrides = [
        Override(text=f"{key}={inline(value)}", path=tuple(key.split(".")), value=value) for key, value in values.items()
    ]
    source = with_overrides(Path("config"), config.model_dump(), overrides)
    known = live_keys(config)
    for override, (key, value) in zip(overrides, values.items(), strict=True):
        if key not in known:
            section, fix = key.partition(".")[0], f"choose one of {', '.join(known)}"
            if section in Config.model_fields and config.value_of(section) is None:
                rule = f"the run was started without the section {section}"
            else:
                validate(source)  # names a key that does not exist
                rule = WHY_FIXED.get(key, "this key cannot be changed during the run")
                fix = did_you_mean(key, known) or f"{fix}; every key can be changed between two runs: --resume RUN {key}=..."
            raise ConfigError(message(f"override {override.text}", f"{key}={inline(value)}", rule, fix))
    validated = validate(source)
    for override, key in zip(overrides, values, strict=True):
        config = _replaced(config, override.path, validated.value_of(key))
    return config


S = TypeVar("S", bound=Section)


def _replaced(section: S, path: Sequence[str], value: Any) -> S:
    """Return a copy of a section with the value at a path replaced."""
    name, *rest = path
    child = getattr(section, name)
    if not rest:
        new = value
    elif isinstance(child, Mapping):
        new = {**child, rest[0]: _replaced(child[rest[0]], rest[1:], value)}
    else:
        new = _replaced(child, rest, value)
    return section.model_copy(update={name: new})


def recorded_config(config: Config) -> str:
    """Return the resolved configuration as YAML with absolute paths, so that it means the same in every directory."""
    return dump(_absolute(config.model_dump()))


def _absolute(value: Any) -> Any:
    """Return nested values with absolute paths. The bare name of an interpreter is looked up on PATH, so it stays."""
    if isinstance(value, Path):
        return value if value.parent == Path() and not value.exists() and shutil.which(value) else data_file(value).absolute()
    if isinstance(value, dict):
        return {key: _absolute(child) for key, child in value.items()}
    return [_absolute(child) for child in value] if isinstance(value, list | tuple) else value


def check_program(config: Config, program: Program, source: Source | None = None) -> None:
    """Raise `ConfigError` if a configuration is for another subcommand, since this one would ignore its section."""
    if config.program == program:
        return
    if program == "train":
        broken = BrokenRule(
            {config.program: config.model_dump(mode="json", exclude_defaults=True)[config.program]},
            f"only `titanrl {config.program}` uses this section",
            f"run `titanrl {config.program}`, or remove the section",
        )
    else:
        fix = f"add `{program}: ...` (docs/config.md), or run `titanrl {config.program}`"
        broken = BrokenRule({program: None}, f"`titanrl {program}` requires this section", fix)
    raise ConfigError(explain_rule(broken, source))


def explain_rule(broken: BrokenRule, source: Source | None = None, section: Location = ()) -> str:
    """Format a broken rule. The message starts with the location of the first key that was set; other keys add their own.

    Without a source, it contains no line numbers. `section` is the path of the section that the keys are relative to.
    """
    paths: dict[Location, object] = {}
    for key, value in broken.values.items():
        # A rule about a single value has no key of its own. A number is an index into a list.
        parts = [int(name) if re.fullmatch("[0-9]{1,9}", name) else name for name in (key.split(".") if key else ())]
        paths[(*section, *parts)] = value
    written = {path: f"{dotted(path)}={inline(value)}" for path, value in paths.items()}
    if source is None:
        return message("config", ", ".join(written.values()), broken.rule, broken.fix)
    locations = {path: source.where(path) for path in paths}
    main = next((path for path, where in locations.items() if where is not None), next(iter(paths)))
    for path, where in locations.items():
        if where is None:  # the user did not set it
            written[path] += " (default)" if source.where((*path[:-1], "preset")) is None else " (preset or default)"
        elif path != main:
            written[path] += f" ({where})"
    return message(source.nearest(main), ", ".join(written.values()), broken.rule, broken.fix)


def _explain_value(details: ErrorDetails, source: Source) -> str:
    path, value = details["loc"], details["input"]
    if details["type"] == "invalid_key":  # such as a number, or null
        what, fix = f"{dotted(path[:-1]) or 'the file'} has the key {inline(value)}", "correct or remove it; "
        fix += "a name that YAML reads as another type needs quotes"
        return message(source.nearest(path[:-1]), what, "keys must be strings", fix)
    if details["type"] == "extra_forbidden":
        return _explain_unknown_key(path, value, source)
    if details["type"] == "missing" and isinstance(path[-1], str):
        fix = f"add `{path[-1]}: ...`. {' '.join((node_at(path) or {}).get('description', '').split())}"
        return message(source.nearest(path), f"{dotted(path)} is missing", "this key is required", fix)
    if path[-1] == "[key]":  # where pydantic reports a key of a free-form mapping
        what, rule = f"{dotted(path[:-2])} has the key {inline(value)}", "its keys must be strings"
        return message(source.nearest(path[:-2]), what, rule, "put the key in quotes")
    if details["type"] == "missing":  # a list that is too short is reported as a whole
        path = path[:-1]
    if node_at(path) is None:  # one part is the type that the value could have
        path = next(filter(node_at, (path[:i] + path[i + 1 :] for i in reversed(range(len(path))))), path)
    node = node_at(path) or {}
    rule = f"must be {type_text(node)}"
    if isinstance(value, float) and not math.isfinite(value):
        rule = rule.replace("a number", "a finite number")
    return message(source.nearest(path), f"{dotted(path)}={inline(value)}", rule, _fix(path, value, node))


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
    return message(source.nearest(path), f"{dotted(path)}={inline(value)}", f"no such key {where}", f"{hint}Keys {of}: {keys}")


def _fix(path: Location, value: Any, node: Node) -> str:
    section = section_at(path)
    if section is not None:
        if isinstance(value, str) and value.lower() in ("none", "nil", "null") and section.is_optional:
            return "write null, without quotes, or its keys below it"
        return f"write its keys below it, or remove it. Keys of {dotted(path)}: {', '.join(section.keys)}"
    if hint := _hint(path, value, node):
        hint = f"{hint}. "
    if (choices := _choices(node)) and not hint:
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
    for sibling in section.keys if section else ():
        if value in _choices(node_at((*path[:-1], sibling)) or {}):
            return f"{value} is a value of {dotted((*path[:-1], sibling))}: set it there, and choose one of them for {key}"
    return ""


def _choices(node: Node) -> list[str]:
    return [str(choice) for option in (node, *node.get("anyOf", ())) for choice in option.get("enum", ())]


_MAX_HINTED = 30
"""Length up to which a text is taken for a number or word in quotes."""


def _hint(path: Location, value: Any, node: Node) -> str:
    """Return how to write the value that was probably meant; empty if that is unknown."""
    kinds = {option.get("type") for option in (node, *node.get("anyOf", ()))}
    if not isinstance(value, str):
        if isinstance(value, float) and not math.isfinite(value):
            return "write a finite number"
        if "integer" in kinds and isinstance(value, float) and value.is_integer():
            return f"write {int(value)}"
        if "array" in kinds and isinstance(value, dict):
            return f"set the list as a whole: {dotted(path)}=[...]"
        return "put it in quotes" if "string" in kinds and isinstance(value, int | float) else ""
    text = value.strip().lower()
    plain: Any = scalar(value) if len(value) <= _MAX_HINTED else value
    is_number = isinstance(plain, int | float) and not isinstance(plain, bool)
    if "null" in kinds and (plain is None or text in ("none", "nil")):
        return "write null, without quotes"
    if "boolean" in kinds and (isinstance(plain, bool) or text in ("yes", "no", "on", "off")):
        return f"write {'true' if plain is True or text in ('yes', 'on') else 'false'}, without quotes"
    if {"integer", "number"} & kinds:
        number = plain if is_number else _number_in(text, str(path[-1])) if len(text) <= _MAX_HINTED else None
        if number is not None and math.isfinite(number) and ("integer" not in kinds or number == int(number)):
            return "remove the quotes" if is_number else f"write {number:g}" if isinstance(number, float) else f"write {number}"
    if "array" in kinds and "object" not in kinds:
        return f"write it as a list: [{value}]"
    return ""


def _number_in(text: str, key: str) -> int | float | None:
    """Return the number that another notation means: `1,000`, `0x10`, `010`, `10k`, of a key in seconds `10m`; None if none."""
    if key.endswith("_s") and (match := re.fullmatch(r"(\d+) ?(s|m|min|h|d)", text)):
        return int(match[1]) * {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}[match[2]]
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
    for section in (*sections(), *filter(None, [here])):  # `sections` leaves out the sections of lists
        is_here = here is not None and section.keys == here.keys
        around = words(section.path.replace("<name>", ""))
        distance = 0 if is_here else 1 if parent and set(words(" ".join(parent))) <= set(around) else 2
        is_off = not is_here and (
            section.is_optional or "<name>" in section.path or section.path.startswith(("hosts.", "algorithm.critic"))
        )
        where = dotted(path[:-1]) if is_here else section.path
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


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a question such as `did you mean exact?`, or an empty string if no name was probably meant."""
    return question(suggestions(name, names))


def question(found: Sequence[str]) -> str:
    """Return the question that suggests names; an empty string for none."""
    listed = " or ".join(filter(None, [", ".join(found[:-1]), *found[-1:]]))
    return f"did you mean {listed}?" if found else ""


def suggestions(name: str, names: Iterable[str]) -> list[str]:
    """Return the names that were probably meant: synonyms, other spellings, typos, and names with more or fewer words."""
    names = list(names)
    if len(name) > MAX_NAME:
        return []
    if (synonym := SYNONYMS.get(name.lower())) in names:
        return [synonym]
    asked = words(name)
    ways = (
        [other for other in names if "".join(words(other)) == "".join(asked)],
        [other for other in names if is_misspelled("".join(asked), "".join(words(other)))],
        [other for other in names if _begins(asked, words(other)) or _begins(words(other), asked)],
    )
    found = next(filter(None, ways), [])
    return found if len(found) <= MAX_SUGGESTIONS else []


def words(name: str) -> list[str]:
    """Return the words of a name in lower case: `maxSteps`, `max-steps` and `max_steps` have the same, and `++` reads `pp`."""
    return re.findall(r"[^\W_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().replace("+", "p"))


def is_misspelled(one: str, other: str) -> bool:
    """Return True if two names are equal, or one is probably a typo of the other.

    A typo keeps the first letter and all digits, because `float16` is not `bfloat16`. In a short name, it only adds, drops or
    swaps a letter, because `grpo` is not `gspo`.
    """
    short, long = sorted((one, other), key=len)
    if one == other or not short:
        return one == other
    if short[0] != long[0] or re.sub(r"\D", "", short) != re.sub(r"\D", "", long):
        return False
    if len(long) < 5:
        return len(long) > 2 and (len(short) < len(long) or sorted(short) == sorted(long)) and _distance(one, other) == 1
    return _distance(one, other) <= (2 if len(short) >= 8 else 1)


def is_same_word(one: str, other: str) -> bool:
    """Return True if two words of names mean the same: equal, misspelled, or a word and a slightly longer form of it."""
    short, long = sorted((one, other), key=len)
    return is_misspelled(one, other) or (len(short) >= 3 and long.startswith(short) and len(long) - len(short) <= 3)


def _begins(start: Sequence[str], name: Sequence[str]) -> bool:
    """Return True if a name begins with the words of another, as in `cuda:0` and `tensorboardx`."""
    return bool(start) and len(start) <= len(name) and all(map(is_same_word, start, name))


def _distance(one: str, other: str) -> int:
    """Return the number of inserted, removed, replaced and swapped letters."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, start=1):
        earlier, before, row = before, row, [i]
        for j, wanted in enumerate(other, start=1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                cost = min(cost, earlier[j - 2] + 1)
            row.append(cost)
    return row[-1]


# Keys, from the JSON schema

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
    for pattern, key in _live_patterns():
        for path in _paths(config, pattern):
            if config.sft is None or path.partition(".")[0] not in USED_BY_SFT:
                values[f"{path}.{key}"] = config.value_of(f"{path}.{key}")
    return values


@cache
def _live_patterns() -> list[tuple[list[str], str]]:
    """Return the path of the section of each live key, and its name. To look for them takes milliseconds."""
    found = ((section, key) for section in sections() for key, node in section.keys.items() if is_live(node))
    return [(section.path.split(".") if section.path else [], key) for section, key in found]


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
        if items:
            return f"a list of {len(items)} numbers"
        plural = re.sub(r"(^| or )an? (import path|\w+)", r"\1\2s", type_text(node["items"]))  # of `an integer >= 1`
        return f"a list of {plural.replace('one of ', 'values from ')}"
    if node.get("type") == "object":
        return "a mapping"
    if node.get("format") == "path":
        return "a path"
    if node.get("format") == "import-path":
        return "an import path"
    bounds = " and ".join(f"{sign} {_number(node[name])}" for name, sign in _BOUNDS.items() if name in node)
    pattern = f"matching `{node['pattern']}`" if "pattern" in node else ""
    return " ".join(filter(None, (_TYPES[node["type"]], bounds, pattern)))


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if value >= 1e6 else f"{value:g}"
