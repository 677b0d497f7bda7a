"""Groups of episodes: plays the episodes of a prompt in an environment, retries failed ones, and scores them."""

import asyncio
import copy
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from titanrl.base.plugins import Plugins
from titanrl.carriers.record import span
from titanrl.carriers.rewards import Answers, Scored
from titanrl.carriers.types import Completion, GenerationRequest, Group, Outcome, Prompt, Rollout, SamplingParams, ScorerFailure
from titanrl.config.data import EnvironmentConfig
from titanrl.config.schema import Config
from titanrl.data.tokenizer import Tokenizer
from titanrl.environments import Environments, Episode, ProcessOptions
from titanrl.rollout.driver import Attempt, Conversation, EpisodeError, Limits, StopText
from titanrl.rollout.group import Generate, GenerateTokens, ScoreAnswers, derive_seed, training_sampling
from titanrl.rollout.renderers import Renderer, make_renderer
from titanrl.rollout.scoring import in_turns

if TYPE_CHECKING:  # importing the endpoint takes time, and few runs need it
    from titanrl.rollout.program_episodes import Programs

NO_TOKENS = Completion(
    token_ids=np.zeros(0, np.int64), logprobs=np.zeros(0, np.float32), versions=np.zeros(0, np.int64), finish_reason="abort"
)
TURNS = "turns"
"""Name of the reward part with the sum of the turn rewards."""
TRUNCATED = "truncated"
"""Name of the reward part of an episode that a limit ended and the environment did not judge."""
COUNTS = (
    *("episodes", "turns", "malformed_calls", "truncated", "unjudged", "environment_ms", "slowest_ms"),
    *("environment_error", "timeout", "reward_error", "generation_error"),
)
"""Names of a group's counts over all attempts: episodes, turns of the policy, malformed tool calls, episodes that a limit
ended, those of them that the environment did not judge, milliseconds in the environment, those of the slowest completion, and
failures by outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """Plays groups of episodes, with the objects that all episodes of a task in a worker share."""

    config: Config
    renderer: Renderer
    environments: Environments | None = None
    """Creates the environment for each episode; None if a program plays them."""
    programs: "Programs | None" = None
    """The program that plays the episodes, and its endpoint."""
    score: ScoreAnswers
    """Function that scores the policy's last messages with the configured rewards."""
    stop_text: StopText = lambda ids, more: ""
    """Text that messages leave out."""
    decode_raw: Callable[[Sequence[int]], str] | None = None
    """Function from token ids to their text with special tokens."""
    evaluation_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while held-out episodes are played. Two evaluations that each held some of the processes would deadlock."""

    @property
    def environment(self) -> EnvironmentConfig:
        """Configuration section of the environment."""
        assert self.config.data.environment is not None
        return self.config.data.environment

    @property
    def num_rounds(self) -> int:
        """Maximum number of turns that one episode can take, including its failed attempts."""
        return self.environment.max_turns * (self.environment.retries + 1)

    async def roll_out(self, prompt: Prompt, generate: GenerateTokens, *, in_round: bool) -> Group:
        """Generate a training group.

        `in_round` is True in synchronous training, where the turns of all groups join the generators' batches together. All
        groups then make the same number of calls.
        """
        rollout = self.config.rollout
        sampling = training_sampling(
            rollout, seed=self.config.seed, stop_ids=self.renderer.stop_ids, experts=self.config.records_experts
        )
        slots = [_Slot(self, prompt, number, sampling, "training") for number in range(rollout.num_requests)]
        started, num_needed = time.perf_counter(), len(slots) - rollout.num_spare_completions
        try:
            with span("play episodes", "phase"):
                if in_round:
                    await _run_in_lockstep(slots, generate, self.num_rounds, in_round=True)
                else:
                    await _run_independently(slots, generate, num_needed)
        finally:
            await asyncio.gather(*(slot.close() for slot in slots))
        return await self._graded(prompt, slots, num_needed, time.perf_counter() - started)

    async def answer(
        self,
        prompts: Sequence[Prompt],
        generate: Generate,
        *,
        num_samples: int,
        max_new_tokens: int,
        temperature: float,
        seed: int,
    ) -> list[Group]:
        """Play episodes of held-out prompts, in lockstep by turn, so that the engine's batches are reproducible.

        At most `max_episodes` of the environment are played at the same time, because an episode occupies its process or
        session until it ends. `max_new_tokens` limits each turn.
        """
        sampling = SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed if temperature else None,
            stop=self.config.rollout.stop_texts,
            stop_ids=(*self.renderer.stop_ids, *self.config.rollout.stop_ids),
        )

        groups = [[_Slot(self, prompt, number, sampling, "heldout") for number in range(num_samples)] for prompt in prompts]
        slots, started = [slot for group in groups for slot in group], time.perf_counter()
        num_concurrent = self.environment.max_episodes or len(slots)
        for start in range(0, len(slots), num_concurrent):
            async with self.evaluation_lock:
                playing = slots[start : start + num_concurrent]
                try:
                    await _run_in_lockstep(playing, generate, self.num_rounds, in_round=False)
                finally:
                    await asyncio.gather(*(slot.close() for slot in playing))
        generate_s = time.perf_counter() - started
        grading = (self._graded(prompt, group, num_samples, generate_s) for prompt, group in zip(prompts, groups, strict=True))
        return list(await asyncio.gather(*grading))

    async def close(self) -> None:
        """Stop the processes of environments, and the endpoint of programs."""
        if self.environments is not None:
            await self.environments.close()
        if self.programs is not None:
            await self.programs.close()

    async def _graded(self, prompt: Prompt, slots: "Sequence[_Slot]", num_needed: int, generate_s: float) -> Group:
        """Score the first `num_needed` episodes that succeeded, and sum the counts of all attempts."""
        started, succeeded = time.perf_counter(), [slot for slot in slots if slot.has_succeeded][:num_needed]
        with span("score"):
            scores = await self._scores(prompt, [slot.conversation for slot in succeeded])
        pairs = [(slot, score) for slot, (score, _) in zip(succeeded, scores, strict=True)]
        scored = [(slot, *score) for slot, score in zip(succeeded, scores, strict=True) if score[0].reward is not None]
        errors: list[tuple[_Slot, str, Outcome]]
        counts = sum((slot.counts for slot in slots), Counter[str]())
        counts["reward_error"] += len(pairs) - len(scored)
        counts["slowest_ms"] = max(slot.counts["environment_ms"] for slot in slots)
        errors = [(slot, score.error, "reward_error") for slot, score in pairs if score.reward is None]
        for slot in slots:
            if slot.error is not None:
                text = str(slot.error)
                text = text if text.startswith("data.environment") else f"data.environment: {text}"
                errors.append((slot, text, slot.error.outcome))
        return Group(
            prompt=replace(prompt, token_ids=()),
            rollouts=tuple(self._rollout(slot.conversation, score, final) for slot, score, final in scored),
            generate_s=generate_s,
            score_s=time.perf_counter() - started,
            failures=tuple(
                ScorerFailure(completion=slot.sampled, error=text, outcome=outcome) for slot, text, outcome in errors
            ),
            conversations=tuple(tuple(slot.conversation.messages) for slot, _, _ in scored),
            counts={name: counts[name] for name in COUNTS},
        )

    async def _scores(self, prompt: Prompt, conversations: Sequence[Attempt]) -> list[tuple[Scored, float]]:
        """Return two weighted sums of rewards for each conversation.

        The first, as `Scored`, covers the rewards of the environment, of the turns and of the configuration. The second leaves
        out the rewards of turns and tokens, so that they can be assigned to the turns separately.
        """
        data = self.config.data
        # Without configured rewards, the source's own score applies to episodes whose environment returned no reward.
        judged = [conversation for conversation in conversations if conversation.is_judged]
        has_own = any(conversation.rewards for conversation in judged)
        asked = list(conversations) if data.rewards else [] if has_own else judged
        configured = dict(zip(map(id, asked), await self._configured(prompt, asked), strict=True))
        scores = []
        for conversation in conversations:
            score = configured.get(id(conversation), Scored(reward=0.0, parts={}))
            own = dict(conversation.rewards)
            if not conversation.is_judged:
                own[TRUNCATED] = self.environment.truncated_reward
            parts = own | ({TURNS: sum(conversation.turn_rewards)} if any(conversation.turn_rewards) else {})
            added = sum(data.weight_of(name) * value for name, value in parts.items())
            final = sum(data.weight_of(name) * value for name, value in own.items())
            if score.reward is None:
                scores.append((score, 0.0))
            elif problem := _problem(score, parts, score.reward + added):
                scores.append((Scored(reward=None, parts={}, error=problem), 0.0))
            else:
                whole = replace(score, reward=score.reward + added, parts={**score.parts, **parts})
                scores.append((whole, final if score.token_rewards is not None else score.reward + final))
        return scores

    async def _configured(self, prompt: Prompt, conversations: Sequence[Attempt]) -> list[Scored]:
        """Score the policy's last messages with the configured rewards."""
        if not conversations:
            return []
        answers = Answers(
            entry=prompt.entry,
            completions=tuple(conversation.last_text for conversation in conversations),
            num_tokens=tuple(conversation.tree.num_sampled for conversation in conversations),
            finish_reasons=tuple(conversation.finish_reason for conversation in conversations),
            token_ids=tuple(conversation.tree.sampled_ids for conversation in conversations),
            decode_raw=self.decode_raw,
        )
        return await self.score(answers)

    def _rollout(self, conversation: Attempt, score: Scored, final: float) -> Rollout:
        assert score.reward is not None
        weight, segments, by_token = self.config.data.weight_of(TURNS), conversation.tree.segments(), None
        *rewards, last = conversation.turn_rewards
        turns = conversation.tree.turns([*(weight * reward for reward in rewards), weight * last + final])
        if score.token_rewards is not None:
            by_token, turns = in_turns(score.token_rewards, turns, segments)
        return Rollout(
            segments=segments,
            reward=score.reward,
            reward_parts=score.parts,
            finish_reason=conversation.finish_reason,
            turns=turns,
            token_rewards=by_token,
            metrics=conversation.metrics,
        )


