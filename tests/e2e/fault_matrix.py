"""Define the cells of the fault matrix, and write its table into the docs: `python -m tests.e2e.fault_matrix FILE`.

FILE is the result written by `tests/e2e/test_fault_matrix.py`.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- matrix: python -m tests.e2e.fault_matrix FILE -->", "<!-- end of matrix -->"
DOCUMENT = Path(__file__).parents[2] / "docs/faults.md"

PARTS = {
    "generator": "generator rank",
    "rollout": "rollout worker with its storage shard",
    "scoring": "scoring process",
    "zygote": "process that forks the scoring processes",
    "template": "template of the generators",
    "trainer": "trainer rank",
    "store": "store process",
    "evaluator": "generator that evaluates in the background",
    "environment": "environment process",
}
FAULTS = ("kill -9", "SIGSTOP", "segfault", "os._exit", "busy loop", "unpicklable exception", "out of memory")
SIGNALS = ("kill -9", "SIGSTOP")
"""Faults that a process can cause in another one."""
TRIGGERS = {
    "rollout": "BufferActor.commit",
    "forward/backward": "PolicyTrainer.forward_backward",
    "push": "PolicyTrainer.push_weights",
    "pull": "Generator.pull_weights",
    "checkpoint": "PolicyTrainer.save_checkpoint",
    "evaluation": "RolloutWorker.evaluate",
}
"""Endpoint whose call begins each phase of a step. The process that runs it sends the signal to the victim."""
OWN_TRIGGERS = {
    ("generator", "start"): "Generator.start",
    ("generator", "rollout"): "Generator.generate",
    ("generator", "pull"): "Generator.pull_weights",
    ("rollout", "start"): "RolloutWorker.start",
    ("rollout", "rollout"): "Outbox.deliver",
    ("rollout", "forward/backward"): "StorageShard.get",
    ("rollout", "checkpoint"): "StorageShard.save",
    ("rollout", "evaluation"): "RolloutWorker.evaluate",
    ("scoring", "rollout"): "reward",
    ("trainer", "start"): "PolicyTrainer.load_model",
    ("trainer", "forward/backward"): "PolicyTrainer.forward_backward",
    ("trainer", "push"): "PolicyTrainer.push_weights",
    ("trainer", "checkpoint"): "PolicyTrainer.save_checkpoint",
    ("store", "rollout"): "BufferActor.commit",
    ("store", "pull"): "BufferActor.release",
    ("store", "checkpoint"): "BufferActor.save",
    ("evaluator", "start"): "Generator.start",
    ("environment", "rollout"): "environment.step",
}
"""Endpoint in which each part works during a phase. `Outbox.deliver` is a method of the worker, `reward` the reward function,
and `environment` the environment."""
MAIN = {
    "generator": "rollout",
    "rollout": "rollout",
    "scoring": "rollout",
    "zygote": "rollout",
    "template": "rollout",
    "trainer": "forward/backward",
    "store": "rollout",
    "evaluator": "evaluation",
    "environment": "rollout",
}
"""Phase in which each part does most of its work."""
WORKS_IN = {
    "scoring": ("rollout", "evaluation"),
    "zygote": ("rollout", "evaluation"),
    "template": ("rollout",),
    "evaluator": ("start", "evaluation"),
    "environment": ("start", "rollout", "evaluation"),
}
"""Phases in which parts are busy that are idle in the others."""
PHASES = ("start", *TRIGGERS)
MODES = ("sync", "async")


@dataclass(frozen=True, slots=True)
class Cell:
    """A fault of a part in a phase of a run."""

    mode: str
    part: str
    fault: str
    phase: str

    @property
    def trigger(self) -> str:
        """Endpoint whose call triggers the fault."""
        if self.is_own:
            return OWN_TRIGGERS[self.part, self.phase]
        return "PolicyTrainer.load_model" if self.phase == "start" else TRIGGERS[self.phase]

    @property
    def is_own(self) -> bool:
        """True if the victim itself runs the trigger. A scoring process may not send signals, not even to itself."""
        is_forbidden = self.part == "scoring" and self.fault in SIGNALS
        saves_nothing = self.mode == "sync" and self.phase == "checkpoint" and self.part in ("rollout", "store")
        return (self.part, self.phase) in OWN_TRIGGERS and not is_forbidden and not saves_nothing

    def reason_against(self) -> str:
        """Return why the cell is skipped; empty if it is run."""
        if self.part in ("scoring", "zygote") and self.phase == "start":
            return "forked later"
        if self.part == "evaluator" and self.mode == "sync":
            return "there is none"
        if self.phase not in WORKS_IN.get(self.part, PHASES):
            return "idle"
        is_signal = self.fault in SIGNALS
        if self.part == "evaluator" and not is_signal:
            return "as a generator"
        if self.part == "environment" and self.phase != MAIN[self.part]:
            return "as rollout"
        if self.part == "environment" and self.mode == "sync":
            return "as async"
        if not is_signal and not self.is_own:
            return "runs no code"
        is_main = self.phase == MAIN[self.part]
        if self.fault in ("segfault", "os._exit") and not is_main:
            return "as kill -9"
        if self.fault == "out of memory" and not is_main:
            return "as an exception"
        if self.fault == "busy loop" and self.phase == "checkpoint":
            return "after 300 s"
        if self.phase == "start" and (not is_signal or self.mode == "sync"):
            return "as kill -9" if not is_signal else "as async"
        if self.mode == "sync" and self.fault != "kill -9" and not is_main:
            return "as async"
        return ""


def cells(mode: str, *, at_start: bool = False) -> list[Cell]:
    """Return the cells of one mode, either those at the start of a run or all others."""
    phases = [phase for phase in PHASES if (phase == "start") == at_start]
    every = [Cell(mode, part, fault, phase) for fault in FAULTS for part in PARTS for phase in phases]
    return [cell for cell in every if not cell.reason_against()]


def main() -> None:
    """Write the tables of a result into the documentation."""
    result = json.loads(Path(sys.argv[1]).read_text())
    text = DOCUMENT.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    DOCUMENT.write_text(f"{before}{BEGIN}\n{rendered(result)}\n{END}{after}")


def rendered(result: Mapping[str, Any]) -> str:
    """Return the tables of both modes, and the machine that measured them."""
    outcomes = {(row["mode"], row["part"], row["fault"], row["phase"]): row for row in result["cells"]}
    tables = [table(mode, outcomes) for mode in MODES]
    machine = result["machine"]
    where = f"Measured on {machine['cores']} cores of an {machine['processor']}, commit {machine['commit']}."
    return "\n\n".join([*tables, where])


def table(mode: str, outcomes: Mapping[tuple[str, str, str, str], Mapping[str, Any]]) -> str:
    """Return the table of one mode: a row for each fault of each part."""
    title = "Synchronous:" if mode == "sync" else "Asynchronous (`max_staleness: 1`):"
    lines = [f"| fault | of | {' | '.join(PHASES)} |", "|---|---|" + "---|" * len(PHASES)]
    for fault in FAULTS:
        for part, name in PARTS.items():
            row = [Cell(mode, part, fault, phase) for phase in PHASES]
            lines.append(f"| {fault} | {name} | {' | '.join(shown(row, outcomes))} |")
    return "\n".join([title, "", *lines])


def shown(row: Iterable[Cell], outcomes: Mapping[tuple[str, str, str, str], Mapping[str, Any]]) -> Sequence[str]:
    """Return the texts of the cells of a row."""
    texts = []
    for cell in row:
        outcome = outcomes.get((cell.mode, cell.part, cell.fault, cell.phase))
        if outcome is None:
            texts.append(cell.reason_against() or "not run")
            continue
        seconds = [outcome["noticed_s"], outcome["recovered_s"]]
        texts.append(f"{outcome['outcome']} {' / '.join('-' if value is None else f'{value:.1f}' for value in seconds)} s")
    return texts


if __name__ == "__main__":
    main()
