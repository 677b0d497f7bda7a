"""What only matters when a run really starts: the files and packages that a configuration names."""

import importlib.metadata
from collections.abc import Iterator

from titanrl.config.errors import BrokenRule
from titanrl.config.explain import explain_rule
from titanrl.config.schema import Config
from titanrl.config.shapes import ModelShape, checkpoint_shape, recipe_shape
from titanrl.config.source import Source


def check_files(config: Config, source: Source | None = None) -> list[str]:
    """What is still missing on this machine for the run to start, one text each; empty if nothing is.

    Args:
        source: what `config` was made from; with it the texts name lines and overrides.
    """
    rules = (*_broken_by_model(config), *_broken_by_data(config), *_broken_by_packages(config))
    return [explain_rule(broken, source) for broken in rules]


def _broken_by_model(config: Config) -> Iterator[BrokenRule]:
    path = config.model.path
    if path is None:
        yield from _broken_by_vocabulary(config, recipe_shape(config.model.recipe))
        return
    shape = checkpoint_shape(path)
    if isinstance(shape, BrokenRule):
        yield shape
        return
    yield from _broken_by_shape(config, shape)
    yield from _broken_by_vocabulary(config, shape)
    for pattern, what in (("*.safetensors", "weights"), ("tokenizer*", "tokenizer")):
        if not any(path.glob(pattern)):
            rule = f"must hold the {what} ({pattern})"
            yield BrokenRule(values={"model.path": str(path)}, rule=rule, fix="complete the download")


def _broken_by_vocabulary(config: Config, shape: ModelShape) -> Iterator[BrokenRule]:
    tp = config.generator.tp
    if config.generator.model_impl == "titan" and shape.vocab_size % tp:
        yield BrokenRule(
            values={"generator.tp": tp, "generator.model_impl": "titan"},
            rule=f"tp must divide the model's vocabulary of {shape.vocab_size} tokens, which only vLLM's own model fills up",
            fix="set generator.model_impl to native, or generator.tp to a divisor",
        )


def _broken_by_shape(config: Config, shape: ModelShape) -> Iterator[BrokenRule]:
    path, tp, row_tokens = str(config.model.path), config.trainer.parallelism.tp, config.trainer.row_tokens
    for key, degree in config.tensor_parallel_degrees.items():
        if shape.num_heads % degree or shape.num_kv_heads % degree:
            yield BrokenRule(
                values={key: degree, "model.path": path},
                rule=f"tp must divide the model's {shape.num_heads} query heads and {shape.num_kv_heads} key and value heads",
                fix=f"set {key} to 1, or to a common divisor of both",
            )
        if shape.intermediate_size % degree:
            yield BrokenRule(
                values={key: degree, "model.path": path},
                rule=f"tp must divide the model's intermediate size {shape.intermediate_size}",
                fix=f"set {key} to a power of two that does",
            )
    if config.trainer.float8 is not None and (shape.hidden_size % 16 or shape.intermediate_size // tp % 16):
        yield BrokenRule(
            values={"trainer.float8": config.trainer.float8, "trainer.parallelism.tp": tp, "model.path": path},
            rule="float8 needs projections whose sides, on each tensor-parallel rank, are multiples of 16",
            fix="set trainer.float8 to null, or lower trainer.parallelism.tp",
        )
    if row_tokens > shape.max_positions:
        yield BrokenRule(
            values={"trainer.row_tokens": row_tokens, "model.path": path},
            rule=f"a row must not be longer than the model's {shape.max_positions} positions",
            fix=f"set trainer.row_tokens to at most {shape.max_positions}",
        )


def _broken_by_data(config: Config) -> Iterator[BrokenRule]:
    path = config.data.path
    if path is not None and not path.is_file():
        rule = "must be a file of one JSON object a line, but there is none"
        yield BrokenRule(
            values={"data.path": str(path)}, rule=rule, fix="correct the path; it is relative to the current directory"
        )


def _broken_by_packages(config: Config) -> Iterator[BrokenRule]:
    if config.trainer.float8 is not None and not any(importlib.metadata.distributions(name="torchao")):
        yield BrokenRule(
            values={"trainer.float8": config.trainer.float8},
            rule="the package torchao must be installed",
            fix="pip install torchao, or set trainer.float8 to null",
        )
    for logger in config.logging.loggers:
        # Not by looking for a module: the folder `wandb` that the tracker writes to would pass for the package.
        if not any(importlib.metadata.distributions(name=logger)):
            rule = f"the package {logger} must be installed"
            yield BrokenRule(
                values={"logging.loggers": list(config.logging.loggers)},
                rule=rule,
                fix=f"pip install {logger}, or remove it here",
            )
