"""A configuration from a YAML file and overrides, and back to YAML."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from titanrl.config.errors import ConfigError
from titanrl.config.explain import explain
from titanrl.config.schema import Config
from titanrl.config.source import Source, read_source
from titanrl.config.strict_yaml import dump


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read and validate a configuration. Starts nothing, writes nothing, and does not look at the files it names.

    Args:
        path: the YAML file.
        overrides: `key.path=value` each, the value in YAML; later ones win.

    Raises:
        ConfigError: anything wrong with it, all mistakes at once.
    """
    return validate(read_source(path, overrides))


def validate(source: Source) -> Config:
    """The configuration a source describes.

    Raises:
        ConfigError: unknown keys, wrong values, broken rules.
    """
    try:
        return Config.model_validate(source.values)
    except ValidationError as error:
        raise ConfigError(*explain(error, source)) from None


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML that `load_config` reads back to an equal one."""
    return dump(config.model_dump())
