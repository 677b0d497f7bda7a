import sys
from pathlib import Path

import pytest

from titanrl.metrics.trackers import make_trackers


def scalars(run_dir: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run_dir / "tensorboard"))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(name)]


def test_tensorboard_gets_every_metric_of_every_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tracker,) = make_trackers(("tensorboard",), tmp_path, {"seed": 0})
    tracker.log(1, {"reward/mean": 0.25, "grad/norm": 2.0})
    tracker.log(2, {"reward/mean": 0.5})
    tracker.close()
    assert scalars(tmp_path, "reward/mean") == [(1, 0.25), (2, 0.5)]
    assert scalars(tmp_path, "grad/norm") == [(1, 2.0)]


def test_tensorboard_hides_the_steps_that_a_resumed_run_repeats(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for resume_step, steps, value in ((None, (1, 2, 3), 0.25), (1, (2, 3), 0.5)):
        (tracker,) = make_trackers(("tensorboard",), tmp_path, {}, resume_step=resume_step)
        for step in steps:
            tracker.log(step, {"reward/mean": value})
        tracker.close()
    assert scalars(tmp_path, "reward/mean") == [(1, 0.25), (2, 0.5), (3, 0.5)]


def test_wandb_records_a_run_under_the_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "quickstart").mkdir()
    (tracker,) = make_trackers(("wandb",), tmp_path / "quickstart", {"seed": 0})
    tracker.log(1, {"reward/mean": 0.25})
    tracker.close()
    wandb.teardown()  # waits for the process that writes the record
    (record,) = (tmp_path / "quickstart").glob("wandb/offline-run-*/*.wandb")
    assert b"reward/mean" in record.read_bytes()


@pytest.mark.parametrize(
    ("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb"), ("trackio", "trackio")]
)
def test_a_tracker_that_is_not_installed_is_named(
    name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"logging.loggers names {name}, .* run `pip install {name}`, or take it off"):
        make_trackers((name,), tmp_path, {})  # type: ignore[arg-type]


def test_no_trackers_are_the_default(tmp_path: Path) -> None:
    assert make_trackers((), tmp_path, {}) == []
