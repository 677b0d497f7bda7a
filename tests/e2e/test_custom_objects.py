"""A run with a custom loss, advantage, group filter, tracker and hook, all named by file."""

import csv
import json
import os
import shutil
import signal
from pathlib import Path

from tests.e2e.conftest import REPO, SMALL, Command, Finished

STEER = """
import json
import titanrl

def keep(group):
    return group.index != 27

class Steer(titanrl.Hook):
    def __init__(self):
        self.calls = []

    def before_step(self, run):
        self.calls.append(["before", run.state.step])

    async def after_step(self, run, metrics):
        self.calls.append(["after", metrics.step])
        if metrics.step == 3:
            run.set_learning_rate(1e-6)

    async def after_evaluation(self, run, result):
        self.calls.append(["evaluation", result.version])

    def after_checkpoint(self, run, folder):
        self.calls.append(["checkpoint", folder.name])
        (run.run_dir / "calls.json").write_text(json.dumps(self.calls))
        if run.state.step == 4:
            raise RuntimeError("enough")
"""


def finished_run(plain_run: Finished, folder: Path) -> Finished:
    """Run the example in a separate folder, with another hook and a loss threshold that every token reaches."""
    for file in ("custom_loss.py", "custom_loss.yaml"):
        shutil.copy(REPO / "examples" / "custom_loss" / file, folder)
    (folder / "steer.py").write_text(STEER)
    runs = plain_run.run_dir.parent
    overrides = [
        *SMALL,
        f"output_dir={runs}",
        f"cache_dir={runs.parent / 'cache'}",
        "algorithm.loss_options={min_entropy: 0.0}",
        "rollout.group_filter=steer.py:keep",
        "hooks=[steer.py:Steer]",
    ]
    command = Command(runs / "custom_loss", ["--config", str(folder / "custom_loss.yaml"), *overrides], {})
    try:
        return command.finish()
    finally:
        if command.process.poll() is None:
            os.killpg(command.process.pid, signal.SIGKILL)


def test_custom_objects_match_built_in_ones_and_steer_the_run(plain_run: Finished, tmp_path: Path) -> None:
    own = finished_run(plain_run, tmp_path)
    # The hook raised after the last checkpoint.
    assert own.code == 1, own.output
    error = f"HookError: hooks: {tmp_path}/steer.py:Steer.after_checkpoint raised RuntimeError: enough"
    assert own.output.splitlines()[-1] == f"error: {error}"
    assert own.events()[-1]["cause"] == error

    # Until the filter and the learning rate differ, the copies of ppo and dr_grpo give the same bits.
    for name in ("reward/mean", "grad/norm", "loss/policy", "tokens/response_len_mean", "policy/ratio_mean", "optim/lr"):
        assert [row[name] for row in own.steps[:3]] == [row[name] for row in plain_run.steps[:3]], name
    assert own.evaluations()[0] == plain_run.evaluations()[0]
    assert [row["policy/uncertain_frac"] for row in own.steps] == [1.0] * 4

    drops = [event for event in own.events() if event["kind"] == "drop"]
    assert [(event["step"], event["groups"], event["reason"]) for event in drops] == [(4, 1, "filtered")]
    assert [row["group/filtered_frac"] for row in own.steps] == [0.0, 0.0, 0.0, 1 / 9]
    assert own.steps[3]["optim/lr"] == 1e-6
    assert [(event["step"], event["value"]) for event in own.events() if event["kind"] == "learning_rate"] == [(3, 1e-6)]

    with (own.run_dir / "reward.csv").open() as file:
        rows = [(int(step), float(reward)) for step, reward in csv.reader(file)]
    assert rows == [(row["step"], row["reward/mean"]) for row in own.steps]
    steps = [[["before", step - 1], ["after", step]] for step in (1, 2, 3, 4)]
    assert json.loads((own.run_dir / "calls.json").read_text()) == [
        ["evaluation", 0],
        *steps[0],
        *steps[1],
        ["checkpoint", "step-2"],
        *steps[2],
        *steps[3],
        ["evaluation", 4],
        ["checkpoint", "step-4"],
    ]
    state = json.loads((own.run_dir / "checkpoints" / "step-4" / "controller.json").read_text())
    assert (state["learning_rate"], state["num_rates"]) == (1e-6, 1), "a resumed run keeps the learning rate"
