"""Job that every system of the comparison runs, and the record that a peer writes. Only the standard library is imported."""

import dataclasses
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Settings of a peer that change its speed, but not the training."""

    threads: int
    """Threads of the process."""
    device_batch: int
    """Completions per forward and backward pass. Generation always has all completions of the step in one batch."""
    continuous_batching: bool = False
    """Generate with the continuous batching of transformers; only TRL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of GRPO, the same for every system."""

    model: str
    """Hugging Face directory of the initial policy."""
    train_file: str
    """JSONL with a `prompt` and an `answer` per row."""
    heldout_file: str
    """The same for evaluations; not read if `evaluate_every` is 0."""
    evaluate_every: int
    """Steps between greedy evaluations of all rows of `heldout_file`, the first before any step; 0 for none."""
    reward: str
    """Name of a function of this module."""
    num_steps: int
    groups: int
    """Groups per step."""
    group_size: int
    """Completions per group."""
    max_new_tokens: int
    learning_rate: float
    seed: int

    @property
    def batch(self) -> int:
        """Completions per step."""
        return self.groups * self.group_size


def answered(completion: str, entry: Mapping[str, Any]) -> float:
    """Return 1 if the text in the last answer tags is the reference answer."""
    found = ANSWER.findall(completion)
    return float(bool(found) and found[-1].strip() == str(entry["answer"]).strip())


def digits(completion: str, entry: Mapping[str, Any]) -> float:
    """Return the share of digits among the characters: a reward that differs within every group."""
    return sum(character.isdigit() for character in completion) / max(1, len(completion))


REWARDS = {"answered": answered, "digits": digits}


class Record:
    """File with one JSON object per step and evaluation, written by a peer."""

    def __init__(self, path: Path) -> None:
        """Create the file."""
        self._file = path.open("w")

    def write(self, **fields: Any) -> None:
        """Append a line with the present time."""
        self._file.write(json.dumps({"time": time.time(), **fields}) + "\n")
        self._file.flush()


def read_job() -> tuple[Job, Setting, Record]:
    """Return the job and the setting in the file that is the first argument, and the record that is the second."""
    job, setting = json.loads(Path(sys.argv[1]).read_text())
    return Job(**job), Setting(**setting), Record(Path(sys.argv[2]))


def write_job(job: Job, setting: Setting, path: Path) -> None:
    """Write a job for `read_job`."""
    path.write_text(json.dumps([dataclasses.asdict(job), dataclasses.asdict(setting)]))


def read_rows(path: str) -> Sequence[Mapping[str, Any]]:
    """Return the rows of a JSONL file."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]
