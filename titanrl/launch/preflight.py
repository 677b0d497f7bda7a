"""Preflight checks of a configuration against this machine, made before a run starts and in `--dry-run`.

Data and user-defined objects are checked in child processes, each with a deadline, because code of a user or a task may crash
or hang. These checks also run in parallel with the caller's other work. User-defined rewards are called once, with sample
completions: in the sandbox, or a trusted one in the child process. A return value that can never be a reward is an error. An
exception is only a warning, because the policy's completions are different.

This module, which the child processes import, does not import torch or vLLM.
"""

import ast
import asyncio
import datetime
import importlib.util
import os
import pickle
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from titanrl.base import terminal
from titanrl.base.files import why_not_writable
from titanrl.base.ownership import bind
from titanrl.base.plugins import Plugin, Plugins, plugins_of_data, plugins_within
from titanrl.carriers import dumps
from titanrl.carriers.rewards import DENIED, INVALID, Answers, BoundReward, Score, custom_reward
from titanrl.config import device as devices
from titanrl.config.data import ENVIRONMENTS, DataConfig, EvaluationSet, JudgeOptions, OverlongOptions, Split, data_file
from titanrl.config.device import device_kind, missing_for, query_gpus
from titanrl.config.errors import BrokenRule, BrokenRules, ConfigError, inline, rule_of, within
from titanrl.config.load import Source, did_you_mean, explain_rule
from titanrl.config.schema import Config, broken_by_positions
from titanrl.config.sections import SMALLEST_PACKAGES, TRACKERS, GeneratorConfig, ModelConfig, TeacherConfig
from titanrl.config.sizes import ModelShape, cpu_bytes, derive, gigabytes, host_bytes, model_values
from titanrl.data import examples
from titanrl.data.entries import FORMATS, BadRow, Selection, data_digest, hinted_entry
from titanrl.data.streams import Encode, PromptStream, make_encoder, make_gym_dataset, open_prompts, open_stream
from titanrl.data.tokenizer import TEMPLATE_DATE, Tokenizer, load_tokenizer, write_tokenizer, writes_date
from titanrl.environments.factories import load_factory
from titanrl.environments.programs import checked_function
from titanrl.hosts.kinds import broken_by_hosts
from titanrl.launch.extensions import config_of, plugins_of, point_of
from titanrl.models.directory import ModelDirectory, broken_by_adapter, model_shape, open_model, read_model, recipe_model
from titanrl.models.family import PACKED_MULTIPLE, vllm_problems
from titanrl.processes.children import RespawnLimitError
from titanrl.processes.confine import SandboxUnavailable, end_with_parent, missing_for_programs
from titanrl.processes.sandbox import SandboxDied
from titanrl.processes.temporary import TemporaryFolder, delete_all
from titanrl.processes.variables import broken_by_cores, broken_by_templates, secure_caches
from titanrl.rollout.renderers import make_renderer
from titanrl.rollout.scoring import ScoringPool, TrustedReward, in_thread, reward_plugin, reward_specs, weighted

OTEL = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")
"""Packages of `logging.otlp_endpoint`."""
WITHOUT_BIAS = "set trainer.expert_bias_rate to 0"
PROCESSES_PER_CORE = 100
"""Limit of processes per CPU core on one machine."""
PROCESS_BYTES = dict.fromkeys(("controller", "trainer", "generator", "teacher", "evaluator"), 200 << 20) | {
    "rollout": 100 << 20
}
"""Lower bound of a process's base memory by role, in bytes. Measured on CPU: 250 MB, and 170 MB for a rollout worker."""
SCALARS: Mapping[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "None": (type(None),),
}
"""Types of vLLM options that are checked, with the Python types of valid YAML values."""


def preflight(
    config: Config,
    source: Source | None = None,
    *,
    plugins: Plugins | None = None,
    training: bool = True,
    sampling: bool = True,
    rollouts: bool = True,
    run_dir: Path | None = None,
    meanwhile: Callable[[], object] = lambda: None,
) -> tuple[Selection, ...]:
    """Check that a run of this configuration can start on this machine, without starting or writing anything.

    Warnings are printed to stderr. With the source, messages name lines and overrides. The requirements of a trainer
    (`training`), of generators (`sampling`) and of prompts (`rollouts`) can be left out. A resumed run continues in `run_dir`.
    `meanwhile` is called while child processes check data and user-defined objects, which by default are those named in the
    configuration. Return the rows of the prompts by use. Raise `ConfigError` if the run cannot start. The error lists all
    reasons.
    """
    secure_caches()  # before packages are imported, also by the children
    plugins = plugins_of(config, {}) if plugins is None else plugins
    has_tokenizer = config.model.path is None or not any(_broken_by_model(config, sampling=sampling))
    children = start_checks(config, plugins, with_data=rollouts, has_tokenizer=has_tokenizer)
    broken = list(broken_rules(config, training=training, sampling=sampling, run_dir=run_dir))
    if not broken:
        meanwhile()
    for child in children:
        broken += child.result()
    if broken:
        raise ConfigError(*(explain_rule(rule, source) for rule in broken))
    for text in (text for child in children for text in child.warnings):
        print(f"warning: {text}", file=sys.stderr)
    return tuple(selection for child in children for selection in child.selections)


