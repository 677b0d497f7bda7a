"""Checks of a configuration against this machine, before a run starts anything and in `--dry-run`.

Nothing here imports torch or vLLM. The task, the data and the scorer are checked in child processes: code of the user or of a
task may crash or hang there, and the checks run in parallel with whatever the caller imports meanwhile.
"""

import ast
import difflib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from titanrl.config.choices import DeviceKind
from titanrl.config.dry_run import print_dry_run
from titanrl.config.errors import BrokenRule, BrokenRules, ConfigError
from titanrl.config.explain import explain_rule
from titanrl.config.schema import Config
from titanrl.config.shapes import ModelShape, checkpoint_shape, recipe_shape
from titanrl.config.sizes import cpu_bytes, derive, gigabytes, host_bytes, model_values
from titanrl.config.source import Source
from titanrl.data.recipe import model_config, write_tokenizer
from titanrl.data.streams import make_encoder, open_stream
from titanrl.data.tokenizer import load_tokenizer
from titanrl.device import missing_for, resolve_device
from titanrl.loading import import_object
from titanrl.models.hf_config import torchtitan_problems, vllm_problems
from titanrl.sandbox.confine import end_with_parent

PROCESSES_PER_CORE = 100
"""Limit of processes on one machine."""
CHECK_LIMIT_S = 60.0
"""Limit of importing the scorer, and of sampling from a task."""
HELDOUT_LIMIT_S = 2.0
"""Time after which the search for held-out prompts stops without an error."""
MAX_HEADER_BYTES = 100 << 20
"""Limit of the safetensors format."""

_CHILD = "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); from titanrl.preflight import _serve; _serve()"


