"""What `--dry-run` shows: the resolved configuration, its sizes, and what stands in the way of a run."""

from collections.abc import Iterator, Sequence

from titanrl.config.explain import explain_rule
from titanrl.config.files import check_files
from titanrl.config.load import dump_config
from titanrl.config.schema import Config
from titanrl.config.sizes import Memory, Sizes, TrainerMemory, derive, gigabytes
from titanrl.config.source import Source


def render_dry_run(config: Config, source: Source | None = None) -> str:
    """The text of a dry run. Starts nothing and writes nothing.

    Args:
        source: what `config` was made from; with it problems name lines and overrides.
    """
    sizes = derive(config)
    table = {**_step_rows(config, sizes), **_memory_rows(config, sizes)}
    width = max(map(len, table)) + 2
    parts = [
        "# Resolved configuration",
        dump_config(config),
        "# Sizes",
        *(f"{name:<{width}}{text}" for name, text in table.items()),
        *_listed("Notes", sizes.notes),
        *_listed("Does not fit", [explain_rule(misfit, source) for misfit in sizes.misfits]),
        *_listed("Not ready yet", check_files(config, source)),
        "",
        "Dry run: nothing was started or written.",
    ]
    return "\n".join(parts)


def _listed(title: str, problems: Sequence[str]) -> Iterator[str]:
    if problems:
        yield from ("", f"# {title}", *problems)


def _step_rows(config: Config, sizes: Sizes) -> dict[str, str]:
    groups = f"{config.rollout.groups_per_step} groups of {config.rollout.group_size}"
    or_more = " or more" if config.rollout.dynamic_sampling else ""
    return {
        "processes": ", ".join(f"{role} {count}" for role, count in sizes.processes.items()),
        "sequences per step": f"{sizes.sequences_per_step}{or_more} ({groups})",
        "tokens per step": f"up to {sizes.max_tokens_per_step:,} ({config.max_sequence_tokens} a sequence)",
        "micro-batches per step": f"up to {sizes.max_microbatches}",
        "buffer slots": str(sizes.buffer_slots),
        "worst staleness": f"{sizes.worst_staleness} versions",
    }


def _memory_rows(config: Config, sizes: Sizes) -> dict[str, str]:
    memory = sizes.memory
    if memory is None:
        return {"parameters": "not known: model.path has no readable config.json yet"}
    return {
        "parameters": f"{memory.num_parameters:,}",
        "trainer rank": _trainer_text(config, memory.trainer),
        "generator replica": _replica_text(config, memory),
        "KV cache": _cache_text(config, memory),
    }


def _trainer_text(config: Config, trainer: TrainerMemory) -> str:
    parts = {
        f"parameters in {config.trainer.dtype}": trainer.parameters,
        "gradients": trainer.gradients,
        "AdamW's moments": trainer.optimizer,
        f"gathered in {config.trainer.compute_dtype}": trainer.gathered,
        "activations (estimate)": trainer.activations,
    }
    listed = ", ".join(f"{gigabytes(size)} {name}" for name, size in parts.items() if size)
    return f"{gigabytes(trainer.total)}: {listed}"


def _replica_text(config: Config, memory: Memory) -> str:
    text = f"{gigabytes(memory.replica_weights)} of weights in {config.generator.dtype}"
    tp = config.generator.tp
    return text if tp == 1 else f"{text}; {gigabytes(memory.generator_rank_weights)} on each of {tp} ranks"


def _cache_text(config: Config, memory: Memory) -> str:
    text = f"{gigabytes(memory.kv_cache)} for {config.generator.max_num_seqs} completions of full length"
    if config.device in ("cuda", "npu"):
        return text
    return f"{text}; {gigabytes(config.generator.kv_cache_bytes)} configured on CPU"
