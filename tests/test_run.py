"""A run without processes: counting skipped steps, and stopping on a full disk."""

import asyncio
import re
from pathlib import Path

import numpy as np
import pytest

from titanrl.config import load_config
from titanrl.grpo import GRPO
from titanrl.launch.progress import RunState
from titanrl.launch.run_lock import claim_new_run
from titanrl.metrics.console import Console
from titanrl.metrics.record import Recorder
from titanrl.metrics.run_directory import RunDirectory, read_lines
from titanrl.metrics.trackers import Trackers
from titanrl.run import NonFiniteGradientError
from titanrl.types import OptimUpdate

SKIPPED = OptimUpdate(version=0, grad_norm=float("inf"), skipped=True)


def run_in(path: Path) -> GRPO:
    run = object.__new__(GRPO)
    run.config = load_config("quickstart", ["algorithm.max_skipped_steps=1"])
    run.state = RunState(step=0, version=0, next_index=0)
    run.console = Console("off", total_steps=1)
    run._lock = claim_new_run(path)
    run._recorder = Recorder(RunDirectory(path), Trackers({}, print), run.console)
    run._session = run._saving = run._closing = run._kept = None
    return run


@pytest.mark.parametrize(
    ("largest_reward", "advice"),
    [
        (1e30, "The rewards reach 1e+30, and gradients grow with them: return smaller numbers from data.rewards"),
        (1.0, "Lower the learning rate; grad/norm in metrics.jsonl shows where it began."),
    ],
)
def test_skipped_steps_advice_names_huge_rewards(largest_reward: float, advice: str, tmp_path: Path) -> None:
    run = run_in(tmp_path / "run")
    rewards = np.array([0.5, -largest_reward])
    run.count_skipped(SKIPPED, rewards)
    with pytest.raises(NonFiniteGradientError, match=re.escape(advice)):
        run.count_skipped(SKIPPED, rewards)
    events = [row for row in read_lines(run.recorder.directory.events) if row["kind"] == "skipped_step"]
    assert [event["largest_reward"] for event in events] == [largest_reward, largest_reward]
    asyncio.run(run.stop())


def test_stop_on_a_full_disk_raises_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_in(tmp_path / "run")
    run.recorder.directory.events.symlink_to("/dev/full")
    asyncio.run(run.stop(code=1, cause="boom"))
    assert f"the end of the run is not recorded: [Errno 28] No space left on device: '{tmp_path}/run/events.jsonl'" in "".join(
        capsys.readouterr().err.splitlines()
    )