class _Slot:
    """One slot of a group: an episode, which is attempted again if it fails."""

    def __init__(self, episodes: Episodes, prompt: Prompt, number: int, sampling: SamplingParams, split: str) -> None:
        self._episodes, self.prompt, self._number, self._common, self._split = episodes, prompt, number, sampling, split
        self._attempt = 0
        self._failed = Counter[str]()
        self.error: EpisodeError | None = None
        """Error of the last attempt, if all attempts failed."""
        self.conversation = self._new()

    @property
    def has_succeeded(self) -> bool:
        """True if the episode ended without an error."""
        return self.error is None and self.conversation.is_done

    @property
    def counts(self) -> Counter[str]:
        """Counts over all attempts, by the names in `COUNTS`."""
        return self._failed + self._counts_of_attempt()

    @property
    def sampled(self) -> Completion:
        """Tokens that the policy sampled in the last attempt."""
        segments = self.conversation.tree.segments()
        if not segments:
            return NO_TOKENS
        return Rollout(segments=segments, reward=0.0, reward_parts={}, finish_reason="abort").sampled

    async def start(self) -> None:
        """Start the episode; if that fails, start the next attempt, or after the last one set `error`."""
        try:
            await self.conversation.start()
        except EpisodeError as error:
            await self._fail(error)

    async def requests(self) -> Sequence[GenerationRequest]:
        """Wait for the next calls of the policy; return their requests, or none if the episode has ended or failed."""
        while self.error is None:
            try:
                if requests := await self.conversation.requests():
                    return requests
            except EpisodeError as error:
                await self._fail(error)
            if self.conversation.is_done:
                await self.close()
                break
        return []

    async def take(self, completions: Sequence[Completion]) -> None:
        """Continue with completions. Close the environment at the end, so that other episodes can use its process."""
        try:
            await self.conversation.take(completions)
        except EpisodeError as error:
            await self._fail(error)
        if self.conversation.is_done:
            await self.close()

    async def run(self, generate: GenerateTokens) -> None:
        """Play the episode until it ends or its last attempt fails."""
        while self.error is None and not self.conversation.is_done:
            try:
                await self.conversation.play(generate)
            except EpisodeError as error:
                await self._retry(error)
        await self.close()

    async def close(self) -> None:
        await self.conversation.close()

    async def _fail(self, error: EpisodeError) -> None:
        """End a failed attempt, and start the next one if there is one."""
        await self._retry(error)
        if self.error is None:
            await self.start()

    async def _retry(self, error: EpisodeError) -> None:
        await self.conversation.close()
        self._failed[error.outcome] += 1
        if self._attempt == self._episodes.environment.retries:
            self.error = error
        else:
            self._attempt += 1
            self._failed += self._counts_of_attempt()
            self.conversation = self._new()

    def _counts_of_attempt(self) -> Counter[str]:
        conversation = self.conversation
        is_truncated = conversation.is_done and conversation.finish_reason == "length"
        return Counter(
            episodes=1,
            turns=conversation.num_turns,
            malformed_calls=conversation.num_malformed,
            truncated=int(is_truncated),
            unjudged=int(is_truncated and not conversation.is_judged),
            environment_ms=round(1000 * conversation.environment_s),
        )

    def _new(self) -> Attempt:
        """Return a new attempt. All episodes of a group share the environment's seed, so that their rewards are comparable."""
        config, environment = self._episodes.config, self._episodes.environment
        limits = Limits(
            max_turns=environment.max_turns,
            max_tokens=config.max_sequence_tokens,
            max_new_tokens=self._common.max_new_tokens,
            step_timeout_s=environment.step_timeout_s,
            episode_timeout_s=environment.episode_timeout_s,
            may_queue=environment.max_episodes is not None,
        )
        episode = Episode(
            task_id=f"{self.prompt.task}/{self._split}/{self.prompt.index}",
            question=self.prompt.text,
            entry=copy.deepcopy(self.prompt.entry),  # the other episodes and later epochs read it, too
            seed=derive_seed(config.seed if self._split == "training" else -1, self.prompt.index),
        )
        shared = episode, self._episodes.renderer, limits, self._sampling, self._episodes.stop_text
        if self._episodes.programs is not None:
            from titanrl.rollout.program_episodes import ProgramEpisode

            return ProgramEpisode(self._episodes.programs, *shared)
        assert self._episodes.environments is not None, "there is neither an environment nor a program"
        return Conversation(self._episodes.environments.make, *shared)

    def _sampling(self, turn: int, max_new_tokens: int) -> SamplingParams:
        """Return the sampling options of a turn, with a seed that is unique to the slot, the attempt and the turn."""
        seed = self._common.seed
        if seed is not None:
            seed = derive_seed(seed, self.prompt.index, self._number, self._attempt, turn)
        return replace(self._common, max_new_tokens=max_new_tokens, seed=seed)