def preflight(config: Config, source: Source | None = None, *, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Check that a run of this configuration can start on this machine. Nothing is started or written.

    Args:
        config: Configuration.
        source: Source of the configuration; with it messages name lines and overrides.
        meanwhile: Function to call while child processes check data and scorer.

    Raises:
        ConfigError: The run cannot start. The error lists all reasons.
    """
    children = [_Child(check, config, values, limit_s) for check, values, limit_s in _child_checks(config)]
    broken = list(broken_rules(config))
    if not broken:
        meanwhile()
    for child in children:
        broken += child.result()
    if broken:
        raise ConfigError(*(explain_rule(rule, source) for rule in broken))


def broken_rules(config: Config) -> Iterator[BrokenRule]:
    """Yield the rules that the configuration breaks on this machine, without those of task, data and scorer."""
    yield from _broken_by_device(config)
    yield from _broken_by_machine(config)
    yield from _broken_by_model(config)
    yield from _broken_by_engine_args(config)
    yield from _broken_by_packages(config)
    yield from _broken_by_folders(config)


def dry_run(config: Config, source: Source | None = None) -> None:
    """Print the report of `--dry-run`, then check the configuration.

    Raises:
        ConfigError: The run cannot start.
    """
    device = config.device if config.device != "auto" else resolve_device("auto").kind
    console = Console(width=None if sys.stdout.isatty() else 200)
    print_dry_run(config, console, source, device=device, device_bytes=_device_bytes(device))
    preflight(config, source)
    console.print("Ready to start. The dry run started and wrote nothing.", highlight=False)


# The machine


def _broken_by_device(config: Config) -> Iterator[BrokenRule]:
    missing = None if config.device == "auto" else missing_for(config.device)
    if missing is not None:
        rule = f"the device must be usable on this machine, but it is not: {missing}"
        yield BrokenRule(values={"device": config.device}, rule=rule, fix="set device to auto or cpu")
    if config.hosts.kind == "slurm" and shutil.which("sbatch") is None:
        rule = "slurm requires the command sbatch, which is not on PATH"
        yield BrokenRule(values={"hosts.kind": "slurm"}, rule=rule, fix="start the run on a Slurm login node")


def _broken_by_machine(config: Config) -> Iterator[BrokenRule]:
    if config.hosts.kind == "slurm":
        return
    sizes = derive(config)
    num_processes, limit = sum(sizes.processes.values()), PROCESSES_PER_CORE * (os.cpu_count() or 1)
    if num_processes > limit:
        keys = {
            "rollout.num_workers": config.rollout.num_workers,
            "sandbox.num_processes": config.sandbox.num_processes,
            "generator.replicas": config.generator.replicas,
        }
        rule = f"a run must not start more than {limit:,} processes on this machine, {PROCESSES_PER_CORE} per CPU core, "
        yield BrokenRule(values=keys, rule=f"{rule}and these values start {num_processes:,}", fix="lower the largest of them")
    if sizes.memory is not None and _device_kind(config) == "cpu":
        needed, available = cpu_bytes(config, sizes.memory, sizes.memory.trainer.state), host_bytes()
        if needed > available:
            rule = f"weights, gradients, optimizer state and KV cache need {gigabytes(needed)} without activations, "
            yield BrokenRule(
                values={**model_values(config), "generator.kv_cache_bytes": config.generator.kv_cache_bytes},
                rule=f"{rule}and this machine has {gigabytes(available)}",
                fix="use a smaller model, fewer replicas, or less KV cache",
            )


def _device_kind(config: Config) -> DeviceKind:
    return resolve_device("auto").kind if config.device == "auto" else config.device


def _device_bytes(device: DeviceKind) -> int | None:
    """Return the memory of the smallest CUDA device of this machine; None if unknown."""
    if device != "cuda" or shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    mebibytes = [int(line) for line in found.stdout.split() if line.isdigit()]
    return min(mebibytes) << 20 if mebibytes else None


def _broken_by_folders(config: Config) -> Iterator[BrokenRule]:
    folders = {"output_dir": config.output_dir}
    if config.model.path is None or config.warm_start is not None:
        folders["cache_dir"] = config.cache_dir
    for key, folder in folders.items():
        existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            rule = f"must be a writable directory, but {existing} is not"
            yield BrokenRule(values={key: str(folder)}, rule=rule, fix=f"correct {key}")


def _broken_by_packages(config: Config) -> Iterator[BrokenRule]:
    # Distributions, not modules: a run directory named `wandb` would look like the module.
    if config.trainer.float8 is not None and not any(importlib.metadata.distributions(name="torchao")):
        yield BrokenRule(
            values={"trainer.float8": config.trainer.float8},
            rule="the package torchao must be installed",
            fix="pip install torchao, or set trainer.float8 to null",
        )
    for logger in config.logging.loggers:
        if not any(importlib.metadata.distributions(name=logger)):
            yield BrokenRule(
                values={"logging.loggers": list(config.logging.loggers)},
                rule=f"the package {logger} must be installed",
                fix=f"pip install {logger}, or remove it from logging.loggers",
            )


def _broken_by_engine_args(config: Config) -> Iterator[BrokenRule]:
    """Yield options of `generator.vllm` that do not exist, from the source of vLLM: importing it takes many seconds."""
    spec = importlib.util.find_spec("vllm") if config.generator.vllm else None
    if spec is None or spec.origin is None:
        return
    tree = ast.parse((Path(spec.origin).parent / "engine" / "arg_utils.py").read_text(encoding="utf-8"))
    options = {
        field.target.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
    for key in config.generator.vllm.keys() - options:
        near = difflib.get_close_matches(key, options, n=1)
        fix = f"did you mean {near[0]}?" if near else "remove it; vllm.EngineArgs documents the options"
        yield BrokenRule(values={f"generator.vllm.{key}": config.generator.vllm[key]}, rule="no such vLLM option", fix=fix)


# The model


def _broken_by_model(config: Config) -> Iterator[BrokenRule]:
    path = config.model.path
    if path is None:
        yield from _broken_by_vocabulary(config, recipe_shape(config.model.recipe))
        yield from _broken_by_vllm(config, model_config(config.model.recipe))
        return
    shape = checkpoint_shape(path)
    if isinstance(shape, BrokenRule):
        yield shape
        return
    hf_config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    for problem in torchtitan_problems(hf_config):
        yield _rule_of(problem, {"model.path": str(path)}, prefix="config.json: ")
    shape_rules = [*_broken_by_shape(config, shape), *_broken_by_vocabulary(config, shape)]
    yield from shape_rules or _broken_by_vllm(config, hf_config)
    yield from _broken_by_weights(path)
    if not any(path.glob("tokenizer*")):
        yield BrokenRule(
            values={"model.path": str(path)}, rule="must contain the tokenizer (tokenizer*)", fix="complete the download"
        )


def _broken_by_vllm(config: Config, hf_config: Mapping[str, Any]) -> Iterator[BrokenRule]:
    generator = config.generator
    problems = vllm_problems(
        hf_config,
        device=_device_kind(config),
        dtype=generator.dtype,
        tp=generator.tp,
        kv_cache_bytes=generator.kv_cache_bytes,
        max_len=config.max_sequence_tokens,
    )
    for problem in problems:
        is_key = problem.startswith("generator.kv_cache_bytes:")
        values = {"generator.kv_cache_bytes": generator.kv_cache_bytes} if is_key else model_values(config)
        yield _rule_of(problem, values, prefix="" if is_key else "config.json: ")


def _broken_by_vocabulary(config: Config, shape: ModelShape) -> Iterator[BrokenRule]:
    tp = config.generator.tp
    if config.generator.model_impl == "titan" and shape.vocab_size % tp:
        yield BrokenRule(
            values={"generator.tp": tp, "generator.model_impl": "titan"},
            rule=f"tp must divide the model's vocabulary of {shape.vocab_size} tokens, which only vLLM's own model pads",
            fix="set generator.model_impl to native, or generator.tp to a divisor",
        )


def _broken_by_shape(config: Config, shape: ModelShape) -> Iterator[BrokenRule]:
    path, tp = str(config.model.path), config.trainer.parallelism.tp
    if shape.num_heads % shape.num_kv_heads:
        yield BrokenRule(
            values={"model.path": path},
            rule=f"the {shape.num_kv_heads} key-value heads of config.json must divide its {shape.num_heads} query heads",
            fix="use another checkpoint",
        )
    for key, degree in config.tensor_parallel_degrees.items():
        if shape.num_heads % degree or shape.num_kv_heads % degree:
            yield BrokenRule(
                values={key: degree, "model.path": path},
                rule=f"tp must divide the model's {shape.num_heads} query heads and {shape.num_kv_heads} key-value heads",
                fix=f"set {key} to 1, or to a common divisor of both",
            )
        if shape.intermediate_size % degree:
            yield BrokenRule(
                values={key: degree, "model.path": path},
                rule=f"tp must divide the model's intermediate size {shape.intermediate_size}",
                fix=f"set {key} to a divisor of it",
            )
    if config.trainer.float8 is not None and (shape.hidden_size % 16 or shape.intermediate_size // tp % 16):
        yield BrokenRule(
            values={"trainer.float8": config.trainer.float8, "trainer.parallelism.tp": tp, "model.path": path},
            rule="float8 requires projections whose dimensions on each tensor-parallel rank are multiples of 16",
            fix="set trainer.float8 to null, or lower trainer.parallelism.tp",
        )
    lengths = {
        "trainer.row_tokens": config.trainer.row_tokens,
        "rollout.max_new_tokens": config.max_sequence_tokens,  # with the longest prompt
    }
    for key, length in lengths.items():
        if length > shape.max_positions:
            what = "a row" if key == "trainer.row_tokens" else f"a prompt plus completion of {length} tokens"
            yield BrokenRule(
                values={key: length if key == "trainer.row_tokens" else config.rollout.max_new_tokens, "model.path": path},
                rule=f"{what} must not be longer than the model's {shape.max_positions} positions",
                fix=f"lower {key}",
            )
            return


def _broken_by_weights(path: Path) -> Iterator[BrokenRule]:
    """Yield the rules that missing or truncated weight files break; reads only their headers."""
    values, fix = {"model.path": str(path)}, "complete the download"
    files = {file.name for file in path.glob("*.safetensors")}
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            files |= set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, LookupError, AttributeError, TypeError):
            yield BrokenRule(values=values, rule=f"{index.name} must be an index of weight files", fix=fix)
    if not files:
        yield BrokenRule(values=values, rule="must contain the weights (*.safetensors)", fix=fix)
    for name in sorted(files):
        if not _is_whole(path / name):
            yield BrokenRule(values=values, rule=f"{name} must be a complete safetensors file", fix=fix)


def _is_whole(file: Path) -> bool:
    """Return True if a safetensors file exists and has the size that its header announces."""
    try:
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(min(header_bytes, MAX_HEADER_BYTES)))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return False
    return file.stat().st_size == 8 + header_bytes + max(ends, default=0)


# Task, data and scorer, in child processes


def _child_checks(config: Config) -> Iterator[tuple[Callable[[Config], None], dict[str, object], float]]:
    data = config.data
    if data.source == "jsonl":
        yield check_data, {"data.path": str(data.path)}, config.timeouts.start_s
    else:
        yield check_data, {"data.task": data.task, "data.task_config": data.task_config}, CHECK_LIMIT_S
    if data.scorer is not None:
        yield check_scorer, {"data.scorer": data.scorer}, CHECK_LIMIT_S


def check_data(config: Config) -> None:
    """Read the file or sample from the task, and split and tokenize the prompts as a rollout worker does.

    Raises:
        ValueError: The data cannot be used.
    """
    path = config.model.path
    with tempfile.TemporaryDirectory() as scratch:
        if path is None:
            write_tokenizer(Path(scratch))
        tokenizer = None
        if path is None or not any(_broken_by_model(config)):
            try:
                tokenizer = load_tokenizer(path or Path(scratch))
            except Exception as error:  # the tokenizers library raises bare Exceptions
                raise BrokenRules(_rule_of(str(error), model_values(config))) from error
    encode: Callable[[str], list[int]] = lambda question: []  # noqa: E731
    if tokenizer is not None:
        encoder = make_encoder(config.data, tokenizer)
        # Rendering a chat imports transformers, which takes seconds; such prompts are checked without their length.
        encode = encoder if encoder == tokenizer.encode else encode
    stream = open_stream(config.data, encode, config.seed)
    stream.heldout(config.evaluation.num_prompts, limit_s=HELDOUT_LIMIT_S)


def check_scorer(config: Config) -> None:
    """Import the scorer, and check that it accepts its arguments.

    Raises:
        ValueError: The scorer cannot be used.
    """
    path = config.data.scorer
    assert path is not None
    scorer = import_object(path, key="data.scorer")
    if not callable(scorer):
        raise ValueError(f"data.scorer: {path} is not callable (got {type(scorer).__name__}). Name a function.")
    try:
        signature = inspect.signature(scorer)
    except (TypeError, ValueError):
        return  # builtins may have no signature
    try:
        signature.bind("completion", {})
    except TypeError as error:
        expected = "def scorer(completion_text: str, entry: Mapping[str, Any]) -> float"
        raise ValueError(f"data.scorer: the signature does not fit: {error} (got {path}). Write it as `{expected}`.") from error


def _serve() -> None:
    """Run one check in a child process: read it from stdin, and write the broken rules to stdout."""
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # imported modules may print
    parent_pid, check, config, values = pickle.load(sys.stdin.buffer)
    end_with_parent(parent_pid)
    broken: tuple[BrokenRule, ...] = ()
    try:
        check(config)
    except BrokenRules as error:
        broken = error.broken
    except Exception as error:  # raised by a task or a file in a way that no rule covers
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        broken = (_rule_of(text, values),)
    with results:
        pickle.dump(broken, results)
    os._exit(0)  # threads of imported modules must not delay the end


class _Child:
    """A check that runs in a child process."""

    def __init__(self, check: Callable[[Config], None], config: Config, values: Mapping[str, object], limit_s: float) -> None:
        self._values, self._limit_s = values, limit_s
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `result`
        with tempfile.TemporaryFile() as order:
            order.write(pickle.dumps(sys.path) + pickle.dumps((os.getpid(), check, config, values)))
            order.seek(0)
            command = [sys.executable, "-c", _CHILD]
            self._process = subprocess.Popen(command, stdin=order, stdout=subprocess.PIPE, stderr=self._errors)

    def result(self) -> tuple[BrokenRule, ...]:
        """Wait for the check; return the rules that are broken."""
        try:
            output, _ = self._process.communicate(timeout=self._limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return (self._failed(f"loading it must not take longer than {self._limit_s:g} s"),)
        finally:
            self._errors.seek(0)
            last_lines = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
            self._errors.close()
        if self._process.returncode == 0 and output:
            broken: tuple[BrokenRule, ...] = pickle.loads(output)
            return broken
        code = self._process.returncode
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return (self._failed(f"loading it must not end the Python process ({', '.join([how, *last_lines])})"),)

    def _failed(self, rule: str) -> BrokenRule:
        return BrokenRule(values=self._values, rule=rule, fix="correct the module, the task or its options")


def _rule_of(text: str, values: Mapping[str, object], *, prefix: str = "") -> BrokenRule:
    """Convert a message `key: problem (got value). Fix.` to a rule; other messages become the rule as a whole."""
    key_first = re.fullmatch(r"(?P<rule>.+) \((?P<got>got .+)\)\. (?P<fix>.+?)\.?", text, re.DOTALL)
    if key_first is None:
        return BrokenRule(values=values, rule=prefix + text, fix="correct it")
    rule = key_first["rule"]
    for key in values:
        rule = rule.removeprefix(f"{key}: ")
    got = "" if key_first["got"].removeprefix("got ").strip("'") in map(str, values.values()) else f" ({key_first['got']})"
    fix = key_first["fix"]
    return BrokenRule(values=values, rule=f"{prefix}{rule}{got}", fix=fix[0].lower() + fix[1:])
