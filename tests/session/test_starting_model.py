"""Names of cached models, and several processes that create the same model."""

import os
import shutil
from pathlib import Path

import pytest

from tests.foreign import NOBODY, ROOT_ONLY, USER
from titanrl.config import load_config
from titanrl.config.errors import BrokenRules
from titanrl.session.starting_model import StartingModel, new_base, prepare_starting_model


def base_in(folder: Path, *overrides: str) -> StartingModel:
    return prepare_starting_model(load_config("configs/quickstart.yaml", [f"cache_dir={folder}", *overrides]))


def test_base_has_the_same_name_wherever_cache_and_model_lie(tmp_path: Path) -> None:
    first, second = base_in(tmp_path / "a"), base_in(tmp_path / "b")
    assert first.base.name == second.base.name
    copies = [shutil.copytree(first.initial, tmp_path / name) for name in ("copy", "other")]
    named = [base_in(tmp_path / "a", f"model.path={copy}").base.name for copy in copies]
    assert named[0] == named[1] != first.base.name
    with (copies[1] / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    assert base_in(tmp_path / "a", f"model.path={copies[1]}").base.name != named[0]
    assert base_in(tmp_path / "a", "warm_start.num_steps=469").base.name != first.base.name


def test_first_of_two_processes_provides_the_base(tmp_path: Path) -> None:
    model = StartingModel(tmp_path / "initial", tmp_path / "cache" / "base-1")
    with new_base(model) as slow:
        slow.mkdir()
        (slow / "config.json").write_text("slow")
        assert not model.is_ready
        with new_base(model) as fast:
            assert fast != slow
            fast.mkdir()
            (fast / "config.json").write_text("fast")
        assert model.is_ready
    assert (model.base / "config.json").read_text() == "fast"
    assert [path.name for path in model.base.parent.iterdir()] == ["base-1"]


@ROOT_ONLY
def test_cached_model_of_another_user_is_refused(tmp_path: Path) -> None:
    initial = base_in(tmp_path).initial
    os.chown(initial, NOBODY, NOBODY)
    with pytest.raises(BrokenRules, match=rf"cache_dir=.*must have been made by you \(.* belongs to the user {USER}\)"):
        base_in(tmp_path)
