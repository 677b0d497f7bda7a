"""Scoring of groups: computes all rewards, in confined processes or in this one, and their weighted sum.

A `ScoringPool` scores completions in confined processes; `docs/sandbox.md` describes the threat model. It starts one zygote
(`titanrl.processes.zygote`), which loads the rewards and forks scoring processes in advance. By default each process scores one
group with one reward and is then killed. A completion that tampers with Python can therefore affect only this reward of its own
group. The pool never unpickles bytes from a scoring process.

A `TrustedReward` runs in this process, with access to the network and to devices. Use it only for functions that do not execute
model output.
"""

import asyncio
import concurrent.futures
import math
import threading
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from titanrl.base.errors import USER_ERRORS, describe_user_error
from titanrl.base.plugins import Plugin, Plugins
from titanrl.carriers.rewards import (
    SEPARATOR,
    Answers,
    BoundReward,
    ProcessFailure,
    RewardSpec,
    Score,
    Scored,
    TokenRewards,
    custom_reward,
    parse_scores,
)
from titanrl.carriers.types import DoubleArray, Segment, Turn
from titanrl.config.data import PENALTIES, REWARD_OPTIONS, REWARDS, JudgeOptions, RewardConfig
from titanrl.config.schema import Config
from titanrl.data.streams import level_options
from titanrl.processes.sandbox import FORK_DEADLINE_S, OnRespawn, SandboxDied, SandboxPool, log_respawn
from titanrl.processes.zygote import END, GROUP, RAW, STARTED, TOKENS, Request

if TYPE_CHECKING:
    from titanrl.rollout.remote import Judge

SCORERS = "titanrl.rollout.scorers"
"""Module with a factory function, of the same name, for each built-in reward that runs in the sandbox."""

ScorePart = Callable[[Answers], Awaitable[list[Score]]]
"""Function from the answers to one prompt to their scores by one reward, in the same order."""
MAX_TEXT_CHARS = 1 << 20
"""Maximum length of the text that a reward receives. Longer texts lose their start, because the answer is at the end."""

_PARSED_AT_ONCE_BYTES = 1 << 16
"""Longer replies are parsed in a thread. Python switches threads between two results, so the event loop keeps running."""
_MAX_SHARES = 4
"""Maximum divisor of the group's time limit when its answers are scored separately."""
MAX_CALLS = 64
"""Maximum number of concurrent calls of one reward. The time limit of a waiting call starts when the call starts."""
_MAX_DETAIL_CHARS = 200


class Scoring:
    """Scores groups of completions with all configured rewards."""

    def __init__(self, config: Config, plugins: Plugins, on_respawn: OnRespawn = log_respawn) -> None:
        """Keep the settings; `start` loads the rewards. `on_respawn` is called after the sandbox died and was replaced."""
        self._rewards, self._plugins, self._timeout_s = config.data.reward_parts, plugins, config.sandbox.timeout_s
        specs = reward_specs(config, plugins)
        self._pool = ScoringPool(specs, config.sandbox, config.faults, on_respawn) if specs else None
        self._confined = [spec.name for spec in specs]
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
        for name, reward in self._rewards.items():
            if reward.trusted:
                function = custom_reward(reward_plugin(name, reward, self._plugins))
                self._parts[name] = TrustedReward(BoundReward(name, function), self._timeout_s).score
            elif reward.function == "judge":
                from titanrl.rollout.remote import Judge  # httpx is missing until `titanrl doctor --install`

                judge = Judge(JudgeOptions.model_validate(reward.options), key=f"data.rewards.{name}")
                self._judges.append(judge)
                self._parts[name] = TrustedReward(BoundReward(name, judge), judge.limit_s).score
            else:
                assert self._pool is not None
                self._parts[name] = partial(self._pool.score, reward=self._confined.index(name))

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


