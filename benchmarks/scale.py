"""Simulate a run at any size on a virtual clock: `python -m benchmarks.scale --json FILE`.

The real loop, batch plan, buffer, publications, weight sync, supervision, pool, rollout workers and generator actors run, each
in a virtual process whose clock advances by the CPU time of its callbacks on this machine (`benchmarks.virtual_actors`). Only
engines, trainer ranks and copies are simulated (`benchmarks.timed_roles`). They take the time of a `Costs`, which was measured
on this machine (`benchmarks.scale_costs`), or is a JSON file of yours (`--costs`).

Each size is simulated twice, as it is and with free callbacks and messages. The difference is the overhead of the design.
"""

import argparse
import gc
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import titanrl.data.tokenizer as tokenizer_module
import titanrl.generator.actor as generator_actor
import titanrl.launch.assembly as assembly
import titanrl.replay.shards as shards
import titanrl.rollout.workers as workers
from benchmarks.machine import write_result
from benchmarks.scale_costs import run_overrides, run_steps
from benchmarks.scale_tables import comparison_table, size_table
from benchmarks.timed_roles import (
    Costs,
    Machinery,
    SizedPayloads,
    TimedFleet,
    TimedGenerator,
    TimedNews,
    TimedTrainer,
    parts_without_hosts,
)
from benchmarks.virtual_actors import MessageCosts, World
from titanrl.carriers.record import close_timeline
from titanrl.config import Config, load_config
from titanrl.grpo import GRPO
from titanrl.metrics.steps import PhaseTimer
from titanrl.run.checkpoints import FIRST, Resumable

