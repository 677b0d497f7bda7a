"""Measure what the record of a run costs: `python -m benchmarks.record --json FILE`.

Pairs of quick starts with and without the record run at the same time on a core each, so that a machine whose speed varies
favors neither. They report the CPU seconds of all their processes per step. Then the benchmark measures recording alone, and
opening and searching the record of 5,000 steps and 100,000 rollouts. CPU seconds exclude waiting for a disk.

With `--board`, it measures only pairs of runs. One of them has the record and is shown by `titanrl board`: a client asks it for
what an open page asks for, as often. The CPU seconds of the client do not count; those of the board do.
"""

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.machine import write_result
from benchmarks.startup import cpu_s as cpu_of_processes
from titanrl.carriers.record import FOLDER, RecordFile, close_timeline, open_timeline, span
from titanrl.carriers.types import Group, Prompt, Rollout, Segment
from titanrl.config import load_config
from titanrl.data.tokenizer import load_tokenizer, write_tokenizer
from titanrl.metrics.reading import RunRecord
from titanrl.rollout.group import GroupRecorder

GROUP_SIZE, GROUPS_PER_STEP = 8, 2
"""Completions of a recorded group, and groups of a step that the defaults record."""
NUM_STEPS, NUM_ROLLOUTS, ROLLOUTS_PER_GROUP = 5_000, 100_000, 10
NUM_REPEATS = 60
SPANS_PER_STEP = 150
"""Spans of all processes in a step of the quick start, before they are merged."""
NUM_SKIPPED = 10
"""Steps at the start of a run that are not measured."""
BOARD = (sys.executable, "-m", "titanrl.commands", "board")
PAGE_S, NUM_VISIBLE = 1.5, 9
"""Seconds between two updates of a page, and charts that a window of 1400 times 1000 pixels shows."""
NEEDLE = "a planted Needle"
SEARCHES: Mapping[str, Callable[[RunRecord], object]] = {
    "needle": lambda run: run.search(NEEDLE.lower()),
    "text of every rollout": lambda run: run.search("12 + 7"),
    "reward, part and steps": lambda run: run.search(reward=(0.5, None), parts={"answer": (1, 1)}, step=(100, 200)),
    "read 100 of those found": lambda run: [hit.completion for hit in run.search()[5_000:5_100]],
}


def main() -> None:
    """Run the benchmark, and write the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.record", description=__doc__)
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--pairs", type=int, default=4, help="number of pairs of runs; an even number uses both cores equally")
    parser.add_argument("--steps", type=int, default=160, help="steps of a run")
    parser.add_argument("--board", action="store_true", help="measure the record and `titanrl board` together")
    parser.add_argument("--run", choices=("on", "off", "board"), help=argparse.SUPPRESS)
    parser.add_argument("--page", help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--open", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run is not None:
        os.sched_setaffinity(0, {arguments.core})
        with tempfile.TemporaryDirectory(prefix="titanrl-bench-") as folder:
            print(json.dumps(asyncio.run(step_costs(Path(folder), arguments.steps, arguments.run))))
        return
    if arguments.page is not None:
        follow(arguments.page)
        return
    if arguments.open is not None:
        print(json.dumps(opened(arguments.open)))
        return
    if arguments.json is None:
        parser.error("--json: give the file to write")
    state = "board" if arguments.board else "on"
    runs = [measured_pair(arguments.steps, number, state) for number in range(arguments.pairs)]
    if arguments.board:
        write_result(arguments.json, "board", {"steps": arguments.steps, "runs": runs})
        return
    with tempfile.TemporaryDirectory(prefix="titanrl-bench-") as folder:
        recording = {str(length): recorded(Path(folder) / str(length), length) for length in (20, 200, 2_000)}
        write_run(Path(folder) / "run")
        opening = [result_of(started("--open", Path(folder) / "run")) for _ in range(3)]
    write_result(arguments.json, "record", {"steps": arguments.steps, "runs": runs, "recording": recording, "opening": opening})


def measured_pair(num_steps: int, number: int, state: str) -> dict[str, Any]:
    """Run the quick start in a state and without the record at the same time, on a core each, swapped in each pair."""
    first, second, *_ = sorted(os.sched_getaffinity(0))
    cores = {state: second, "off": first} if number % 2 else {state: first, "off": second}
    processes = {state: started("--run", state, "--core", core, "--steps", num_steps) for state, core in cores.items()}
    return {state: result_of(process) for state, process in processes.items()}


def started(*arguments: object) -> subprocess.Popen[str]:
    """Start a part of the benchmark in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.record", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def result_of(process: subprocess.Popen[str]) -> Any:
    """Return the figures of a part of the benchmark."""
    output, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"a part of the benchmark failed with exit code {process.returncode}")
    return json.loads(output.splitlines()[-1])