def reward_specs(config: Config, plugins: Plugins) -> list[RewardSpec]:
    """Return the rewards that run in the sandbox."""
    specs = []
    for name, reward in config.data.reward_parts.items():
        if reward.trusted or reward.function == "judge":  # the judge needs the network, and executes no model output
            continue
        function, is_custom = reward.function, reward.function not in REWARDS
        factory = f"{SCORERS}:{function}"
        kwargs: dict[str, Any] = {}
        bounds = (-1.0, 0.0) if function in PENALTIES else (0.0, 1.0)
        if is_custom:
            factory = f"{custom_reward.__module__}:{custom_reward.__name__}"
            kwargs, bounds = {"plugin": reward_plugin(name, reward, plugins)}, (-math.inf, math.inf)
        elif function == "reasoning_gym":
            kwargs = {"task": config.data.task, "config": config.data.task_config, "levels": level_options(config.data)}
        elif function in REWARD_OPTIONS:
            kwargs = REWARD_OPTIONS[function].model_validate(reward.options).model_dump()
        if function == "overlong":
            kwargs["max_tokens"] = kwargs["max_tokens"] or config.rollout.max_new_tokens
        specs.append(RewardSpec(name=name, factory=factory, kwargs=kwargs, bounds=bounds, is_custom=is_custom))
    return specs


def reward_plugin(name: str, reward: RewardConfig, plugins: Plugins) -> Plugin:
    """Return the plugin of a user-defined reward by its name."""
    key = f"data.rewards.{name}"
    return plugins.get(key) or Plugin(key=key, name=reward.function)


def weighted(scores: Mapping[str, Score], rewards: Mapping[str, RewardConfig], answers: Answers, index: int) -> Scored:
    """Return the weighted sum of the scores of one completion by each reward, or a failure if any reward failed."""
    total, parts, errors = 0.0, {}, []
    of_whole, by_token = 0.0, None  # rewards of the complete text, and of its tokens if any of them is `TokenRewards`
    for name, score in scores.items():
        config = rewards[name]
        if error := _error(name, score, config):
            errors.append(f"{name}: {error}")
        for part, value in score.parts.items():
            weight = config.weight * config.weights.get(part.removeprefix(f"{name}/"), 1.0)
            total += weight * value
            parts[part] = value
            if part not in score.token_rewards:
                of_whole += weight * value
                continue
            try:
                added = rewards_by_token(score.token_rewards[part], answers, index)
            except ValueError as error:
                errors.append(f"{part}: {error}")
                continue
            earlier = by_token or [0.0] * len(added)
            by_token = [before + weight * reward for before, reward in zip(earlier, added, strict=True)]
    if not (errors or math.isfinite(total)):
        errors.append(f"the weighted sum of {_names(parts)} is not a finite number")
    if errors:
        return Scored(reward=None, parts={}, error="; ".join(errors))
    if by_token:
        by_token[-1] += of_whole
    return Scored(reward=total, parts=parts, token_rewards=None if by_token is None else tuple(by_token))


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


def rewards_by_token(rewards: TokenRewards, answers: Answers, index: int) -> list[float]:
    """Return the reward of each sampled token of a completion; raise `ValueError` if they do not fit its tokens or its text."""
    num_tokens, text, decode = answers.num_tokens[index], answers.completions[index], answers.decode
    if len(rewards.tokens) not in (0, num_tokens):
        rule = f"it returned {len(rewards.tokens)} token rewards for a completion of {num_tokens} tokens"
        raise ValueError(f"{rule}. Return one per sampled token, including the end-of-sequence token.")
    by_token = list(rewards.tokens) or [0.0] * num_tokens
    for end, reward in rewards.steps:
        if decode is None:
            rule = f"it returned a step (ending at {end}), but with an environment the text is only the last message"
            raise ValueError(f"{rule}. Return token rewards instead, or turn rewards from the environment.")
        if end > len(text):
            rule = f"it returned a step that ends after {end} characters, but the completion has {len(text)}"
            raise ValueError(f"{rule}. Count characters from the start of the completion.")
        ids = answers.token_ids[index]
        nums = range(1, len(ids))  # the first of them whose tokens complete the step; otherwise all tokens
        by_token[bisect_left(nums, True, key=lambda num: decode(ids[:num])[:end] == text[:end])] += reward
    if by_token:
        by_token[-1] += rewards.whole
    return by_token


