"""Measure a run's start: `python -m benchmarks.startup --json FILE`, also beside another checkout with `--before FOLDER`.

Each round starts the quick start once per checkout; then it is started with the templates of `titanrl warm`. The measurements
are taken when the first step is recorded: seconds since the launch, and CPU seconds of every process. The base model is cached.
"""

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import write_result
from titanrl.processes.templates import SHARED

ROOT = Path(__file__).parents[1]
ROLES = {
    "titanrl.processes.zygote": "scoring",
    "titanrl.processes.templates": "template",
    "titanrl.processes.bootstrap": "stand-ins",
    "titanrl.commands.warm": "warm",
    "titanrl.grpo": "controller",
}
"""Roles of processes without a log of their own, by a part of their command line."""
_TICKS = os.sysconf("SC_CLK_TCK")
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Start:
    """Measurements of one start, up to the first step."""

    first_step_s: float
    """Seconds from the launch until the first step was recorded."""
    cpu_s: Mapping[str, float]
    """CPU seconds of the processes since the launch, by role; `all` is their sum."""
    total_s: float
    """Seconds from the launch until the run, which ends after its first step, has exited."""


def main() -> None:
    """Measure, and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--rounds", type=int, default=5, help="starts of each kind")
    parser.add_argument("--before", type=Path, help="root of another checkout, measured alternately with this one")
    parser.add_argument("--cache", type=Path, help="folder with the base model; by default it is created first")
    parser.add_argument("--no-warm", action="store_true", help="leave out the starts with `titanrl warm`")
    parser.add_argument("--set", dest="overrides", nargs="+", default=[], metavar="key.path=value", help="changes of the run")
    arguments = parser.parse_args()
    checkouts = {"start": ROOT} | ({"before": arguments.before.resolve()} if arguments.before else {})
    starts: dict[str, list[Start]] = {name: [] for name in checkouts}
    with tempfile.TemporaryDirectory(prefix="titanrl-bench-") as name:
        folder = Path(name)
        overrides = [*arguments.overrides, f"cache_dir={arguments.cache or folder / 'cache'}"]
        if arguments.cache is None:
            measured(ROOT, folder, overrides)  # creates the model
        for _ in range(arguments.rounds):
            for kind, checkout in checkouts.items():
                starts[kind].append(measured(checkout, folder, overrides))
        if not arguments.no_warm:
            for kind, checkout in checkouts.items():
                with templates(checkout) as (shared, warm):
                    measured(checkout, folder, overrides, {SHARED: shared}, [warm])  # the first run after the imports
                    again = [measured(checkout, folder, overrides, {SHARED: shared}, [warm]) for _ in range(arguments.rounds)]
                starts[f"{kind}, with warm"] = again
    medians = {kind: median_of(of_kind) for kind, of_kind in starts.items()}
    every = {kind: [asdict(start) for start in of_kind] for kind, of_kind in starts.items()}
    write_result(arguments.json, "startup", {"medians": medians, "starts": every}, shown=medians)


def median_of(starts: Sequence[Start]) -> dict[str, Any]:
    """Return the median of each measurement."""
    roles = sorted({role for start in starts for role in start.cpu_s}, key=lambda role: -starts[0].cpu_s.get(role, 0.0))
    return {
        "first_step_s": round(statistics.median(start.first_step_s for start in starts), 2),
        "total_s": round(statistics.median(start.total_s for start in starts), 2),
        "cpu_s": {role: round(statistics.median(start.cpu_s.get(role, 0.0) for start in starts), 2) for role in roles},
    }


def measured(
    checkout: Path,
    folder: Path,
    overrides: Sequence[str],
    environment: Mapping[str, str] | None = None,
    others: Sequence[int] = (),
) -> Start:
    """Start a run of one step from a checkout, and wait until it has exited.

    Args:
        checkout: Root of the checkout.
        folder: Folder of the runs.
        overrides: Changes of the quick start.
        environment: Additional environment variables.
        others: Ids of running processes that do work for the run; what they and their children use from now on counts.
    """
    run = Path(tempfile.mkdtemp(dir=folder))
    small = ("num_steps=1", "checkpoint.every_steps=0", "logging.console=off")
    command = ["-m", "titanrl.grpo", "--config", "quickstart", *small, f"output_dir={run}", "name=run", *overrides]
    variables = {SHARED: "", **os.environ, **(environment or {}), "PYTHONPATH": str(checkout)}
    before, started = cpu_s(others), time.perf_counter()
    metrics = run / "run" / "metrics.jsonl"
    with subprocess.Popen([sys.executable, *command], cwd=checkout, env=variables) as process:
        while process.poll() is None and not ("loss/" in read(metrics) or "train/" in read(metrics)):
            time.sleep(_POLL_S)
        first_step_s, used = time.perf_counter() - started, Counter(cpu_s([process.pid, *others]))
    if process.returncode:
        sys.exit(f"the run failed: {run}")
    used.subtract(before)
    by_role = {role: round(seconds, 2) for role, seconds in used.items() if seconds >= 0.005}
    return Start(first_step_s, by_role | {"all": round(sum(used.values()), 2)}, time.perf_counter() - started)


def read(path: Path) -> str:
    """Return the content of a file; empty if there is none."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def cpu_s(roots: Sequence[int]) -> dict[str, float]:
    """Return the CPU seconds of processes and everything that they have started, by role, with what exited children used."""
    parents, seconds = dict[int, int](), dict[int, float]()
    for folder in Path("/proc").glob("[0-9]*"):
        if fields := read_stat(folder):
            pid = int(folder.name)
            parents[pid], seconds[pid] = int(fields[1]), sum(map(int, fields[11:15])) / _TICKS
    used: defaultdict[str, float] = defaultdict(float)
    for pid in seconds:
        ancestor = pid
        while ancestor not in roots and ancestor in parents:
            ancestor = parents[ancestor]
        if ancestor in roots:
            used[role_of(Path(f"/proc/{pid}"))] += seconds[pid]
    return dict(used)


def read_stat(process: Path) -> list[str]:
    """Return the fields of a process's `stat` file that follow its name; none if it has exited."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def role_of(process: Path) -> str:
    """Return the role of a process: the name of its log without the number of its rank, or that of its program."""
    try:
        output = (process / "fd" / "1").resolve()
        line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return "exited"
    if output.suffix == ".log":
        return re.sub(r"(_\d+)+$", "", output.stem)
    return next((role for part, role in ROLES.items() if part in line), line[:40])


@contextmanager
def templates(checkout: Path) -> Iterator[tuple[str, int]]:
    """Run `titanrl warm` during the body; yield the value of SHARED and the id of its process."""
    command = [sys.executable, "-m", "titanrl.commands.warm", "--config", "quickstart"]
    variables = os.environ | {"PYTHONPATH": str(checkout)}
    with subprocess.Popen(command, cwd=checkout, env=variables, stdout=subprocess.PIPE, text=True) as warm:
        assert warm.stdout is not None
        yield next(line for line in iter(warm.stdout.readline, "") if "export" in line).split("=")[1].strip(), warm.pid
        warm.send_signal(signal.SIGINT)


if __name__ == "__main__":
    main()
