"""A run without processes: counting skipped steps, and stopping on a full disk."""

import asyncio
import re
from pathlib import Path

import numpy as np
import pytest

from titanrl.carriers.types import EvaluationResult, OptimUpdate
from titanrl.config import load_config
from titanrl.grpo import GRPO
from titanrl.launch.run_lock import claim_new_run
from titanrl.metrics.console import Console
from titanrl.metrics.record import Recorder
from titanrl.metrics.run_directory import RunDirectory, read_lines
from titanrl.metrics.trackers import Trackers
from titanrl.run.progress import RunState
from titanrl.run.run import NonFiniteGradientError

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


@pytest.mark.parametrize(
    ("num_errors", "max_error_frac", "is_compared"), [(0, 0.0, True), (1, 0.0, False), (1, 0.1, True), (2, 0.1, False)]
)
def test_evaluation_with_failed_rewards_is_not_compared(
    num_errors: int, max_error_frac: float, is_compared: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_in(tmp_path / "run")
    best = ("evaluation.best_metric=eval/chain_sum/mean", f"evaluation.max_error_frac={max_error_frac}")
    run.config = load_config("quickstart", best)
    run.state = RunState(step=2, version=2, next_index=0, best_value=0.5, best_step=1)
    worse = EvaluationResult(
        task="chain_sum", version=2, mean=0.4, num_prompts=10, response_len_mean=1.0, num_errors=num_errors, first_error="boom"
    )
    run.recorder.directory.event("start", step=0)
    asyncio.run(run._compare(2, worse))
    events = [row for row in read_lines(run.recorder.directory.events) if row["kind"] == "not_compared"]
    assert run.state.num_without_better == is_compared
    assert [(event["count"], event["completions"]) for event in events] == [] if is_compared else [(num_errors, 10)]
    warned = f"{num_errors} of 10 completions have no reward; mean over 10 of 10 prompts, but evaluation.max_error_frac is"
    assert (warned in capsys.readouterr().err.replace("\n", " ")) is not is_compared
    asyncio.run(run.stop())


def test_stop_on_a_full_disk_raises_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_in(tmp_path / "run")
    run.recorder.directory.events.symlink_to("/dev/full")
    asyncio.run(run.stop(code=1, cause="boom"))
    assert f"the end of the run is not recorded: [Errno 28] No space left on device: '{tmp_path}/run/events.jsonl'" in "".join(
        capsys.readouterr().err.splitlines()
    )
