"""What the user wrote: a YAML file and overrides, merged, with the place of every value."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from titanrl.config.errors import ConfigError, inline, message
from titanrl.config.strict_yaml import explain_yaml_error, line_of, parse


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """A `key.path=value` of the command line.

    Example: `Override(text="rollout.group_size=16", path=("rollout", "group_size"), value=16)`
    """

    text: str
    """As it was given."""
    path: tuple[str, ...]
    """The key."""
    value: Any
    """The value, parsed as YAML."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A configuration file and its overrides, not validated yet."""

    path: Path
    """The file."""
    node: yaml.Node
    """Its node tree, which knows the lines."""
    overrides: tuple[Override, ...]
    """In order; later ones win."""
    values: dict[str, Any]
    """The values of the file with the overrides applied."""

    def where(self, path: Sequence[str | int]) -> str | None:
        """Where the value at `path` was written: an override, or file and line; None if it was written nowhere."""
        for override in reversed(self.overrides):
            if override.path == tuple(path[: len(override.path)]):
                return f"override {override.text}"
        line = line_of(self.node, path)
        if line is not None:
            return f"{self.path}:{line}"
        below = (override.text for override in self.overrides if override.path[: len(path)] == tuple(path))
        return next((f"override {text}" for text in below), None)

    def nearest(self, path: Sequence[str | int]) -> str:
        """Where the value at `path` was written, else the section around it."""
        written = (self.where(path[:length]) for length in range(len(path), 0, -1))
        return next((place for place in written if place is not None), f"{self.path}:{line_of(self.node, ())}")


def read_source(path: str | Path, overrides: Sequence[str] = ()) -> Source:
    """Read a configuration file and parse the overrides; paths are relative to the current directory.

    Raises:
        ConfigError: no such file, not a strict YAML mapping, or a broken override.
    """
    path = Path(path)
    values, node = _read_mapping(path)
    parsed = [_parse_override(text) for text in overrides]
    broken = [override for override in parsed if isinstance(override, str)]
    if broken:
        raise ConfigError(*broken)
    good = tuple(override for override in parsed if isinstance(override, Override))
    for override in good:
        values = _with_value(values, override.path, override.value)
    return Source(path=path, node=node, overrides=good, values=values)


def _read_mapping(path: Path) -> tuple[dict[str, Any], yaml.Node]:
    if not path.is_file():
        found = "is a directory" if path.is_dir() else "does not exist"
        rule = f"must be a YAML file, but it {found} (current directory: {Path.cwd()})"
        raise ConfigError(
            message(str(path), "configuration file", rule, "give the path of a file, such as configs/quickstart.yaml")
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            message(str(path), "configuration file", f"must be readable UTF-8: {error}", "save it as UTF-8 text")
        ) from None
    try:
        values, node = parse(text)
    except yaml.YAMLError as error:
        line, shown, rule, fix = explain_yaml_error(error, text)
        raise ConfigError(message(f"{path}:{line}", shown or "configuration file", rule, fix)) from None
    if node is None or not isinstance(values, dict):
        rule = f"must be a mapping of keys, but it {'is empty' if node is None else f'holds {inline(values)}'}"
        raise ConfigError(message(f"{path}:1", "configuration file", rule, "write `key: value` lines; see docs/config.md"))
    return values, node


def _parse_override(text: str) -> Override | str:
    """The override, or what is wrong with it."""
    key, equals, value = text.partition("=")
    path = tuple(key.split("."))
    if not equals or not all(path):
        rule = "must be key.path=value, with a name between the dots"
        return message(f"override {text}", inline(text), rule, "write it like rollout.group_size=16")
    try:
        return Override(text=text, path=path, value=parse(value)[0])
    except yaml.YAMLError as error:
        _, _, rule, _ = explain_yaml_error(error, value)
        return message(
            f"override {text}", f"{key}={value}", f"the value {rule}", f"quote text with special characters: {key}='\"...\"'"
        )


def _with_value(values: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A copy with the value at `path` replaced; sections on the way are made where there are none."""
    key, *rest = path
    if not rest:
        return values | {key: value}
    section = values.get(key)
    return values | {key: _with_value(section if isinstance(section, dict) else {}, tuple(rest), value)}