def broken_rules(
    config: Config, *, training: bool = True, sampling: bool = True, run_dir: Path | None = None
) -> Iterator[BrokenRule]:
    """Yield the rules that the configuration breaks on this machine, except rules on data and user-defined objects.

    Without `training` or `sampling`, rules that concern only a trainer or only generators are skipped. A resumed run
    continues in `run_dir`.
    """
    is_remote = config.hosts.across_machines  # the controller then needs no device
    if config.device != "auto" and not is_remote and (missing := missing_for(config.device)) is not None:
        rule = f"the device must be usable on this machine, but it is not: {missing}"
        yield config.broken("device", rule, "set device to auto or cpu")
    is_built = config.trainer.compile and device_kind(config.device) == "cpu" and not is_remote  # C++ code, on this machine
    compiler, header = os.environ.get("CXX", "g++"), Path(sysconfig.get_path("include"), "Python.h")
    needed = {f"the compiler {compiler}": shutil.which(compiler) is not None, f"the header {header}": header.is_file()}
    for name in (name for name, is_installed in needed.items() if training and is_built and not is_installed):
        rule = f"torch.compile builds C++ code for a CPU, but {name} is not installed"
        yield config.broken("trainer.compile", rule, "install it, or set trainer.compile to false")
    yield from broken_by_hosts(config)
    yield from broken_by_cores(config)
    yield from _broken_by_machine(config)
    yield from _broken_by_model(config, sampling=sampling)
    for key, teacher in {} if config.distill is None else config.distill.by_key.items():
        if teacher.path is not None:
            yield from _broken_by_teacher(config, key, teacher, teacher.path)
        elif teacher.url is not None:
            yield from _broken_by_endpoint(config, key, teacher)
    yield from broken_by_templates()
    if sampling:
        yield from _broken_by_engine_args("generator", config.generator.vllm)
    yield from broken_by_packages(config, device_kind(config.device), training=training, sampling=sampling)
    yield from _broken_by_rewards(config)
    has_turns = any(task.environment is not None for task in config.data.tasks.values())
    if training and config.algorithm.credit == "state" and not has_turns:  # it may be passed from Python
        rule = "without an environment, there are no turns whose states and rewards could be compared"
        yield config.broken("algorithm.credit data.environment", rule, "remove algorithm.credit, or set data.environment")
    if training and config.trainer.lora is not None:
        yield from broken_by_adapter(config.trainer.lora)
    host, port = config.logging.metrics_host, config.logging.metrics_port
    if training and port is not None and config.hosts.kind == "local":  # `titanrl submit` checks on another machine
        try:
            bind((host, port)).close()
        except OSError as error:
            rule = f"this machine must be able to listen at it, but {error.strerror}"
            yield config.broken("logging.metrics_port logging.metrics_host", rule, "choose a free port, or null")
    yield from dumps.broken_rules(config.rollout)
    yield from _broken_by_replay(config)
    folders = {"output_dir": run_dir or config.output_dir}
    if config.model.path is None or config.warm_start is not None:
        folders["cache_dir"] = config.cache_dir
    for key, folder in folders.items():
        if why := why_not_writable(folder):
            rule = f"must be a writable directory, but {why}"
            yield BrokenRule({key: str(folder)}, rule, f"correct {key}, or the permissions of the directory")
        else:
            yield from _broken_by_space(config, key, folder)


def read_examples(config: Config, source: Source | None = None) -> examples.Examples:
    """Read the examples of a run that trains on examples; raise `ConfigError` if it cannot use them."""
    try:
        tokenizer = policy_tokenizer(config)
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise ConfigError(explain_rule(rule_of(str(error), model_values(config)), source)) from error
    try:
        return examples.read_examples(config, tokenizer)
    except BrokenRules as error:
        raise ConfigError(*(explain_rule(rule, source) for rule in error.broken)) from None


Checked = tuple[str, Sequence[Selection], Mapping[str, str]]
"""A remark, the rows of the data by use, and numbers of the examples by label."""


def dry_run(config: Config, source: Source | None, check: Callable[[], Checked]) -> None:
    """Print the report of `--dry-run`, then call `check` for what the start of the run checks."""
    from titanrl.config.dry_run import print_dry_run, print_table, table_console  # rich, which child processes do not need

    device = device_kind(config.device)
    console = table_console()
    sizes = [line.removesuffix(" MiB") for line in (query_gpus("memory.total") if device == "cuda" else [])]
    device_bytes = min((int(size) << 20 for size in sizes if size.isdigit()), default=None)  # of the smallest device
    print_dry_run(config, console, source, shape=model_shape(config), device=device, device_bytes=device_bytes)
    with terminal.announcing("checking the model, the data and the rewards"):
        remark, selections, numbers = check()
    if numbers:
        print_table(console, "Examples", ("number", "value"), numbers.items())
    columns = ("data", "rows", "to train on", "held out", "left out")
    if selections:
        print_table(console, "Rows", columns, (found.row() for found in selections))
    for found in selections:
        kind = "warning: more than half of the rows are left out" if found.is_mostly_left_out else "note"
        lines = found.messages() if found.is_mostly_left_out else [f"{found.key}: {text}" for text in found.notes]
        for text in lines:
            console.print(f"{kind}: {text}", markup=False, highlight=False, soft_wrap=True)
    teachers = () if config.distill is None else config.distill.by_key.values()
    teacher_notes = [note for teacher in teachers if teacher.path is not None for note in open_model(teacher.path).notes()]
    for note in (*policy_notes(config), *teacher_notes):
        console.print(f"note: {note}", markup=False, highlight=False)
    ready = f"Ready to start{f', {remark}' if remark else ''}. The dry run started and wrote nothing."
    console.print(ready, markup=False, highlight=False, soft_wrap=True)


def broken_by_saved_model(config: Config, recorded: Mapping[str, Any], step: int) -> Iterator[BrokenRule]:
    """Yield a broken rule if a checkpoint's model has other sizes. A model that moved, or has other weights, is accepted.

    `recorded` are the values with which the checkpoint of `step` was saved.
    """
    try:
        model = ModelConfig.model_validate(recorded.get("model"), strict=False)
        saved, now = model_shape(config.model_copy(update={"model": model})), model_shape(config)
    except (BrokenRules, ValidationError, OSError):  # another check names what is wrong with the model of today
        return
    if saved is None or now is None:
        return
    sizes = {**asdict(now), "max_positions": saved.max_positions}  # which no weight depends on
    differing = [f"{name} {inline(value)}" for name, value in asdict(saved).items() if value != sizes[name]]
    if not differing:
        return
    key = "model.recipe" if config.model.path is None else "model.path"
    rule = f"the checkpoint of step {step} was saved with a model of other sizes ({', '.join(differing)})"
    where = "" if model.path is None else f", such as {model.path}"
    yield config.broken(key, rule, f"name a model of these sizes{where}, or start a new run")


# Machine


def _broken_by_machine(config: Config) -> Iterator[BrokenRule]:
    if config.hosts.across_machines:
        return
    sizes = derive(config, model_shape(config))
    num_processes, limit = sum(sizes.processes.values()), PROCESSES_PER_CORE * (os.cpu_count() or 1)
    has_generators = config.num_generator_ranks > 0
    if num_processes > limit:
        rule = f"a run must not start more than {limit:,} processes on this machine, {PROCESSES_PER_CORE} per CPU core, "
        rule += f"but these values start {num_processes:,}"
        keys = "rollout.num_workers sandbox.num_processes generator.replicas"
        yield config.broken(keys, rule, "lower the largest of them")
        return
    at_least = sum(number * PROCESS_BYTES.get(role, 0) for role, number in sizes.processes.items())
    if at_least > host_bytes():
        least, most = gigabytes(at_least), gigabytes(host_bytes())
        rule = f"the processes of a run need {least} before they load a model, but this machine has {most}"
        yield config.broken("generator.replicas rollout.num_workers", rule, "lower the larger of them")
        return
    if sizes.memory is not None and device_kind(config.device) == "cpu":
        needed, available = cpu_bytes(config, sizes.memory, sizes.memory.trainer.state), host_bytes()
        if needed > available:
            what, keys, fix = "gradients and optimizer state", "model.path", "use a smaller model"
            if has_generators:
                what, keys = "gradients, optimizer state and KV cache", f"{keys} generator.kv_cache_bytes"
                fix += ", fewer replicas, or less KV cache"
            rule = f"weights, {what} need {gigabytes(needed)} without activations, but this machine has {gigabytes(available)}"
            yield config.broken(keys, rule, fix)


