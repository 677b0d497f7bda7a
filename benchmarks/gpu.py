"""Check the trainer on one GPU: `python -m benchmarks.gpu --json FILE`; docs/gpu.md describes the parts and the figures.

Each part runs in a process of its own, because an illegal memory access would end all work of a process on its device. A part
that fails, or that exceeds its time, keeps the figures that it has measured, and the other parts still run. On a CPU, all parts
run in one process with tiny models, which tests the program and measures nothing.

This file imports neither torch nor titanrl's trainer, so that it can collect wheels and report what is missing.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WHEELS = (
    "torchtitan==0.3.0",
    "torchao==0.17.0",
    "spmd_types==0.2.3",
    "tyro==1.0.17",
    "docstring_parser==0.18.0",
    "pydantic==2.14.4",
    "pydantic_core==2.50.5",
    "annotated-types==0.8.0",
    "typing-inspection==0.4.5",
    "PyYAML==6.0.4",
    "rich==15.0.0",
    "markdown-it-py==4.3.0",
    "mdurl==0.1.2",
    "Pygments==2.21.0",
)
"""Packages that the parts import besides torch, transformers and numpy. The last nine usually come with transformers."""
FOR_MACHINE = ("--python-version", "3.12", "--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_17_x86_64")

BUDGET_S = 470.0
"""Seconds for all parts on a GPU."""
SHORTEST_S = 15.0
"""A part that has less time than this is not started."""
START_S = 25.0
"""Added to the limit of each process for its imports, which usually run while the part before it measures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the check."""

    name: str
    """Name of a function of `benchmarks.gpu_parts`, with its argument after a colon."""
    limit_s: float
    """Seconds after which the part is ended."""
    on_cpu: bool = False
    """True if the part runs on the CPU although there is a GPU."""


PARTS = (
    Part(name="limits", limit_s=30),
    Part(name="reference", limit_s=45, on_cpu=True),
    Part(name="numerics", limit_s=100),
    Part(name="step:0.6B compile", limit_s=90),
    Part(name="step:4B compile, full checkpointing, bf16 weights", limit_s=90),
    Part(name="weights", limit_s=50),
    Part(name="invariance", limit_s=40),
    Part(name="shares", limit_s=60),
    Part(name="step:0.6B", limit_s=40),
    Part(name="step:0.6B compile, float8", limit_s=70),
    Part(name="step:4B compile, full checkpointing", limit_s=70),
    Part(name="step:0.6B compile, selective checkpointing", limit_s=60),
    Part(name="step:0.6B compile, full checkpointing", limit_s=60),
    Part(name="step:4B compile, full checkpointing, bf16 weights, float8", limit_s=80),
    Part(name="step:0.6B autotuned attention", limit_s=100),
)
"""All parts on a GPU, most valuable first."""
SMALL_PARTS = tuple(
    Part(name=name, limit_s=60) for name in ("limits", "reference", "numerics", "step:small", "weights", "invariance", "shares")
)
"""All parts on a CPU."""


def main() -> None:
    """Run all parts that fit into the time, or collect the wheels."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write, rewritten after each part")
    parser.add_argument("--wheels", type=Path, help="folder of wheels: downloads them without --json, imports them with it")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="cpu: tiny models, no measurement")
    parser.add_argument("--seconds", type=float, default=BUDGET_S, help=f"time for all parts; default {BUDGET_S:g}")
    parser.add_argument("--only", nargs="+", metavar="PART", help="run only the parts whose names begin with one of these")
    arguments = parser.parse_args()
    if arguments.json is None:
        if arguments.wheels is None:
            parser.error("set --json to run the parts, or --wheels to collect the wheels")
        collect_wheels(arguments.wheels)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("interrupted"))  # so that the JSON is written and the parts are ended
    on_cuda = arguments.device == "cuda" or (arguments.device == "auto" and Path("/dev/nvidiactl").exists())
    chosen = [
        part
        for part in (PARTS if on_cuda else SMALL_PARTS)
        if arguments.only is None or part.name.startswith(tuple(arguments.only))
    ]
    with tempfile.TemporaryDirectory(prefix="titanrl-gpu-") as folder:
        result = check(chosen, Path(folder), arguments, on_cuda=on_cuda)
    missed = [name for name, part in result["parts"].items() if part["status"] != "ok"]
    print(f"wrote {arguments.json}; {len(chosen) - len(missed)} of {len(chosen)} parts complete", *missed, sep="\n  not: ")


