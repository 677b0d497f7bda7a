"""Checkpoints, states and models that cannot be written or read: every rank gets one line with folder and cause."""

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.trainer import full_disk
from tests.trainer.ranks import World
from titanrl.base.errors import StorageError
from titanrl.base.files import digests_of
from titanrl.trainer.model import mark, unwritten
from titanrl.trainer.rank import PolicyTrainer


@pytest.mark.parametrize("in_background", [False, True], ids=["waiting", "in background"])
def test_full_disk_error_is_one_line_on_every_rank(
    in_background: bool, world: Callable[[int], World], tiny_model: Path, tmp_path: Path
) -> None:
    replies = world(2).run(full_disk.save_until_full, tiny_model, {"dp_shard": 2}, tmp_path, in_background)
    step_1 = tmp_path / "checkpoints" / "step-1"
    assert {name: digest for digests, _ in replies for name, digest in digests.items()} == digests_of(step_1, step_1.iterdir())
    assert replies[0][0].keys() == {".metadata", "__0_0.distcp"}
    for _, errors in replies:
        assert len(errors) == 4
        assert all("\n" not in error and len(error) < 600 and "Traceback" not in error for error in errors), errors
        checkpoint, state, model, missing = errors
        assert checkpoint.startswith(f"cannot save a checkpoint in {tmp_path}/checkpoints: ")
        assert state.startswith(f"cannot save a state in {tmp_path}/state: ")
        assert "No space left on device" in checkpoint or "file write failed" in checkpoint
        assert "No space left on device" in state or "file write failed" in state
        assert model.startswith(f"cannot export the model in {tmp_path}/final: ")
        assert missing.startswith(f"cannot load a checkpoint in {tmp_path}/checkpoints: ")
        assert in_background or "step-7" in missing  # a failed write in the background fails every later call, too
    assert not (tmp_path / "final").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensor_with_one_unwritten_element_is_named(dtype: torch.dtype) -> None:
    state = {name: torch.ones(3, 4, dtype=dtype) for name in ("b.weight", "a.weight")}
    mark(state)
    assert all(value.isnan().all() for value in state.values())
    assert unwritten(state) == ["a.weight", "b.weight"]
    state["a.weight"].zero_()
    state["b.weight"].view(-1)[:11] = 1.0
    assert unwritten(state) == ["b.weight"]
    state["b.weight"][2, 3] = float("nan")  # of a checkpoint whose weights have diverged
    assert unwritten(state) == []


def test_other_dtypes_and_empty_shards_are_ignored() -> None:
    state = {"count": torch.tensor(3), "shard": torch.empty(0, 4), "scalar": torch.tensor(1.0)}
    mark(state)
    assert state["count"] == 3
    assert unwritten(state) == ["scalar"]


async def test_trainer_leaves_its_process_group_although_a_checkpoint_cannot_be_written() -> None:
    def fail() -> None:
        raise StorageError("the disk is full")

    ended = list[str]()
    trainer = PolicyTrainer(None)  # type: ignore[arg-type]
    for end in (partial(ended.append, "process group"), partial(ended.append, "record"), fail):
        trainer._closing.callback(end)
    with pytest.raises(StorageError):
        await inspect.unwrap(vars(PolicyTrainer)["close"]._method)(trainer)
    assert ended == ["record", "process group"]