def broken_by_packages(config: Config, device: str, *, training: bool = True, sampling: bool = True) -> Iterator[BrokenRule]:
    """Yield the rules that missing or mismatched packages break for a run on this device type."""
    if wrong := devices.problems(device, sampling=sampling and config.num_generator_ranks > 0):
        rule = f"a run on {device} requires the tested package versions, but {', '.join(wrong)}"
        yield config.broken("device", rule, f"titanrl doctor {device} --install")
    if training and config.trainer.float8 is not None and devices.installed_version("torchao") is None:
        fix = "pip install torchao, or set trainer.float8 to null"
        yield config.broken("trainer.float8", "the package torchao must be installed", fix)
    # Look for distributions, because a run directory named `wandb` would look like the module.
    for logger in config.logging.loggers:
        if logger in TRACKERS and devices.installed_version(SMALLEST_PACKAGES.get(logger, logger)) is None:
            fix = f"pip install {logger}, or remove it from logging.loggers"
            yield config.broken("logging.loggers", f"the package {logger} must be installed", fix)
    for package in OTEL if training and config.logging.otlp_endpoint is not None else ():
        if devices.installed_version(package) is None:
            fix = "pip install 'titanrl[otel]', or set logging.otlp_endpoint to null"
            yield config.broken("logging.otlp_endpoint", f"the package {package} must be installed", fix)


def _broken_by_space(config: Config, key: str, folder: Path) -> Iterator[BrokenRule]:
    """Yield a rule if the smallest output of a training run does not fit the disk.

    It is a checkpoint and the exported model in `output_dir`, and the starting models that `cache_dir` certainly lacks.
    """
    memory = derive(config, model_shape(config)).memory
    if memory is None or not config.train:
        return
    num_copies = config.trainer.parallelism.world_size // config.trainer.parallelism.dp_replicate
    state, model = memory.trainer.state - memory.trainer.gradients, memory.trainer.parameters
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    what, size, place = "one checkpoint and the exported model need", state + model, f"set {key} to"
    if key == "cache_dir":
        made = {"initial-*": config.model.path is None, "base-*": config.warm_start is not None}
        num_models = sum(is_made and not any(folder.glob(names)) for names, is_made in made.items())
        what, size = "the starting models need", model * num_models
    elif folder != config.output_dir:
        place = "copy the directory of the run to"
    needed, free = size * num_copies, shutil.disk_usage(existing).free
    if needed > free:
        rule = f"{what} {gigabytes(needed)}, but {existing} has {gigabytes(free)} free"
        yield config.broken(f"{key} model.path", rule, f"free space, or {place} a larger disk")


def _broken_by_replay(config: Config) -> Iterator[BrokenRule]:
    """Yield a rule if the dump to replay was written with another tokenizer, whose ids would be other texts."""
    replay = config.rollout.replay
    if replay is None or not dumps.holds_dump(replay):
        return
    try:
        info, vocabulary = dumps.read_info(replay), policy_tokenizer(config).vocabulary
    except Exception:  # the rules of the dump and of the model name the cause
        return
    if info.tokenizer != dumps.fingerprint(vocabulary):
        rule = f"the dump was written with another tokenizer, of {info.vocabulary} tokens; the model has {len(vocabulary)}"
        yield config.broken("rollout.replay model.path", rule, "set model to the dump's model")


