"""Checkpoints under `tinker://` on disk. They survive a restart of the server, and belong to the user who saved them.

    <root>/<session>/<n>/run.json                   the model: base, rank, user
    <root>/<session>/<n>/weights/<name>.json        a training checkpoint, which names its state
    <root>/<session>/<n>/sampler_weights/<name>.json
    <root>/<session>/<n>/states/<random>/           files of the trainer

A checkpoint exists from the moment that its JSON file does, which is written last and in one step. The next start deletes
states that no file names.
"""

import asyncio
import json
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from titanrl.base.files import DamagedError, replace_text
from titanrl.serving.calls import Refused

Kind = Literal["weights", "sampler_weights"]
KINDS: Mapping[str, str] = {"weights": "training", "sampler_weights": "sampler"}
"""Type of a checkpoint in Tinker's terms, by the second part of its path."""
_MODEL_ID = re.compile(r"([A-Za-z0-9_-]{1,64}):train:([0-9]{1,9})")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A client's settings of a model."""

    rank: int
    """Rank of its adapters; 0 trains all weights."""
    seed: int | None = None
    """Seed of the initial adapters; None uses the server's."""
    train_attn: bool = True
    """Adapters on the projections of attention."""
    train_mlp: bool = True
    """Adapters on the projections of the MLP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A model of a user, in the protocol a training run, which may have ended."""

    model_id: str
    owner: str
    base_model: str
    spec: ModelSpec
    user_metadata: Mapping[str, str]
    used: float
    """Time of the last request or save, in seconds since the epoch."""

    def wire(self) -> dict[str, Any]:
        """Return the run as the protocol has it."""
        return {
            "training_run_id": self.model_id,
            "base_model": self.base_model,
            "model_owner": self.owner,
            "is_lora": self.spec.rank > 0,
            "lora_rank": self.spec.rank or None,
            "last_request_time": _iso(self.used),
            "user_metadata": dict(self.user_metadata),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A saved state of a model."""

    model_id: str
    kind: Kind
    name: str
    state: str
    """Folder of its files."""
    size_bytes: int
    saved: float
    """Time, in seconds since the epoch."""
    expires: float | None
    """Time after which it is deleted; None keeps it."""
    user_metadata: Mapping[str, str]

    @property
    def path(self) -> str:
        """Path that clients use."""
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"

    def wire(self) -> dict[str, Any]:
        """Return the checkpoint as the protocol has it."""
        return {
            "checkpoint_id": f"{self.kind}/{self.name}",
            "checkpoint_type": KINDS[self.kind],
            "time": _iso(self.saved),
            "tinker_path": self.path,
            "size_bytes": self.size_bytes,
            "user_metadata": dict(self.user_metadata),
            "expires_at": None if self.expires is None else _iso(self.expires),
        }


class Checkpoints:
    """The models and checkpoints of all users in one folder. Only one server may use it at a time."""

    def __init__(self, root: Path, now: Callable[[], float] = time.time) -> None:
        """Open a folder that exists; delete expired checkpoints, and what a killed server left. `now` returns Unix seconds."""
        self._root, self.now = root, now
        self._incoming = set[str]()  # states that are being moved into the folder
        for folder in self._run_folders():
            self._clean(folder)

    def open_run(self, run: Run) -> None:
        """Write the file of a new model, or of one whose time of last use has changed."""
        folder = self._folder(run.model_id)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_text(folder / "run.json", json.dumps(asdict(run)), durable=True)

    def run(self, model_id: str, owner: str) -> Run:
        """Return a model of a user; raise `Refused` if there is none of this id."""
        run = self._read_run(model_id) if _MODEL_ID.fullmatch(model_id) else None
        if run is None or run.owner != owner:
            raise Refused(f"model_id: you have no such model (got {model_id[:80]!r})", status=404)
        return run

    def runs(self, owner: str) -> list[Run]:
        """Return the models of a user, the last used first."""
        found = (self._read_run(f"{folder.parent.name}:train:{folder.name}") for folder in self._run_folders())
        return sorted((run for run in found if run is not None and run.owner == owner), key=lambda run: -run.used)

    def check_name(self, name: str) -> None:
        """Raise `Refused` if the name of a checkpoint is invalid, before anything is written."""
        if not _NAME.fullmatch(name):
            raise Refused(f"path: must have up to 128 letters, digits and ._-, and not start with a dot (got {name[:80]!r})")

    def check_free(self, model_id: str, kind: Kind, name: str) -> None:
        """Raise `Refused` if a name is taken."""
        if self._read(model_id, kind, name) is not None:
            raise Refused(
                f"path: the checkpoint exists (got tinker://{model_id}/{kind}/{name}). Use overwrite, or another name."
            )

    async def add(
        self,
        model_id: str,
        kind: Kind,
        name: str,
        state: Path,
        *,
        ttl_s: int | None = None,
        user_metadata: Mapping[str, str] | None = None,
    ) -> Checkpoint:
        """Move a written state into the folder, and name it. A checkpoint of this name is replaced, in one step.

        Another file system may have the state, so that the move copies it.
        """
        states = self._folder(model_id) / "states"
        states.mkdir(parents=True, exist_ok=True)
        target = states / secrets.token_hex(8)
        self._incoming.add(target.name)
        try:
            await asyncio.to_thread(shutil.move, state, target)
            return self._name(model_id, kind, name, target, ttl_s=ttl_s, user_metadata=user_metadata or {})
        finally:
            self._incoming.discard(target.name)

    def _name(
        self, model_id: str, kind: Kind, name: str, target: Path, *, ttl_s: int | None, user_metadata: Mapping[str, str]
    ) -> Checkpoint:
        now, old = self.now(), self._read(model_id, kind, name)
        checkpoint = Checkpoint(
            model_id=model_id,
            kind=kind,
            name=name,
            state=target.name,
            size_bytes=sum(file.stat().st_size for file in target.rglob("*") if file.is_file()),
            saved=now,
            expires=None if ttl_s is None else now + ttl_s,
            user_metadata=user_metadata,
        )
        self._write(checkpoint)
        if old is not None:
            shutil.rmtree(target.parent / old.state, ignore_errors=True)
        if (run := self._read_run(model_id)) is not None:
            self.open_run(replace(run, used=now))
        return checkpoint

    def find(self, path: str, owner: str, *kinds: Kind) -> tuple[Run, Checkpoint, Path]:
        """Return a checkpoint of a user with its model and the folder of its state; raise `Refused` if there is none."""
        parts = path.removeprefix("tinker://").split("/")
        is_path = (
            path.startswith("tinker://") and len(parts) == 3 and _MODEL_ID.fullmatch(parts[0]) and _NAME.fullmatch(parts[2])
        )
        if not is_path or parts[1] not in KINDS:
            rule = "path: must be tinker://MODEL_ID/weights/NAME or tinker://MODEL_ID/sampler_weights/NAME"
            raise Refused(f"{rule} (got {path[:120]!r})")
        kind: Kind = "weights" if parts[1] == "weights" else "sampler_weights"
        if kinds and kind not in kinds:
            raise Refused(f"path: must be a checkpoint in {' or '.join(kinds)} (got {path[:200]!r})")
        run, checkpoint = self._read_run(parts[0]), self._read(parts[0], kind, parts[2])
        if run is None or run.owner != owner or checkpoint is None:
            raise Refused(f"path: you have no such checkpoint (got {path[:200]!r})", status=404)
        return run, checkpoint, self._folder(parts[0]) / "states" / checkpoint.state

    def all_of(self, owner: str, model_id: str | None = None) -> list[Checkpoint]:
        """Return the checkpoints of a user or of one of the user's models, the newest first."""
        runs = self.runs(owner) if model_id is None else [self.run(model_id, owner)]
        found = [each for run in runs for each in self._clean(self._folder(run.model_id))]
        return sorted(found, key=lambda each: -each.saved)

    def set_ttl(self, path: str, owner: str, ttl_s: int | None) -> None:
        """Let a checkpoint expire after some seconds from now, or never; raise `Refused` if there is none."""
        _, checkpoint, _ = self.find(path, owner)
        self._write(replace(checkpoint, expires=None if ttl_s is None else self.now() + ttl_s))

    def delete(self, path: str, owner: str) -> None:
        """Delete a checkpoint; raise `Refused` if there is none."""
        _, checkpoint, state = self.find(path, owner)
        self._file(checkpoint.model_id, checkpoint.kind, checkpoint.name).unlink()
        shutil.rmtree(state, ignore_errors=True)

    def _clean(self, folder: Path) -> list[Checkpoint]:
        """Delete expired checkpoints of a model, and states without one; return the checkpoints."""
        model_id = f"{folder.parent.name}:train:{folder.name}"
        found = list[Checkpoint]()
        for kind in KINDS:
            for file in (folder / kind).glob("*.json"):
                checkpoint = self._read(model_id, "weights" if kind == "weights" else "sampler_weights", file.stem)
                if checkpoint is None:
                    file.unlink(missing_ok=True)
                else:
                    found.append(checkpoint)
        named = self._incoming | {checkpoint.state for checkpoint in found}
        for state in (folder / "states").glob("*"):
            if state.name not in named:
                shutil.rmtree(state, ignore_errors=True)
        return found

    def _run_folders(self) -> Iterator[Path]:
        for file in sorted(self._root.glob("*/*/run.json")):
            if _MODEL_ID.fullmatch(f"{file.parent.parent.name}:train:{file.parent.name}"):
                yield file.parent

    def _folder(self, model_id: str) -> Path:
        match = _MODEL_ID.fullmatch(model_id)
        assert match, model_id
        return self._root / match[1] / match[2]

    def _file(self, model_id: str, kind: Kind, name: str) -> Path:
        return self._folder(model_id) / kind / f"{name}.json"

    def _read_run(self, model_id: str) -> Run | None:
        values = _read_json(self._folder(model_id) / "run.json")
        return None if values is None else Run(**{**values, "spec": ModelSpec(**values["spec"])})

    def _read(self, model_id: str, kind: Kind, name: str) -> Checkpoint | None:
        """Return a checkpoint; None if there is none, or if it has expired."""
        values = _read_json(self._file(model_id, kind, name))
        checkpoint = None if values is None else Checkpoint(**values)
        has_expired = checkpoint is not None and checkpoint.expires is not None and checkpoint.expires <= self.now()
        return None if has_expired else checkpoint

    def _write(self, checkpoint: Checkpoint) -> None:
        file = self._file(checkpoint.model_id, checkpoint.kind, checkpoint.name)
        file.parent.mkdir(exist_ok=True)
        replace_text(file, json.dumps(asdict(checkpoint)), durable=True)


def _read_json(file: Path) -> dict[str, Any] | None:
    """Return a JSON object that this server wrote; None if the file is missing, `DamagedError` if it is damaged."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DamagedError(f"{file} is damaged ({error}). Delete it.") from None
    if not isinstance(values, dict):
        raise DamagedError(f"{file} is damaged. Delete it.")
    return values


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