def in_turns(
    rewards: Sequence[float], turns: Sequence[Turn], segments: Sequence[Segment]
) -> tuple[DoubleArray, tuple[Turn, ...]]:
    """Add the reward of each turn of an episode to its last sampled token, and the rewards of its tokens to the turn.

    `turns` are in order. One without sampled tokens adds its reward to the last token of the previous turn, or to the episode's
    first one; an episode has at least one. Return the rewards of all sampled tokens, and the turns with their new rewards.
    """
    sampled = [np.cumsum(segment.mask) for segment in segments]
    before = np.cumsum([0, *(int(counts[-1]) for counts in sampled)])
    ends = [int(before[turn.segment] + (sampled[turn.segment][turn.end - 1] if turn.end else 0)) for turn in turns]
    by_token = np.array(rewards, np.float64)
    sums = [float(by_token[start:end].sum()) for start, end in zip([0, *ends], ends, strict=False)]
    for turn, end in zip(turns, ends, strict=True):
        by_token[max(end, 1) - 1] += turn.reward
    return by_token, tuple(replace(turn, reward=turn.reward + of_tokens) for turn, of_tokens in zip(turns, sums, strict=True))


# Confined rewards


class ScoringPool(SandboxPool):
    """Scores groups of answers, several groups at the same time."""

    name, reason = "scoring pool", "rewards may eval() model output, so they run"

    async def _check(self) -> None:
        nothing = Answers(entry={}, completions=(), num_tokens=(), finish_reasons=())
        if isinstance(failure := await self._attempt(0, nothing, FORK_DEADLINE_S), str):
            raise SandboxDied(f"the first scoring process could not reply: {failure}")

    async def score(self, answers: Answers, *, reward: int = 0) -> list[Score]:
        """Score the answers to one prompt by the reward with this index. Wait while `num_processes` groups are being scored.

        If the group times out or crashes its process, each answer is scored again in a separate process, so that only the
        answer at fault fails. A reward that scores the whole group in one call cannot be split: all of its answers fail. If the
        zygote dies, it is replaced, and the answers are scored again.

        Raises:
            SandboxDied: The pool is closed.
            RespawnLimitError: The zygote died too often.
        """
        num = len(answers.completions)
        if num == 0:
            return []
        scores = await self._attempt(reward, answers, self._config.timeout_s)
        if not isinstance(scores, str):
            return scores
        if self._flags[reward] & GROUP or (scores == "timeout" and num == 1):
            return [self._failed(scores)] * num
        share_s = self._config.timeout_s / min(num, _MAX_SHARES)
        alone = await asyncio.gather(*(self._attempt(reward, answers.only(index), share_s) for index in range(num)))
        return [self._failed(scores) if isinstance(scores, str) else scores[0] for scores in alone]

    async def _attempt(self, reward: int, answers: Answers, timeout_s: float) -> list[Score] | ProcessFailure:
        """Score the answers in one process. Kill the process afterwards, unless it may score another group."""
        self._check_open()
        texts = tuple([text[-MAX_TEXT_CHARS:] for text in answers.completions])
        token_ids = answers.token_ids if self._flags[reward] & TOKENS else ()
        raw = answers.with_raw().raw_completions if self._flags[reward] & RAW else ()
        raw = tuple([text[-MAX_TEXT_CHARS:] for text in raw])
        request: Request = (reward, answers.entry, texts, answers.num_tokens, answers.finish_reasons, token_ids, raw)
        limits = [self._specs[reward].max_result_bytes(num) + len(SEPARATOR) for num in answers.num_tokens]
        max_bytes = len(STARTED) + len(END) + sum(limits)

        async def parse(reply: bytes) -> list[Score] | None:
            body = reply.removeprefix(STARTED).removesuffix(END)
            parsed = partial(parse_scores, body, self._specs[reward], answers.num_tokens)
            return parsed() if len(reply) <= _PARSED_AT_ONCE_BYTES else await asyncio.to_thread(parsed)

        scores = await self._request(request, timeout_s, max_bytes, parse)
        if isinstance(scores, str) or texts == answers.completions:
            return scores
        nums_cut = [len(whole) - len(text) for whole, text in zip(answers.completions, texts, strict=True)]
        return [score.moved(num_cut) for score, num_cut in zip(scores, nums_cut, strict=True)]

    def _failed(self, status: ProcessFailure) -> Score:
        timeout = (
            f"timeout: the reward did not return in time (sandbox.timeout_s={self._config.timeout_s:g}, for a whole group)"
        )
        crash = "crash: the scoring process exited, was killed by a signal, or sent a reply that is invalid or too long"
        return Score(parts={}, status=status, detail=timeout if status == "timeout" else crash)


