"""Load a configuration from YAML and overrides, explain its mistakes, and write it as YAML.

A `Source` is a strict YAML file with overrides, and the location where each value was set. The file may be one that is shipped
with the package. Scalars follow YAML 1.2, like in editors. PyYAML follows YAML 1.1, where `1e-5` is a string, `off` is false,
`12:00:00` is the number 43200 and `010` is 8. Duplicate keys, tags, anchors and aliases are errors.

Types and descriptions of keys are those of the JSON schema. A message names location, key, value, rule and fix. A suggested
name was probably meant, and is not merely spelled in a similar way.
"""

import argparse
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePath
from typing import Any, TypeVar, cast

import yaml
from pydantic import ValidationError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import ErrorDetails, core_schema
from yaml.events import AliasEvent, CollectionStartEvent, Event, ScalarEvent

from titanrl.base import terminal
from titanrl.base.files import why_no_file, why_no_folder
from titanrl.config.algorithm import ALGORITHM_PRESETS
from titanrl.config.data import ACCEPTS_CHANGED_DATA, data_file
from titanrl.config.errors import BrokenRule, BrokenRules, ConfigError, inline, message
from titanrl.config.schema import USED_BY_SFT, Config, Program
from titanrl.config.sections import FOLDER, Section, meanings

MAX_FILE_BYTES = 1_000_000
"""Maximum size of a configuration file. Larger files would take long to parse."""
MAX_DEPTH = 50
"""Maximum number of components in the path of a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """A `key.path=value` argument of the command line.

    Example: `Override(text="rollout.group_size=16", path=("rollout", "group_size"), value=16)`
    """

    text: str
    """Argument as given."""
    path: tuple[str, ...]
    """Path of the key."""
    value: Any
    """Value, parsed as YAML."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A configuration file and its overrides, before validation."""

    path: Path
    """Configuration file."""
    node: yaml.Node
    """YAML node tree of the file, which contains the line numbers."""
    overrides: tuple[Override, ...]
    """Overrides in order; later ones win."""
    values: dict[str, Any]
    """Values of the file with the overrides applied."""

    def where(self, path: Sequence[str | int]) -> str | None:
        """Return the override, or the file and line, that set the value at `path`; None if it was not set."""
        for override in reversed(self.overrides):
            if override.path == tuple(path[: len(override.path)]):
                return f"override {override.text}"
        line = line_of(self.node, path)
        if line is not None:
            return f"{self.path}:{line}"
        below = (override.text for override in self.overrides if override.path[: len(path)] == tuple(path))
        return next((f"override {text}" for text in below), None)

    def nearest(self, path: Sequence[str | int]) -> str:
        """Return the location of the value at `path`, or of the innermost enclosing section that was set."""
        written = (self.where(path[:length]) for length in range(len(path), 0, -1))
        return next((location for location in written if location is not None), f"{self.path}:{line_of(self.node, ())}")


def read_source(path: str | Path, overrides: Sequence[str] = ()) -> Source:
    """Read the configuration file `path`, or the shipped configuration of this name, and apply the overrides; later ones win.

    Raises:
        ConfigError: The file does not exist or is not a strict YAML mapping, or an override is malformed.
    """
    file: object = path
    listed: object = overrides
    if (
        not isinstance(file, str | Path)
        or not isinstance(listed, list | tuple)
        or not all(isinstance(text, str) for text in listed)
    ):
        given = inline(overrides) if isinstance(file, str | Path) else type(path).__name__
        raise TypeError(f"load_config: expected a path and a list of overrides, such as ['seed=1'] (got {given})")
    path = config_file(path)
    values, node = _read_mapping(path)
    return with_overrides(path, values, parse_overrides(overrides), node)


def read_policy_source(path: str | Path, overrides: Sequence[str] = ()) -> Source:
    """Read a configuration like `read_source`, of a distillation run without what only distillation may have.

    Its policy can then be sampled from like that of any other run.
    """
    source = read_source(path, overrides)
    if source.values.get("distill") is None:
        return source
    undone, rollout, data = ["distill=null"], source.values.get("rollout"), source.values.get("data")
    if isinstance(rollout, Mapping) and rollout.get("group_size") == 1:
        undone.append("rollout.group_size=2")
    mixture = data.get("mixture") if isinstance(data, Mapping) else None
    for name, task in mixture.items() if isinstance(mixture, Mapping) else ():
        given = task if isinstance(task, Mapping) else {}
        for key, default in {"teacher": "null", "distill_weight": "1.0", "reward_weight": "null"}.items():
            if key in given:
                undone.append(f"data.mixture.{name}.{key}={default}")
    return read_source(path, [*overrides, *undone])


