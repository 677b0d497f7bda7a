"""The report of `--dry-run`: changed keys, hosts and devices, sizes, notes, and values that may not fit."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from pydantic import BaseModel
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from titanrl.config.device import DeviceKind
from titanrl.config.errors import BrokenRule, inline
from titanrl.config.load import Source, explain_rule
from titanrl.config.schema import Config, device_shortage
from titanrl.config.sections import HostGroup
from titanrl.config.sizes import (
    LIBRARY_BYTES,
    Memory,
    ModelShape,
    Sizes,
    cpu_bytes,
    derive,
    gigabytes,
    host_bytes,
    model_values,
    multiplies_bfloat16,
    notes,
    received_bytes,
    replica_hosts,
    rollout_group,
    store_group,
    worker_hosts,
)

DEVICE_BYTES = 80_000_000_000
"""Assumed memory of an accelerator type that this machine does not have."""

HERE = "this machine"

LARGE = 50_000_000
"""Number of parameters from which the time of a step is that of its matrix products."""


def print_dry_run(
    config: Config,
    console: Console,
    source: Source | None = None,
    *,
    shape: ModelShape | None,
    device: DeviceKind = "cpu",
    device_bytes: int | None = None,
) -> None:
    """Print the report of a dry run. Tables have a frame only on a terminal.

    With the source, warnings name lines and overrides. `device_bytes` is the memory of one accelerator; None assumes
    `DEVICE_BYTES`. Without `shape`, the report omits the memory of processes.
    """
    sizes = derive(config, shape)
    print_table(console, "Keys that differ from the defaults", ("key", "value", "default"), changed_keys(config))
    columns = ("host", "devices", "role", "processes", "memory each", "available")
    print_table(console, "Hosts and devices", columns, _placement_rows(config, sizes, device, device_bytes))
    print_table(console, "Sizes", ("size", "value"), chain(_step_rows(config, sizes), _memory_rows(config, sizes.memory)))
    _print_list(console, "Notes", [*notes(config), *(_dtype_notes(config, sizes.memory) if device == "cpu" else ())])
    unfit = misfits(config, sizes.memory, device_bytes or DEVICE_BYTES)
    _print_list(console, "May not fit", [explain_rule(misfit, source) for misfit in unfit])


def changed_keys(section: BaseModel, defaults: BaseModel | None = None, path: str = "") -> list[tuple[str, str, str]]:
    """Return key, value and default of every changed key; without `defaults`, those of the fields. `path` is a prefix.

    A task of a mixture inherits keys; those are not repeated.
    """
    rows: list[tuple[str, str, str]] = []
    for name, field in type(section).model_fields.items():
        value, key = getattr(section, name), f"{path}{name}"
        default = field.get_default() if defaults is None else getattr(defaults, name)
        if isinstance(value, BaseModel):
            below = changed_keys(value, None if field.is_required() else default, f"{key}.")
            rows += below or ([(key, "{}", "null")] if default is None else [])
        elif isinstance(value, dict) and any(isinstance(child, BaseModel) for child in value.values()):
            for other, child in value.items():
                below = changed_keys(child, None, prefix := f"{key}.{other}.")
                own = [row for row in below if (f"{path}{row[0].removeprefix(prefix)}", *row[1:]) not in rows]
                rows += own or [(f"{key}.{other}", "{}", "(not set)")]
        elif field.is_required() or value != default:
            rows.append((key, inline(value), "required" if field.is_required() else inline(default)))
    return rows


def table_console() -> Console:
    """Return a console that prints to stdout: as wide as the terminal, or wide enough for tables in a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else 200)


