"""Custom trackers, valid and invalid."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Lines:
    """Writes its arguments, then one line per call."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any], resume_step: int | None) -> None:
        self.file = run_dir / "lines.jsonl"
        self.write([run_dir.name, config["seed"], resume_step])

    def write(self, line: object) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.write([step, dict(values)])

    def close(self) -> None:
        self.write("closed")


def start(run_dir: Path, config: Mapping[str, Any], resume_step: int | None) -> Lines:
    return Lines(run_dir, config, resume_step)


class Mute:
    def __init__(self, run_dir: Path, config: Mapping[str, Any], resume_step: int | None) -> None:
        pass

    def close(self) -> None:
        pass


def start_mute(run_dir: Path, config: Mapping[str, Any], resume_step: int | None) -> Mute:
    return Mute(run_dir, config, resume_step)


class Wrong(Lines):
    def log(self, values: Mapping[str, float]) -> None:  # type: ignore[override]
        pass


class WrongSamples(Lines):
    def log_samples(self, step: int, rows: object) -> None:
        pass


class Asynchronous(Lines):
    async def log(self, step: int, values: Mapping[str, float]) -> None:  # type: ignore[override]
        pass


class NoArguments:
    def log(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass
