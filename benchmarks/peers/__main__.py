"""Compare with other programs: `python -m benchmarks.peers --json FILE`.

The same GRPO task runs in alternation through TitanRL, synchronously and asynchronously, through TRL's `GRPOTrainer` with
Hugging Face generation, and through a plain loop of PyTorch and transformers, which shows what a framework costs. All start
from the same model with the same prompts, rewards, batch, lengths and optimizer, take one optimizer step per batch, and compute
in float32. The benchmark makes an environment of its own for TRL, with the newest version that pip finds. A peer first tries
the settings of `trials`, and runs with the fastest; TitanRL runs with its defaults.

The file is written after each run. With a file of the same commit and machine, the benchmark runs only what is missing.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine, write_result
from benchmarks.peers.figures import Run, best, score_figures, speed_figures, summary
from benchmarks.peers.job import Job, Setting, read_rows, write_job
from benchmarks.peers.watch import Watch
from titanrl.config import load_config
from titanrl.config.device import TORCH_CPU, TORCH_CPU_INDEX
from titanrl.config.sections import RecipeConfig
from titanrl.data.streams import make_stream
from titanrl.data.tokenizer import load_tokenizer
from titanrl.metrics.reading import read_metrics
from titanrl.models.recipe import create_model
from titanrl.session.session import prepare_starting_model

QUICKSTART = Path("configs/quickstart.yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """A model and a task."""

    recipe: RecipeConfig | None
    """Shape of a random model; None for the warm-started model of the quick start."""
    reward: str
    groups: int
    group_size: int
    max_new_tokens: int
    learning_rate: float
    evaluate_every: int = 0
    num_turns: int
    num_steps: int
    """Steps of a run. Asynchronous runs make `NUM_AHEAD` more, which do not count."""
    num_skipped: int
    """Steps at the start that do not count."""
    num_trial_steps: int
    """Steps of a trial of a setting; the first does not count unless it is the only one."""
    trial_threads: Sequence[int]
    """Threads that peers try; 0 for one per core."""


SHORT = Payload(
    recipe=None, reward="answered", groups=8, group_size=8, max_new_tokens=26, learning_rate=5e-5, num_turns=3, num_steps=60,
    num_skipped=10, num_trial_steps=13, trial_threads=(0, 1),
)  # fmt: skip
LONG_10M = Payload(
    recipe=RecipeConfig(
        hidden_size=384, num_layers=6, num_heads=6, num_kv_heads=2, head_dim=64, intermediate_size=1088, max_positions=1024
    ),
    reward="digits", groups=8, group_size=8, max_new_tokens=512, learning_rate=1e-6, num_turns=2, num_steps=4, num_skipped=1,
    num_trial_steps=1, trial_threads=(0,),
)  # fmt: skip
PAYLOADS = {
    "quickstart": SHORT,
    "score": replace(SHORT, evaluate_every=5, num_turns=2, num_steps=15),
    "10M": LONG_10M,
    "100M": replace(
        LONG_10M, groups=4, group_size=4, recipe=RecipeConfig(
            hidden_size=768, num_layers=14, num_heads=12, num_kv_heads=4, head_dim=64, intermediate_size=2304,
            max_positions=1024,
        ),
    ),
}  # fmt: skip
"""The quick start without and with evaluations, and random models of 10 and 96 million parameters. Their tokens are all about
equally probable, the end token included, so most completions are short and some are cut at 512 tokens; the mean is about 90."""
SETTINGS_OF = {"score": "quickstart"}
"""Payload whose trials also count for another one, because evaluations do not change the work of a step."""
OURS = {"TitanRL": 0, "TitanRL, asynchronous": 1}
"""Values of `max_staleness`."""
PEERS = {"TRL": "benchmarks.peers.trl_loop", "PyTorch": "benchmarks.peers.plain_loop"}
"""Modules of the peers."""
NUM_AHEAD = 2
"""Steps that an asynchronous run with `max_staleness: 1` may have begun to generate."""
PACKAGES = ("trl", "transformers", "torch", "accelerate")


def main() -> None:
    """Run what the file lacks, and write it after each run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file to write, or to continue")
    parser.add_argument("--payloads", nargs="+", choices=tuple(PAYLOADS), default=list(PAYLOADS))
    parser.add_argument("--systems", nargs="+", choices=(*OURS, *PEERS), default=[*OURS, *PEERS])
    parser.add_argument("--turns", type=int, help="runs of each system; by default 2 or 3")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run after so many seconds")
    parser.add_argument("--environment", type=Path, default=Path("runs/bench/peers"), help="folder of TRL's environment")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started = time.monotonic()
    python = make_environment(arguments.environment.absolute())
    runs = earlier_runs(arguments.json)
    packages = installed(python)
    for name in arguments.payloads:
        payload = PAYLOADS[name]
        with tempfile.TemporaryDirectory(prefix="titanrl-bench-") as folder:
            job = make_job(payload, Path(folder))
            for run in missing(name, runs, arguments.systems, arguments.turns or payload.num_turns):
                if time.monotonic() - started > arguments.seconds:
                    return
                runs.append(asdict(run) | {"figures": measure(run, payload, job, Path(folder), python)})
                result = {"peer_packages": packages, "summary": summary(runs), "runs": runs}
                write_result(arguments.json, "peers", result, shown=runs[-1])