async def step_costs(folder: Path, num_steps: int, state: str) -> Mapping[str, Any]:
    """Run the quick start; return the CPU seconds per step of all processes and of those by role, and the bytes of the record.

    The state is `off` (without the record), `on` (with it), or `board` (with it, shown by a board whose CPU seconds count).
    """
    from titanrl.grpo import GRPO
    from titanrl.launch import assembly
    from titanrl.run import run as loop

    overrides = [
        f"output_dir={folder}",
        "name=run",
        f"num_steps={num_steps}",
        "evaluation.every_steps=0",
        "logging.console=off",
    ]
    if state == "off":
        vars(assembly).update(span_bytes=lambda config: 0)  # no process but the controller opens a timeline
        vars(loop).update(open_timeline=lambda *place, **options: None)
        overrides.append("logging.rollouts_per_step=0")
    run = await GRPO(load_config("quickstart", overrides)).start()
    helpers: list[subprocess.Popen[str]] = []
    try:
        if state == "board":
            helpers.append(subprocess.Popen([*BOARD, str(folder)], stdout=subprocess.PIPE, text=True))
            assert helpers[0].stdout is not None
            address = helpers[0].stdout.readline().split(" at ")[1].strip()
            helpers.append(started("--page", address))
        for _ in range(NUM_SKIPPED):
            await run.step()

        def used() -> Counter[str]:
            seconds = Counter(cpu_of_processes([os.getpid()]))
            if helpers:
                board, page = (Counter(cpu_of_processes([each.pid])) for each in helpers)
                seconds.subtract(page)
                seconds.subtract(board)
                seconds["board"] = board.total()
            return seconds

        before = used()
        for _ in range(num_steps - NUM_SKIPPED):
            await run.step()
        after = used()
        after.subtract(before)
    finally:
        for each in reversed(helpers):
            each.terminate()
            each.wait()
        await run.close()
    num_bytes = sum(path.stat().st_size for path in (folder / "run" / FOLDER).glob("*"))
    roles = {role: seconds / (num_steps - NUM_SKIPPED) for role, seconds in after.items() if seconds}
    return {"step_cpu_s": sum(roles.values()), "step_bytes": num_bytes / num_steps, "roles_cpu_s": roles}


def follow(address: str) -> None:
    """Ask a board for what an open page of its run asks for, until this process is ended."""
    url, _, key = address.partition("/#key=")
    client = httpx.Client(base_url=url, headers={"x-api-key": key}, timeout=60)
    with client, client.stream("GET", "/api/changes") as changes:
        asked, known, state = 0.0, [""], ""
        client.post("/api/steer", json={"run": "run"})  # later only when the run was steered
        for line in changes.iter_lines():
            if not line.startswith("data: ") or time.monotonic() < asked + PAGE_S:
                continue
            asked = time.monotonic()
            shown = client.post("/api/run", json={"run": "run"}).json()
            names = [name for panel in shown["panels"][:NUM_VISIBLE] for name in panel["labels"]]
            charts = client.post("/api/charts", json={"run": "run", "name": names, "since": state if names == known else ""})
            known, state = names, charts.json()["state"]


def cpu_s(work: Callable[[], object]) -> float:
    """Return the CPU seconds of this process in a call."""
    started = time.process_time()
    work()
    return time.process_time() - started


def recorded(run_dir: Path, length: int) -> Mapping[str, float]:
    """Return the median CPU seconds, and the bytes, of recording a step whose completions have `length` tokens."""
    config = load_config("quickstart", ["logging.loggers=[]"])
    folder = run_dir / "model"
    folder.mkdir(parents=True)
    write_tokenizer(folder)
    tokenizer = load_tokenizer(folder)
    recorder = GroupRecorder(run_dir, "rollout_0_0", config, tokenizer)
    random = np.random.default_rng(0)
    group = sampled_group(random, length)
    trained = RecordFile(run_dir, "trained", "trainer_0", 10**9)
    names = ("positions", "logprobs", "generator_logprobs", "versions", "advantages", "weights")
    columns = {name: random.normal(size=length).astype(np.float32) for name in names}
    values = {"time": time.time(), "step": 1, "update": 0, "version": 3, "index": 0, "segment": 0, "mean_weight": 1.0}

    def groups() -> None:
        for _ in range(GROUPS_PER_STEP):
            recorder.rollouts(group, tokenizer.decode_completion, status="kept", version=3)

    def losses() -> None:
        trained.append(*[(values, columns)] * (GROUPS_PER_STEP * GROUP_SIZE))

    def spans() -> None:
        for _ in range(SPANS_PER_STEP):
            with span("compute"):
                pass

    parts = {f"{work.__name__}_s": statistics.median(cpu_s(work) for _ in range(NUM_REPEATS)) for work in (groups, losses)}
    open_timeline(run_dir, "trainer_0", 10**8, is_server=True)
    parts["spans_s"] = statistics.median(cpu_s(spans) for _ in range(NUM_REPEATS))
    close_timeline()
    num_bytes = sum(path.stat().st_size for path in (run_dir / FOLDER).glob("[rt]*"))
    return {**parts, "bytes": num_bytes / NUM_REPEATS}


