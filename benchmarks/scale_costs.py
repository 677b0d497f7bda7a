"""Measure the costs for `benchmarks.scale` on this machine: `python -m benchmarks.scale_costs --json FILE`.

Synchronous runs with one generator on one core, in which nothing overlaps, give the seconds of decoding and of training, by
least squares over their steps, and those of a push and a pull. Requests to an idle actor give the costs of messages.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.machine import describe_machine
from benchmarks.timed_roles import Costs
from benchmarks.virtual_actors import MessageCosts, Procs, World
from titanrl.launch.assembly import Fleet, local_host
from titanrl.launch.supervision import Supervisor
from titanrl.metrics.reading import read_metrics
from titanrl.processes.actors import Actor, ask_actor, concurrent_endpoint

MODEL = (
    "model.recipe.hidden_size=256",
    "model.recipe.num_layers=4",
    "model.recipe.num_heads=8",
    "model.recipe.num_kv_heads=4",
    "model.recipe.intermediate_size=768",
    "trainer.row_tokens=512",
    "trainer.rows_per_microbatch=8",
    "trainer.share_prompts=false",
    "generator.max_num_seqs=1024",
    "generator.kv_cache_bytes=536870912",
    "generator.on_update=continue",
    "sandbox.num_processes=1",
)
"""Overrides that set the model, which has 3 million parameters, and its batches."""
ROWS_PER_MICROBATCH = 8
GROUP_SIZE = 8
CASES = ((4, 32), (4, 128), (16, 32), (16, 128))
"""Groups per step and longest completion of the synchronous runs."""
SKIPPED_STEPS = 3
NUM_STEPS = 8
"""Measured steps of each run."""
NUM_MESSAGES = 3000


class Echo(Actor):
    """Actor that replies immediately."""

    @concurrent_endpoint
    async def echo(self, value: int) -> int:
        """Return the argument."""
        return value

    @concurrent_endpoint
    async def cpu_s(self) -> float:
        """Return the CPU seconds of this process so far."""
        return time.process_time()


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale_costs", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="titanrl-bench-", ignore_cleanup_errors=True) as folder:
        messages = asyncio.run(message_costs(Path(folder)))
        rows = [(groups, row) for groups, longest in CASES for row in synchronous_steps(Path(folder), groups, longest)]
    machine = describe_machine()
    source = f"measured on one core of an {machine['processor']} at commit {machine['commit']}"
    costs = costs_of(rows, messages, source)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(asdict(costs), indent=2) + "\n")
    print(arguments.json.read_text())


async def message_costs(folder: Path) -> MessageCosts:
    """Measure requests to an actor: many at once for the CPU seconds, one by one for the latency."""
    supervisor = Supervisor()
    fleet = Fleet(folder, supervisor)
    actor: Any = fleet.spawn("echo", local_host(), 1, {}, ("benchmarks.scale_costs",)).spawn("echo", Echo)
    try:
        for _ in range(100):
            await ask_actor(actor.echo, 0)
        before, own_before = time.process_time() + await ask_actor(actor.cpu_s), time.thread_time()
        for _ in range(NUM_MESSAGES // 50):
            await asyncio.gather(*(ask_actor(actor.echo, number) for number in range(50)))
        own_s = (time.thread_time() - own_before) / NUM_MESSAGES
        cpu_s = (time.process_time() + await ask_actor(actor.cpu_s) - before) / NUM_MESSAGES
        seconds = []
        for _ in range(500):
            began = time.perf_counter()
            await ask_actor(actor.echo, 0)
            seconds.append(time.perf_counter() - began)
    finally:
        supervisor.expect_deaths()
        await fleet.stop(20)
    each_s = max(0.0, own_s - executed_s()) / 2
    # A request and its reply are two messages; this thread sends one and receives the other, and so does the actor's.
    return MessageCosts(
        send_s=each_s,
        receive_s=each_s,
        others_s=max(0.0, cpu_s - 2 * own_s) / 2,
        latency_s=max(0.0, statistics.median(seconds) / 2 - own_s),
        bytes_per_s=1e9,
    )


def executed_s() -> float:
    """Return the CPU seconds of a request that a simulation executes itself, in the process that sends it."""
    world = World(MessageCosts(send_s=0.0, receive_s=0.0, others_s=0.0, latency_s=0.0, bytes_per_s=1e9))
    controller = world.process("controller")

    async def ask() -> None:
        actor = Procs(world.process("echo")).spawn("echo", Echo)
        for _ in range(NUM_MESSAGES // 50):
            await asyncio.gather(*(ask_actor(actor.echo, number) for number in range(50)))

    world.run(controller, ask(), limit_s=1e6)
    world.close()
    return controller.busy_s / NUM_MESSAGES


def run_overrides(folder: Path, name: str, num_steps: int) -> list[str]:
    """Return the overrides of every measured run."""
    return [
        f"name={name}",
        f"output_dir={folder}/runs",
        f"cache_dir={folder}/cache",
        f"num_steps={num_steps}",
        "warm_start=null",
        "data.rewards={answer: {function: benchmarks.varied_reward:by_place_in_loop, trusted: true}}",
        "evaluation.every_steps=0",
        "evaluation.num_prompts=0",
        "checkpoint.every_steps=0",
        "logging.console=plain",
        "logging.rollouts_per_step=0",
        *MODEL,
    ]


def run_steps(folder: Path, name: str, num_steps: int, overrides: Sequence[str], core: int | None = None) -> list[Any]:
    """Run the command, on one core if given; return the metrics of its steps, in order."""
    arguments = [*run_overrides(folder, name, num_steps), *overrides]
    command = [sys.executable, "-m", "titanrl.grpo", "--config", "configs/quickstart.yaml", *arguments]

    def bind() -> None:
        if core is not None:
            os.sched_setaffinity(0, {core})

    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=bind)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return read_metrics(folder / "runs" / name / "metrics.jsonl")


def synchronous_steps(folder: Path, groups: int, longest: int) -> list[Any]:
    """Return the metrics of the steps of a synchronous run on one core."""
    sizes = [f"rollout.groups_per_step={groups}", f"rollout.max_new_tokens={longest}", "max_staleness=0"]
    name = f"sync-{groups}-{longest}"
    return run_steps(folder, name, SKIPPED_STEPS + NUM_STEPS, sizes, core=0)[SKIPPED_STEPS:]


def costs_of(rows: Sequence[tuple[int, Mapping[str, float]]], messages: MessageCosts, source: str) -> Costs:
    """Return the costs that explain the steps of synchronous runs, each with its number of groups."""
    decode, train = [], []
    for groups, row in rows:
        num_tokens = row["tokens/response_len_mean"] * groups * GROUP_SIZE
        prompt_tokens = row["tokens/prompt_len_mean"] * groups
        decode.append((row["tokens/response_len_max"], num_tokens, prompt_tokens, num_tokens / row["perf/gen_tokens_per_s"]))
        busy_s = (1.0 - row["perf/trainer_idle_frac"]) * row["time/step_s"]
        places = row["perf/train_tokens_per_s"] * busy_s / row["perf/packing_efficiency"]
        passes = np.ceil(places / (512 * ROWS_PER_MICROBATCH))
        train.append((passes, places, busy_s - row["time/optim_s"]))
    decode_s, decode_sequence_s, prefill_token_s = least_squares(decode)
    pass_s, train_token_s = least_squares(train)

    def median(name: str) -> float:
        return statistics.median(row[name] for _, row in rows if name in row)

    num_bytes = median("sync/bytes")
    stops = sum(1.0 - row["tokens/truncated_frac"] for _, row in rows)
    tokens = sum(row["tokens/response_len_mean"] for _, row in rows)
    way_s = 2 * (messages.latency_s + messages.send_s + messages.receive_s)
    return Costs(
        source=source,
        decode_s=decode_s,
        decode_sequence_s=decode_sequence_s,
        prefill_token_s=prefill_token_s,
        pass_s=pass_s,
        train_token_s=train_token_s,
        optim_s=median("time/optim_s"),
        weight_bytes=num_bytes,
        push_bytes_per_s=num_bytes / max(median("sync/push_s") - way_s, 1e-5),
        pull_bytes_per_s=num_bytes / max(median("sync/pull_s") - way_s, 1e-5),
        serve_bytes_per_s=8 * num_bytes / max(median("sync/pull_s") - way_s, 1e-5),
        stop_probability=stops / tokens,
        messages=messages,
    )


def least_squares(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return nonnegative coefficients with which the columns add up to the last one. All rows have the same relative weight."""
    table: npt.NDArray[np.float64] = np.array(rows, np.float64)
    table = table / table[:, -1:]
    columns, coefficients = list(range(table.shape[1] - 1)), np.zeros(table.shape[1] - 1)
    while columns:
        found = np.linalg.lstsq(table[:, columns], table[:, -1], rcond=None)[0]
        if (found >= 0.0).all():
            coefficients[columns] = found
            break
        columns.pop(int(np.argmin(found)))
    return [float(value) for value in coefficients]


if __name__ == "__main__":
    main()