def with_overrides(path: Path, values: dict[str, Any], overrides: Sequence[Override], node: yaml.Node | None = None) -> Source:
    """Return the source of values with overrides. Messages name `path` as their file, with the lines that `node` has."""
    for override in overrides:
        values = _with_value(values, override.path, override.value)
    node = node or yaml.MappingNode("tag:yaml.org,2002:map", [])
    return Source(path=path, node=node, overrides=tuple(overrides), values=values)


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Parse `key.path=value` arguments. Raise `ConfigError` if an override is malformed."""
    parsed: list[Override] = []
    mistakes: list[str] = []
    for text in overrides:
        try:
            parsed.append(_parse_override(text))
        except ConfigError as error:
            mistakes += error.messages
    if mistakes:
        raise ConfigError(*mistakes)
    return parsed


def shipped_configs() -> dict[str, Path]:
    """Return the files of the shipped configurations by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def config_file(path: str | Path) -> Path:
    """Return the path if it exists, else the shipped configuration of this name."""
    path = Path(path)
    return path if os.path.exists(path) else shipped_configs().get(str(path), path)


def config_of_run(run_dir: Path) -> Path:
    """Return the configuration file of a run that `--resume` names; raise `ConfigError` if it cannot be read."""
    file = run_dir / "config.yaml"
    found = why_no_folder(run_dir) or why_no_file(file)
    if found is None:
        return file
    what = "it" if why_no_folder(run_dir) else "its config.yaml"
    rule = f"must be the directory of a run, but {what} {found} (current directory: {Path.cwd()})"
    fix = "give the directory that the run printed, such as runs/quickstart, or start a new run with --config"
    raise ConfigError(message(f"--resume {inline(str(run_dir))}", "run directory", rule, fix))


def parse_run(
    argv: Sequence[str] | None,
    *,
    prog: str,
    purpose: str,
    dry_run_help: str = "check everything, print what would run, and start nothing",
) -> argparse.Namespace:
    """Parse the command line of a run: a configuration with overrides, or a run to resume."""
    parser = argparse.ArgumentParser(prog=prog, description=purpose)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--config", type=terminal.path, help="YAML file of the run, or the name of a shipped configuration")
    which.add_argument("--resume", type=terminal.path, metavar="RUN_DIR", help="continue a run from its newest checkpoint")
    parser.add_argument("--dry-run", action="store_true", help=dry_run_help)
    parser.add_argument(
        ACCEPTS_CHANGED_DATA,
        action="store_true",
        help="with --resume: continue although the run's data files or prompts have changed",
    )
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="values that override the file's")
    return parser.parse_intermixed_args(argv)


def source_of(arguments: argparse.Namespace) -> Source:
    """Return the source of the configuration that the arguments of a run name."""
    return read_source(config_of_run(arguments.resume) if arguments.resume else arguments.config, arguments.overrides)


def _read_mapping(path: Path) -> tuple[dict[str, Any], yaml.Node]:
    def refusal(rule: str, fix: str, line: str = "", what: str = "configuration file") -> ConfigError:
        return ConfigError(message(f"{path}{line}", what, rule, fix))

    found = why_no_file(path)
    if found is not None:
        rule = f"must be a YAML file, but it {found} (current directory: {Path.cwd()})"
        raise refusal(rule, "give the path of a YAML file, or a name from `titanrl configs`, such as quickstart")
    try:
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            rule = f"must not be larger than {MAX_FILE_BYTES:,} bytes, but has {size:,}"
            raise refusal(rule, "give the path of the configuration, not of a data file")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        rule = f"must be a readable UTF-8 file: {error}"
        raise refusal(rule, "correct its permissions, or save it as UTF-8") from None
    try:
        values, node = parse(text)
    except yaml.YAMLError as error:
        line, shown, rule, fix = explain_yaml_error(error, text)
        raise refusal(rule, fix, f":{line}", shown or "configuration file") from None
    if node is None or not isinstance(values, dict):
        rule = f"must be a mapping of keys, but it {'is empty' if node is None else f'contains {inline(values)}'}"
        raise refusal(rule, "write `key: value` lines; see docs/config.md", ":1")
    return values, node


