"""Measure the cost of faults: `python -m benchmarks.chaos --json FILE --minutes 5`.

The quick start with two generator replicas, two rollout workers and `max_staleness: 1` first runs undisturbed for some minutes.
A second run takes as long, while a random process is hit every few seconds, by `kill -9` or, with `--stop-share`, sometimes by
SIGSTOP. The benchmark counts samples from the files of the run: every prompt must have been trained on, or be in the last
checkpoint, exactly once.
"""

import argparse
import contextlib
import pickle
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import titanrl
from benchmarks.machine import write_result
from benchmarks.victims import SIGNALS, NewEvents, Victim, events, is_recovery, victims
from titanrl.carriers.record import read_lines
from titanrl.carriers.types import StepMetrics
from titanrl.config import load_config
from titanrl.metrics.reading import read_metrics
from titanrl.replay.groups import BufferState

SETTINGS = (
    "num_steps=100000",
    "max_staleness=1",
    "generator.replicas=2",
    "rollout.num_workers=2",
    "checkpoint.every_steps=20",
    "evaluation.every_steps=0",
    "logging.console=plain",
    "logging.rollouts_per_step=8",  # one line per group, from which the samples are counted
    "faults.max_respawns=1000",
    "faults.min_stall_s=5",
    "hooks=[benchmarks.chaos:EndOnRequest]",
)
"""Overrides of both runs."""
WEIGHTS: Mapping[str, float] = {"generator": 4.0, "rollout": 4.0, "scoring": 4.0, "trainer": 1.0, "store": 1.0}
"""Relative frequency of each kind of victim. The death of the trainer or of the store restarts all processes."""
LOOK_S = 0.05
"""Polling interval in seconds."""
START_LIMIT_S, RECOVERY_LIMIT_S, END_LIMIT_S = 600.0, 120.0, 120.0
"""Time limits for the first step, for the last recoveries, and for the shutdown of a run."""
END = "end"
"""File in the run directory that requests the end of the run."""


class EndOnRequest(titanrl.Hook):
    """Evaluates and ends the run when the file `END` exists."""

    async def after_step(self, run: titanrl.GRPO, metrics: StepMetrics) -> None:
        """Check for the file."""
        if (run.run_dir / END).exists():
            await run.evaluate()
            run.end_after_step()


