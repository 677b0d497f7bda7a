"""Configuration of a run: typed models, strict YAML, overrides, and errors that name the fix."""

from titanrl.config.errors import ConfigError
from titanrl.config.load import Source, load_config, read_source, recorded_config
from titanrl.config.schema import Config

__all__ = ["Config", "ConfigError", "Source", "load_config", "read_source", "recorded_config"]