def _parse_override(text: str) -> Override:
    def refusal(what: str, rule: str, fix: str) -> ConfigError:
        return ConfigError(message(f"override {text}", what, rule, fix))

    try:
        text = os.fsencode(text).decode()  # in an ASCII locale, Python decodes arguments to surrogates
    except UnicodeError:
        raise refusal(inline(text), "must be valid UTF-8", "correct the encoding of the argument") from None
    key, equals, value = text.partition("=")
    path = tuple(key.split("."))
    if not equals or not all(path) or len(path) > MAX_DEPTH:
        rule = "must have the form key.path=value, with no empty name in the path"
        raise refusal(inline(text), rule, "write it like rollout.group_size=16")
    if re.search(r"^-|\s|[\[\]]", key):
        fix = "write it like rollout.group_size=16, or algorithm.betas=[0.9, 0.95]"
        raise refusal(inline(key), "a key must have no spaces, brackets or leading dashes", fix)
    if not value.strip():
        fix = f"write {key}=null for no value, or {key}='\"\"' for an empty text"
        raise refusal(f"{key}=", "an override must have a value", fix)
    try:
        *_, last, _ = yaml.scan(value)
        if value[last.end_mark.index :].strip():  # an argument needs no comment
            rule = "YAML reads the text from # on as a comment"
            raise refusal(f"{key}={value}", rule, f"quote the value: {key}='{inline(value)}'")
        return Override(text=text, path=path, value=parse(value)[0])
    except yaml.YAMLError as error:
        rule = f"the value {explain_yaml_error(error, value)[2]}"
        raise refusal(f"{key}={value}", rule, f"quote strings with special characters: {key}='\"...\"'") from None


def _with_value(values: dict[str, Any], path: tuple[str, ...], value: Any, parent: str = "") -> dict[str, Any]:
    """Return a copy with the value at `path` replaced, creating missing sections."""
    key, *rest = path
    if not rest:
        return values | {key: value}
    section = values.get(key)
    if isinstance(section, str) and (key == "environment" or parent == "rewards"):
        section = {"function": section}  # written in short, as `FunctionSection` allows
    return values | {key: _with_value(section if isinstance(section, dict) else {}, tuple(rest), value, key)}


class _Scalars(yaml.resolver.Resolver):
    """Types of plain scalars, shared by loader and dumper so that dumped values round-trip."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - overrides PyYAML's attribute, so that no YAML 1.1 rule is inherited


_INT = r"[-+]?(?:0|[1-9][0-9_]*)"
_EXPONENT = r"[eE][-+]?[0-9]+"
_FLOAT = rf"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:{_EXPONENT})?|\.[0-9]+(?:{_EXPONENT})?|[0-9][0-9_]*{_EXPONENT}|\.inf)|\.nan"

for _tag, _pattern, _first in (
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", "true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", _INT, list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
):
    _Scalars.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)


_MAX_NESTING = 50
"""Maximum nesting of a document. Python's recursion limit would be reached at a few hundred levels."""
_MAX_DIGITS = 100
"""Maximum length of an integer. Python refuses to convert more than 4,300 digits."""
_UNUSABLE = re.compile("[\0\ud800-\udfff]")
"""Characters that YAML escapes can produce, but that paths or UTF-8 cannot contain."""


_FIX = "correct the syntax; strings that contain ': ' or ' #' need quotes"
_FIXES = {
    "character '\\t'": "replace tabs by spaces",
    "could not find expected ':'": "write a space after the colon, as in `key: value`",
    "found another document": "remove the line `---`, and keep one document",
}
"""Fixes of syntax errors, by a part of PyYAML's message."""