def sampled_group(random: np.random.Generator, length: int) -> Group:
    """Return a group whose completions have `length` tokens after a prompt of 20."""
    mask = np.arange(20 + length) >= 20
    rollouts = [
        Rollout(
            segments=(
                Segment(
                    token_ids=random.integers(10, 30, 20 + length),
                    mask=mask,
                    logprobs=random.normal(size=20 + length).astype(np.float32),
                    versions=np.where(mask, 3, -1),
                ),
            ),
            reward=1.0,
            reward_parts={"answer": 1.0},
            finish_reason="stop",
        )
        for _ in range(GROUP_SIZE)
    ]
    entry = {"question": "1 + 1 =", "answer": "2", "metadata": {}}
    prompt = Prompt(index=0, task="sums", text="1 + 1 =", token_ids=tuple(range(10, 30)), entry=entry)
    return Group(prompt=prompt, rollouts=tuple(rollouts), generate_s=0.1, score_s=0.1)


def write_run(run_dir: Path) -> None:
    """Write the files of a long run. Its completions have 200 tokens and 277 characters; one has the needle."""
    file = RecordFile(run_dir, "rollouts", "rollout_0_0", 10**10)
    text = "<think>" + "12 + 7 = 19; " * 20 + "</think>"
    completion = {"num_tokens": 200, "finish_reason": "stop", "outcome": "ok", "segments": [{"num_tokens": 220}]}
    columns = {
        "token_ids": np.zeros(220 * ROLLOUTS_PER_GROUP, np.int32),
        "mask": np.ones(220 * ROLLOUTS_PER_GROUP, np.bool_),
        "logprobs": np.zeros(220 * ROLLOUTS_PER_GROUP, np.float32),
        "versions": np.zeros(220 * ROLLOUTS_PER_GROUP, np.int32),
    }
    num_groups = NUM_ROLLOUTS // ROLLOUTS_PER_GROUP
    for index in range(num_groups):
        rewards = [float(number % 2) for number in range(ROLLOUTS_PER_GROUP)]
        texts = [text] * (ROLLOUTS_PER_GROUP - 1) + [NEEDLE if index == num_groups * 3 // 4 else text]
        prompt = f"{index} + 1 ="
        line = {
            "time": float(index),
            "index": index,
            "task": "sums",
            "status": "kept",
            "version": index // 2,
            "prompt": prompt,
            "rendered": prompt,
            "answer": str(index + 1),
            "completions": [
                {**completion, "text": text, "reward": reward, "reward_parts": {"answer": reward}}
                for text, reward in zip(texts, rewards, strict=True)
            ],
        }
        file.append((line, columns))
    metrics = [{"step": step, "version": step, **{f"m/{n}": 0.5 for n in range(60)}} for step in range(1, NUM_STEPS + 1)]
    steps = [{"step": index // 2 + 1, "index": index, "version": 0, "advantages": [0.5] * 10} for index in range(num_groups)]
    for name, rows in (("metrics", metrics), ("advantages", steps)):
        (run_dir / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def opened(run_dir: Path) -> Mapping[str, float]:
    """Return the CPU seconds of opening a run and of searches, and the memory that the process grew by, in bytes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run = RunRecord(run_dir)
    figures = {
        "metrics": cpu_s(run.metrics),
        "open": cpu_s(lambda: len(run.search())),
        "refresh": cpu_s(lambda: len(run.search())),
    }
    assert (len(run.search()), len(run.search(NEEDLE.lower())), len(run.metrics())) == (NUM_ROLLOUTS, 1, NUM_STEPS)
    figures |= {name: cpu_s(partial(search, run)) for name, search in SEARCHES.items()}
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {**figures, "memory_bytes": grown * 1024.0}


if __name__ == "__main__":
    main()