def _broken_by_engine_args(section: str, given: Mapping[str, Any]) -> Iterator[BrokenRule]:
    """Check the key `vllm` of a section against the options in vLLM's source code, because importing vLLM takes long."""
    spec = importlib.util.find_spec("vllm") if given else None
    if spec is None or spec.origin is None:
        return
    tree = ast.parse((Path(spec.origin).parent / "engine" / "arg_utils.py").read_text(encoding="utf-8"))
    options = {
        field.target.id: ast.unparse(field.annotation)
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
    for key, value in given.items():
        if key in options:
            kinds = set(options[key].split(" | "))
            matching = {kind for kind, types in SCALARS.items() if type(value) in types}  # a boolean is not a number
            if kinds <= SCALARS.keys() and not kinds & matching:
                yield BrokenRule(
                    {f"{section}.vllm.{key}": value},
                    f"vLLM expects {options[key]}",
                    "correct the value; vllm.EngineArgs documents the options",
                )
            continue
        fix = did_you_mean(key, options) or "remove it; vllm.EngineArgs documents the options"
        yield BrokenRule({f"{section}.vllm.{key}": value}, "no such vLLM option", fix)


def _broken_by_rewards(config: Config) -> Iterator[BrokenRule]:
    rewards = {
        f"{data.key(task)}.rewards.{name}": (reward, data.rollout(config.rollout).max_new_tokens)
        for task, data in config.data.tasks.items()
        for name, reward in data.rewards.items()
    }
    for eval_set in config.evaluation_sets.values():
        if eval_set.has_own_data:
            named = eval_set.data.rewards.items()
            rewards |= {f"{eval_set.key}.data.rewards.{name}": (reward, eval_set.max_new_tokens) for name, reward in named}
    for key, (reward, max_new_tokens) in rewards.items():
        if reward.function == "math_verify" and devices.installed_version("math-verify") is None:
            yield BrokenRule(
                {f"{key}.function": reward.function},
                "the package math-verify must be installed",
                'pip install "titanrl[math]"',
            )
        elif reward.function == "judge":
            variable = JudgeOptions.model_validate(reward.options).key_variable
            if variable is not None and not os.environ.get(variable):
                yield BrokenRule(
                    {f"{key}.options.key_variable": variable},
                    "the environment variable must hold the API key, but it is not set",
                    f"export {variable} where the run starts",
                )
        elif reward.function == "overlong":
            options = OverlongOptions.model_validate(reward.options)
            for rule in options.broken_by(options.max_tokens or max_new_tokens):
                values = {f"{key}.options.{option}": value for option, value in rule.values.items()}
                yield BrokenRule(values, rule.rule, rule.fix)


# Model


def _broken_by_model(config: Config, *, sampling: bool) -> Iterator[BrokenRule]:
    path = config.model.path
    model = recipe_model(config.model) if path is None else read_model(path, config.model.family)
    if isinstance(model, BrokenRule):
        yield model
        return
    values = model_values(config) if path is not None else {"model.recipe.family": config.model.recipe.family}
    for problem in model.problems:
        yield rule_of(problem, values, prefix="config.json: ")
    if config.publishes_adapters and not model.family.vllm_lora_modules:
        rule = f"the family {model.family.model_type} names no modules of vLLM's model for adapters (vllm_lora_modules)"
        yield BrokenRule({"weights.lora": config.weights.lora, **values}, rule, "set weights.lora to merged")
    if not model.problems:
        yield from _broken_by_experts(config, model.shape, next(iter(values)))
    if path is None:  # rules on sizes of the recipe are part of the configuration
        if sampling:
            yield from _broken_by_vocabulary(config, model.shape)
            yield from _broken_by_vllm(config, model.hf, "generator", config.generator, model_values(config))
        return
    shape_rules = [*_broken_by_shape(config, model.shape), *(_broken_by_vocabulary(config, model.shape) if sampling else ())]
    yield from shape_rules or (_broken_by_vllm(config, model.hf, "generator", config.generator, values) if sampling else ())
    yield from _broken_by_weights(model, "model.path")
    if not any(path.glob("tokenizer*")):
        yield BrokenRule({"model.path": str(path)}, "must contain the tokenizer (tokenizer*)", "complete the download")


def _broken_by_experts(config: Config, shape: ModelShape, model: str) -> Iterator[BrokenRule]:
    """Yield the rules on the distribution of experts, and on what they do not support. `model` is the key of the model."""
    trainer, generator, number = config.trainer, config.generator, shape.num_experts
    ep, rate = trainer.parallelism.ep, trainer.expert_bias_rate
    if not number:
        if ep > 1:
            rule = "ep distributes experts, but the model has none"
            yield config.broken(f"trainer.parallelism.ep {model}", rule, "set trainer.parallelism.ep to 1")
        if config.records_experts:
            rule = "routing of experts needs a mixture of experts, and the model is dense"
            yield config.broken(f"trainer.routing {model}", rule, "set trainer.routing to own")
        if rate:
            rule = "expert_bias_rate balances experts, but the model has none"
            yield config.broken(f"trainer.expert_bias_rate {model}", rule, WITHOUT_BIAS)
        return
    if config.records_experts and config.program == "sft":
        rule = "the experts are recorded by generators, and fine-tuning has none"
        yield config.broken("trainer.routing", rule, "set trainer.routing to own")
    elif config.records_experts and config.num_generator_ranks and device_kind(config.device) != "cpu":
        rule = "the generators can record experts only on a CPU"
        yield config.broken("trainer.routing device", rule, "set trainer.routing to own")
    if config.train and number % ep:
        rule = f"ep must divide the model's {number} experts"
        yield config.broken(f"trainer.parallelism.ep {model}", rule, "set trainer.parallelism.ep to a divisor of them")
    if config.train and trainer.parallelism.tp > 1 and ep == 1:
        rule = "tensor parallelism of a mixture of experts needs expert parallelism: without it, torch 2.13 fails for odd rows"
        fix = f"set trainer.parallelism.ep to {trainer.parallelism.tp}, or tp to 1"
        yield config.broken(f"trainer.parallelism.tp trainer.parallelism.ep {model}", rule, fix)
    if config.train and trainer.compile:
        rule = "compile is not supported for a mixture of experts"
        yield config.broken(f"trainer.compile {model}", rule, "set trainer.compile to false")
    if config.train and trainer.float8 is not None:
        rule = "float8 is not supported for a mixture of experts, whose experts are not linear layers"
        yield config.broken(f"trainer.float8 {model}", rule, "set trainer.float8 to null")
    if config.train and trainer.lora is not None and "mlp" in trainer.lora.targets:
        rule = "the experts of a mixture of experts cannot have LoRA adapters"
        yield config.broken(f"trainer.lora.targets {model}", rule, "set trainer.lora.targets to [attention]")
    if rate and trainer.lora is not None:
        rule = "the bias of experts belongs to the base, which LoRA does not change"
        yield config.broken("trainer.expert_bias_rate trainer.lora.rank", rule, f"{WITHOUT_BIAS}, or trainer.lora to null")
    if rate and generator.model_impl == "native" and config.num_generator_ranks:
        rule = "vLLM's own model has no bias of experts, so it would choose other experts than the trainer"
        fix = f"set generator.model_impl to titan, or {WITHOUT_BIAS.removeprefix('set ')}"
        yield config.broken("trainer.expert_bias_rate generator.model_impl", rule, fix)
    share = shape.intermediate_size // generator.tp
    is_packed = generator.model_impl == "native" and device_kind(config.device) == "cpu" and config.num_generator_ranks
    if is_packed and (share % PACKED_MULTIPLE or shape.hidden_size % PACKED_MULTIPLE):
        rule = (
            f"vLLM's experts on a CPU need hidden and expert sizes on each rank that are multiples of {PACKED_MULTIPLE}, but "
            f"they are {shape.hidden_size} and {share}"
        )
        keys = f"generator.model_impl generator.tp {model}"
        yield config.broken(keys, rule, "set generator.model_impl to titan")


def _broken_by_vllm(
    config: Config,
    hf_config: Mapping[str, Any],
    section: str,
    engine: GeneratorConfig | TeacherConfig,
    values: Mapping[str, object],
) -> Iterator[BrokenRule]:
    """Yield the reasons why vLLM cannot serve a model with the options of a section. `values` name the model."""
    if not config.num_generator_ranks:
        return
    problems = vllm_problems(
        hf_config,
        device=device_kind(config.device),
        dtype=engine.dtype,
        tp=engine.tp,
        kv_cache_bytes=engine.kv_cache_bytes,
        max_len=config.max_sampled_tokens,
    )
    for problem in problems:
        of_cache = problem.removeprefix("kv_cache_bytes: ")
        if of_cache != problem:
            yield rule_of(of_cache, {f"{section}.kv_cache_bytes": engine.kv_cache_bytes})
        else:
            yield rule_of(problem, values, prefix="config.json: ")


def _broken_by_vocabulary(config: Config, shape: ModelShape) -> Iterator[BrokenRule]:
    tp = config.generator.tp
    if config.generator.model_impl == "titan" and shape.vocab_size % tp:
        rule = f"tp must divide the model's vocabulary of {shape.vocab_size} tokens, which only vLLM's own model pads"
        fix = "set generator.model_impl to native, or generator.tp to a divisor"
        yield config.broken("generator.tp generator.model_impl", rule, fix)


def _broken_by_shape(config: Config, shape: ModelShape) -> Iterator[BrokenRule]:
    tp = config.trainer.parallelism.tp
    if shape.num_heads % shape.num_kv_heads:
        rule = f"the {shape.num_kv_heads} key-value heads of config.json must divide its {shape.num_heads} query heads"
        yield config.broken("model.path", rule, "use another checkpoint")
    for key, degree in config.tensor_parallel_degrees.items():
        if shape.num_heads % degree or shape.num_kv_heads % degree:
            rule = f"tp must divide the model's {shape.num_heads} query heads and {shape.num_kv_heads} key-value heads"
            yield config.broken(f"{key} model.path", rule, f"set {key} to 1, or to a common divisor of both")
        if shape.intermediate_size % degree:
            rule = f"tp must divide the model's intermediate size {shape.intermediate_size}"
            yield config.broken(f"{key} model.path", rule, f"set {key} to a divisor of it")
    if config.trainer.float8 is not None and (shape.hidden_size % 16 or shape.intermediate_size // tp % 16):
        rule = "float8 requires projections whose dimensions on each tensor-parallel rank are multiples of 16"
        fix = "set trainer.float8 to null, or lower trainer.parallelism.tp"
        yield config.broken("trainer.float8 trainer.parallelism.tp model.path", rule, fix)
    yield from broken_by_positions(config, shape.max_positions)
    longest = config.max_sequence_tokens
    for key, length, what in (
        ("trainer.row_tokens", config.trainer.row_tokens, "a row"),
        ("rollout.max_new_tokens", longest, f"a prompt plus completion of {longest} tokens"),
    ):
        if length > shape.max_positions:
            rule = f"{what} must not be longer than the model's {shape.max_positions} positions"
            yield config.broken(f"{key} model.path", rule, f"lower {key}")
            return


def _broken_by_endpoint(config: Config, key: str, teacher: TeacherConfig) -> Iterator[BrokenRule]:
    """Yield a rule if the endpoint of a teacher cannot be used. This sends requests to it."""
    from titanrl.rollout.remote import RemoteTeacher, TeacherError  # imports httpx

    async def check() -> None:
        remote = RemoteTeacher(teacher, key=key)
        try:
            num_top = config.distill.top_k if config.distill is not None and config.distill.reads_top else 0
            await remote.check(policy_tokenizer(config), config.max_sequence_tokens, num_top)
        finally:
            await remote.close()

    try:
        with ThreadPoolExecutor(1) as thread:  # the caller may run in an event loop
            thread.submit(asyncio.run, check()).result()
    except (TeacherError, ValueError) as error:
        yield rule_of(str(error), {f"{key}.url": teacher.url})


def _broken_by_teacher(config: Config, key: str, engine: TeacherConfig, path: Path) -> Iterator[BrokenRule]:
    values = {f"{key}.path": str(path)}
    model = read_model(path, None)
    if isinstance(model, BrokenRule):
        yield replace(model, values=values)
        return
    for problem in model.problems:
        yield rule_of(problem, values, prefix="config.json: ")
    yield from _broken_by_weights(model, f"{key}.path")
    yield from _broken_by_engine_args(key, engine.vllm)
    shape, tp = model.shape, engine.tp
    if not model.problems and (shape.num_heads % tp or shape.num_kv_heads % tp or shape.intermediate_size % tp):
        rule = f"tp must divide the teacher's {shape.num_heads} query heads, {shape.num_kv_heads} key-value heads and "
        rule += f"intermediate size {shape.intermediate_size}"
        yield BrokenRule({f"{key}.tp": tp, **values}, rule, f"set {key}.tp to 1, or to a common divisor")
    elif not model.problems:
        yield from _broken_by_vllm(config, model.hf, key, engine, values)
    if model.shape.max_positions < config.max_sequence_tokens:
        yield BrokenRule(
            {"rollout.max_new_tokens": config.rollout.max_new_tokens, **values},
            f"a prompt plus completion of {config.max_sequence_tokens} tokens must not be longer than the teacher's "
            f"{model.shape.max_positions} positions",
            "lower rollout.max_new_tokens",
        )
    try:
        policy, teacher = policy_tokenizer(config).vocabulary, load_tokenizer(path).vocabulary
    except Exception as error:  # the tokenizers library raises bare Exceptions
        yield rule_of(str(error), values)
        return
    different = [token for token in policy.keys() | teacher.keys() if policy.get(token) != teacher.get(token)]
    if different:
        yield BrokenRule(
            {**values, **model_values(config)},
            "the teacher must have the vocabulary of the policy, because it scores the policy's tokens, but "
            f"{len(different)} tokens differ, such as {min(different)!r}",
            "choose a teacher of the policy's family",
        )


def _broken_by_weights(model: ModelDirectory, key: str) -> Iterator[BrokenRule]:
    """Yield the rules that the weight files of a model break; reads their headers."""
    try:
        model.weight_files()
    except BrokenRules as error:
        for rule in error.broken:
            yield replace(rule, values={key: str(model.path)})


def policy_notes(config: Config) -> Iterator[str]:
    """Yield remarks on the date in chats, and on weights in `model.path` that are not used. Call this after `preflight`."""
    if config.model.path is not None:
        yield from open_model(config.model.path, config.model.family).notes()
        data = config.data
        if data.chat_template != "never" and "strftime_now" not in data.chat_template_kwargs and writes_date(config.model.path):
            own = f"data.chat_template_kwargs: {{strftime_now: {datetime.date.today()}}} sets another"
            yield f"the chat template writes a date, which is {TEMPLATE_DATE} on every day; {own}"


# Data and user-defined objects, in child processes

Finding = str | Selection
"""A warning of a check, or the rows of a source by use."""

CHECK_LIMIT_S = 60.0
"""Time limit for importing a user-defined object, or for sampling from a task."""
BUSY_FACTOR = 5
"""Factor by which the time limits are extended on a busy machine."""
SAMPLED_PROMPTS = 100
"""Number of prompts of a generated task that are tried, to count those that are too long."""
HELDOUT_LIMIT_S = 2.0
"""Time after which the search for held-out prompts stops without an error."""

TRIAL_LIMIT_S = 10.0
"""Longest trial of a reward, in seconds, unless `sandbox.timeout_s` is shorter."""
_FIX = (
    "return a finite number, TokenRewards or a mapping of parts for every completion; return 0 for a wrong answer, and raise "
    "an exception if the reward is unknown"
)

_CHILD = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); from titanrl.launch.preflight import _serve; _serve()"
)


