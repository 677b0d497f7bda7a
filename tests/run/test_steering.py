"""Changes of a run without processes: which are refused, when they are made, and which a resumed run repeats."""

import asyncio
import json
from collections.abc import Collection, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from titanrl.config import Config, load_config
from titanrl.config.errors import ConfigError
from titanrl.config.load import read_source
from titanrl.metrics.console import Console
from titanrl.metrics.run_directory import RunDirectory
from titanrl.metrics.trackers import Hook, Hooks, Recorder, Trackers
from titanrl.run.checkpoints import FIRST, RunState
from titanrl.run.steering import CHANGES_FILE, TEMPERATURE, Steering, repeated_changes

MIXED = (
    "data.source=jsonl",
    "data.path=sums.jsonl",
    "data.mixture={easy: {weight: 1}, hard: {weight: 1}}",
    "evaluation.num_prompts=0",
    "warm_start=null",
)
LR, WEIGHT, EVERY = "algorithm.learning_rate", "data.mixture.hard.weight", "checkpoint.every_steps"


@dataclass
class Steps:
    """A run without processes that takes steps in the order of `Run.step` and `Publications.publish`."""

    config: Config
    run_dir: Path
    recorder: Recorder
    console: Console
    state: RunState = FIRST
    hooks: Hooks = field(default_factory=lambda: Hooks([]))
    is_ending: bool = False
    admits_prompts: bool = True
    is_in_step: bool = False
    applied: list[set[str]] = field(default_factory=list)
    values: list[tuple[float, float]] = field(default_factory=list)
    """Learning rate of each step, and the weight with which its prompts were admitted."""
    weight: float = 1.0
    steering: Steering = field(init=False)

    async def unless_ending(self, work: Coroutine[Any, Any, object]) -> bool:
        await work
        return True

    async def apply_changes(self, keys: Collection[str]) -> None:
        self.applied.append(set(keys))

    async def after_pause(self) -> None:
        self.applied.append({"after pause"})

    async def step(self, *, during: dict[str, Any] | None = None) -> None:
        await self.hooks.before_step(self)
        await self.steering.begin_step()
        assert self.config.data.mixture or self.weight == 1.0
        self.values.append((self.config.algorithm.learning_rate, self.weight))
        if during:
            self.steering.set(during)
        state = replace(self.state, step=self.state.step + 1, version=self.state.version + 1)
        if state.version % self.config.algorithm.updates_per_publish == 0:
            await self.steering.begin_publication()
            self.weight = self.config.data.mixture["hard"].weight
        self.state = state

    def steps(self, number: int) -> None:
        for _ in range(number):
            asyncio.run(self.step())

    def events(self) -> list[tuple[int, str, Any, str]]:
        lines = map(json.loads, self.recorder.directory.events.read_text().splitlines())
        return [(row["step"], row["key"], row["value"], row["by"]) for row in lines if row["kind"] == "set"]


@contextmanager
def run_in(path: Path, *overrides: str, config: Config | None = None, resume_step: int | None = None) -> Iterator[Steps]:
    config = config or load_config("quickstart", ["num_steps=24", "algorithm.learning_rate=0.5", *MIXED, *overrides])
    console = Console("off", total_steps=1)
    run = Steps(config, path, Recorder(RunDirectory(path, resume_step=resume_step), Trackers({}, print), console), console)
    if resume_step is None:
        run.steering = Steering(run, [])
    else:
        run.state = RunState(step=resume_step, version=resume_step, next_index=0)
        run.steering = Steering(run, repeated_changes(run.config, path, None))
        run.weight = run.config.data.mixture["hard"].weight
    yield run
    run.recorder.close()