def earlier_runs(path: Path) -> list[Mapping[str, Any]]:
    """Return the runs in the file, which must be of this commit and machine; none if there is no file."""
    if not path.exists():
        return []
    earlier = json.loads(path.read_text())
    if earlier["machine"] != describe_machine():
        sys.exit(f"{path}: of another commit or machine. Move it, or write to another file.")
    runs: list[Mapping[str, Any]] = earlier["runs"]
    return runs


def make_environment(folder: Path) -> Path:
    """Return the interpreter of TRL's environment; create the environment if it is missing."""
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        print(f"installing TRL into {folder} ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        index = os.environ.get("TORCH_CPU_INDEX", TORCH_CPU_INDEX)
        options = ["--quiet", "--retries", "1", "--extra-index-url", index]
        subprocess.run([python, "-m", "pip", "install", *options, "--requirement", TORCH_CPU, "trl"], check=True)
        (folder / "complete").touch()
    return python


def installed(python: Path) -> Mapping[str, str]:
    """Return the versions of the peers' packages."""
    program = f"import importlib.metadata as m, json; print(json.dumps({{name: m.version(name) for name in {PACKAGES}}}))"
    versions: Mapping[str, str] = json.loads(subprocess.check_output([python, "-c", program], text=True))
    return versions


def make_job(payload: Payload, folder: Path) -> Job:
    """Write the model and the prompts, and return the job."""
    config = load_config(QUICKSTART)
    if payload.recipe is None:
        model = prepare_starting_model(config)
        if not model.is_ready:
            command = [sys.executable, "-m", "titanrl.grpo", "--config", str(QUICKSTART), "num_steps=1", f"output_dir={folder}"]
            subprocess.run(command, check=True)
        path = model.base
    else:
        create_model(path := folder / "model", payload.recipe, seed=0)
    stream = make_stream(config.data, load_tokenizer(path), seed=0)
    train, heldout = [stream[i] for i in range(1000)], stream.heldout(200)
    # TitanRL reads one file, and splits it into the same parts, because a hash of the prompt decides.
    for name, prompts in {"train": train, "heldout": heldout, "all": [*train, *heldout]}.items():
        rows = ({"prompt": prompt.text, "answer": prompt.entry["answer"]} for prompt in prompts)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Job(
        model=str(path), train_file=str(folder / "train.jsonl"), heldout_file=str(folder / "heldout.jsonl"),
        evaluate_every=payload.evaluate_every, reward=payload.reward, num_steps=payload.num_steps, groups=payload.groups,
        group_size=payload.group_size, max_new_tokens=payload.max_new_tokens, learning_rate=payload.learning_rate, seed=0,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A run to make."""

    payload: str
    system: str
    turn: int | None
    """None for a trial of a setting."""
    setting: Setting | None
    """None for TitanRL."""


def missing(name: str, runs: Sequence[Mapping[str, Any]], systems: Sequence[str], num_turns: int) -> Iterator[Asked]:
    """Yield the runs of a payload that `runs` lacks: first the trials of the peers, then the turns.

    The caller adds each run to `runs` before it asks for the next one, because the trials determine the settings. The systems
    run in order in one turn, and in reverse order in the next.
    """
    tried = SETTINGS_OF.get(name, name)
    for system in filter(PEERS.__contains__, systems):
        done = [run["setting"] for run in found(runs, tried, system, None)]
        yield from (
            Asked(payload=tried, system=system, turn=None, setting=setting)
            for setting in trials(system, PAYLOADS[tried])
            if asdict(setting) not in done
        )
    for turn in range(num_turns):
        for system in systems[:: 1 if turn % 2 == 0 else -1]:
            if not found(runs, name, system, turn):
                setting = Setting(**best(found(runs, tried, system, None))) if system in PEERS else None
                yield Asked(payload=name, system=system, turn=turn, setting=setting)


def found(runs: Sequence[Mapping[str, Any]], payload: str, system: str, turn: int | None) -> list[Mapping[str, Any]]:
    """Return the runs of a payload, a system and a turn."""
    return [run for run in runs if (run["payload"], run["system"], run["turn"]) == (payload, system, turn)]


def trials(system: str, payload: Payload) -> Iterator[Setting]:
    """Yield the settings that a peer tries: every device batch with every number of threads, and continuous batching."""
    batch = payload.groups * payload.group_size
    for threads in (number or len(os.sched_getaffinity(0)) for number in payload.trial_threads):
        for device_batch in sorted({8, 16, batch}):
            yield Setting(threads=threads, device_batch=device_batch)
    if system == "TRL":
        yield Setting(threads=len(os.sched_getaffinity(0)), device_batch=8, continuous_batching=True)


def measure(run: Asked, payload: Payload, job: Job, folder: Path, python: Path) -> dict[str, Any]:
    """Make a run and return its figures."""
    if run.turn is None:
        made = make_run(run, replace(job, evaluate_every=0, num_steps=payload.num_trial_steps), folder, python)
        return speed_figures(made, num_skipped=min(1, payload.num_trial_steps - 1), num_dropped=0)
    ahead = NUM_AHEAD * OURS.get(run.system, 0)
    made = make_run(run, replace(job, num_steps=job.num_steps + ahead), folder, python)
    return (
        score_figures(made) if job.evaluate_every else speed_figures(made, num_skipped=payload.num_skipped, num_dropped=ahead)
    )


def make_run(run: Asked, job: Job, folder: Path, python: Path) -> Run:
    """Run a system once, and sample its processes.

    Raises:
        SystemExit: The system failed.
    """
    environment = dict(os.environ)
    record, run_dir, log = folder / "record.jsonl", folder / "runs" / "ours", folder / "log.txt"
    if run.setting is not None:
        write_job(job, run.setting, folder / "job.json")
        command = [str(python), "-m", PEERS[run.system], str(folder / "job.json"), str(record)]
        environment |= {"OMP_NUM_THREADS": str(run.setting.threads), "PYTHONPATH": str(Path.cwd())}
    else:
        command = [sys.executable, "-m", "titanrl.grpo", "--config", str(QUICKSTART), *overrides(job, folder, OURS[run.system])]
    shutil.rmtree(run_dir, ignore_errors=True)
    with log.open("w") as output:
        launched = time.time()
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            with Watch(process.pid, run_dir) as watch:
                process.wait()
        finally:
            process.terminate()  # without effect unless the benchmark was interrupted
            process.wait()
    if process.returncode:
        sys.exit(f"{run.system} exited with code {process.returncode}:\n{log.read_text()[-3000:]}")
    rows = read_rows(str(record)) if run.setting is not None else our_rows(read_metrics(run_dir / "metrics.jsonl"))
    return Run(
        launched=launched, rows=rows, cpu_s=watch.cpu_s, peak_bytes=watch.memory.peak_bytes, others_share=watch.others_share
    )


def overrides(job: Job, folder: Path, max_staleness: int) -> list[str]:
    """Return the changes of the quick start that make it the job."""
    long_tailed = [] if job.max_new_tokens < 100 else [
        f"trainer.row_tokens={32 + job.max_new_tokens}", "generator.on_update=continue",
        f"generator.kv_cache_bytes={256 << 20}",
    ]  # fmt: skip
    return [
        "name=ours", f"output_dir={folder}/runs", "warm_start=null", f"model.path={job.model}", f"seed={job.seed}",
        f"max_staleness={max_staleness}", f"num_steps={job.num_steps}", "logging.console=off",
        "data.source=jsonl", f"data.path={folder}/all.jsonl", "data.task_config={}",
        f"data.rewards={{{job.reward}: benchmarks/peers/job.py:{job.reward}}}",
        f"evaluation.every_steps={job.evaluate_every}", f"evaluation.num_prompts={200 if job.evaluate_every else 0}",
        f"rollout.groups_per_step={job.groups}", f"rollout.group_size={job.group_size}",
        f"rollout.max_new_tokens={job.max_new_tokens}", f"algorithm.learning_rate={job.learning_rate}",
        "algorithm.num_warmup_steps=0", *long_tailed,
    ]  # fmt: skip


def our_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the metrics of a run of TitanRL in the form of a peer's record."""
    made: list[dict[str, Any]] = []
    tokens = 0
    for row in rows:
        if "reward/mean" in row:
            generated = row["count/generated_tokens"]
            made.append({
                "time": row["time"], "step": row["step"], "step_s": row["time/step_s"], "reward": row["reward/mean"],
                "tokens": generated - tokens, "generate_s": row["time/rollout_s"],
                "train_s": row["time/train_s"] + row["time/optim_s"],
            })  # fmt: skip
            tokens = generated
        made += [
            {"time": row["time"], "score": value}
            for name, value in row.items()
            if name.startswith("eval/") and name.endswith("/mean")
        ]
    return made


if __name__ == "__main__":
    main()