class RunningCheck:
    """A running check in a child process."""

    def __init__(self, check: Callable[[], Sequence[Finding] | None], values: Mapping[str, object], limit_s: float) -> None:
        """Start the check, which raises `ValueError` if a rule is broken. `values` are the checked keys with their values."""
        self._values, self._limit_s = values, limit_s
        self.warnings: Sequence[str] = ()
        """Warnings of the check; set by `result`."""
        self.selections: tuple[Selection, ...] = ()
        """Rows of the checked sources by use, after `result`."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `result`
        with tempfile.TemporaryFile() as request:
            request.write(pickle.dumps(sys.path) + pickle.dumps((os.getpid(), check, values)))
            request.seek(0)
            command = [sys.executable, "-c", _CHILD]
            try:
                self._process = subprocess.Popen(command, stdin=request, stdout=subprocess.PIPE, stderr=self._errors)
            except OSError as error:
                raise ConfigError(
                    f"checks: a process must be started for each, but that fails: {error.strerror} (got {sys.executable}). "
                    "Free memory, or raise the limit of processes (ulimit -u)."
                ) from error

    def result(self) -> tuple[BrokenRule, ...]:
        """Wait for the check, and return the broken rules."""
        try:
            output = self._output()
        except subprocess.TimeoutExpired:
            used_s = self._cpu_s()
            if used_s > self._limit_s / 2:
                fix = "it computes for too long: make the module, the task or its options load faster"
            elif _is_busy():
                load = f"{os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"
                fix = f"the machine is busy (load {load}): try again when it is idle"
            else:
                fix = "it waits, perhaps for the network, a lock or another process: do this later than at import"
            self._process.kill()
            self._process.communicate()
            took = f"longer than {self._limit_s:g} s (it used {used_s:.0f} s of CPU time)"
            return (BrokenRule(self._values, f"the check timed out: loading it must not take {took}", fix),)
        finally:
            self._errors.seek(0)
            last_lines = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
            self._errors.close()
        if self._process.returncode == 0 and output:
            broken: tuple[BrokenRule, ...]
            found: Sequence[Finding]
            broken, found = pickle.loads(output)
            self.warnings = [text for text in found if isinstance(text, str)]
            self.selections = tuple(rows for rows in found if isinstance(rows, Selection))
            return broken
        code = self._process.returncode
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        rule = f"loading it must not end the Python process ({', '.join([how, *last_lines])})"
        fix = "correct the module, the task or its options"
        if code == -signal.SIGKILL:
            fix = "free memory, or load less: the system kills a process when memory runs out"
        return (BrokenRule(values=self._values, rule=rule, fix=fix),)

    def _output(self) -> bytes:
        """Return what the check wrote. If a busy machine has given it little CPU time, wait `BUSY_FACTOR` times as long."""
        try:
            return self._process.communicate(timeout=self._limit_s)[0]
        except subprocess.TimeoutExpired:
            if not _is_busy() or self._cpu_s() > self._limit_s / 2:
                raise
        waited_s, self._limit_s = self._limit_s, BUSY_FACTOR * self._limit_s
        return self._process.communicate(timeout=self._limit_s - waited_s)[0]

    def _cpu_s(self) -> float:
        line = Path(f"/proc/{self._process.pid}/stat").read_bytes().rpartition(b")")[2]  # a name may contain spaces
        fields = line.split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _is_busy() -> bool:
    return os.getloadavg()[0] > (os.cpu_count() or 1)


def start_checks(config: Config, plugins: Plugins, *, with_data: bool, has_tokenizer: bool) -> list[RunningCheck]:
    """Start the checks of prompts (`with_data`), rewards, and user-defined objects given by import path.

    Without a usable tokenizer in `model.path`, the lengths of prompts are not checked.
    """
    checks: list[RunningCheck] = []
    if with_data:
        parts: list[tuple[str, DataConfig, Callable[..., Sequence[Finding]]]] = [
            (task.key(name), task, partial(check_data, config, plugins, name)) for name, task in config.data.tasks.items()
        ]
        for eval_set in config.evaluation_sets.values():
            if eval_set.has_own_data:
                parts.append((f"{eval_set.key}.data", eval_set.data, partial(check_set, config, plugins, eval_set)))
        for section, data, check in parts:
            values: dict[str, object] = {"source": data.source, "options": data.options}
            if data.source == "reasoning_gym":
                values = {"task": data.task, "task_config": data.task_config}
            elif data.path is not None:
                values = {"path": str(data.path)}
            limit_s = CHECK_LIMIT_S if data.source == "reasoning_gym" else config.timeouts.start_s
            keys = {f"{section}.{key}": value for key, value in values.items()}
            checks.append(RunningCheck(partial(check, has_tokenizer=has_tokenizer), keys, limit_s))
    by_module: dict[str, list[Plugin]] = defaultdict(list)  # so that each module is imported only once
    for plugin in plugins.values():
        # Python objects were checked before they were pickled.
        if not plugin.is_object and point_of(plugin.key).key != "data.source":
            by_module[plugin.name.rpartition(":")[0]].append(plugin)
    for same_module in by_module.values():
        names = {plugin.key: plugin.name for plugin in same_module}
        checks.append(RunningCheck(partial(check_plugins, same_module, config), names, CHECK_LIMIT_S))
    return checks


def check_plugins(plugins: Iterable[Plugin], config: Config) -> None:
    """Import the objects named by configuration keys, and check that each fits its extension point."""
    broken: list[BrokenRule] = []
    for plugin in plugins:
        try:
            point_of(plugin.key).check(plugin, config_of(plugin.key, config))
        except BrokenRules as error:
            broken += error.broken
        except ValueError as error:
            broken.append(rule_of(str(error), {plugin.key: plugin.name}))
    if broken:
        raise BrokenRules(*broken)


def check_data(config: Config, plugins: Plugins, name: str | None = None, *, has_tokenizer: bool = True) -> list[Finding]:
    """Read, split and tokenize the prompts of a task (by default the first) as a rollout worker does, and try its rewards.

    Return the rows by use, and warnings. Without a tokenizer, skip all that needs one. Raise `ValueError` for unusable data.
    """
    name = name or next(iter(config.data.tasks))
    data = config.data.tasks[name]
    section = data.key(name)
    try:
        encode, of_task = _encoder(config, data, has_tokenizer=has_tokenizer), plugins_of_data(plugins, section)
        stream = open_prompts(name, data, encode, config.seed, of_task).stream
        notes: list[str] = []
        if has_tokenizer and data.source != "reasoning_gym":
            notes += _long_answers(data, stream, policy_tokenizer(config), data.rollout(config.rollout).max_new_tokens)
        if data.source == "reasoning_gym":  # generate some prompts, to count those that are too long
            started = time.monotonic()
            for index in range(min(SAMPLED_PROMPTS, stream.num_prompts)):
                if time.monotonic() - started <= HELDOUT_LIMIT_S:
                    stream[index]
        for eval_set in config.evaluation_sets.values():
            if eval_set.task == name:
                notes += _few_prompts(eval_set, stream)
        _check_hint(config, data, stream, encode)
        found = _selection(data, stream, section, notes)
    except BrokenRules as error:
        raise within(error, section) from None
    return [found, *try_rewards(config.of_task(data), of_task, stream[0].entry, section)]


def _check_hint(config: Config, data: DataConfig, stream: PromptStream, encode: Encode) -> None:
    """Raise `BrokenRules` unless `distill.hint` fits every prompt to train on; of a generated task, the first one."""
    if config.distill is None or (hint := config.distill.hint) is None or not data.distillation(config.distill).weight:
        return
    for number, prompt in enumerate([stream[0]] if data.source == "reasoning_gym" else stream.training_prompts()):
        try:
            hinted = hinted_entry(prompt.entry, hint)
            if number == 0:
                encode(hinted)
        except BadRow as error:
            rule = f"the prompt {inline(prompt.text)} {error.problem}"
            raise BrokenRules(BrokenRule({"distill.hint": hint}, rule, error.fix)) from error


def check_set(config: Config, plugins: Plugins, eval_set: EvaluationSet, *, has_tokenizer: bool = True) -> list[Finding]:
    """Read the prompts of an evaluation set that has a separate data section, and try its rewards; see `check_data`."""
    plugins = plugins_within(plugins, eval_set.key)
    try:
        encode = _encoder(config, eval_set.data, has_tokenizer=has_tokenizer)
        stream = open_stream(eval_set.data, encode, config.seed, plugins, is_trained_on=False)
        notes = _few_prompts(eval_set, stream)
        first = stream.heldout(1, split=eval_set.split, key=eval_set.key)[0]
        found = _selection(eval_set.data, stream, f"{eval_set.key}.data", notes, eval_set.split)
    except BrokenRules as error:
        raise within(error, f"{eval_set.key}.data") from None
    of_set = config.model_copy(update={"data": eval_set.data})
    return [found, *try_rewards(of_set, plugins, first.entry, f"{eval_set.key}.data")]


def _selection(
    data: DataConfig, stream: PromptStream, section: str, notes: Sequence[str], split: Split | None = None
) -> Selection:
    """Return the rows of a source by use, with the digest of its files. `split` is None for a training task."""
    found = stream.selection
    key = found.key.replace("data", section, 1)
    heldout = found.num_heldout + (found.num_training if split == "all" else 0)
    left_out = {reason.replace("data.", f"{section}.", 1): number for reason, number in found.left_out.items()}
    if split is not None:
        found = replace(found, num_training=0, num_heldout=heldout, num_other=found.num_rows_used - heldout)
    found = replace(found, key=key, left_out=left_out, notes=(*found.notes, *notes))
    if data.path is not None:
        path = data_file(data.path)
        found = replace(found, source=str(path.absolute()), digest=data_digest(path, "data.path", FORMATS[data.source]))
    elif data.options:
        found = replace(found, source=f"{found.source} {inline(data.options)}")
    return found


def _few_prompts(eval_set: EvaluationSet, stream: PromptStream) -> list[str]:
    """Check that an evaluation set has a prompt, and return a note if it has fewer than it takes."""
    started = time.monotonic()
    found = len(stream.heldout(eval_set.num_prompts, split=eval_set.split, key=eval_set.key, limit_s=HELDOUT_LIMIT_S))
    if found == eval_set.num_prompts or time.monotonic() - started > HELDOUT_LIMIT_S:
        return []
    which = "held-out prompts" if eval_set.split == "heldout" else "prompts"
    return [
        f"{eval_set.key}.num_prompts is {eval_set.num_prompts:,}, but there are only {found:,} {which}, which are all evaluated"
    ]


def _long_answers(data: DataConfig, stream: PromptStream, tokenizer: Tokenizer, max_new_tokens: int) -> list[str]:
    """Return a note if no completion can equal some reference answers, which are too long; raise `BrokenRules` if all are."""
    if data.environment is not None or all(part.function != "exact" for part in data.reward_parts.values()):
        return []
    answers = [prompt.entry["answer"] for prompt in stream.training_prompts()]
    shown = data.path or data.source
    number = sum(_num_tokens(tokenizer, answer) > max_new_tokens for answer in answers)
    if number == len(answers):
        rule = f"no completion can equal a reference answer: all {number:,} have more tokens"
        fix = "raise it, or take a part of the answers with data.answer"
        values = {"rollout.max_new_tokens": max_new_tokens, "data.path" if data.path else "data.source": str(shown)}
        raise BrokenRules(BrokenRule(values, rule, fix))
    text = f"{number:,} of {len(answers):,} reference answers have more tokens than rollout.max_new_tokens={max_new_tokens}"
    return [f"{text}, so that no completion equals them"] if number else []


def _num_tokens(tokenizer: Tokenizer, answer: str) -> int:
    """Return the number of tokens of a reference answer; 0 if the tokenizer lacks a character of it."""
    try:
        return len(tokenizer.encode(" ".join(answer.split())))
    except ValueError:
        return 0


def _encoder(config: Config, data: DataConfig, *, has_tokenizer: bool) -> Encode:
    """Check environment and rewards, then return the function that tokenizes questions."""
    encode: Encode = lambda entry: []  # noqa: E731
    if has_tokenizer:
        try:
            tokenizer = policy_tokenizer(config)
        except Exception as error:  # the tokenizers library raises bare Exceptions
            raise BrokenRules(rule_of(str(error), model_values(config))) from error
        known = set(tokenizer.vocabulary.values())
        if unknown := [token_id for token_id in config.rollout.stop_ids if token_id not in known]:
            rule = f"the tokenizer has no token with this id; its ids are 0 to {max(known)}"
            raise BrokenRules(BrokenRule({"rollout.stop": unknown[0]}, rule, "correct the id"))
        encode = make_encoder(data, tokenizer)
        if (environment := data.environment) is not None:
            try:
                make_renderer(tokenizer, environment.renderer, environment.renderer_options)
                if isinstance(environment.program, str):
                    checked_function(environment.program, environment.options)
                elif environment.python is None and environment.function in ENVIRONMENTS:  # others are extension points
                    load_factory(environment.function, environment.options)
            except ValueError as error:
                keys = ("renderer_options", "renderer", "function" if environment.program is None else "program")
                name = next((name for name in keys if str(error).startswith(f"data.environment.{name}")), keys[-1])
                raise BrokenRules(rule_of(str(error), {f"data.environment.{name}": getattr(environment, name)})) from error
            if environment.confined and (missing := missing_for_programs()):
                rule = f"confinement needs {', '.join(missing)}"
                raise BrokenRules(BrokenRule({"data.environment.confined": True}, rule, "remove confined"))
    if data.source != "reasoning_gym" and any(reward.function == "reasoning_gym" for reward in data.rewards.values()):
        make_gym_dataset(data.task, data.task_config, seed=0, size=1)
    return encode


def policy_tokenizer(config: Config) -> Tokenizer:
    """Return the policy's tokenizer. Raise `ValueError` if `model.path` has no usable tokenizer."""
    if config.model.path is not None:
        return load_tokenizer(config.model.path)
    folder = TemporaryFolder().path  # stays until the process exits, because a renderer reads the tokenizer again
    write_tokenizer(folder)
    return load_tokenizer(folder)


