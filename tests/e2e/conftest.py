"""Fixtures for small runs of the real stack, which share one cache of warm-started models."""

import contextlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
from filelock import FileLock

from tests.listeners import exposed, family
from tests.workers import common_folder
from titanrl.metrics.reading import open_run, read_metrics
from titanrl.processes.templates import SHARED

REPO = Path(__file__).parents[2]
SMALL = (
    "num_steps=4",
    # 60 warm-start steps suffice for groups with different rewards.
    "warm_start.num_steps=60",
    "warm_start.num_long_only_steps=40",
    "evaluation.num_prompts=32",
    "evaluation.every_steps=0",
    "checkpoint.every_steps=2",
    "logging.console=plain",
)


@dataclass(frozen=True)
class Finished:
    """A finished run."""

    code: int
    output: str
    run_dir: Path

    @property
    def as_start(self) -> tuple[str, str]:
        """Overrides that start another run from this run's exported model."""
        return ("warm_start=null", f"model.path={self.run_dir}/checkpoints/final")

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Metrics of the steps, without evaluation lines."""
        return [row for row in read_metrics(self.run_dir / "metrics.jsonl") if "reward/mean" in row]

    def evaluations(self, task: str = "chain_sum") -> list[float]:
        """Return held-out mean rewards, in order."""
        rows = read_metrics(self.run_dir / "metrics.jsonl")
        return [row[f"eval/{task}/mean"] for row in rows if f"eval/{task}/mean" in row]

    def events(self) -> list[dict[str, Any]]:
        """Recorded events, in order."""
        return [json.loads(line) for line in (self.run_dir / "events.jsonl").read_text().splitlines()]

    def rollouts(self) -> list[dict[str, Any]]:
        """Return the recorded groups."""
        return [group.model_dump() for group in open_run(self.run_dir).groups()]


@dataclass
class Serving:
    """A running `titanrl serve`."""

    url: str
    process: "subprocess.Popen[str]"


@contextlib.contextmanager
def serving(policy: Path | str, *options: str) -> Iterator[Serving]:
    """Serve a policy on a free port; at the end, interrupt the server and check that it leaves no process."""
    command = [sys.executable, "-m", "titanrl.commands", "serve", str(policy), "--port", "0", *options]
    process = subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if found := re.search(r" at (http://\S+?)(/v1)?$", line.rstrip()):
                break
        else:
            raise AssertionError("".join(lines))
        descendants = psutil.Process(process.pid).children(recursive=True)
        yield Serving(found[1], process)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 128 + signal.SIGINT, process.stdout.read()
        _, alive = psutil.wait_procs(descendants, timeout=30)
        assert alive == []
    finally:
        if process.poll() is None:
            process.kill()


class Command:
    """A running `python -m titanrl.grpo`."""

    started: ClassVar[list["Command"]] = []
    """Commands of the current test."""

    def __init__(self, run_dir: Path, arguments: list[str], environment: dict[str, str]) -> None:
        self.run_dir = run_dir
        self.process = subprocess.Popen(
            [sys.executable, "-m", "titanrl.grpo", *arguments],
            cwd=REPO,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.descendants: set[psutil.Process] = set()
        self.started.append(self)

    def wait_for_step(self, step: int, timeout_s: float = 270) -> None:
        """Wait until a step is in `metrics.jsonl`, and record the processes of the run, which must not be exposed."""
        metrics, deadline = self.run_dir / "metrics.jsonl", time.monotonic() + timeout_s
        while not (metrics.exists() and any(row["step"] >= step and "reward/mean" in row for row in read_metrics(metrics))):
            assert self.process.poll() is None, f"the run ended before step {step}: {self.finish().output}"
            assert time.monotonic() < deadline, f"no step {step} within {timeout_s} s"
            time.sleep(0.1)
        pids = self.pids()
        with contextlib.suppress(psutil.NoSuchProcess):  # a scoring process that has just ended
            self.descendants |= {psutil.Process(pid) for pid in pids - {self.process.pid}}
        assert exposed(pids) == set()

    def pids(self) -> set[int]:
        """Return the ids of all processes of the run. Forks of shared templates are not descendants of the command."""
        named = [int(file.read_text().split()[0]) for file in (self.run_dir / "logs").glob("*.pid")]
        return set().union(*(family(pid) for pid in (self.process.pid, *named)))

    def finish(self, timeout_s: float = 240) -> Finished:
        """Wait until the process exits."""
        output, _ = self.process.communicate(timeout=timeout_s)
        return Finished(self.process.returncode, output, self.run_dir)

    def leftovers(self) -> list[str]:
        """Return recorded processes that still run. A resource tracker exits shortly after its parent, later under load."""
        _, alive = psutil.wait_procs(self.descendants, timeout=15)
        return [str(process) for process in alive]

    def process_of(self, role: str, rank: int = 0) -> psutil.Process:
        """Return a process of a role. Its children, such as a resource tracker, write to the same log."""
        return psutil.Process(int((self.run_dir / "logs" / f"{role}_{rank}.pid").read_text().split()[0]))


Start = Callable[..., Command]


@pytest.fixture(scope="session", autouse=True)
def all_runs_share_templates(shared_templates: None) -> None:
    """Start no run without shared templates, except on request."""


@pytest.fixture(autouse=True)
def no_run_outlives_its_test() -> Iterator[None]:
    """Kill the processes that a failed test left running, because they would slow down later tests."""
    yield
    for command in Command.started:
        if command.process.poll() is None:
            os.killpg(command.process.pid, signal.SIGKILL)
    Command.started.clear()


@pytest.fixture(scope="session")
def start_run(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Return a function that starts a small quick-start run with overrides and environment variables."""
    folder = shared_folder(tmp_path_factory)

    def start(name: str, *overrides: str, resume: bool = False, kill: str = "", **environment: str) -> Command:
        run_dir = folder / "runs" / name
        if kill:  # for `killer.Killer`
            run_dir.parent.mkdir(exist_ok=True)
            run_dir.with_name(f"{name}.kill").write_text(kill)
        which = ["--resume", str(run_dir)] if resume else ["--config", "configs/quickstart.yaml", *SMALL]
        places = [] if resume else [f"name={name}", f"output_dir={folder / 'runs'}", f"cache_dir={folder / 'cache'}"]
        return Command(run_dir, [*which, *places, *overrides], environment)

    return start