@pytest.mark.parametrize(
    ("overrides", "values", "problem"),
    [
        ((), {LR: -1.0}, r"algorithm.learning_rate=-1.0\n  rule: must be a number > 0\n  fix: "),
        ((), {LR: "1e-5"}, r"rule: must be a number > 0\n  fix:  remove the quotes"),
        ((), {LR: float("nan")}, r"rule: must be a finite number > 0"),
        ((), {"algorithm.lr": 1.0}, r"rule: no such key in algorithm\n  fix:  did you mean algorithm.learning_rate\?"),
        ((), {"": 1}, "rule: no such key"),
        ((), {"examples.weight": 1}, r"rule: the run was started without the section examples\n  fix:  choose one of "),
        ((), {"algorithm.loss": "gspo"}, r"rule: this key cannot be changed during the run\n  fix:  .*--resume RUN"),
        ((), {"rollout.top_p": 0.5}, r"rule: trainer and generators use one top_p, .*\n  fix:  .*--resume RUN"),
        ((), {TEMPERATURE: 3.0}, r"rollout.temperature=3.0\n  rule: must be a number >= 0.01 and <= 2"),
        (
            ("max_staleness=1",),
            {TEMPERATURE: 0.5},
            r"rule: trainer and generators use one temperature, .*\n  fix:  resume the run",
        ),
        (("replay.fraction=0.5",), {TEMPERATURE: 0.5}, r"rule: trainer and generators use one temperature"),
        (("rollout.save=dump",), {TEMPERATURE: 0.5}, r"rule: a dump has one temperature"),
        (
            (),
            {"data.mixture.harder.weight": 2.0},
            r"rule: this key cannot be changed .*\n  fix:  did you mean data.mixture.hard.weight\?$",
        ),
        (
            ("algorithm.updates_per_publish=2", "checkpoint.every_steps=0"),
            {"checkpoint.on_interrupt": True},
            r"rule: checkpoints between two publications need the published weights, of which this run keeps no copy",
        ),
        ((), {"evaluation.patience": 3}, r"rule: patience requires best_metric"),
        (
            ("max_staleness=1", "evaluation.every_steps=0", "evaluation.num_prompts=8", "data.mixture={}"),
            {"evaluation.every_steps": 5},
            r"rule: asynchronous training evaluates between steps on a separate generator, which this run has not started",
        ),
    ],
)
def test_change_is_refused_with_key_value_rule_and_fix(
    tmp_path: Path, overrides: tuple[str, ...], values: dict[str, Any], problem: str
) -> None:
    with run_in(tmp_path / "run", *overrides) as run:
        before = run.config
        with pytest.raises(ConfigError, match=problem):
            run.steering.set(values)
        with pytest.raises(ConfigError, match=problem):  # one wrong value refuses all
            run.steering.set({"logging.rollouts_per_step": 7, **values})
        assert run.config is before
        assert not (tmp_path / "run" / CHANGES_FILE).exists()


def test_change_that_would_have_no_effect_is_refused(tmp_path: Path) -> None:
    with run_in(tmp_path / "run") as run:
        run.state = replace(run.state, learning_rate=0.1)
        with pytest.raises(ConfigError, match=r"run\.set_learning_rate overrides the schedule"):
            run.steering.set({LR: 0.25})
        run.admits_prompts = False
        with pytest.raises(ConfigError, match="only titanrl train, with a trainer, samples new prompts while it runs"):
            run.steering.set({WEIGHT: 2.0})


def test_change_holds_from_the_next_step_and_weights_from_the_next_admission(tmp_path: Path) -> None:
    with run_in(tmp_path / "run") as run:
        run.steps(1)
        assert run.steering.set({LR: 0.25, WEIGHT: 3.0}) == 2, "the prompts of step 2 are already admitted"
        assert run.config.algorithm.learning_rate == 0.5
        asyncio.run(run.step(during={LR: 0.125, WEIGHT: 5.0}))  # during step 2, before it publishes
        run.steps(2)
        assert run.values == [(0.5, 1.0), (0.25, 1.0), (0.125, 5.0), (0.125, 5.0)]
        assert run.events() == [(1, LR, 0.25, "user"), (2, WEIGHT, 5.0, "user"), (2, LR, 0.125, "user")]
        assert run.applied == [{LR}, {WEIGHT}, {LR}]
        assert run.steering.metrics() == {f"set/{LR}": 0.125, f"set/{WEIGHT}": 5.0}


