"""Evaluate a model: `titanrl evaluate --model DIR --config FILE`.

Prompts, rewards, generators and the names and meaning of the results are the same as in a training run with this configuration.
vLLM runs its own implementation of the model.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from titanrl.base import terminal
from titanrl.base.files import why_no_file, why_no_folder
from titanrl.carriers.types import EvaluationResult
from titanrl.config import Config, ConfigError, Source
from titanrl.config.dry_run import print_table, table_console
from titanrl.config.errors import BrokenRule, refusing
from titanrl.config.load import read_policy_source, validate
from titanrl.config.sections import ConsoleMode
from titanrl.launch.preflight import preflight
from titanrl.metrics.console import Console
from titanrl.models.directory import read_model
from titanrl.run import command

Results = Mapping[str, EvaluationResult]
"""Results by evaluation set."""


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m titanrl.commands.evaluate") -> None:
    """Run the command, then exit the process."""
    terminal.prepare()
    arguments = parse(argv, prog=prog)
    with refusing():
        model, config, source = evaluated_model(arguments.model, arguments.config, arguments.overrides)
        names = chosen_sets(config, arguments.set)
        with terminal.announcing("checking the data, the model and the rewards"):
            selections = preflight(config, source, training=False)
        for text in (text for found in selections for text in found.messages()):
            print(f"note: {text}", file=sys.stderr)
    command.exit_process(run(model, config, names, as_json=arguments.json))


def parse(argv: Sequence[str] | None, *, prog: str) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog=prog, description="Evaluate a model on the evaluation sets of a configuration.")
    parser.add_argument(
        "--model",
        type=terminal.path,
        required=True,
        metavar="DIR",
        help="Hugging Face directory of a model, or directory of a finished run",
    )
    parser.add_argument(
        "--config",
        type=terminal.path,
        help="YAML file with the evaluation sets, or the name of a shipped configuration (default: the run's configuration)",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME", help="evaluation set; may be repeated (default: all sets)"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="values that override the file's")
    return parser.parse_intermixed_args(argv)


def evaluated_model(folder: Path, config_file: Path | None, overrides: Sequence[str]) -> tuple[Path, Config, Source]:
    """Return the directory of the model, and the configuration and source to evaluate it with.

    The folder is a Hugging Face directory, or a run directory: then its exported model is evaluated, by default with the run's
    configuration. Raise `ConfigError` if the model or the configuration is missing, or the configuration has no prompts.
    """
    is_run = not why_no_folder(folder / "checkpoints")
    model = folder / "checkpoints" / "final" if is_run else folder
    if is_run and why_no_file(model / "config.json"):
        raise ConfigError(f"--model: checkpoints/final has no exported model (got {folder}). Give a finished run.")
    if why_no_file(model / "config.json"):
        found = read_model(folder)
        assert isinstance(found, BrokenRule)
        raise ConfigError(str(replace(found, values={"--model": str(folder)})))
    if config_file is None and not is_run:
        raise ConfigError("--config: required, unless --model is a run directory. Give the file with the evaluation sets.")
    fixed = (f"model.path={json.dumps(str(model.absolute()))}", "warm_start=null")
    source = read_policy_source(config_file or folder / "config.yaml", [*overrides, *fixed])
    config = validate(source)
    if config.sft is not None:
        option = "--model" if config_file is None else "--config"
        raise ConfigError(
            f"{option}: a fine-tuning run has no prompts to evaluate (got {source.path}). "
            "Give a configuration of `titanrl train` with --config."
        )
    return model, config, source


def chosen_sets(config: Config, names: Sequence[str]) -> list[str]:
    """Return the names of the sets to evaluate, all if `names` is empty; raise `ConfigError` if there is none."""
    try:
        chosen = [config.evaluation_set(name).name for name in names or config.evaluation_sets]
        return chosen or [config.evaluation_set().name]
    except ValueError as error:
        raise ConfigError(f"--set: {error}") from None


def run(model: Path, config: Config, names: Sequence[str], *, as_json: bool) -> int:
    """Evaluate a model and print the results; return the exit code."""
    folder = Path(tempfile.mkdtemp(prefix="titanrl-evaluate-"))
    config = config.model_copy(update={"output_dir": folder})
    mode: ConsoleMode = "off" if as_json or config.logging.console == "off" else "plain"
    results, code = command.run_session(partial(evaluate_sets, config, names), title=config.name, folder=folder, mode=mode)
    if code or results is None:
        return code
    if as_json:
        print(json.dumps(as_dict(model, results), indent=2))
    else:
        columns = ("set", "completions", "metric", "value", "95 % interval")
        print_table(table_console(), f"Evaluation of {model}", columns, rows(results))
    return 0


async def evaluate_sets(config: Config, names: Sequence[str], console: Console) -> dict[str, EvaluationResult]:
    """Start generators with the configured model, and evaluate it on the named sets."""
    from titanrl.session.session import connect  # imports torch

    results = {}
    async with connect(config, training=False, console=console) as session:
        task = await session.task()
        for name in names:
            console.phase("evaluate", name)
            results[name] = await task.evaluate(session.sampling, name=name)
    for name, result in results.items():
        if result.num_errors:
            console.warn(f"evaluation {name}: {result.failures} (first error: {result.first_error})")
    return results


def as_dict(model: Path, results: Results) -> dict[str, Any]:
    """Return the results as the object that `--json` prints."""
    sets = {
        name: {
            **result.statistics,
            "num_prompts": result.num_prompts,
            "num_samples": result.num_samples,
            "num_completions": result.num_completions,
            "num_scored_prompts": result.num_prompts - result.num_unscored_prompts,
            "response_len_mean": result.response_len_mean,
            **{f"environment/{metric}_mean": value for metric, value in result.environment.items()},
            "num_truncated": result.num_truncated,
            "num_unjudged": result.num_unjudged,
            "num_errors": result.num_errors,
            "first_error": result.first_error,
        }
        for name, result in results.items()
    }
    return {"model": str(model), "sets": sets}


def rows(results: Results) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield the rows of the result table: set, completions, metric, value and 95 % interval."""
    for name, result in results.items():
        first = name, f"{result.num_prompts} x {result.num_samples}"
        for metric, value in result.statistics.items():
            if metric.endswith("_ci95"):
                continue
            half = result.statistics.get(f"{metric}_ci95")
            yield *first, metric, f"{value:.4f}", "" if half is None else f"{value - half:.4f} to {value + half:.4f}"
            first = "", ""
        yield *first, "response_len_mean", f"{result.response_len_mean:.1f}", ""
        for metric, value in result.environment.items():
            yield "", "", f"environment/{metric}_mean", f"{value:.4f}", ""
        for what, number in (("truncated", result.num_truncated), ("truncated and not judged", result.num_unjudged)):
            if number:
                yield "", "", what, str(number), ""
        if result.num_errors:
            yield "", "", "failed rewards", f"{result.num_errors} of {result.num_completions}", result.first_error
            scored = result.num_prompts - result.num_unscored_prompts
            yield "", "", "prompts in the mean", f"{scored} of {result.num_prompts}", ""


if __name__ == "__main__":
    main()
