"""Evaluations of hand-made completions: the requests and the result."""

import asyncio
import inspect
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from titanrl.base.errors import StoppedError
from titanrl.carriers.rewards import Answers, Scored, ScorerError
from titanrl.carriers.types import Completion, EvaluationResult, GenerationRequest, Group, Prompt
from titanrl.config import Config
from titanrl.config.data import EvaluationSet
from titanrl.metrics.steps import evaluation_metrics
from titanrl.rollout.group import roll_out
from titanrl.rollout.open_tasks import IN_FLIGHT, answer_prompts, evaluation_requests, evaluation_result, open_tasks
from titanrl.rollout.workers import RolloutWorker

PROMPTS = [Prompt(index=i, task="sums", text=f"{i}", token_ids=(5, i), entry={"answer": str(i)}) for i in range(200)]


def made_set(**values: object) -> EvaluationSet:
    config = Config.model_validate({"name": "a", "num_steps": 3, "evaluation": {"num_prompts": 0, "sets": {"hard": values}}})
    return config.evaluation_set()


class Engine:
    """Fake engine: replies to each request with one token, 2 if the seed is odd or missing. The version increases per call."""

    def __init__(self, versions: Sequence[int] = (4,)) -> None:
        self.versions = versions
        self.calls: list[Sequence[GenerationRequest]] = []
        self.most_at_once = self.at_once = 0

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        self.calls.append(requests)
        self.at_once += len(requests)
        self.most_at_once = max(self.most_at_once, self.at_once)
        version = self.versions[min(len(self.calls), len(self.versions)) - 1]
        await asyncio.sleep(0)
        self.at_once -= len(requests)
        return [
            Completion(
                token_ids=np.array([2 if request.sampling.seed is None else 1 + request.sampling.seed % 2]),
                logprobs=np.zeros(1, np.float32),
                versions=np.array([version]),
                finish_reason="stop",
            )
            for request in requests
        ]


async def score(answers: Answers) -> list[Scored]:
    if answers.entry["answer"] == "1":
        return [Scored(reward=None, parts={}, error="broken") for _ in answers.completions]
    return [Scored(reward=float(text == "2"), parts={}) for text in answers.completions]


def test_environment_metrics_are_averaged_over_the_set() -> None:
    rollout = evaluated_group().rollouts[0]
    numbers: list[dict[str, float]] = [{"calls": 2.0}, {"calls": 1.0, "late": 1.0}, {}]
    group = replace(evaluated_group(), rollouts=tuple(replace(rollout, metrics=own) for own in numbers))
    result = evaluation_result(made_set(), [group, group])
    assert result.environment == {"calls": 1.5, "late": 1.0}
    values = evaluation_metrics(result)
    assert (values["eval/hard/environment/calls_mean"], values["eval/hard/environment/late_mean"]) == (1.5, 1.0)


def evaluated_group() -> Group:
    requests = evaluation_requests(PROMPTS[7], made_set(), seed=3)
    return asyncio.run(roll_out(PROMPTS[7], requests, Engine().generate, score, lambda tokens: "2"))


def evaluated(eval_set: EvaluationSet, engine: Engine, prompts: Sequence[Prompt] = PROMPTS) -> EvaluationResult:
    async def complete(prompt: Prompt) -> Group:
        requests = evaluation_requests(prompt, eval_set, seed=3)
        return await roll_out(prompt, requests, engine.generate, score, lambda tokens: "".join(map(str, tokens)))

    async def answer(prompts: Sequence[Prompt]) -> Sequence[Group]:
        return await asyncio.gather(*map(complete, prompts))

    return evaluation_result(eval_set, asyncio.run(answer_prompts(eval_set, prompts, answer)))


def test_seeds_are_equal_in_every_evaluation() -> None:
    eval_set = made_set(num_samples=3, temperature=0.5, max_new_tokens=9)
    requests = evaluation_requests(PROMPTS[7], eval_set, seed=3)
    assert requests == evaluation_requests(PROMPTS[7], eval_set, seed=3)
    seeds = {request.sampling.seed for request in requests}
    assert len(seeds) == 3
    assert not seeds & {request.sampling.seed for request in evaluation_requests(PROMPTS[8], eval_set, seed=3)}
    assert {(request.sampling.temperature, request.sampling.max_new_tokens) for request in requests} == {(0.5, 9)}


def test_result_leaves_failed_rewards_out_and_counts_them() -> None:
    result = evaluated(made_set(), Engine())
    assert (result.task, result.version, result.mean, result.num_prompts) == ("hard", 4, 1.0, 200)
    assert (result.num_errors, result.first_error, result.response_len_mean) == (1, "broken", 1.0)
    assert result.failures == "1 of 200 completions have no reward; mean over 199 of 200 prompts"
    assert result.statistics == {"mean": 1.0, "mean_ci95": 0.0}