def test_weights_wait_for_the_publication(tmp_path: Path) -> None:
    with run_in(tmp_path / "run", "algorithm.updates_per_publish=4") as run:
        run.steps(5)
        assert run.steering.set({WEIGHT: 3.0, TEMPERATURE: 0.5}) == 8
        run.steps(4)
        assert [weight for _, weight in run.values] == [1.0] * 8 + [3.0]
        assert run.applied == [{WEIGHT, TEMPERATURE}]


@pytest.mark.parametrize("resume_step", [0, 1, 2, 3, 4, 5, 6])
def test_resumed_run_repeats_the_changes_at_their_steps(tmp_path: Path, resume_step: int) -> None:
    with run_in(tmp_path / "run") as run:
        config = run.config
        run.steps(2)
        run.steering.set({LR: 0.25, WEIGHT: 3.0})
        asyncio.run(run.step(during={EVERY: 7}))
        run.steering.set({LR: 0.125})
        run.steps(3)
        values, events = run.values, run.events()
    with run_in(tmp_path / "run", config=config, resume_step=resume_step) as resumed:
        resumed.steps(6 - resume_step)
        assert resumed.values == values[resume_step:]
        assert resumed.events() == events
        assert resumed.config.checkpoint.every_steps == 7


def test_resume_with_another_value_drops_the_changes_of_the_key(tmp_path: Path) -> None:
    with run_in(tmp_path / "run") as run:
        config = run.config
        run.steps(2)
        run.steering.set({LR: 0.25, EVERY: 7})
        run.steps(2)
    changed = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"learning_rate": 0.75})})
    with run_in(tmp_path / "run", config=changed, resume_step=1) as resumed:
        resumed.steps(3)
        assert [rate for rate, _ in resumed.values] == [0.75] * 3
        assert resumed.config.checkpoint.every_steps == 7
    # The value that the run was started with is another one only if the user names it.
    with run_in(tmp_path / "run", config=config, resume_step=1) as resumed:
        source = read_source("quickstart", [f"{EVERY}=50"])
        steering = Steering(resumed, repeated_changes(resumed.config, tmp_path / "run", source))
        assert {change.key for change in steering._changes} == {LR}


def test_new_value_replaces_the_later_changes_of_the_key(tmp_path: Path) -> None:
    with run_in(tmp_path / "run") as run:
        config = run.config
        run.steps(3)
        run.steering.set({LR: 0.25, EVERY: 7})
        run.steps(1)
    with run_in(tmp_path / "run", config=config, resume_step=1) as resumed:
        resumed.steering.set({LR: 0.375})
        resumed.steps(4)
        assert [rate for rate, _ in resumed.values] == [0.375] * 4
        assert [event[1] for event in resumed.events()] == [LR, EVERY]


def test_change_is_checked_with_the_pending_ones(tmp_path: Path) -> None:
    decay, num_decay_steps = "algorithm.lr_decay", "algorithm.num_decay_steps"
    with run_in(tmp_path / "run") as run:
        run.steps(1)
        run.steering.set({decay: "linear"})
        run.steering.set({num_decay_steps: 5})  # valid only with the decay that begins with the same step
        with pytest.raises(ConfigError, match="a constant rate does not decay"):
            run.steering.set({decay: "constant"})
        run.steps(1)
        assert (run.config.algorithm.lr_decay, run.config.algorithm.num_decay_steps) == ("linear", 5)


def test_requested_restart_forgets_later_changes_and_a_fault_does_not(tmp_path: Path) -> None:
    for forgets, rate in ((True, 0.5), (False, 0.25)):
        with run_in(tmp_path / f"run-{forgets}") as run:
            run.steps(2)
            run.steering.set({LR: 0.25})
            run.steps(1)
            run.state = RunState(step=2, version=2, next_index=0)
            run.steering.restore(run.state, forgets_later=forgets)
            run.steps(1)
            assert run.values[-1][0] == rate


class Halve(Hook):
    """Halves the learning rate before step 3."""

    def before_step(self, run: Any) -> None:
        if run.state.step == 2:
            run.steering.set({LR: 0.5 * run.config.algorithm.learning_rate})


