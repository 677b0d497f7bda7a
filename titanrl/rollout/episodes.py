"""Groups of episodes: the rollouts of one prompt in an environment, retried where the environment fails, and their rewards."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

import numpy as np

from titanrl.config.environment import EnvironmentConfig
from titanrl.config.schema import Config
from titanrl.data.tokenizer import Tokenizer
from titanrl.environments import Environments, Episode, ProcessOptions
from titanrl.plugins import Plugins
from titanrl.rewards import Answers, Scored
from titanrl.rollout.driver import Conversation, EpisodeError, Limits
from titanrl.rollout.group import Generate, ScoreAnswers, derive_seed
from titanrl.rollout.renderers import Renderer, make_renderer
from titanrl.rollout.token_rewards import in_turns
from titanrl.types import Completion, GenerationRequest, Group, Outcome, Prompt, Rollout, SamplingParams, ScorerFailure

NO_TOKENS = Completion(
    token_ids=np.zeros(0, np.int64), logprobs=np.zeros(0, np.float32), versions=np.zeros(0, np.int64), finish_reason="abort"
)
TURNS = "turns"
"""Part of the reward with the sum of the rewards of the turns."""
COUNTS = ("episodes", "turns", "malformed_calls", "environment_error", "timeout", "reward_error")
"""Counts of a group, over all attempts: episodes, turns of the policy, malformed tool calls, and failures by outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """Everything that the episodes of a worker have in common."""

    config: Config
    """Configuration of the run; it has an environment."""
    renderer: Renderer
    """Renderer of the policy's model."""
    environments: Environments
    """Makes the environment of each episode."""
    score: ScoreAnswers
    """Function that scores the last messages of the policy with the configured rewards."""
    answering: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while held-out episodes are played. Two evaluations, each with some of the processes, would wait for each other."""

    @property
    def environment(self) -> EnvironmentConfig:
        """Section of the configuration."""
        assert self.config.data.environment is not None
        return self.config.data.environment

    @property
    def num_rounds(self) -> int:
        """Largest number of turns of a place in a group, those of failed attempts included."""
        return self.environment.max_turns * (self.environment.retries + 1)

    async def roll_out(self, prompt: Prompt, generate: Generate, *, in_round: bool) -> Group:
        """Generate a training group.

        Args:
            prompt: Task of all episodes.
            generate: Function from requests to their completions.
            in_round: True if the turns of all groups join the generators' batches together, as in synchronous training. The
                same number of calls is then made for every group.
        """
        rollout = self.config.rollout
        sampling = SamplingParams(
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            seed=self.config.seed,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            supports=rollout.is_truncated,
            stop_ids=self.renderer.stop_ids,
        )
        places = [_Place(self, prompt, number, sampling, "training") for number in range(rollout.num_requests)]
        started, num_needed = time.perf_counter(), len(places) - rollout.num_spare_completions
        try:
            if in_round:
                await _run_together(places, generate, self.num_rounds)
            else:
                await _run_apart(places, generate, num_needed)
        finally:
            await asyncio.gather(*(place.close() for place in places))
        return await self._graded(prompt, places, num_needed, time.perf_counter() - started)

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
        """Play episodes of held-out prompts, turn by turn, so that the engine's batches repeat.

        At most `num_processes` episodes are played at once, if they run in processes: each needs one until it ends.

        Args:
            prompts: Tasks of the episodes.
            generate: Function from requests to their completions.
            num_samples: Number of episodes of each task.
            max_new_tokens: Longest turn, in tokens.
            temperature: Sampling temperature; 0 is greedy.
            seed: Seed of the completions.
        """
        sampling = SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed if temperature else None,
            stop_ids=self.renderer.stop_ids,
        )

        groups = [[_Place(self, prompt, number, sampling, "heldout") for number in range(num_samples)] for prompt in prompts]
        places, started = [place for group in groups for place in group], time.perf_counter()
        at_once = self.environment.num_processes or len(places)
        for start in range(0, len(places), at_once):
            async with self.answering:
                await _play_together(places[start : start + at_once], generate, self.num_rounds)
        generate_s = time.perf_counter() - started
        grading = (self._graded(prompt, group, num_samples, generate_s) for prompt, group in zip(prompts, groups, strict=True))
        return list(await asyncio.gather(*grading))

    async def _graded(self, prompt: Prompt, places: "Sequence[_Place]", num_needed: int, generate_s: float) -> Group:
        """Score the first `num_needed` episodes that have ended without an error, and count the attempts of all."""
        started, ended = time.perf_counter(), [place for place in places if place.has_ended][:num_needed]
        scores = await self._scores(prompt, [place.conversation for place in ended])
        pairs = [(place, score) for place, (score, _) in zip(ended, scores, strict=True)]
        scored = [(place, *score) for place, score in zip(ended, scores, strict=True) if score[0].reward is not None]
        errors: list[tuple[_Place, str, Outcome]]
        counts = sum((place.counts for place in places), Counter[str]())
        counts["reward_error"] += len(pairs) - len(scored)
        errors = [(place, score.error, "reward_error") for place, score in pairs if score.reward is None]
        errors += [
            (place, f"data.environment: {place.error}", place.error.outcome) for place in places if place.error is not None
        ]
        return Group(
            prompt=replace(prompt, token_ids=()),
            rollouts=tuple(self._rollout(place.conversation, score, final) for place, score, final in scored),
            generate_s=generate_s,
            score_s=time.perf_counter() - started,
            failures=tuple(
                ScorerFailure(completion=place.sampled, error=text, outcome=outcome) for place, text, outcome in errors
            ),
            conversations=tuple(tuple(place.conversation.messages) for place, _, _ in scored),
            counts={name: counts[name] for name in COUNTS},
        )

    async def _scores(self, prompt: Prompt, conversations: Sequence[Conversation]) -> list[tuple[Scored, float]]:
        """Return the weighted sum of the rewards of the environment, of the turns and of the configuration, by conversation,
        and that sum without what turns and tokens earned.
        """
        own = [conversation.rewards for conversation in conversations]
        data = self.config.data
        counts = bool(data.rewards) or not any(own)
        if counts and conversations:
            answers = Answers(
                entry=prompt.entry,
                completions=tuple(conversation.last_text for conversation in conversations),
                num_tokens=tuple(conversation.num_sampled for conversation in conversations),
                finish_reasons=tuple(conversation.finish_reason for conversation in conversations),
                token_ids=tuple(conversation.sampled_ids for conversation in conversations),
            )
            configured = await self.score(answers)
        else:
            configured = [Scored(reward=0.0, parts={}) for _ in conversations]
        scores = []
        for conversation, score in zip(conversations, configured, strict=True):
            parts = dict(conversation.rewards)
            if any(conversation.turn_rewards):
                parts[TURNS] = sum(conversation.turn_rewards)
            added = sum(data.weight_of(name) * value for name, value in parts.items())
            final = sum(data.weight_of(name) * value for name, value in conversation.rewards.items())
            if score.reward is None:
                scores.append((score, 0.0))
            else:
                whole = replace(score, reward=score.reward + added, parts={**score.parts, **parts})
                scores.append((whole, final if score.token_rewards is not None else score.reward + final))
        return scores

    def _rollout(self, conversation: Conversation, score: Scored, final: float) -> Rollout:
        assert score.reward is not None
        weight, segments, by_token = self.config.data.weight_of(TURNS), conversation.segments(), None
        *rewards, last = conversation.turn_rewards
        turns = conversation.turns([*(weight * reward for reward in rewards), weight * last + final])
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


class _Place:
    """One place of a group: an episode, and the attempts before it that failed."""

    def __init__(self, episodes: Episodes, prompt: Prompt, number: int, sampling: SamplingParams, split: str) -> None:
        self._episodes, self.prompt, self._number, self._common, self._split = episodes, prompt, number, sampling, split
        self._attempt = 0
        self._failed = Counter[str]()
        self.error: EpisodeError | None = None
        """Error of the last attempt, if all of them have failed."""
        self.conversation = self._new()
        """The episode; that of the last attempt, if earlier ones have failed."""

    @property
    def has_ended(self) -> bool:
        """True if the episode has ended without an error."""
        return self.error is None and self.conversation.is_done

    @property
    def counts(self) -> Counter[str]:
        """Numbers of all attempts, by the names of `COUNTS`."""
        return self._failed + self._numbers()

    @property
    def sampled(self) -> Completion:
        """Tokens that the policy sampled in the last attempt."""
        segments = self.conversation.segments()
        if not segments:
            return NO_TOKENS
        return Rollout(segments=segments, reward=0.0, reward_parts={}, finish_reason="abort").sampled

    async def start(self) -> None:
        """Start the episode; if that fails, the next attempt."""
        try:
            await self.conversation.start()
        except EpisodeError as error:
            await self._fail(error)

    async def take(self, completion: Completion) -> None:
        """Continue with the policy's turn. At the end the environment is closed, because others may wait for its process."""
        try:
            await self.conversation.take(completion)
        except EpisodeError as error:
            await self._fail(error)
        if self.conversation.is_done:
            await self.close()

    def request(self) -> GenerationRequest | None:
        """Return the request of the next turn; None if there is none."""
        return None if self.error is not None else self.conversation.request()

    async def run(self, generate: Generate) -> None:
        """Play the episode to its end, or until its last attempt has failed."""
        await self.start()
        while (request := self.request()) is not None:
            (completion,) = await generate([request])
            await self.take(completion)

    async def close(self) -> None:
        """Close the environment."""
        await self.conversation.close()

    async def _fail(self, error: EpisodeError) -> None:
        await self.conversation.close()
        self._failed[error.outcome] += 1
        if self._attempt == self._episodes.environment.retries:
            self.error = error
        else:
            self._attempt += 1
            self._failed += self._numbers()
            self.conversation = self._new()
            await self.start()

    def _numbers(self) -> Counter[str]:
        """Return the numbers of the present attempt."""
        talk = self.conversation
        return Counter(episodes=1, turns=talk.num_turns, malformed_calls=talk.num_malformed)

    def _new(self) -> Conversation:
        """Return an episode that has not begun. All episodes of a group have the same seed, so that they can be compared."""
        config, environment = self._episodes.config, self._episodes.environment
        limits = Limits(
            max_turns=environment.max_turns,
            max_tokens=config.max_sequence_tokens,
            max_new_tokens=self._common.max_new_tokens,
            step_timeout_s=environment.step_timeout_s,
            episode_timeout_s=environment.episode_timeout_s,
            may_queue=environment.num_processes > 0,
        )
        episode = Episode(
            task_id=f"{self.prompt.task}/{self._split}/{self.prompt.index}",
            question=self.prompt.text,
            entry=self.prompt.entry,
            seed=derive_seed(config.seed if self._split == "training" else -1, self.prompt.index),
        )
        return Conversation(self._episodes.environments.make, episode, self._episodes.renderer, limits, self._sampling)

    def _sampling(self, turn: int, max_new_tokens: int) -> SamplingParams:
        """Return the options of a turn, with a seed of its own."""
        seed = self._common.seed
        if seed is not None:
            seed = derive_seed(seed, self.prompt.index, self._number, self._attempt, turn)
        return replace(self._common, max_new_tokens=max_new_tokens, seed=seed)