class _Loader(_Scalars, yaml.SafeLoader):
    """A loader that rejects duplicate keys, tags, anchors, aliases, and values that cannot be converted."""

    _nesting = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Event = self.peek_event()  # type: ignore[no-untyped-call]
        if self._nesting == _MAX_NESTING:
            raise _refusal(event, f"the value is nested deeper than {_MAX_NESTING} levels", "flatten it")
        if isinstance(event, AliasEvent):
            raise _refusal(event, "aliases are not supported", "write the value instead")
        if isinstance(event, ScalarEvent | CollectionStartEvent):
            if event.anchor is not None:
                raise _refusal(event, "anchors are not supported", "write the value at each place of use")
            if event.tag is not None:
                raise _refusal(event, f"the tag {event.tag} is not supported", "remove it")
        self._nesting += 1
        node = super().compose_node(parent, index)
        self._nesting -= 1
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        if unusable := _UNUSABLE.search(node.value):
            raise _refusal(node, f"the character U+{ord(unusable[0]):04X} is not supported", "remove it")
        if node.tag == "tag:yaml.org,2002:int" and len(node.value) > _MAX_DIGITS:
            raise _refusal(node, f"an integer has more than {_MAX_DIGITS} digits", "write a smaller number, or quote a string")
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _refusal(key, "a key must be a string", "write `key: value`")
            if key.value == "<<" and key.style is None:
                raise _refusal(key, "merge keys (<<) are not supported", "write the keys that it would merge")
            if key.value in lines:
                raise _refusal(key, f"duplicate key {key.value}, first defined at line {lines[key.value]}", "keep one of them")
            lines[key.value] = key.start_mark.line + 1
        return node


def _refusal(at: Event | yaml.Node, problem: str, fix: str) -> yaml.MarkedYAMLError:
    # The type stubs also allow the mark of the C loader, but this loader is pure Python.
    return yaml.MarkedYAMLError(problem=problem, problem_mark=cast("yaml.Mark | None", at.start_mark), note=fix)


class _Dumper(_Scalars, yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # PyYAML reads these line separators as line breaks unless they are escaped, which requires double quotes.
    style = '"' if re.search("[\x85\u2028\u2029]", text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_multi_representer(PurePath, lambda dumper, path: dumper.represent_str(str(path)))


def parse(text: str) -> tuple[Any, yaml.Node | None]:
    """Return the value of a YAML document, and its node tree for `line_of`: None if the document is empty."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        return (None if node is None else loader.construct_document(node)), node
    finally:
        loader.dispose()


def scalar(text: str) -> Any:
    """Return the value that a text has in YAML without quotes, if it is null, true, false or a number; else the text."""
    tag: str = _Loader("").resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
    return text if tag.endswith(":str") else parse(text)[0]


def dump(value: Any) -> str:
    """Return a value as YAML that `parse` reads back; paths become strings and tuples become lists."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def line_of(node: yaml.Node | None, path: Sequence[str | int]) -> int | None:
    """Return the line of the key or item at `path`, counted from 1; None if the document does not contain it."""
    mark = None if node is None else node.start_mark
    for part in path:
        if isinstance(node, yaml.MappingNode):
            found = [(key.start_mark, child) for key, child in node.value if key.value == str(part)]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            found = [(child.start_mark, child) for child in node.value[part : part + 1]]
        else:
            return None
        if not found:
            return None
        mark, node = found[0]
    return None if mark is None else mark.line + 1


def explain_yaml_error(error: yaml.YAMLError, text: str) -> tuple[int, str, str, str]:
    """Return the line number, the line, the violated rule and the fix for an error raised by `parse`."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return 1, "", f"must be YAML: {error}", "save the file as plain UTF-8 text"
    lines = text.splitlines()
    line = min(error.problem_mark.line, max(0, len(lines) - 1))
    problem = error.problem or error.context or ""
    fix = error.note or next((fix for part, fix in _FIXES.items() if part in problem), _FIX)
    return line + 1, (lines[line].strip()[:80] if lines else ""), f"must be YAML: {problem.removeprefix('but ')}", fix


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
        fix = "put the key in quotes"
        if details["type"] == "literal_error":
            names = re.findall(r"'(.*?)'", details["ctx"]["expected"])
            rule, fix = f"its keys must be among {', '.join(names)}", did_you_mean(str(value), names) or "choose one of them"
        return message(source.nearest(path[:-2]), what, rule, fix)
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
