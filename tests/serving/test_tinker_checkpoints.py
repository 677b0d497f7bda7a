"""Checkpoints of Tinker's clients on disk."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from titanrl.base.files import DamagedError
from titanrl.serving.calls import Refused
from titanrl.serving.tinker_sessions import Checkpoint, Checkpoints, Kind, ModelSpec, Run

MODEL = "session_1:train:0"


class Clock:
    time = 1000.0

    def __call__(self) -> float:
        return self.time


def run_of(owner: str = "ann", model_id: str = MODEL) -> Run:
    return Run(
        model_id=model_id, owner=owner, base_model="base", spec=ModelSpec(rank=4), user_metadata={"renderer": "r"}, used=1000.0
    )


def add(checkpoints: Checkpoints, kind: Kind, name: str, state: Path, **options: Any) -> Checkpoint:
    return asyncio.run(checkpoints.add(MODEL, kind, name, state, **options))


def state_in(folder: Path, text: str = "weights") -> Path:
    state = folder / "new-state"
    state.mkdir()
    (state / "data").write_text(text)
    return state


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


def test_checkpoint_survives_a_restart(root: Path, tmp_path: Path) -> None:
    checkpoints = Checkpoints(root, Clock())
    checkpoints.open_run(run_of())
    saved = add(checkpoints, "weights", "step.1", state_in(tmp_path), user_metadata={"a": "b"})
    assert saved.path == "tinker://session_1:train:0/weights/step.1"
    again = Checkpoints(root, Clock())
    run, checkpoint, state = again.find(saved.path, "ann", "weights")
    assert (run, checkpoint) == (run_of(), saved)
    assert (state / "data").read_text() == "weights"
    assert [each.path for each in again.all_of("ann")] == [saved.path]
    assert again.run(MODEL, "ann").wire()["lora_rank"] == 4


def test_other_users_see_nothing(root: Path, tmp_path: Path) -> None:
    checkpoints = Checkpoints(root, Clock())
    checkpoints.open_run(run_of())
    path = add(checkpoints, "sampler_weights", "a", state_in(tmp_path)).path
    for look in (checkpoints.find, checkpoints.delete):
        with pytest.raises(Refused, match="you have no such checkpoint") as raised:
            look(path, "bob")
        assert raised.value.status == 404
    with pytest.raises(Refused, match="you have no such model"):
        checkpoints.run(MODEL, "bob")
    assert checkpoints.all_of("bob") == checkpoints.runs("bob") == []
    with pytest.raises(Refused, match="must be a checkpoint in weights"):
        checkpoints.find(path, "ann", "weights")


def test_replaced_deleted_and_expired_states_are_removed(root: Path, tmp_path: Path) -> None:
    clock = Clock()
    checkpoints = Checkpoints(root, clock)
    checkpoints.open_run(run_of())
    add(checkpoints, "weights", "a", state_in(tmp_path))
    with pytest.raises(Refused, match="the checkpoint exists"):
        checkpoints.check_name(MODEL, "weights", "a")
    path = add(checkpoints, "weights", "a", state_in(tmp_path, "newer")).path
    states = root / "session_1/0/states"
    (state,) = states.iterdir()
    assert (state / "data").read_text() == "newer"
    checkpoints.delete(path, "ann")
    assert list(states.iterdir()) == []
    add(checkpoints, "weights", "b", state_in(tmp_path), ttl_s=10)
    checkpoints.check_name(MODEL, "weights", "c")
    clock.time += 11
    with pytest.raises(Refused, match="no such checkpoint"):
        checkpoints.find("tinker://session_1:train:0/weights/b", "ann")
    assert checkpoints.all_of("ann") == []
    assert list(states.iterdir()) == []


def test_listing_keeps_a_state_that_is_being_moved(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, move = Checkpoints(root, Clock()), shutil.move
    checkpoints.open_run(run_of())
    seen = list[Checkpoint]()

    def list_meanwhile(source: Path, target: Path) -> None:
        move(source, target)
        seen.extend(checkpoints.all_of("ann"))

    monkeypatch.setattr("titanrl.serving.tinker_sessions.shutil.move", list_meanwhile)
    path = add(checkpoints, "weights", "a", state_in(tmp_path)).path
    assert seen == []
    assert (checkpoints.find(path, "ann")[2] / "data").read_text() == "weights"


def test_killed_save_leaves_nothing(root: Path, tmp_path: Path) -> None:
    checkpoints = Checkpoints(root, Clock())
    checkpoints.open_run(run_of())
    path = add(checkpoints, "weights", "a", state_in(tmp_path)).path
    state_in(root / "session_1/0/states", "half")  # moved, but not named
    again = Checkpoints(root, Clock())
    assert len(list((root / "session_1/0/states").iterdir())) == 1
    assert again.find(path, "ann")[1].name == "a"


def test_damaged_file_is_named(root: Path) -> None:
    Checkpoints(root, Clock()).open_run(run_of())
    (root / "session_1/0/weights").mkdir()
    (root / "session_1/0/weights/a.json").write_text("{")
    with pytest.raises(DamagedError, match=r"a\.json is damaged"):
        Checkpoints(root, Clock())


@pytest.mark.parametrize(
    "path",
    [
        "weights/a",
        "tinker://session_1:train:0/weights",
        "tinker://session_1:train:0/weights/../run",
        "tinker://session_1:train:0/weights/..",
        "tinker://../weights/a",
        "tinker://session_1:train:0/states/a",
        "tinker://session_1:train:0/weights/a/b",
    ],
)
def test_path_must_have_three_valid_parts(root: Path, path: str) -> None:
    with pytest.raises(Refused, match="path: must be tinker://"):
        Checkpoints(root, Clock()).find(path, "ann")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "ä", "x" * 129, ".hidden"])
def test_names_stay_in_their_folder(root: Path, name: str) -> None:
    with pytest.raises(Refused, match="path: must have up to 128"):
        Checkpoints(root, Clock()).check_name(MODEL, "weights", name)