def collect_wheels(folder: Path) -> None:
    """Download the wheels for Python 3.12 on x86-64, and print their sizes."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    subprocess.run([*command, *FOR_MACHINE, *WHEELS], check=True)
    for wheel in sorted(folder.glob("*.whl")):
        print(f"{wheel.stat().st_size / 1e6:6.2f} MB  {wheel.name}")


def check(parts: Sequence[Part], folder: Path, arguments: argparse.Namespace, *, on_cuda: bool) -> dict[str, Any]:
    """Run the parts and return their results, which are also in the JSON file after each part."""
    deadline = time.monotonic() + arguments.seconds
    result: dict[str, Any] = {"benchmark": "gpu", "ran_on_gpu": False, "machine": machine(), "parts": {}}
    environment = environment_of(folder, arguments.wheels)
    groups = [[part] for part in parts] if on_cuda else [list(parts)]
    waiting = [start(group, folder, environment, on_cuda=on_cuda) for group in groups[:1]]
    try:
        for number, group in enumerate(groups):
            process = waiting[-1]
            # The next process imports its packages meanwhile, and uses the device only after a line on its standard input.
            waiting += [start(following, folder, environment, on_cuda=on_cuda) for following in groups[number + 1 : number + 2]]
            left_s = deadline - time.monotonic()
            limit_s = min(left_s, sum(part.limit_s for part in group) + START_S)
            why = "no time is left" if left_s < SHORTEST_S else finish(process, limit_s)
            end(process)
            last = errors_file(folder, group[0].name).read_text(errors="replace").strip()[-1000:]
            for part in group:
                result["parts"][part.name] = found = read(folder / records_file(part.name), f"{why}: {last}" if last else why)
                result["ran_on_gpu"] |= any(figure["device"] == "cuda" for figure in found["figures"])
                print(f"{part.name}: {found['status']} {found.get('why', '')}", flush=True)
            write(arguments.json, result)
    finally:
        for process in waiting:
            end(process)
        for part in parts:  # after an interruption, also what the current parts have measured
            result["parts"].setdefault(part.name, read(folder / records_file(part.name), "the check was interrupted"))
        write(arguments.json, result)
    return result


def environment_of(folder: Path, wheels: Path | None) -> dict[str, str]:
    """Return the variables of the parts' processes. Packages of the machine take precedence over the wheels."""
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    if wheels is not None:
        target = folder / "wheels"
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target)
        environment["TITANRL_GPU_WHEELS"] = str(target)
    return environment


def start(parts: Sequence[Part], folder: Path, environment: dict[str, str], *, on_cuda: bool) -> "subprocess.Popen[bytes]":
    """Start a process that imports the packages of some parts and waits."""
    kind = "cuda" if on_cuda and not parts[0].on_cpu else "cpu"
    command = [sys.executable, "-m", "benchmarks.gpu_parts", kind, str(folder), *(part.name for part in parts)]
    with errors_file(folder, parts[0].name).open("wb") as errors:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=errors, env=environment, start_new_session=True)


def finish(process: "subprocess.Popen[bytes]", limit_s: float) -> str:
    """Let a process run its parts; return why the parts that it did not report are missing."""
    try:
        process.communicate(b"go\n", timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"ended after {limit_s:.0f} s"
    return f"its process exited with {process.returncode}"


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a process and the compilers that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def records_file(name: str) -> str:
    """Return the name of the file with a part's figures, one JSON object per line."""
    return "".join(character if character.isalnum() else "_" for character in name) + ".jsonl"


def errors_file(folder: Path, name: str) -> Path:
    """Return the file with the standard error of a process, by its first part."""
    return folder / f"{records_file(name)}.err"


def write(file: Path, result: Mapping[str, Any]) -> None:
    """Write the results so far."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=2) + "\n")


def read(file: Path, why: str) -> dict[str, Any]:
    """Return the status and figures of a part. `why` explains a missing status."""
    records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    figures = [record["figure"] for record in records if "figure" in record]
    status = next((record for record in records if "status" in record), {"status": "not finished", "why": why})
    return {**status, "figures": figures}


def machine() -> dict[str, object]:
    """Return what is known of the machine without torch."""
    try:
        from benchmarks.machine import describe_machine

        return dict(describe_machine())
    except OSError as error:  # git is not installed
        return {"python": platform.python_version(), "cores": len(os.sched_getaffinity(0)), "incomplete": str(error)}


if __name__ == "__main__":
    main()
