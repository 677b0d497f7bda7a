"""Configuration of a run: typed models, strict YAML, overrides, and errors that name the fix."""

from titanrl.config.algorithm import AlgorithmConfig
from titanrl.config.data import DataConfig, EvaluationConfig, RewardConfig
from titanrl.config.dry_run import print_dry_run
from titanrl.config.errors import BrokenRule, ConfigError
from titanrl.config.load import dump_config, load_config, recorded_config, validate
from titanrl.config.schema import Config
from titanrl.config.sections import (
    CheckpointConfig,
    FaultsConfig,
    GeneratorConfig,
    HostsConfig,
    LoggingConfig,
    ModelConfig,
    ParallelismConfig,
    RecipeConfig,
    RolloutConfig,
    SandboxConfig,
    TimeoutsConfig,
    TrainerConfig,
    WarmStartConfig,
)
from titanrl.config.source import Source, read_source

__all__ = [
    "AlgorithmConfig",
    "BrokenRule",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "EvaluationConfig",
    "FaultsConfig",
    "GeneratorConfig",
    "HostsConfig",
    "LoggingConfig",
    "ModelConfig",
    "ParallelismConfig",
    "RecipeConfig",
    "RewardConfig",
    "RolloutConfig",
    "SandboxConfig",
    "Source",
    "TimeoutsConfig",
    "TrainerConfig",
    "WarmStartConfig",
    "dump_config",
    "load_config",
    "print_dry_run",
    "read_source",
    "recorded_config",
    "validate",
]