def print_table(console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table under a title."""
    table = Table(box=SIMPLE_HEAD if console.is_terminal else None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    _print_lines(console, f"# {title}")
    console.print(table)
    _print_lines(console, "")


def _print_list(console: Console, title: str, items: Sequence[str]) -> None:
    if items:
        _print_lines(console, f"# {title}", *items, "")


def _print_lines(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _placement_rows(config: Config, sizes: Sizes, device: DeviceKind, device_bytes: int | None) -> Iterator[Sequence[str]]:
    accelerator = gigabytes(device_bytes) if device_bytes else f"{gigabytes(DEVICE_BYTES)} (assumed)"
    for row in placements(config, sizes, device):
        needed = "" if row.num_bytes is None else gigabytes(row.num_bytes)
        available = accelerator if row.devices and device != "cpu" else ""
        if device != "cpu" and row.role == "generator rank" and needed:
            needed += " + KV cache"
        yield row.host, row.devices, row.role, str(row.processes), needed, available
    if sizes.memory is not None and (received := received_bytes(config, sizes.memory)):
        yield host_name(config, "generators"), "", "received weights", "", f"{gigabytes(received)} shared", ""
    if device == "cpu" and sizes.memory is not None:
        total = cpu_bytes(config, sizes.memory, sizes.memory.trainer.cpu_total)
        available = "" if config.hosts.across_machines else gigabytes(host_bytes())
        roles = "all ranks and published weights" if config.num_generator_ranks else "all ranks"
        yield "", "cpu", roles, "", f"{gigabytes(total)} together", available


def _step_rows(config: Config, sizes: Sizes) -> Iterator[Sequence[str]]:
    sequences, rollout = str(sizes.sequences_per_step), config.rollout
    if config.sft is None:
        or_more = " or more" if rollout.dynamic_sampling else ""
        sequences += f"{or_more} ({rollout.groups_per_step} groups of {rollout.group_size})"
    yield "sequences per step", sequences
    yield "tokens per step", f"up to {sizes.max_tokens_per_step:,} ({config.max_sequence_tokens} per sequence)"
    yield "micro-batches per step", f"up to {sizes.max_microbatches}"
    if config.program == "train":
        yield "buffer slots", str(config.num_slots)
        yield "maximum staleness", f"{config.staleness_bound} versions"


def _memory_rows(config: Config, memory: Memory | None) -> Iterator[Sequence[str]]:
    if memory is None:
        yield "parameters", "unknown: the model cannot be read, for the reason below"
        return
    experts = (
        f", {memory.expert_parameters:,} of them in experts; {memory.active_parameters:,} compute a token"
        if memory.expert_parameters
        else ""
    )
    yield "parameters", f"{memory.num_parameters:,}{experts}"
    if config.train:
        trainer = memory.trainer
        last = "activations (estimate)" if trainer.activations >= trainer.unreduced else "last gradients of a pass"
        sizes = {
            f"parameters in {config.trainer.dtype}": trainer.parameters - trainer.experts,
            f"experts in {config.trainer.dtype}": trainer.experts,
            "gradients": trainer.gradients,
            "AdamW moments": trainer.optimizer,
            "moving average": trainer.average,
            "critic with gradients and moments": trainer.critic,
            f"parameters in {config.trainer.compute_dtype} for the passes": trainer.gathered,
            last: max(trainer.activations, trainer.unreduced),
        }
        listed = ", ".join(f"{gigabytes(size)} {name}" for name, size in sizes.items() if size)
        yield "trainer rank", f"{gigabytes(trainer.total)}: {listed}"
    if config.train and config.trainer.lora is not None:
        size, most = gigabytes(memory.trainer.another_model), config.trainer.lora.max_models
        yield "each further adapter of a session", f"{size} on each trainer rank; at most {most} adapters"
    if not config.num_generator_ranks:
        return
    replica, tp = f"{gigabytes(memory.replica_weights)} of weights in {config.generator.dtype}", config.generator.tp
    per_rank = f"; {gigabytes(memory.generator_rank_weights)} on each of {tp} ranks"
    yield "generator replica", replica if tp == 1 else replica + per_rank
    cache = f"{gigabytes(memory.kv_cache)} for {config.generator.max_num_seqs} completions of maximum length"
    on_cpu = f"; {gigabytes(config.generator.kv_cache_bytes)} configured on CPU"
    yield "KV cache", cache if config.device in ("cuda", "npu") else cache + on_cpu


def _dtype_notes(config: Config, memory: Memory | None) -> Iterator[str]:
    """Yield a note on each dtype that makes this processor multiply the matrices of a large model slowly."""
    if memory is None or memory.num_parameters < LARGE:
        return
    dtypes = {"trainer.compute_dtype": config.trainer.compute_dtype} if config.train else {}
    dtypes |= {"generator.dtype": config.generator.dtype} if config.num_generator_ranks else {}
    for key, dtype in dtypes.items():
        if multiplies_bfloat16() and dtype == "float32":
            yield f"{key}=float32: this processor has instructions for bfloat16, in which a model of this size is much faster."
        elif not multiplies_bfloat16() and dtype == "bfloat16":
            yield f"{key}=bfloat16: this processor has no instructions for bfloat16, so float32 is much faster."


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Identical processes of one role, on one host or on several identical hosts.

    Example: `Placement(host="trainer hosts (4)", devices="0-7", role="trainer rank", processes=8, num_bytes=52_000_000_000)`
    """

    host: str
    """Name of the host, or type and number of hosts."""
    devices: str
    """Indices of the accelerators, `cpu`, or selected CPU cores; empty if the role uses no device."""
    role: str
    """Role of the processes."""
    processes: int
    """Number of processes per host."""
    num_bytes: int | None
    """Estimated memory of one process: its private memory on CPU, else its device memory. None if unknown or zero."""


def placements(config: Config, sizes: Sizes, device: DeviceKind) -> Iterator[Placement]:
    """Yield the placement of each role, on the hosts that `hosts.kind` and `placement` select."""
    yield from _rank_placements(config, sizes, device)
    cores = config.placement.cpus
    workers = list(_counts(config, rollout_group(config), worker_hosts(config)))
    for role in ("rollout", "sandbox", "store", "controller"):
        number = sizes.processes.get(role)
        if number is None:
            continue
        if role in ("rollout", "sandbox") and "rollout" in sizes.processes:
            per_worker, choice = number // config.rollout.num_workers, cores.rollout
            hosts = [(host, count * per_worker) for host, count in workers]
        elif role == "store":
            hosts, choice = [(_host(config, store_group(config), 0), number)], cores.store
        else:
            hosts, choice = [(HERE, number)], None
        for host, count in hosts:
            num_bytes = LIBRARY_BYTES[role] if device == "cpu" else None
            yield Placement(host=host, devices=_cores(choice), role=role, processes=count, num_bytes=num_bytes)


def _rank_placements(config: Config, sizes: Sizes, device: DeviceKind) -> Iterator[Placement]:
    is_cpu, hosts, cores = device == "cpu", config.hosts, config.placement.cpus
    trainer_bytes = generator_bytes = None
    if sizes.memory is not None:
        trainer = sizes.memory.trainer
        trainer_bytes = LIBRARY_BYTES["trainer"] + trainer.cpu_total if is_cpu else trainer.total
        beside = LIBRARY_BYTES["generator"] + config.generator.kv_cache_bytes // config.generator.tp if is_cpu else 0
        generator_bytes = sizes.memory.generator_rank_weights + beside + (sizes.memory.packed_weights if is_cpu else 0)
    ranks, generators, of_replica = config.num_trainer_ranks, config.num_generator_ranks, replica_hosts(config)
    most = max(map(of_replica.count, of_replica)) * config.generator.tp if generators else 0
    per_host = ranks // hosts.trainer_hosts
    on_ranks = per_host if config.placement.generator == "trainers" else 0
    # Emulated hosts share the devices of one machine.
    first = 0 if hosts.share_devices else on_ranks if hosts.across_machines else ranks
    behind = first + (most if hosts.across_machines else generators)
    if ranks:
        host, shown = host_name(config, "trainers"), per_host if hosts.across_machines else ranks
        devices = _devices(device, 0, shown) + _cores(cores.trainer, " ")
        yield Placement(host=host, devices=devices, role="trainer rank", processes=per_host, num_bytes=trainer_bytes)
    for host, count in _counts(config, "generators", of_replica) if generators else ():
        number = count * config.generator.tp
        devices = _devices(device, first, number if hosts.across_machines else generators) + _cores(cores.generator, " ")
        yield Placement(host=host, devices=devices, role="generator rank", processes=number, num_bytes=generator_bytes)
    for role in ("teacher", "evaluator"):
        if number := sizes.processes.get(role, 0):
            devices, host = _devices(device, behind, number), _host(config, "generators", 0)
            yield Placement(host=host, devices=devices, role=f"{role} rank", processes=number, num_bytes=None)


def _counts(config: Config, group: HostGroup, hosts: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Yield hosts with their number of processes. Hosts of a group are yielded together if all have the same number."""
    counts = [hosts.count(host) for host in range(max(hosts) + 1)]
    if config.hosts.kind == "local" or group == "controller":
        yield HERE, len(hosts)
    elif len(set(counts)) == 1 and len(counts) == config.hosts.count(group):
        yield host_name(config, group), counts[0]
    else:
        for number, count in enumerate(counts):
            yield _host(config, group, number), count


def host_name(config: Config, group: HostGroup) -> str:
    """Return the name of all hosts of a group."""
    hosts = config.hosts
    if hosts.kind == "local" or group == "controller":
        return HERE
    if group == "trainers":
        return f"trainer hosts ({hosts.trainer_hosts})"
    if config.placement.generator == "generators":
        return f"generator hosts ({hosts.generator_hosts})"
    if hosts.generator_hosts == hosts.trainer_hosts:
        return f"trainer hosts ({hosts.trainer_hosts})"
    return f"trainer hosts (first {hosts.generator_hosts} of {hosts.trainer_hosts})"


def _host(config: Config, group: HostGroup, number: int) -> str:
    if config.hosts.kind == "local" or group == "controller":
        return HERE
    return f"{'generator' if group == config.placement.generator == 'generators' else 'trainer'} host {number}"


def _devices(device: DeviceKind, first: int, count: int) -> str:
    if device == "cpu":
        return "cpu"
    return f"{device} {first}" if count == 1 else f"{device} {first}-{first + count - 1}"


def _cores(choice: str | None, before: str = "") -> str:
    return "" if choice is None else f"{before}cores {choice}"


def misfits(config: Config, memory: Memory | None, device_bytes: int = DEVICE_BYTES) -> Iterator[BrokenRule]:
    """Yield rules that are probably broken on accelerators with this memory, according to estimates."""
    if config.device == "auto":  # the device is unknown until the run starts
        for broken in device_shortage(config):
            yield replace(broken, fix=f"{broken.fix}; ignore this on CPU")
    if memory is None:
        return
    if config.device not in ("cuda", "npu"):
        available = host_bytes()
        if config.num_generator_ranks and memory.kv_cache > config.generator.kv_cache_bytes:
            rule = f"max_num_seqs completions of maximum length need {gigabytes(memory.kv_cache)} of KV cache, else some wait"
            fix = f"set generator.kv_cache_bytes to {memory.kv_cache}, or lower generator.max_num_seqs"
            yield config.broken("generator.kv_cache_bytes generator.max_num_seqs", rule, fix)
        needed = cpu_bytes(config, memory, memory.trainer.cpu_total)
        if not config.hosts.across_machines and needed > available:
            has_generators = config.num_generator_ranks > 0
            replicas = {"generator.replicas": config.generator.replicas} if has_generators else {}
            roles, fewer = ("trainer and generators need", "fewer replicas, ") if has_generators else ("the trainer needs", "")
            yield BrokenRule(
                {**model_values(config), **replicas},
                f"{roles} about {gigabytes(needed)}, but this machine has {gigabytes(available)}",
                f"use a smaller model, {fewer}or trainer.dtype=bfloat16",
            )
        return
    has_generators = config.num_generator_ranks > 0
    shares = config.hosts.share_devices and has_generators
    if shares and "gpu_memory_utilization" not in config.generator.vllm:
        rule = "vLLM reserves 90 % of a device by default, which leaves too little memory for the trainer"
        fix = "set generator.vllm.gpu_memory_utilization, for example to 0.4"
        yield config.broken("hosts.share_devices generator.vllm", rule, fix)
    shard = {"trainer.parallelism.dp_shard": config.trainer.parallelism.dp_shard}
    tp = {"generator.tp": config.generator.tp}
    needs = {"trainer rank": (memory.trainer.total, shard, "trainer.parallelism.dp_shard, cp or tp")}
    if has_generators:
        needs["generator rank"] = (memory.generator_rank_weights, tp, "generator.tp")
    if shares:
        total = memory.trainer.total + memory.generator_rank_weights
        needs = {"trainer rank with its generator rank": (total, shard | tp, "trainer.parallelism.dp_shard or generator.tp")}
    for role, (needed, values, keys) in needs.items():
        if needed > device_bytes:
            yield BrokenRule(
                {**model_values(config), **values},
                f"a {role} needs about {gigabytes(needed)} without KV cache, but a device has {gigabytes(device_bytes)}",
                f"raise {keys}, or use bfloat16, a smaller model or larger devices",
            )