def _problem(score: Scored, parts: Mapping[str, float], reward: float) -> str:
    """Return why the configured rewards and those of the environment cannot be combined; empty if they can."""
    if both := score.parts.keys() & parts.keys():
        rule = f"data.environment: its reward {min(both)} has the name of a reward in data.rewards"
        return f"{rule}. Rename one of them."
    if not math.isfinite(reward):
        return f"data.environment: the sum of the rewards must be finite (got {dict(score.parts) | dict(parts)})"
    return ""


async def start_episodes(
    config: Config, tokenizer: Tokenizer, score: ScoreAnswers, plugins: Plugins, log: Path | None = None
) -> Episodes:
    """Load the environment and the renderer, and start the first environment process if environments run in processes.

    The processes write to `log`, or to the standard error stream. Raise `ValueError` or `EnvironmentFailure` if the environment
    or the renderer cannot be used.
    """
    environment = config.data.environment
    assert environment is not None
    renderer = make_renderer(tokenizer, environment.renderer, environment.renderer_options)  # before any process starts
    environments = programs = processes = None
    if environment.program:
        from titanrl.rollout.program_episodes import Programs

        stop = () if config.rollout.keep_stop else config.rollout.stop_texts
        programs = Programs(environment, tokenizer, memory_bytes=config.sandbox.memory_bytes, stop=stop, log=log)
        await programs.start()
    else:
        if environment.num_processes:
            processes = ProcessOptions(
                num_processes=environment.num_processes,
                python=environment.python,
                log=log,
                reset_s=environment.step_timeout_s,
                step_s=environment.step_timeout_s,
                close_s=environment.step_timeout_s,
            )
        environments = Environments(environment.function, environment.options, plugins, processes=processes)
        await environments.start()
    rollout = config.rollout

    def stop_text(ids: Sequence[int], more: Sequence[str | int]) -> str:
        text = tokenizer.decode_completion(ids, rollout.stop, keep_stop=rollout.keep_stop)
        if more:
            text = min(text, tokenizer.decode_completion(ids, more), key=len)
        return tokenizer.decode_completion(ids)[len(text) :]

    return Episodes(
        config=config,
        renderer=renderer,
        environments=environments,
        programs=programs,
        score=score,
        stop_text=stop_text,
        decode_raw=tokenizer.decode_raw,
    )