def try_rewards(config: Config, plugins: Plugins, entry: Mapping[str, Any], section: str) -> list[str]:
    """Call each user-defined reward of `config.data` once, with two completions of the prompt `entry`, and return warnings.

    Rewards that cannot be loaded in time are skipped: another check names them. `section` is the section in messages. Raise
    `BrokenRules` if a reward returned anything other than a reward, or needs what the sandbox denies.
    """
    answers = sample_answers(entry, with_tokens=config.data.environment is None)
    limit_s = min(config.sandbox.timeout_s, TRIAL_LIMIT_S)
    scores = asyncio.run(_scores(config, plugins, answers, limit_s))
    broken: list[BrokenRule] = []
    warnings = []
    for name, of_reward in scores.items():
        reward, key = config.data.reward_parts[name], f"{section}.rewards.{name}"
        scored = [weighted({name: score}, {name: reward}, answers, index) for index, score in enumerate(of_reward)]
        errors = [(index, one.error.removeprefix(f"{name}: ")) for index, one in enumerate(scored) if one.reward is None]
        if not errors:
            if denied := next((score.detail for score in of_reward if score.detail), ""):
                rule = f"it tried to read {denied}, {DENIED}, and went on without it"
                fix = f"Read it when the module is imported, or set data.rewards.{name}.trusted to true"
                warnings.append(f"{key}: {rule}. {fix}, unless its rewards do not depend on it.")
            continue
        index, error = errors[0]
        sample = f"for the sample completion {answers.completions[index]!r:.60}"
        if DENIED in error:
            rule, _, fix = error.replace(" (the reward", ": the reward").partition("; ")
            broken.append(BrokenRule(values={key: reward.function}, rule=f"{rule} ({sample})", fix=fix.rstrip(")")))
        elif of_reward[index].status == "ok" or error.startswith(INVALID):
            broken.append(BrokenRule(values={key: reward.function}, rule=f"{error} ({sample})", fix=_FIX))
        else:
            warnings.append(
                f"{key}: the reward failed {sample} ({error}). If it fails on real completions, they have no reward."
            )
    if broken:
        raise BrokenRules(*broken)
    return warnings


