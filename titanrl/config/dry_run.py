"""The report of `--dry-run`: changed keys, placement, sizes, and warnings."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from pydantic import BaseModel
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from titanrl.base.choices import DeviceKind
from titanrl.config.errors import inline
from titanrl.config.explain import explain_rule
from titanrl.config.placement import host_name, placements
from titanrl.config.schema import Config
from titanrl.config.sizes import (
    DEVICE_BYTES,
    Memory,
    ModelShape,
    Sizes,
    TrainerMemory,
    cpu_bytes,
    derive,
    gigabytes,
    host_bytes,
    received_bytes,
)
from titanrl.config.source import Source


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

    Args:
        config: Configuration.
        console: Destination.
        source: Source of the configuration. If given, warnings name the lines and overrides.
        shape: Dimensions of the policy model; None if unknown.
        device: Device type of the run.
        device_bytes: Memory of one accelerator in bytes; None assumes `DEVICE_BYTES`.
    """
    sizes = derive(config, shape, device_bytes=device_bytes or DEVICE_BYTES)
    print_table(console, "Keys that differ from the defaults", ("key", "value", "default"), changed_keys(config))
    columns = ("host", "devices", "role", "processes", "memory each", "available")
    print_table(console, "Hosts and devices", columns, _placement_rows(config, sizes, device, device_bytes))
    print_table(console, "Sizes", ("size", "value"), chain(_step_rows(config, sizes), _memory_rows(config, sizes.memory)))
    _print_list(console, "Notes", sizes.notes)
    _print_list(console, "May not fit", [explain_rule(misfit, source) for misfit in sizes.misfits])


def changed_keys(section: BaseModel, defaults: BaseModel | None = None, path: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield key, value and default of every key whose value differs from its default.

    Args:
        section: Section to compare.
        defaults: Values to compare with; None compares with the defaults of the fields.
        path: Prefix of the keys.
    """
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        default = field.get_default() if defaults is None else getattr(defaults, name)
        if isinstance(value, BaseModel) and field.is_required():
            yield from changed_keys(value, None, f"{path}{name}.")
        elif isinstance(value, BaseModel):
            below = list(changed_keys(value, default, f"{path}{name}."))
            yield from below or ([(f"{path}{name}", "{}", "null")] if default is None else [])
        elif field.is_required() or value != default:
            yield f"{path}{name}", inline(value), "required" if field.is_required() else inline(default)


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
    if config.sft is not None:
        yield "sequences per step", str(sizes.sequences_per_step)
        yield "tokens per step", f"up to {sizes.max_tokens_per_step:,} ({config.max_sequence_tokens} per sequence)"
        yield "micro-batches per step", f"up to {sizes.max_microbatches}"
        return
    groups = f"{config.rollout.groups_per_step} groups of {config.rollout.group_size}"
    or_more = " or more" if config.rollout.dynamic_sampling else ""
    yield "sequences per step", f"{sizes.sequences_per_step}{or_more} ({groups})"
    yield "tokens per step", f"up to {sizes.max_tokens_per_step:,} ({config.max_sequence_tokens} per sequence)"
    yield "micro-batches per step", f"up to {sizes.max_microbatches}"
    if config.distill is None:
        yield "buffer slots", str(sizes.buffer_slots)
        yield "maximum staleness", f"{sizes.worst_staleness} versions"


def _memory_rows(config: Config, memory: Memory | None) -> Iterator[Sequence[str]]:
    if memory is None:
        yield "parameters", "unknown: the model cannot be read, for the reason below"
        return
    yield "parameters", f"{memory.num_parameters:,}"
    if config.train:
        yield "trainer rank", _trainer_text(config, memory.trainer)
    if not config.num_generator_ranks:
        return
    replica, tp = f"{gigabytes(memory.replica_weights)} of weights in {config.generator.dtype}", config.generator.tp
    per_rank = f"; {gigabytes(memory.generator_rank_weights)} on each of {tp} ranks"
    yield "generator replica", replica if tp == 1 else replica + per_rank
    cache = f"{gigabytes(memory.kv_cache)} for {config.generator.max_num_seqs} completions of maximum length"
    on_cpu = f"; {gigabytes(config.generator.kv_cache_bytes)} configured on CPU"
    yield "KV cache", cache if config.device in ("cuda", "npu") else cache + on_cpu


def _trainer_text(config: Config, trainer: TrainerMemory) -> str:
    last = "activations (estimate)" if trainer.activations >= trainer.unreduced else "last gradients before FSDP reduces them"
    sizes = {
        f"parameters in {config.trainer.dtype}": trainer.parameters,
        "gradients": trainer.gradients,
        "AdamW moments": trainer.optimizer,
        "moving average": trainer.average,
        f"gathered in {config.trainer.compute_dtype}": trainer.gathered,
        last: max(trainer.activations, trainer.unreduced),
    }
    listed = ", ".join(f"{gigabytes(size)} {name}" for name, size in sizes.items() if size)
    return f"{gigabytes(trainer.total)}: {listed}"
