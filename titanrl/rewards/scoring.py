"""Scoring of groups: computes all rewards, in the sandbox or in this process, and their weighted sum."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from titanrl.base.plugins import Plugin, Plugins
from titanrl.carriers.rewards import Answers, BoundReward, Scored
from titanrl.carriers.scores import RewardSpec, Score
from titanrl.config.data import RewardConfig
from titanrl.config.rewards import (
    JudgeOptions,
    MathVerifyOptions,
    OverlongOptions,
    RegexOptions,
    RepetitionOptions,
)
from titanrl.config.schema import Config
from titanrl.processes.sandbox import OnRespawn, log_respawn
from titanrl.rewards.scorers import custom
from titanrl.rewards.scoring_pool import ScoringPool
from titanrl.rewards.token_rewards import TokenCredit
from titanrl.rewards.trusted import TrustedReward

if TYPE_CHECKING:
    from titanrl.rewards.judge import Judge

SCORERS = "titanrl.rewards.scorers"
"""Module with a factory function, of the same name, for each built-in reward that runs in the sandbox."""

ScorePart = Callable[[Answers], Awaitable[list[Score]]]
"""Function from the answers to one prompt to their scores by one reward, in the same order."""


class Scoring:
    """Scores groups of completions with all configured rewards."""

    def __init__(self, config: Config, plugins: Plugins, on_respawn: OnRespawn = log_respawn) -> None:
        """Keep the settings; `start` loads the rewards.

        Args:
            config: Configuration.
            plugins: User-defined objects.
            on_respawn: Called after the sandbox died and was replaced.
        """
        self._rewards, sandbox = config.data.reward_parts, config.sandbox
        self._trusted = {
            name: plugins.get(key) or Plugin(key=key, name=config.function)
            for name, config in self._rewards.items()
            if config.trusted and (key := f"data.rewards.{name}")
        }
        specs = reward_specs(config, plugins)
        self._pool = ScoringPool(specs, sandbox, config.faults, on_respawn) if specs else None
        self._confined = [spec.name for spec in specs]
        self._timeout_s = sandbox.timeout_s
        self._parts: dict[str, ScorePart] = {}
        self._judges: list[Judge] = []

    async def start(self) -> None:
        """Load the rewards, and start the scoring processes if any reward runs in the sandbox.

        Raises:
            SandboxUnavailable: This machine cannot confine a process.
            ValueError: A reward cannot be loaded.
        """
        if self._pool is not None:
            await self._pool.start()
        self._parts = {name: self._part(name) for name in self._rewards}

    async def score(self, answers: Answers) -> list[Scored]:
        """Score the answers to one prompt, in order."""
        if not answers.completions:
            return []
        if len(self._parts) == 1:
            scores = [await score(answers) for score in self._parts.values()]
        else:
            scores = await asyncio.gather(*(score(answers) for score in self._parts.values()))
        by_completion = [dict(zip(self._parts, by_part, strict=True)) for by_part in zip(*scores, strict=True)]
        return [weighted(by_reward, self._rewards, answers, index) for index, by_reward in enumerate(by_completion)]

    async def close(self) -> None:
        """Stop the scoring processes, and close the connections to judges."""
        if self._pool is not None:
            await self._pool.close()
        for judge in self._judges:
            await judge.close()
        self._judges.clear()

    def _part(self, name: str) -> ScorePart:
        if name in self._trusted:
            return TrustedReward(BoundReward(name, custom(self._trusted[name])), self._timeout_s).score
        if self._rewards[name].function == "judge":
            from titanrl.rewards.judge import Judge  # httpx is missing until `titanrl doctor --install`

            judge = Judge(JudgeOptions.model_validate(self._rewards[name].options), key=f"data.rewards.{name}")
            self._judges.append(judge)
            return TrustedReward(BoundReward(name, judge), judge.limit_s).score
        pool, index = self._pool, self._confined.index(name)
        assert pool is not None
        return lambda answers: pool.score(answers, reward=index)


def reward_specs(config: Config, plugins: Plugins) -> list[RewardSpec]:
    """Return the rewards that run in the sandbox."""
    rewards = config.data.reward_parts
    return [_spec(name, reward, config, plugins) for name, reward in rewards.items() if reward.is_confined]


def _spec(name: str, reward: RewardConfig, config: Config, plugins: Plugins) -> RewardSpec:
    function, key, bounds = reward.function, f"data.rewards.{name}", (0.0, 1.0)
    kwargs: dict[str, object]
    match function:
        case "exact":
            kwargs = {}
        case "reasoning_gym":
            kwargs = {"task": config.data.task, "config": config.data.task_config}
        case "math_verify":
            kwargs = MathVerifyOptions.model_validate(reward.options).model_dump()
        case "regex":
            kwargs = RegexOptions.model_validate(reward.options).model_dump()
        case "overlong":
            options = OverlongOptions.model_validate(reward.options)
            max_tokens = options.max_tokens or config.rollout.max_new_tokens
            kwargs, bounds = {"cache_tokens": options.cache_tokens, "max_tokens": max_tokens}, (-1.0, 0.0)
        case "repetition":
            kwargs, bounds = RepetitionOptions.model_validate(reward.options).model_dump(), (-1.0, 0.0)
        case _:
            plugin = plugins.get(key) or Plugin(key=key, name=function)
            return RewardSpec(name=name, factory=f"{SCORERS}:custom", kwargs={"plugin": plugin}, is_custom=True)
    return RewardSpec(name=name, factory=f"{SCORERS}:{function}", kwargs=kwargs, bounds=bounds)


def weighted(scores: Mapping[str, Score], rewards: Mapping[str, RewardConfig], answers: Answers, index: int) -> Scored:
    """Return the weighted sum of the scores of one completion, or a failure if any reward failed.

    Args:
        scores: Score of the completion by each reward.
        rewards: Configuration of each reward, with its weights.
        answers: Completions of the prompt.
        index: Index of the completion.
    """
    total, parts, errors = 0.0, {}, []
    credited = TokenCredit(answers, index)
    for name, score in scores.items():
        config = rewards[name]
        if error := _error(name, score, config):
            errors.append(f"{name}: {error}")
        for part, value in score.parts.items():
            weight = config.weight * config.weights.get(part.removeprefix(f"{name}/"), 1.0)
            total += weight * value
            parts[part] = value
            try:
                credited.add(weight, score.token_rewards.get(part, value))
            except ValueError as error:
                errors.append(f"{part}: {error}")
    if not (errors or math.isfinite(total)):
        errors.append(f"the weighted sum of {_names(parts)} is not a finite number")
    if errors:
        return Scored(reward=None, parts={}, error="; ".join(errors))
    return Scored(reward=total, parts=parts, token_rewards=credited.rewards)


def _error(name: str, score: Score, config: RewardConfig) -> str:
    """Return the reason why a score is invalid; "" if it is valid."""
    if score.status != "ok":
        return score.detail
    if not config.weights:
        return ""
    missing = config.weights.keys() - {part.removeprefix(f"{name}/") for part in score.parts if part != name}
    returned = _names(part.removeprefix(f"{name}/") for part in score.parts) if name not in score.parts else "a number"
    return f"it returned {returned}, but data.rewards.{name}.weights names {_names(missing)}" if missing else ""


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
