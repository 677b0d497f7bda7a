"""The source of a configuration: a YAML file with overrides, and the location where each value was set."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from titanrl.base.files import why_no_file, why_no_folder
from titanrl.config.errors import ConfigError, inline, message
from titanrl.config.shipped import config_file
from titanrl.config.strict_yaml import explain_yaml_error, line_of, parse

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
    """Read a configuration file and parse the overrides.

    Args:
        path: YAML file, relative to the current directory, or the name of a shipped configuration.
        overrides: Overrides as `key.path=value`; later ones win.

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
    parsed = [_parse_override(text) for text in overrides]
    broken = [override for override in parsed if isinstance(override, str)]
    if broken:
        raise ConfigError(*broken)
    good = tuple(override for override in parsed if isinstance(override, Override))
    for override in good:
        values = _with_value(values, override.path, override.value)
    return Source(path=path, node=node, overrides=good, values=values)


def config_of_run(run_dir: Path) -> Path:
    """Return the configuration file of a run that `--resume` names.

    Raises:
        ConfigError: The directory or its configuration cannot be read.
    """
    file = run_dir / "config.yaml"
    found = why_no_folder(run_dir) or why_no_file(file)
    if found is None:
        return file
    what = "it" if why_no_folder(run_dir) else "its config.yaml"
    raise ConfigError(
        message(
            f"--resume {inline(str(run_dir))}",
            "run directory",
            f"must be the directory of a run, but {what} {found} (current directory: {Path.cwd()})",
            "give the directory that the run printed, such as runs/quickstart, or start a new run with --config",
        )
    )


def _read_mapping(path: Path) -> tuple[dict[str, Any], yaml.Node]:
    found = why_no_file(path)
    if found is not None:
        rule = f"must be a YAML file, but it {found} (current directory: {Path.cwd()})"
        fix = "give the path of a YAML file, or a name from `titanrl configs`, such as quickstart"
        raise ConfigError(message(str(path), "configuration file", rule, fix))
    try:
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            rule = f"must not be larger than {MAX_FILE_BYTES:,} bytes, but has {size:,}"
            raise ConfigError(
                message(str(path), "configuration file", rule, "give the path of the configuration, not of a data file")
            )
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            message(
                str(path),
                "configuration file",
                f"must be a readable UTF-8 file: {error}",
                "correct its permissions, or save it as UTF-8",
            )
        ) from None
    try:
        values, node = parse(text)
    except yaml.YAMLError as error:
        line, shown, rule, fix = explain_yaml_error(error, text)
        raise ConfigError(message(f"{path}:{line}", shown or "configuration file", rule, fix)) from None
    if node is None or not isinstance(values, dict):
        rule = f"must be a mapping of keys, but it {'is empty' if node is None else f'contains {inline(values)}'}"
        raise ConfigError(message(f"{path}:1", "configuration file", rule, "write `key: value` lines; see docs/config.md"))
    return values, node


def _parse_override(text: str) -> Override | str:
    """Parse an override, or return an error message."""
    try:
        text = os.fsencode(text).decode()  # in an ASCII locale, Python decodes arguments to surrogates
    except UnicodeError:
        return message(f"override {text}", inline(text), "must be valid UTF-8", "correct the encoding of the argument")
    key, equals, value = text.partition("=")
    path = tuple(key.split("."))
    if not equals or not all(path) or len(path) > MAX_DEPTH:
        rule = "must have the form key.path=value, with no empty name in the path"
        return message(f"override {text}", inline(text), rule, "write it like rollout.group_size=16")
    if re.search(r"^-|\s|[\[\]]", key):
        rule = "a key must have no spaces, brackets or leading dashes"
        return message(
            f"override {text}", inline(key), rule, "write it like rollout.group_size=16, or algorithm.betas=[0.9, 0.95]"
        )
    if not value.strip():
        fix = f"write {key}=null for no value, or {key}='\"\"' for an empty text"
        return message(f"override {text}", f"{key}=", "an override must have a value", fix)
    try:
        return Override(text=text, path=path, value=parse(value)[0])
    except yaml.YAMLError as error:
        _, _, rule, _ = explain_yaml_error(error, value)
        return message(
            f"override {text}", f"{key}={value}", f"the value {rule}", f"quote strings with special characters: {key}='\"...\"'"
        )


def _with_value(values: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return a copy with the value at `path` replaced, creating missing sections."""
    key, *rest = path
    if not rest:
        return values | {key: value}
    section = values.get(key)
    return values | {key: _with_value(section if isinstance(section, dict) else {}, tuple(rest), value)}
