"""The controller's part of a checkpoint, and the choice of a run directory."""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError

from titanrl.config.errors import ConfigError
from titanrl.files import DamagedError, Digests, check_folder, commit_folder, replace_text

STATE_FILE = "controller.json"
JOB_SCRIPT = "job.sh"
"""Script of `titanrl submit` in a run directory. Its job resumes the run, also when there is no checkpoint yet."""
STRICT = ConfigDict(strict=True, extra="forbid")
"""Rules for reading the state: no key that it does not have, and no value of another type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Work of a run since its first step, over all processes and attempts. A step adds what its batch used up."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    prompts: int = 0
    """Prompts whose groups were trained on, or discarded before a batch that was."""
    rollouts: int = 0
    """Completions of these prompts, also those without a reward."""
    environment_steps: int = 0
    """Turns of the policy in an environment, for these prompts."""
    generated_tokens: int = 0
    """Tokens that were sampled for these completions."""
    trained_tokens: int = 0
    """Tokens in the losses of optimizer steps. A token of a replayed group counts in each batch."""

    def plus(self, **more: int) -> Self:
        """Return the counts after further work, given by the names of the fields."""
        return replace(self, **{name: getattr(self, name) + number for name, number in more.items()})

    def metrics(self) -> dict[str, float]:
        """Return the counts as metrics."""
        return {
            "count/prompts": self.prompts,
            "count/rollouts": self.rollouts,
            "count/environment_steps": self.environment_steps,
            "count/generated_tokens": self.generated_tokens,
            "count/trained_tokens": self.trained_tokens,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The controller's state: how far a run has come."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    step: int
    """Steps taken."""
    version: int
    """Policy version."""
    next_index: int
    """First position of the prompts, or of the examples, that no batch has passed. In a checkpoint with groups, the first
    position that was not admitted."""
    learning_rate: float | None = None
    """Learning rate that replaces the schedule; None follows the schedule."""
    num_rates: int = 0
    """Changes of that learning rate so far."""
    in_flight: tuple[int, ...] = ()
    """Positions before `next_index` that a resumed run samples again, because their groups were being generated."""
    published: tuple[int, ...] = ()
    """Last published versions, the newest last; without any, `version` was published."""
    num_held: int = 0
    """Groups trained on since the last publication, with slots."""
    num_skipped: int = 0
    """Optimizer steps that were skipped in a row."""
    evaluated_step: int = -1
    """Last step after which the policy was evaluated; -1 if it never was."""
    best_value: float | None = None
    """Best value of `evaluation.best_metric` so far; None without any."""
    best_step: int = -1
    """Step after which the policy had it; -1 if there is none."""
    num_without_better: int = 0
    """Evaluations since then."""
    counts: Counts = Counts()
    """Work since the first step."""


FIRST = RunState(step=0, version=0, next_index=0)
"""State before the first step."""
_STATE = TypeAdapter(RunState)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumable:
    """The newest whole checkpoint of a run."""

    state: RunState
    """State to continue from."""
    unusable: Mapping[str, str]
    """Newer checkpoints that are incomplete or damaged, with the reason."""


def complete_checkpoint(checkpoints: Path, state: RunState, digests: Digests) -> None:
    """Write the controller's state and the list of all files, which completes a checkpoint; see `titanrl.files`.

    Args:
        checkpoints: Folder of all checkpoints.
        state: State of the step that was saved.
        digests: Digests of the trainer's files, which are on disk; other files are read.
    """
    folder = checkpoint_dir(checkpoints, state.step)
    replace_text(folder / STATE_FILE, json.dumps(asdict(state)), durable=True)
    commit_folder(folder, digests)


def resumable(run_dir: Path) -> Resumable:
    """Return the newest whole checkpoint of a run directory. Every byte of it is read and compared with its digest.

    A submitted run that has no checkpoint yet begins with its first step.

    Raises:
        ConfigError: There is none.
    """
    unusable: dict[str, str] = {}
    for step, folder in sorted(_checkpoint_dirs(run_dir / "checkpoints"), reverse=True):
        try:
            check_folder(folder, needs=(STATE_FILE, ".metadata"))
            return Resumable(state=_read_state(folder / STATE_FILE, step), unusable=unusable)
        except DamagedError as error:
            unusable[folder.name] = str(error)
    if not unusable and (run_dir / JOB_SCRIPT).is_file():
        return Resumable(state=FIRST, unusable={})
    found = "".join(f"; {name}: {reason}" for name, reason in unusable.items())
    raise ConfigError(f"--resume: no whole checkpoint (got {run_dir}{found}). Give the directory of a run that saved one.")


def set_aside(checkpoints: Path, after_step: int) -> list[str]:
    """Rename the checkpoints behind a step to `unusable-<step>`; delete those that earlier calls have renamed.

    A run that continues from the step would otherwise count them among its newest ones, and delete whole ones in their place.

    Returns:
        The new names.
    """
    for earlier in checkpoints.glob("unusable-*"):
        shutil.rmtree(earlier)
    later = [(step, folder) for step, folder in sorted(_checkpoint_dirs(checkpoints)) if step > after_step]
    return [folder.rename(checkpoints / f"unusable-{step}").name for step, folder in later]


def _checkpoint_dirs(checkpoints: Path) -> Iterator[tuple[int, Path]]:
    for path in checkpoints.glob("step-*"):
        match = re.fullmatch(r"step-(\d+)", path.name, re.ASCII)
        if match and path.is_dir():
            yield int(match[1]), path


def _read_state(path: Path, step: int) -> RunState:
    """Read the state of a checkpoint.

    Raises:
        DamagedError: It is not one, or that of another step.
    """
    try:
        state = _STATE.validate_json(path.read_bytes())
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be read: {type(error).__name__}") from error
    except ValidationError as error:
        raise DamagedError(f"{path.name} is not the state of step {step}") from error
    if state.step != step:
        raise DamagedError(f"{path.name} is not the state of step {step}")
    return state


def checkpoint_dir(checkpoints: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint, as torchtitan's manager names it."""
    return checkpoints / f"step-{step}"