def sample_answers(entry: Mapping[str, Any], *, with_tokens: bool = True) -> Answers:
    """Return a right and a wrong completion of a prompt. Each character is a token.

    Without tokens, as in an environment, they cannot be located in the text.
    """
    texts = (f"<answer>{entry.get('answer') or 'a sample'}</answer>", "I do not know.")
    return Answers(
        entry=entry,
        completions=texts,
        num_tokens=tuple(map(len, texts)),
        finish_reasons=("stop", "length"),
        token_ids=tuple([ord(char) for char in text] for text in texts),
        decode_raw=lambda ids: "".join(map(chr, ids)),
        decode=(lambda ids: "".join(map(chr, ids))) if with_tokens else None,
    )


async def _scores(config: Config, plugins: Plugins, answers: Answers, limit_s: float) -> dict[str, list[Score]]:
    scores: dict[str, list[Score]] = {}
    for name, reward in config.data.reward_parts.items():
        if reward.trusted:
            try:
                loading = in_thread(partial(custom_reward, reward_plugin(name, reward, plugins)))
                function = await asyncio.wait_for(loading, CHECK_LIMIT_S)
            except Exception:  # importing a module may raise anything
                continue
            scores[name] = await TrustedReward(BoundReward(name, function), limit_s).score(answers)
    if specs := [spec for spec in reward_specs(config, plugins) if spec.is_custom]:
        pool = ScoringPool(specs, config.sandbox.model_copy(update={"timeout_s": limit_s, "num_processes": len(specs)}))
        try:
            await asyncio.wait_for(pool.start(), CHECK_LIMIT_S)
            found = await asyncio.gather(*(pool.score(answers, reward=index) for index in range(len(specs))))
            scores |= {spec.name: own for spec, own in zip(specs, found, strict=True)}
        except (RespawnLimitError, SandboxDied, SandboxUnavailable, TimeoutError, ValueError):
            return scores
        finally:
            await pool.close()
    return scores


def _serve() -> None:
    """Run one check in a child process: read it from stdin, then write the broken rules to stdout."""
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # imported modules may print
    parent_pid, check, values = pickle.load(sys.stdin.buffer)
    end_with_parent(parent_pid)
    broken: tuple[BrokenRule, ...] = ()
    found: Sequence[Finding] = ()
    try:
        found = check() or ()
    except BrokenRules as error:
        broken = error.broken
    except Exception as error:  # tasks and user modules may raise anything
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        broken = (rule_of(text, values),)
    with results:
        pickle.dump((broken, found), results)
    delete_all()
    os._exit(0)  # threads of imported modules must not delay the exit