LIMIT_S = 1e7
"""Virtual seconds after which a simulation fails."""
FREE = MessageCosts(send_s=0.0, receive_s=0.0, others_s=0.0, latency_s=0.0, bytes_per_s=float("inf"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Size of a simulated run."""

    generators: int
    trainer_ranks: int = 1
    groups_per_step: int
    workers: int = 1
    group_size: int = 8
    max_new_tokens: int = 256
    max_staleness: int = 1


class _Simulated(GRPO):
    """The loop, without the checks of this machine."""

    @classmethod
    def check(cls, config: Config, **options: Any) -> Resumable:
        """Check nothing."""
        return Resumable(state=FIRST, unusable={})


def simulate(
    size: Size, costs: Costs, *, num_steps: int, callback_s: float | None = None, is_free: bool = False, warmup: int = 2
) -> dict[str, Any]:
    """Simulate a run and return its figures per step.

    Args:
        size: Size of the run.
        costs: Costs of the stand-ins and of messages.
        num_steps: Number of measured steps, after `warmup` others.
        callback_s: CPU seconds of each callback; None measures them.
        is_free: True if callbacks and messages take no time.
    """
    world = World(FREE if is_free else costs.messages, 0.0 if is_free else callback_s)
    machinery = Machinery(world, costs, size.trainer_ranks)
    with tempfile.TemporaryDirectory(prefix="titanrl-bench-") as folder, _stand_ins(machinery):
        run = _Simulated(config_of(size, Path(folder)))
        run.timer = PhaseTimer(clock=world.now)
        controller = world.process("controller", machinery.cores)
        collecting = gc.isenabled()
        gc.disable()  # a collection would be charged to the process in which it happens, for the memory of all
        try:
            return world.run(controller, _measure(run, machinery, size, num_steps, warmup), LIMIT_S)
        finally:
            world.close()
            if run._recorder is not None:
                run.recorder.close()
            close_timeline()  # its thread writes into the folder
            run.console.close()
            run._lock.release()
            if collecting:
                gc.enable()


def config_of(size: Size, folder: Path) -> Config:
    """Return the configuration of a simulated run."""
    overrides = [
        *run_overrides(folder, "scale", 1_000_000),
        f"max_staleness={size.max_staleness}",
        f"rollout.groups_per_step={size.groups_per_step}",
        f"rollout.group_size={size.group_size}",
        f"rollout.max_new_tokens={size.max_new_tokens}",
        f"rollout.num_workers={size.workers}",
        f"trainer.parallelism.dp_shard={size.trainer_ranks}",
        f"generator.replicas={size.generators}",
        "logging.console=off",
        *(f"{key}=1e6" for key in ("rollout.starvation_timeout_s", "faults.min_stall_s")),
        *(f"timeouts.{key}=1e6" for key in ("start_s", "step_s", "sync_s")),
    ]
    return load_config("configs/quickstart.yaml", overrides)


async def _measure(run: GRPO, machinery: Machinery, size: Size, num_steps: int, warmup: int) -> dict[str, Any]:
    await run.start()
    for _ in range(warmup):
        await run.step()
    world = machinery.world
    before, before_messages, began = _busy(machinery), world.processes["controller"].num_messages, world.now()
    values = []
    for _ in range(num_steps):
        values.append((await run.step()).values)
        world.free.post(world.now(), gc.collect)
    seconds = world.now() - began
    busy = {name: after - before[name] for name, after in _busy(machinery).items()}
    rollouts = [busy[f"rollout_{number}"] for number in range(size.workers)]
    medians = {
        key: statistics.median(value[key] for value in values if key in value)
        for key in ("time/step_s", "sync/push_s", "sync/pull_s", "time/rollout_s", "staleness/mean")
        if any(key in value for value in values)
    }
    return {
        "step_s": seconds / num_steps,
        "tokens_per_s": busy["tokens"] / seconds,
        "push_s": medians.get("sync/push_s"),
        "pull_s": medians.get("sync/pull_s"),
        "wait_for_batch_s": medians["time/rollout_s"],
        "staleness_mean": medians["staleness/mean"],
        "controller_s": busy["controller"] / num_steps,
        "buffer_s": busy["store"] / num_steps,
        "worker_s": max(rollouts) / num_steps,
        "controller_messages": (world.processes["controller"].num_messages - before_messages) / num_steps,
        "trainer_busy": busy["trainer"] / seconds,
        "generators_busy": busy["generators"] / seconds / size.generators,
    }


def _busy(machinery: Machinery) -> dict[str, float]:
    busy = {name: process.busy_s for name, process in machinery.world.processes.items()}
    return busy | {
        "trainer": machinery.train_busy_s,
        "generators": machinery.decode_busy_s,
        "tokens": float(machinery.num_tokens),
    }


@contextmanager
def _stand_ins(machinery: Machinery) -> Iterator[None]:
    """Replace what starts processes, computes or copies."""
    payloads = cache(lambda number: SizedPayloads())

    async def hosts(config: Config, *arguments: Any, **options: Any) -> Any:
        return parts_without_hosts(config)

    async def store(procs: Any) -> None:
        return None

    replaced: dict[Any, dict[str, Any]] = {
        assembly: {
            "PolicyTrainer": partial(TimedTrainer, machinery),
            "Generator": partial(TimedGenerator, machinery, itertools.count()),
            "ShardNews": TimedNews,
            "Fleet": lambda *arguments, **options: TimedFleet(machinery),
            "acquire_hosts": hosts,
            "spawn_store": store,
            "needed": lambda *arguments: {},
        },
        generator_actor: {"current_rank": lambda: _FIRST},
        workers: {"shared_payloads": lambda number, *arguments: payloads(number)},
        shards: {"shared_payloads": lambda number, *arguments: payloads(number)},
        tokenizer_module: {"load_tokenizer": cache(tokenizer_module.load_tokenizer)},
    }
    before = {module: {name: vars(module)[name] for name in names} for module, names in replaced.items()}
    for module, names in replaced.items():
        vars(module).update(names)
    try:
        yield
    finally:
        for module, names in before.items():
            vars(module).update(names)


class _First:
    rank = 0


_FIRST = _First()


def cluster(generators: int) -> Size:
    """Return a run of a size: 8 generators per trainer rank, 16 per worker, and 4 groups per generator and step."""
    return Size(
        generators=generators,
        trainer_ranks=max(1, generators // 8),
        workers=max(1, generators // 16),
        groups_per_step=4 * generators,
    )


SIZES = (1, 4, 16, 64, 256, 1024, 4096)
"""Generators of the simulated sizes."""
REPLICAS = (1, 2, 4)
"""Generators of the runs with which a simulation is compared."""
COMPARED = ("rollout.groups_per_step=16", "rollout.max_new_tokens=128", "max_staleness=1")
"""Overrides of these runs, after those of `benchmarks.scale_costs`."""
SKIPPED_STEPS = 5
LATE = (0.1, 0.5)
"""Overheads from which the design counts as used up."""


def main() -> None:
    """Simulate or compare, print a table, and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file to write; sizes that are in it and not simulated stay")
    parser.add_argument(
        "--costs", type=Path, required=True, help="JSON file with costs, such as that of benchmarks.scale_costs"
    )
    parser.add_argument("--generators", type=int, nargs="+", default=list(SIZES), help="sizes to simulate")
    parser.add_argument("--steps", type=int, default=3, help="measured steps per size")
    parser.add_argument("--compare", action="store_true", help="compare simulations with real runs on this machine instead")
    arguments = parser.parse_args()
    costs = read_costs(arguments.costs)
    if arguments.compare:
        runs = compare(costs)
        print(comparison_table(runs))
        write_result(arguments.json, "scale_compare", {"costs": asdict(costs), "runs": runs}, shown={})
        return
    known = json.loads(arguments.json.read_text())["sizes"] if arguments.json.exists() else []
    by_size = {row["generators"]: row for row in known}
    for generators in arguments.generators:
        by_size[generators] = row_of(cluster(generators), costs, arguments.steps)
        print(size_table([by_size[generators]]).splitlines()[-1], flush=True)
    rows = [by_size[generators] for generators in sorted(by_size)]
    print(size_table(rows))
    write_result(arguments.json, "scale", {"costs": asdict(costs), "sizes": rows, "ends": ends(rows)}, shown=ends(rows))


def read_costs(path: Path) -> Costs:
    """Read costs from a JSON file."""
    values = json.loads(path.read_text())
    return Costs(**{**values, "messages": MessageCosts(**values["messages"])})


def row_of(size: Size, costs: Costs, num_steps: int, callback_s: float | None = None) -> dict[str, Any]:
    """Simulate a size as it is and without overhead; return its figures and the first bottleneck."""
    began = time.monotonic()
    figures = simulate(size, costs, num_steps=num_steps, callback_s=callback_s)
    free = simulate(size, costs, num_steps=num_steps, is_free=True)
    overhead = max(0.0, 1.0 - free["step_s"] / figures["step_s"])
    return {
        **asdict(size),
        **figures,
        "free_step_s": free["step_s"],
        "overhead": overhead,
        "controller_share": figures["controller_s"] / figures["step_s"],
        "bottleneck": bottleneck(figures),
        "simulation_s": time.monotonic() - began,
    }


def bottleneck(figures: Mapping[str, Any]) -> str:
    """Return the part that is busiest, or `stragglers` if every part waits for more than a quarter of the time."""
    step_s = figures["step_s"]
    busy = {
        "controller": figures["controller_s"] / step_s,
        "buffer": figures["buffer_s"] / step_s,
        "rollout workers": figures["worker_s"] / step_s,
        "push and pull": (figures["push_s"] + figures["pull_s"]) / step_s,
        "trainer": figures["trainer_busy"],
        "generators": figures["generators_busy"],
    }
    part = max(busy, key=lambda name: busy[name])
    return part if busy[part] >= 0.75 else "stragglers"


def ends(rows: Sequence[Mapping[str, Any]]) -> dict[str, int | None]:
    """Return the smallest size whose overhead exceeds each limit; None if no size's does."""
    return {
        f"overhead above {limit:.0%}": next((row["generators"] for row in rows if row["overhead"] > limit), None)
        for limit in LATE
    }


def compare(costs: Costs, num_steps: int = 25) -> list[dict[str, Any]]:
    """Run and simulate the same configuration on this machine, for each number of generators."""
    cores = float(len(os.sched_getaffinity(0)))
    rows = []
    for replicas in REPLICAS:
        overrides = [*COMPARED, f"generator.replicas={replicas}"]
        with tempfile.TemporaryDirectory(prefix="titanrl-bench-", ignore_cleanup_errors=True) as folder:
            steps = run_steps(Path(folder), f"real{replicas}", num_steps, overrides)[SKIPPED_STEPS:]
        seconds = sum(step["time/step_s"] for step in steps)
        tokens = sum(step["tokens/response_len_mean"] for step in steps) * 16 * 8
        real = {"step_s": seconds / len(steps), "tokens_per_s": tokens / seconds}
        size = Size(generators=replicas, groups_per_step=16, max_new_tokens=128)
        simulated = simulate(size, replace(costs, cores=cores), num_steps=num_steps - SKIPPED_STEPS, warmup=SKIPPED_STEPS)
        rows.append({"replicas": replicas, "real": real, "simulated": {name: simulated[name] for name in real}})
    return rows


if __name__ == "__main__":
    main()