# Trusted rewards


class TrustedReward:
    """A user-defined reward. An async function is awaited in the event loop; a synchronous one is called in a thread.

    Example: `TrustedReward(BoundReward("judge", ask_the_judge), timeout_s=5.0)`
    """

    def __init__(self, reward: BoundReward, timeout_s: float) -> None:
        self._reward = reward
        self._timeout_s = timeout_s
        self._running = asyncio.Semaphore(MAX_CALLS)

    async def score(self, answers: Answers) -> list[Score]:
        """Score the answers to one prompt, in order."""
        num = len(answers.completions)
        answers = answers.with_raw() if self._reward.takes_raw else answers
        if not self._reward.is_group:
            return list(await asyncio.gather(*(self._score_one(answers, index) for index in range(num))))
        try:
            returned = await self._call(partial(self._reward.call_group, answers), "the whole group")
            values = self._reward.values(returned, num)
        except USER_ERRORS as error:
            return [_failed(error)] * num
        return [self._checked(value) for value in values]

    async def _score_one(self, answers: Answers, index: int) -> Score:
        try:
            value = await self._call(partial(self._reward.call_one, answers, index), "one completion")
        except USER_ERRORS as error:
            return _failed(error)
        return self._checked(value)

    def _checked(self, value: object) -> Score:
        try:
            return Score.of(self._reward.parts(value))
        except Exception as error:  # as above: the value may be an object of the user
            return _failed(error)

    async def _call(self, call: Callable[[], Any], what: str) -> Any:
        """Return the result of a call, which scores `what`. Raise `_TimeLimit` if the call took too long."""
        async with self._running:
            try:
                async with asyncio.timeout(self._timeout_s) as limit:
                    value = call() if self._reward.is_async else await in_thread(call)
                    return await value if isinstance(value, Awaitable) else value
            except TimeoutError:
                if not limit.expired():  # the function itself raised TimeoutError
                    raise
                raise _TimeLimit(
                    f"the reward did not return in time (sandbox.timeout_s={self._timeout_s:g}, for {what})"
                ) from None


class _TimeLimit(Exception):
    """Raised if a reward exceeds its time limit."""


def _failed(error: BaseException) -> Score:
    if isinstance(error, _TimeLimit):
        return Score(parts={}, status="timeout", detail=f"timeout: {error}")
    detail = describe_user_error(error)[:_MAX_DETAIL_CHARS]
    return Score(parts={}, status="error", detail=repr(detail)[1:-1])


async def in_thread(call: Callable[[], Any]) -> Any:
    """Call a function in a new thread. A thread cannot be stopped, so if the wait is cancelled, its result is dropped."""
    done: concurrent.futures.Future[Any] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()  # now cancelling the wait cannot cancel the future, so the thread can always set it

    def run() -> None:
        try:
            result = call()
        except BaseException as error:  # futures reject StopIteration, and SystemExit would end the worker
            is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            done.set_exception(error if is_plain else RuntimeError(describe_user_error(error)))
        else:
            done.set_result(result)

    threading.Thread(target=run, name="reward", daemon=True).start()
    return await asyncio.wrap_future(done)