async def _run_in_lockstep(slots: Sequence[_Slot], generate: Generate, num_rounds: int, *, in_round: bool) -> None:
    """Play episodes in lockstep, with one `generate` call per turn and prompt.

    In a round, every turn has a call for its prompt; after the last turn of all episodes, calls have no requests.
    """
    await asyncio.gather(*(slot.start() for slot in slots))
    for _ in range(num_rounds):
        all_requests = await asyncio.gather(*(slot.requests() for slot in slots))
        waiting = [(slot, requests) for slot, requests in zip(slots, all_requests, strict=True) if requests]
        by_prompt = [list(group) for _, group in groupby(waiting, lambda pair: pair[0].prompt.index)]
        calls = [[request for _, requests in group for request in requests] for group in by_prompt]
        turns = await asyncio.gather(*map(generate, calls or ([[]] if in_round else [])))
        completions = (completion for turn in turns for completion in turn)
        taken = [(slot, list(islice(completions, len(requests)))) for slot, requests in waiting]
        await asyncio.gather(*(slot.take(own) for slot, own in taken))
    remaining = await asyncio.gather(*(slot.requests() for slot in slots))  # a program ends after its last reply
    assert not any(remaining), "no attempt has a call left"


async def _run_independently(slots: Sequence[_Slot], generate: GenerateTokens, num_needed: int) -> None:
    """Play the episodes concurrently until `num_needed` have succeeded or all have ended, and cancel the others."""
    running = {asyncio.create_task(slot.run(generate)): slot for slot in slots}
    try:
        while running and sum(slot.has_succeeded for slot in slots if slot not in running.values()) < num_needed:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                del running[task]
                task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