def test_several_samples_give_pass_and_avg_statistics() -> None:
    eval_set = made_set(num_samples=4, temperature=1.0, pass_k=(1, 2))
    engine = Engine()
    result = evaluated(eval_set, engine)
    assert result.num_errors == 4
    solved = [
        sum(1 + request.sampling.seed % 2 == 2 for request in call if request.sampling.seed is not None)
        for call in engine.calls
        if call[0].token_ids != (5, 1)
    ]
    assert result.statistics["avg@4"] == pytest.approx(np.mean(solved) / 4)
    assert result.statistics["pass@1"] == pytest.approx(result.statistics["avg@4"])
    pairs = [1 - (4 - number) * (3 - number) / 12 for number in solved]
    assert result.statistics["pass@2"] == pytest.approx(np.mean(pairs))


def test_number_of_concurrent_completions_is_limited() -> None:
    engine = Engine()
    evaluated(made_set(num_samples=4, temperature=1.0), engine)
    assert engine.most_at_once == IN_FLIGHT
    assert len(engine.calls) == 200


def test_result_tells_if_the_version_changed_during_the_evaluation() -> None:
    assert evaluated(made_set(), Engine([4])).is_pinned
    mixed = evaluated(made_set(), Engine([4] * 150 + [5]))
    assert not mixed.is_pinned
    assert mixed.version == 4


def test_evaluation_raises_if_every_reward_fails() -> None:
    with pytest.raises(ScorerError, match="all 1 completions of the evaluation"):
        evaluated(made_set(), Engine(), [replace(PROMPTS[0], entry={"answer": "1"})])


def test_error_for_an_unknown_set_lists_the_sets() -> None:
    config = Config.model_validate({"name": "a", "num_steps": 3, "evaluation": {"sets": {"hard": {}}}})
    with pytest.raises(ValueError, match=r"no such set \(got 'easy'\)\. Choose one of chain_sum, hard\."):
        config.evaluation_set("easy")


@pytest.mark.parametrize("in_background", [False, True])
def test_abandoned_evaluation_raises_stopped_error(in_background: bool) -> None:
    """The controller then repeats it. A leaked cancellation would reach the controller as an unknown error and end the run."""

    class Endless:
        def named(self, name: str) -> str:
            return name

        async def evaluate(self, eval_set: str, generate: object, *, record: object) -> None:
            started.set()
            await asyncio.Event().wait()

    async def scenario() -> None:
        worker = object.__new__(RolloutWorker)
        setup = {"max_staleness": 0, "generator": SimpleNamespace(max_num_seqs=4)}
        worker._setup = SimpleNamespace(config=SimpleNamespace(**setup))  # type: ignore[assignment]
        worker._pool = SimpleNamespace(generate=asyncio.sleep)  # type: ignore[assignment]
        worker._record = SimpleNamespace(evaluation=None)  # type: ignore[assignment]
        worker._outbox = SimpleNamespace(reset=lambda: None)  # type: ignore[assignment]
        worker._sets, worker._tasks, worker._turn = Endless(), set(), asyncio.Lock()  # type: ignore[assignment]
        evaluate = inspect.unwrap(RolloutWorker.evaluate._method)
        abandon = inspect.unwrap((RolloutWorker.abandon_evaluation if in_background else RolloutWorker.abandon_round)._method)
        evaluating = asyncio.create_task(evaluate(worker, "set", object() if in_background else None))
        await started.wait()
        await abandon(worker)
        with pytest.raises(StoppedError, match="the evaluation was abandoned"):
            await evaluating

    started = asyncio.Event()
    asyncio.run(asyncio.wait_for(scenario(), 10))


async def test_failed_start_closes_the_tasks_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[str]()

    class Fake:
        score = None

        def __init__(self, *args: object) -> None:
            pass

        async def start(self) -> None:
            calls.append("start")
            if len(calls) == 2:
                raise ValueError("the reward cannot be loaded")

        async def close(self) -> None:
            calls.append("close")

    monkeypatch.setattr("titanrl.rollout.open_tasks.Scoring", Fake)
    config = Config.model_validate({"name": "a", "num_steps": 1, "data": {"mixture": {"sums": {}, "others": {}}}})
    prompts: Any = {name: SimpleNamespace(stream=None) for name in config.data.tasks}
    with pytest.raises(ValueError, match="cannot be loaded"):
        await open_tasks(config, None, {}, prompts=prompts)  # type: ignore[arg-type]
    assert calls == ["start", "start", "close", "close"]