def test_changes_of_hooks_are_kept_but_repeated_only_by_the_hook(tmp_path: Path) -> None:
    with run_in(tmp_path / "run") as run:
        run.hooks = Hooks([("Halve", Halve())])
        config = run.config
        run.steps(4)
        assert [rate for rate, _ in run.values] == [0.5, 0.5, 0.25, 0.25]
        assert run.events() == [(2, LR, 0.25, "hook")]
        run.steering.set({LR: 0.125})
    for step, rates in ((3, [0.25, 0.125]), (1, [0.5, 0.5, 0.5, 0.125]), (4, [0.125])):  # without the hook
        with run_in(tmp_path / "run", config=config, resume_step=step) as resumed:
            asyncio.run(resumed.steering.listen())  # writes the changes that are left
            resumed.steering.close()
            resumed.steps(5 - step)
            assert [rate for rate, _ in resumed.values] == rates


@pytest.mark.parametrize("content", ["{}", "[1]", '[{"step": 1}]', "["])
def test_damaged_changes_are_refused_before_a_resume(tmp_path: Path, content: str) -> None:
    with run_in(tmp_path / "run") as run:
        config = run.config
    (tmp_path / "run" / CHANGES_FILE).write_text(content)
    refused = pytest.raises(ConfigError, match=r"cannot be read: it is not a list of changes \(got .*Delete it")
    with refused, run_in(tmp_path / "run", config=config, resume_step=0):
        pass


def test_pause_waits_for_the_boundary_and_ends_with_resume(tmp_path: Path) -> None:
    async def scenario(run: Steps) -> list[str]:
        seen, steering = [], run.steering

        async def train() -> None:
            with steering.training():
                await steering.pause()  # by a hook: returns at once, because the step waits for the hook
                assert steering.is_pausing
                await steering.wait()
                seen.append("continued")

        await steering.pause()  # returns at once, because no steps are taken
        training = asyncio.create_task(train())
        await asyncio.sleep(0)
        await steering.pause()
        seen.append(steering.status()["state"])
        steering.resume()
        await training
        seen.append(steering.status()["state"])
        return seen

    with run_in(tmp_path / "run") as run:
        assert asyncio.run(scenario(run)) == ["paused", "continued", "idle"]
        kinds = [json.loads(line)["kind"] for line in run.recorder.directory.events.read_text().splitlines()]
        assert kinds == ["paused", "continued"]
        assert run.applied == [{"after pause"}]


def test_pause_right_after_resume_is_not_lost(tmp_path: Path) -> None:
    async def scenario(run: Steps) -> None:
        steering = run.steering

        async def train() -> None:
            with steering.training():
                while not run.is_ending:
                    if steering.is_pausing:
                        await steering.wait()
                    await asyncio.sleep(0)

        training = asyncio.create_task(train())
        await asyncio.sleep(0)
        await steering.pause()
        steering.resume()
        async with asyncio.timeout(10):
            await steering.pause()
        assert steering.status()["state"] == "paused"
        run.is_ending = True
        steering.resume()
        await training

    with run_in(tmp_path / "run") as run:
        asyncio.run(scenario(run))


def test_requests_are_answered_or_refused_with_what_is_allowed(tmp_path: Path) -> None:
    with run_in(tmp_path / "run") as run:
        answer = run.steering._answer
        assert answer({"action": "status"})["keys"][LR] == 0.5
        assert answer({"action": "pause"})["state"] == "pausing"
        assert answer({"action": "resume"})["text"] == "the run continues"
        assert answer({"action": "resume"})["text"] == "the run was not paused"
        both = answer({"action": "set", "values": {WEIGHT: 3, LR: 0.25}})["text"]
        assert both == "algorithm.learning_rate = 0.25 from step 1 on; data.mixture.hard.weight = 3 from step 2 on"
        pending = "algorithm.learning_rate=0.25 from step 1 on; data.mixture.hard.weight=3.0 from step 2 on"
        assert answer({"action": "status"})["text"] == f"idle after step 0 of 24; pending: {pending}"
        for request, problem in (
            ({"action": "stop"}, "action: must be status, pause, resume or set"),
            ({}, "action: must be status"),
            ({"action": "set"}, "set: needs at least one key"),
            ({"action": "set", "values": [1]}, "values: must be an object"),
        ):
            with pytest.raises((TypeError, ValueError), match=problem):
                answer(request)