@pytest.fixture(scope="session")
def plain_run(start_run: Start, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """One uninterrupted run, shared by many tests and by all pytest workers; it also fills the cache."""
    folder = shared_folder(tmp_path_factory)
    with FileLock(folder / "plain.lock"):
        kept = folder / "plain.pickle"
        if not kept.exists():
            kept.write_bytes(
                pickle.dumps(make_plain_run(start_run, tmp_path_factory.mktemp("temporary"), folder / "runs/dump"))
            )
        finished: Finished = pickle.loads(kept.read_bytes())
    return finished


def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of all runs, the same for all workers of pytest-xdist."""
    folder = common_folder(tmp_path_factory) / "e2e"
    folder.mkdir(exist_ok=True)
    return folder


def make_plain_run(start_run: Start, temporary: Path, dump: Path) -> Finished:
    """Run the quick start once, saving its rollouts and with templates of its own; check that it leaves nothing behind.

    Its processes log their imports.
    """
    profiled = {"PYTHONPROFILEIMPORTTIME": "1"}  # for `test_all_processes_are_forks_of_templates`
    command = start_run("plain", f"rollout.save={dump}", TMPDIR=str(temporary), **{SHARED: ""}, **profiled)
    command.wait_for_step(1)
    finished = command.finish()
    assert finished.code == 0, finished.output
    assert command.leftovers() == []
    left = [name for name in os.listdir(temporary) if not name.startswith("torchinductor")]  # a cache that runs share
    assert left == []
    lines = finished.output.splitlines(keepends=True)
    return replace(finished, output="".join(line for line in lines if not line.startswith("import time:")))