def main() -> None:
    """Measure both runs and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--minutes", type=float, default=5.0, help="length of each run in minutes, from its first step on")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two faults")
    parser.add_argument("--seed", type=int, default=0, help="seed for choosing victims")
    parser.add_argument("--kinds", nargs="+", choices=WEIGHTS, default=list(WEIGHTS), help="kinds of processes to hit")
    help_text = "share of faults that stop a process (SIGSTOP); detected after faults.min_stall_s, here 5 s"
    parser.add_argument("--stop-share", type=float, default=0.0, help=help_text)
    parser.add_argument("--folder", type=Path, help="folder that keeps the files of both runs")
    parser.add_argument(
        "--set", dest="overrides", nargs="+", default=[], metavar="key.path=value", help="changes to configs/quickstart.yaml"
    )
    arguments = parser.parse_args()
    chaos = Chaos(random.Random(arguments.seed), arguments.every, arguments.kinds, arguments.stop_share)
    with tempfile.TemporaryDirectory(prefix="titanrl-bench-", ignore_cleanup_errors=True) as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        plain = measure(folder, "undisturbed", arguments.minutes, arguments.overrides, None)
        hit = measure(folder, "disturbed", arguments.minutes, arguments.overrides, chaos)
    result = {
        **chaos.figures(),
        **{name: hit[name] for name in ("samples_lost", "samples_duplicated", "staleness_violations")},
        "throughput_ratio": hit["groups_per_s"] / plain["groups_per_s"],
        "heldout_last": hit["heldout_last"],
        "exit_code": hit["exit_code"],
        "seconds_between_faults": arguments.every,
        "weights": {kind: WEIGHTS[kind] for kind in arguments.kinds},
        "stop_share": arguments.stop_share,
        "runs": {"undisturbed": plain, "disturbed": hit},
    }
    write_result(arguments.json, "chaos", {**result, "faults": [fault.row() for fault in chaos.faults]}, shown=result)


@dataclass(slots=True)
class Fault:
    """An injected fault."""

    victim: Victim
    """Process that was hit."""
    name: str
    """Name of the signal."""
    time: float
    """Unix time in seconds."""
    siblings: set[int]
    """Scoring processes of the same worker at that time."""
    recovery_s: float | None = None
    """Seconds until recovery; None before."""

    def update(self, recorded: Sequence[Mapping[str, Any]]) -> None:
        """Set `recovery_s` if the new events show a recovery, or if a scoring process has been replaced."""
        times = [event["time"] for event in recorded if is_recovery(event, self.victim.part, self.time)]
        if self.victim.kind == "scoring" and self.victim.process.is_gone and self.victim.siblings() - self.siblings:
            times.append(time.time())
        if self.recovery_s is None and times:
            self.recovery_s = min(times) - self.time

    def row(self) -> dict[str, Any]:
        """Return the fault as a JSON object."""
        return {
            "time": self.time,
            "kind": self.victim.kind,
            "part": self.victim.part,
            "signal": self.name,
            "recovery_s": self.recovery_s,
        }


class Chaos:
    """Hits a random process at a fixed interval, regardless of ongoing recoveries."""

    def __init__(self, rng: random.Random, every_s: float, kinds: Sequence[str], stop_share: float) -> None:
        """Start without faults."""
        self._rng, self._every_s, self._kinds, self._stop_share = rng, every_s, kinds, stop_share
        self._due = 0.0
        self.faults: list[Fault] = []

    def run(self, subject: "Subject", until: float) -> None:
        """Signal processes until a unix time, then wait until all faults have recovered or the run has ended."""
        self._due = time.time() + self._every_s
        limit, recorded = until + RECOVERY_LIMIT_S, NewEvents(subject.run_dir)
        while subject.is_running and (time.time() < until or (self._has_open and time.time() < limit)):
            if self._due <= time.time() < until:
                self._hit(subject)
            new = recorded.read()
            for fault in self.faults:
                fault.update(new)
            subject.wait(LOOK_S)

    @property
    def _has_open(self) -> bool:
        return any(fault.recovery_s is None for fault in self.faults)

    def _hit(self, subject: "Subject") -> None:
        """Signal a process of a random kind; if none is alive, try again at the next poll."""
        kind = self._rng.choices(self._kinds, [WEIGHTS[kind] for kind in self._kinds])[0]
        found = [victim for victim in victims(subject.run_dir) if victim.kind == kind]
        if not found:
            return
        victim, name = self._rng.choice(found), "SIGSTOP" if self._rng.random() < self._stop_share else "kill -9"
        fault = Fault(victim, name, time.time(), victim.siblings())
        if victim.hit(SIGNALS[name]):
            print(f"{name} of {kind} process {victim.process.pid} ({victim.part})", flush=True)
            self.faults.append(fault)
            self._due += self._every_s

    def figures(self) -> dict[str, Any]:
        """Return the numbers of faults and the recovery times, in total and by kind."""
        by_kind = {
            kind: fault_figures([fault for fault in self.faults if fault.victim.kind == kind])
            for kind in sorted({fault.victim.kind for fault in self.faults})
        }
        return {**fault_figures(self.faults), "by_kind": by_kind}


def fault_figures(faults: Sequence[Fault]) -> dict[str, Any]:
    """Return the numbers of injected and survived faults, and the median and maximum recovery time."""
    times = [fault.recovery_s for fault in faults if fault.recovery_s is not None]
    spread = {"median": statistics.median(times), "max": max(times)} if times else {}
    return {"faults_injected": len(faults), "faults_survived": len(times), "recovery_s": spread}


class Subject:
    """A running command whose processes are hit."""

    def __init__(self, folder: Path, name: str, overrides: Sequence[str]) -> None:
        """Start the command; its output goes to `<name>.txt` in the folder."""
        self.run_dir = folder / "runs" / name
        places = [f"name={name}", f"output_dir={folder}/runs", f"cache_dir={folder}/cache"]
        command = [sys.executable, "-m", "titanrl.grpo", "--config", "configs/quickstart.yaml", *places, *SETTINGS, *overrides]
        self.output = folder / f"{name}.txt"
        with self.output.open("w") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    @property
    def is_running(self) -> bool:
        """True until the command has exited."""
        return self._process.poll() is None

    def wait_for_first_step(self) -> None:
        """Wait until the first step has been recorded."""
        limit = time.time() + START_LIMIT_S
        while not self.steps():
            if not self.is_running or time.time() > limit:
                self._process.kill()
                raise RuntimeError(f"no first step: {self.last_line()}")
            self.wait(LOOK_S)

    def wait(self, timeout_s: float) -> None:
        """Wait until the command has exited, or the timeout has passed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, timeout_s))

    def steps(self) -> list[dict[str, Any]]:
        """Return the metrics of all steps so far."""
        file = self.run_dir / "metrics.jsonl"
        return [row for row in read_metrics(file) if "reward/mean" in row] if file.exists() else []

    def end(self) -> int:
        """Request the end of the run, wait for it, and return the exit code."""
        (self.run_dir / END).touch()
        try:
            return self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def last_line(self) -> str:
        """Return the last line that the command printed."""
        lines = self.output.read_text().splitlines()
        return lines[-1] if lines else ""


