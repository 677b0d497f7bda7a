"""The source of a configuration: a strict YAML file with overrides, and the location where each value was set.

The file may be one that is shipped with the package.

Scalars follow YAML 1.2, like in editors. PyYAML follows YAML 1.1, where `1e-5` is a string, `off` is false, `12:00:00` is the
number 43200 and `010` is 8. Duplicate keys, tags, anchors and aliases are errors.
"""

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, cast

import yaml
from yaml.events import AliasEvent, CollectionStartEvent, Event, ScalarEvent

from titanrl.base import terminal
from titanrl.base.files import why_no_file, why_no_folder
from titanrl.config.errors import ConfigError, inline, message
from titanrl.config.section import FOLDER

ACCEPTS_CHANGED_DATA = "--accept-changed-data"
"""Flag of the command line that lets a resumed run continue on changed data."""
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


def data_file(path: Path) -> Path:
    """Return the path of a JSONL file if it exists, else the shipped file of this name."""
    shipped = FOLDER / path
    return shipped if not os.path.exists(path) and path.suffix == ".jsonl" and os.path.isfile(shipped) else path


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
