"""Hooks: their order, plain and asynchronous methods, errors and signatures."""

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from titanrl.base.plugins import import_object, plugin_of
from titanrl.carriers.types import AdamParams, EvaluationResult, StepMetrics
from titanrl.config.algorithm import AlgorithmConfig
from titanrl.grpo import GRPO
from titanrl.metrics.trackers import Hook, HookError, Hooks, check_hook
from titanrl.run.checkpoints import RunState, complete_checkpoint, resumable

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_loss" / "custom_loss.py"
METRICS = StepMetrics(step=3, version=3, values={"optim/lr": 0.5})
RESULT = EvaluationResult(task="sums", version=3, mean=0.5, num_prompts=2, response_len_mean=4.0)


class Plain(Hook):
    def before_step(self, run: list[Any]) -> None:
        run.append("before")

    def after_step(self, run: list[Any], metrics: StepMetrics) -> None:
        run.append(metrics)


class Asynchronous(Hook):
    async def before_step(self, run: list[Any]) -> None:
        await asyncio.sleep(0)
        run.append("before, later")

    async def after_evaluation(self, run: list[Any], result: EvaluationResult) -> None:
        run.append(result)

    async def after_checkpoint(self, run: list[Any], folder: Path) -> None:
        run.append(folder)


def hooks(*given: object) -> Hooks:
    return Hooks.of({f"hooks.{i}": plugin_of(f"hooks.{i}", hook, is_local=True) for i, hook in enumerate(given)})


async def test_every_hook_is_called_in_order() -> None:
    run: list[Any] = []
    both = hooks(Plain(), Asynchronous)  # an object and a class
    await both.before_step(run)
    await both.after_step(run, METRICS)
    await both.after_evaluation(run, RESULT)
    await both.after_checkpoint(run, Path("step-3"))
    assert run == ["before", "before, later", METRICS, RESULT, Path("step-3")]


class Raising(Hook):
    async def after_step(self, run: object, metrics: StepMetrics) -> None:
        raise KeyError("reward/mine")


class Unbuildable(Hook):
    def __init__(self) -> None:
        raise OSError("no such host")


def test_error_names_the_failed_hook() -> None:
    with pytest.raises(HookError, match=r"^hooks: Raising\.after_step raised KeyError: 'reward/mine'$"):
        asyncio.run(hooks(Raising).after_step(None, METRICS))
    with pytest.raises(HookError, match=r"^hooks: Unbuildable raised OSError: no such host$"):
        hooks(Unbuildable)


class NeedsArguments(Hook):
    def __init__(self, target: float) -> None:
        self.target = target


class WrongSignature(Hook):
    def after_step(self, run: object) -> None:  # type: ignore[override]
        pass


class Misspelt(Hook):
    def after_steps(self, run: object, metrics: StepMetrics) -> None:
        pass


class NoHook:
    def after_step(self, run: object, metrics: StepMetrics) -> None:
        pass


@pytest.mark.parametrize(
    ("hook", "problem"),
    [
        (NoHook, r"not a hook \(got mine, of type type\)\. Write it as `class MyHook\(titanrl\.Hook\)`"),
        (print, r"not a hook \(got mine, of type builtin_function_or_method\)"),
        (NeedsArguments, r"the class must not require arguments: missing a required argument: 'target'"),
        (
            WrongSignature,
            r"wrong signature: too many positional arguments \(got mine\.after_step\(run: object\) -> None\)\. "
            r"Write it as `def after_step\(self, run: Any, metrics: titanrl\.carriers\.types\.StepMetrics\)",
        ),
        (Misspelt(), r"hooks have no such method \(got mine\.after_steps\)\. Choose one of before_step, after_step, "),
    ],
    ids=["no-hook", "function", "arguments", "signature", "name"],
)
def test_invalid_hook_is_rejected(hook: object, problem: str) -> None:
    with pytest.raises(ValueError, match=rf"^hooks\.0: {problem}"):
        check_hook(hook, key="hooks.0", name="mine")


def test_valid_hooks_are_accepted() -> None:
    for hook in (Plain, Plain(), Asynchronous, NeedsArguments(0.5)):
        check_hook(hook, key="hooks.0", name="mine")


@pytest.mark.parametrize("rate", [-1e-6, math.nan, math.inf])
def test_learning_rate_must_be_finite(rate: float) -> None:
    run = object.__new__(GRPO)
    with pytest.raises(ValueError, match=r"^set_learning_rate: must be a finite number >= 0 \(got "):
        run.set_learning_rate(rate)


def test_step_uses_the_learning_rate_that_was_set(tmp_path: Path) -> None:
    algorithm = AlgorithmConfig(learning_rate=1e-3)
    assert AdamParams.at_step(algorithm, 3, 10).learning_rate == 1e-3
    state = RunState(step=3, version=3, next_index=24, learning_rate=1e-5)
    assert AdamParams.at_step(algorithm, 3, 10, rate=state.learning_rate).learning_rate == 1e-5
    folder = tmp_path / "checkpoints" / "step-3"
    folder.mkdir(parents=True)
    (folder / ".metadata").touch()
    complete_checkpoint(folder.parent, state, {}, "")
    assert resumable(tmp_path).state == state


async def test_example_hook_lowers_learning_rate_once() -> None:
    class Run:
        def __init__(self) -> None:
            self.rates: list[float] = []

        def set_learning_rate(self, learning_rate: float) -> None:
            self.rates.append(learning_rate)

    run = Run()
    slow_down = hooks(import_object(f"{EXAMPLE}:SlowDown", key="hooks"))
    for mean in (0.95, 0.5, 0.9, 0.95):  # before the first step there is no learning rate to halve
        await slow_down.after_evaluation(run, replace(RESULT, mean=mean))
        await slow_down.after_step(run, METRICS)
    assert run.rates == [0.25]