async def start_episodes(
    config: Config, tokenizer: Tokenizer, score: ScoreAnswers, plugins: Plugins, log: Path | None = None
) -> Episodes:
    """Load the environment and the renderer of a configuration, and start the processes of the environment.

    Args:
        config: Configuration with an environment.
        tokenizer: Tokenizer of the policy.
        score: Function that scores the last messages of the policy with the configured rewards.
        plugins: The user's objects.
        log: File for the output of the processes; None is the standard error stream.

    Raises:
        ValueError: The environment or the renderer cannot be used.
        EnvironmentFailure: The environment cannot be loaded in a process of its own.
    """
    environment = config.data.environment
    assert environment is not None
    processes = None
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
    renderer = make_renderer(tokenizer, environment.renderer, environment.renderer_options)
    return Episodes(config=config, renderer=renderer, environments=environments, score=score)


async def _run_together(places: Sequence[_Place], generate: Generate, num_rounds: int) -> None:
    """Play the episodes turn by turn, with one call for all of them per turn, and calls without requests at the end."""
    await asyncio.gather(*(place.start() for place in places))
    for _ in range(num_rounds):
        waiting = [(place, request) for place in places if (request := place.request()) is not None]
        completions = await generate([request for _, request in waiting])
        taking = (place.take(completion) for (place, _), completion in zip(waiting, completions, strict=True))
        await asyncio.gather(*taking)


async def _play_together(places: Sequence[_Place], generate: Generate, num_rounds: int) -> None:
    """Play episodes of several prompts turn by turn, with one call per turn for those of each prompt, and close them."""
    try:
        await asyncio.gather(*(place.start() for place in places))
        for _ in range(num_rounds):
            waiting = [(place, request) for place in places if (request := place.request()) is not None]
            by_prompt = [list(group) for _, group in groupby(waiting, lambda pair: pair[0].prompt.index)]
            turns = await asyncio.gather(*(generate([request for _, request in group]) for group in by_prompt))
            completions = (completion for turn in turns for completion in turn)
            await asyncio.gather(*(place.take(completion) for (place, _), completion in zip(waiting, completions, strict=True)))
    finally:
        await asyncio.gather(*(place.close() for place in places))


async def _run_apart(places: Sequence[_Place], generate: Generate, num_needed: int) -> None:
    """Play the episodes side by side until so many have ended without an error, or all have ended."""
    running = {asyncio.create_task(place.run(generate)): place for place in places}
    try:
        while running and sum(place.has_ended for place in places if place not in running.values()) < num_needed:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                del running[task]
                task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
