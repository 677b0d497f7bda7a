"""Files of a run directory: writing them and reading them back."""

import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from titanrl.types import StepMetrics


class RunDirectory:
    """The folder of one run, `runs/<name>/`.

    The controller writes `config.yaml`, `metrics.jsonl`, `advantages.jsonl` and `events.jsonl` through this class. Rollout
    workers append to `rollouts.jsonl` (`append_line`). Every process writes to `logs/`, the trainer to `checkpoints/`.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        """Create the folders and open `metrics.jsonl`.

        Args:
            path: The run's own folder.
            resume_step: Step the run resumes from; lines of later steps are dropped, so that curves do not double.
                None starts a new run.

        Raises:
            ValueError: The folder of a new run holds another run, or the folder to resume does not exist.
        """
        self.path = path
        if resume_step is None:
            _check_holds_no_run(path)
        elif not path.is_dir():
            raise ValueError(f"--resume: {path} does not exist. Give the folder of an earlier run.")
        for folder in (self.logs, self.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        if resume_step is None:
            # A run that ended before its first step can leave these.
            self.rollouts.unlink(missing_ok=True)
            self.events.unlink(missing_ok=True)
            self.advantages.unlink(missing_ok=True)
        else:
            _drop_steps_after(self.metrics, resume_step)
            _drop_steps_after(self.advantages, resume_step)
        self._metrics_file = self.metrics.open("a", encoding="utf-8", buffering=1)

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """Metrics, one JSON object per step and one per evaluation."""
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """Faults, drops, publications, checkpoints and other events, one JSON object each."""
        return self.path / "events.jsonl"

    @property
    def rollouts(self) -> Path:
        """Sampled groups, one JSON object each."""
        return self.path / "rollouts.jsonl"

    @property
    def advantages(self) -> Path:
        """Advantages of the groups trained on, one JSON object per group."""
        return self.path / "advantages.jsonl"

    @property
    def logs(self) -> Path:
        """Output of processes and libraries, `<role>_<rank>.log`."""
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints, and the exported model."""
        return self.path / "checkpoints"

    def write_config(self, text: str) -> None:
        """Write `config.yaml`."""
        replace_text(self.config, text)

    def log(self, metrics: StepMetrics) -> None:
        """Append one line to `metrics.jsonl`: `step`, `version`, `time` (unix seconds), then the values."""
        head = {"step": metrics.step, "version": metrics.version, "time": time.time()}
        self._metrics_file.write(_encode({**head, **metrics.values}) + "\n")

    def log_advantages(self, step: int, groups: Iterable[tuple[int, int, Sequence[float]]]) -> None:
        """Append one line per group to `advantages.jsonl`: `step`, `index`, `version` and `advantages`.

        Args:
            step: Step that trained on the groups.
            groups: Of each group, `index` and `version` as in its line in `rollouts.jsonl`, and the advantages of its
                completions, without those whose scorer failed.
        """
        lines = [
            _encode({"step": step, "index": index, "version": version, "advantages": advantages}) + "\n"
            for index, version, advantages in groups
        ]
        with self.advantages.open("a", encoding="utf-8") as file:
            file.write("".join(lines))

    def event(self, kind: str, **fields: Any) -> None:
        """Append one line to `events.jsonl`: `time` (unix seconds), `kind`, then the fields."""
        append_line(self.events, {"time": time.time(), "kind": kind, **fields})

    def close(self) -> None:
        """Close `metrics.jsonl`."""
        self._metrics_file.close()

    def __enter__(self) -> Self:
        """Return the directory itself; leaving the context closes the files."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the files."""
        self.close()


def append_line(path: Path, obj: Mapping[str, Any]) -> None:
    """Append `obj` as one JSON line. Several processes can append to the same file.

    Raises:
        OSError: The file system wrote only a part of the line.
    """
    line = (_encode(obj) + "\n").encode()
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        # One write to an O_APPEND file is atomic, so lines of several processes do not mix.
        written = os.write(file, line)
    finally:
        os.close(file)
    if written != len(line):
        raise OSError(f"{path}: only {written} of {len(line)} bytes were appended. Check that the disk is not full.")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the objects of `metrics.jsonl`, without a last line that a killed process left unfinished.

    Raises:
        ValueError: An earlier line is not a JSON object.
    """
    lines = path.read_bytes().splitlines()
    rows = [_decode(line) for line in lines]
    for number, row in enumerate(rows[:-1], start=1):
        if row is None:
            raise ValueError(f"{path}, line {number}: not a JSON object. Remove the line to read the rest.")
    return [row for row in rows if row is not None]


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of `rollouts.jsonl` or `advantages.jsonl`, without lines that a killed process left unfinished."""
    with path.open("rb") as file:
        for line in file:
            row = _decode(line)
            if row is not None:
                yield row


def replace_text(path: Path, text: str) -> None:
    """Write a file atomically: readers see the old text or the new one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _check_holds_no_run(path: Path) -> None:
    metrics = path / "metrics.jsonl"
    if metrics.exists() and metrics.stat().st_size > 0:
        raise ValueError(
            f"name: {path} already holds a run (got {path.name}). "
            f"Choose another name, remove the folder, or continue the run with --resume {path}."
        )


def _drop_steps_after(path: Path, step: int) -> None:
    rows = read_metrics(path) if path.exists() else []
    replace_text(path, "".join(_encode(row) + "\n" for row in rows if row["step"] <= step))


def _encode(obj: Mapping[str, Any]) -> str:
    return json.dumps(_finite(obj), separators=(",", ":"))


def _finite(value: Any) -> Any:
    """Replace infinities and NaN, which JSON lacks, by None, and convert containers to dicts and lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _decode(line: bytes) -> dict[str, Any] | None:
    """Decode the object of a line; return None for an incomplete line."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
