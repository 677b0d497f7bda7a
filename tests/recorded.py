"""Records of groups, written as rollout workers write them."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from titanrl.carriers.record import RecordFile, parts_of, read_lines
from titanrl.metrics.reading import RunRecord

TOKEN = 7
"""Token of the completions of `record_group`; its text is "a"."""
_times = itertools.count(1.0)


def record(run_dir: Path, kind: str, *lines: Mapping[str, Any], process: str = "rollout_0") -> None:
    """Append lines to a new part."""
    file = RecordFile(run_dir, kind, process, 10**9)
    file.append(*[({"time": next(_times), **line}, {}) for line in lines])
    file.close()


def recorded(run_dir: Path, kind: str, key: str = "index") -> list[Any]:
    """Return the values under a key of the lines of a kind, in the order of the parts."""
    parts = [part for part in parts_of(run_dir, kind) if part.path.is_file()]
    return [line[key] for part in parts for line in read_lines(part.path) if key in line]


def record_group(run_dir: Path, line: Mapping[str, Any], logprob: float = -0.12345) -> None:
    """Append a group whose completions have `num_tokens` equal tokens each."""
    num = [completion["num_tokens"] for completion in line["completions"]]
    completions = [
        {**completion, "segments": [{"num_tokens": n}]} for completion, n in zip(line["completions"], num, strict=True)
    ]
    columns = {
        "token_ids": np.full(sum(num), TOKEN, np.int32),
        "mask": np.ones(sum(num), np.bool_),
        "logprobs": np.full(sum(num), logprob, np.float32),
        "versions": np.full(sum(num), line["version"], np.int32),
    }
    files = {kind: RecordFile(run_dir, kind, "rollout_0", 10**9) for kind in ("rollouts", "vocabulary")}
    files["rollouts"].append(({"time": next(_times), **line, "completions": completions}, columns))
    files["vocabulary"].append(({"texts": {TOKEN: "a"}}, {}))
    for file in files.values():
        file.close()


def coverage(run: RunRecord, name: str) -> float:
    """Return the fraction of a process's lifetime that its spans cover."""
    (process,) = (each for each in run.processes() if each.name == name)
    covered, end = 0.0, process.start
    for span in run.spans(name):
        covered += max(0.0, span.start + span.seconds - max(span.start, end))
        end = max(end, span.start + span.seconds)
    return covered / (process.end - process.start)