def measure(folder: Path, name: str, minutes: float, overrides: Sequence[str], chaos: Chaos | None) -> dict[str, Any]:
    """Run for some minutes, with faults unless `chaos` is None, and return the measurements."""
    subject = Subject(folder, name, overrides)
    subject.wait_for_first_step()
    started, first = time.time(), subject.steps()[-1]["step"]
    until = started + 60 * minutes
    if chaos is not None:
        chaos.run(subject, until)
    subject.wait(until - time.time())
    code = subject.end()
    rows = read_metrics(subject.run_dir / "metrics.jsonl")
    steps, last = subject.steps(), subject.steps()[-1]
    heldout = [row["eval/chain_sum/mean"] for row in rows if "eval/chain_sum/mean" in row]
    config = load_config(subject.run_dir / "config.yaml", [])
    return {
        "exit_code": code,
        "last_line": subject.last_line() if code else "",
        "seconds": last["time"] - started,
        "steps": last["step"],
        "groups_per_s": config.rollout.groups_per_step * (last["step"] - first) / (last["time"] - started),
        "heldout_first": heldout[0],
        "heldout_last": heldout[-1] if code == 0 else None,
        "staleness_max": max(row["staleness/max"] for row in steps),
        "staleness_violations": sum(row["staleness/max"] > config.staleness_bound for row in steps),
        **sample_figures(subject.run_dir, last if code == 0 else None),
    }


def sample_figures(run_dir: Path, last: Mapping[str, Any] | None) -> dict[str, int | None]:
    """Count prompts that were lost or trained on twice, from the records of training and the last checkpoint.

    Every prompt before the checkpoint's next one was trained on, or waits in the checkpoint, or will be sampled again by a
    resumed run. Groups of a batch without any signal were dropped.

    Args:
        run_dir: Directory of a run that ended with a checkpoint.
        last: Metrics of its last step; None if the run failed, so that there is nothing to compare.
    """
    names = ("samples", "samples_dropped", "samples_lost", "samples_duplicated", "samples_miscounted")
    if last is None:
        return dict.fromkeys(names)
    trained = [row["index"] for row in read_lines(run_dir / "advantages.jsonl")]
    state = pickle.loads((run_dir / "checkpoints" / f"step-{last['step']}" / "groups" / "records.pkl").read_bytes())
    assert isinstance(state, BufferState)
    places = Counter([*trained, *(group.record.index for group in state.ready), *state.in_flight])
    dropped = sum(event["groups"] for event in events(run_dir) if event["kind"] == "drop")
    return {
        "samples": state.next_index,
        "samples_dropped": dropped,
        "samples_lost": len(set(range(state.next_index)) - places.keys()) - dropped - len(state.discarded),
        "samples_duplicated": places.total() - len(places),
        "samples_miscounted": abs(int(last["count/prompts"]) - len(trained) - dropped),
    }


if __name__ == "__main__":
    main()
