"""Load a configuration from YAML and overrides, check that it is for a subcommand, and dump it as YAML."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from titanrl.base.choices import Program
from titanrl.config.errors import BrokenRule, ConfigError
from titanrl.config.explain import explain, explain_rule
from titanrl.config.schema import Config
from titanrl.config.shipped import data_file
from titanrl.config.source import Source, dump, read_source


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
    """Build the configuration from a source.

    Raises:
        ConfigError: A key is unknown, a value is invalid, or a rule is violated.
    """
    try:
        return Config.model_validate(source.values, context={"folder": source.path.parent})
    except ValidationError as error:
        raise ConfigError(*explain(error, source)) from None


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


def dump_config(config: Config) -> str:
    """Return the resolved configuration as YAML; `load_config` reads it back to an equal one."""
    return dump(config.model_dump())


def check_program(config: Config, program: Program, source: Source | None = None) -> None:
    """Check that a configuration is for a subcommand, since other subcommands would ignore its section.

    Raises:
        ConfigError: It is for another subcommand.
    """
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
