"""An asynchronous run that is killed between two publications, resumed, and interrupted."""

import os
import signal
import time

from tests.e2e.conftest import Finished, Start
from tests.e2e.exactly_once import OVERLAPPING, check_every_prompt_once


def test_every_prompt_is_trained_on_once_after_a_kill_and_an_interrupt(start_run: Start, plain_run: Finished) -> None:
    endless = "num_steps=100000"
    command = start_run(
        "once", *plain_run.as_start, *OVERLAPPING, endless, "checkpoint.every_steps=5", "evaluation.num_prompts=8"
    )
    command.wait_for_step(6)
    command.process.send_signal(signal.SIGKILL)
    command.finish()

    saves = ("rollout.num_workers=2", "checkpoint.every_steps=0", "checkpoint.on_interrupt=true")
    command = start_run("once", *saves, resume=True)
    command.wait_for_step(9)
    interrupted = time.monotonic()
    os.killpg(command.process.pid, signal.SIGINT)  # as a terminal does
    resumed = command.finish(timeout_s=90)
    assert time.monotonic() - interrupted < 90
    assert resumed.code == 130, resumed.output
    assert command.leftovers() == []
    last = resumed.steps[-1]["step"]
    assert "interrupted; saving a checkpoint after the current step, then shutting down." in resumed.output
    assert f"saved step {last}; --resume continues after it" in resumed.output

    check_every_prompt_once(resumed)
    (restored,) = [event for event in resumed.events() if event["kind"] == "restored"]
    assert restored["ready"] + restored["in_flight"] > 0
    assert restored["too_old"] == 0
    assert [row["version"] for row in resumed.steps] == list(range(1, last + 1))
    published = [event["version"] for event in resumed.events() if event["kind"] == "publication"]
    assert published == list(range(0, last + 1, 2)), "the interval continues where it was"
    assert max(row["staleness/max"] for row in resumed.steps) <= 2
    saved, next_one = resumed.steps[restored["step"] - 1 : restored["step"] + 1]
    assert next_one["replay/stored"] >= saved["replay/stored"] > 0, "the groups kept for replay are restored"
