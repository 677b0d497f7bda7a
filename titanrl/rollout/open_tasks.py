"""Opens the tasks of a run: loads the prompts, and starts the rewards and environments. Evaluates on held-out prompts."""

import asyncio
import math
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import numpy as np

from titanrl.base.plugins import Plugins, plugins_of_data, plugins_within
from titanrl.carriers.rewards import scorer_failed
from titanrl.carriers.types import TOLERANCE, EvaluationResult, GenerationRequest, Group, Prompt, SamplingParams
from titanrl.config.data import EvaluationSet
from titanrl.config.errors import BrokenRules, within
from titanrl.config.schema import Config
from titanrl.config.sections import RolloutConfig
from titanrl.data.streams import LeveledPrompts, PromptStream, make_encoder, make_stream, open_prompts
from titanrl.data.tokenizer import Tokenizer
from titanrl.processes.sandbox import OnRespawn, log_respawn
from titanrl.rollout.episodes import TRUNCATED, Episodes, start_episodes
from titanrl.rollout.group import Generate, derive_seed, roll_out, summed_metrics
from titanrl.rollout.scoring import Scoring

Z_95 = 1.959964
"""Critical value of a two-sided 95 % interval of the normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenData:
    """Prompts, rewards and environment of a task or an evaluation set, loaded and started."""

    stream: PromptStream
    """Prompts; in a task, those of the first level."""
    scoring: Scoring
    episodes: Episodes | None
    """Plays the episodes; None without an environment."""

    async def close(self) -> None:
        """Stop the processes."""
        await self.scoring.close()
        if self.episodes is not None:
            await self.episodes.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTask(OpenData):
    """A task of a run."""

    config: Config
    """Configuration that applies to the groups of the task."""
    prompts: LeveledPrompts
    """Training prompts by level, and held-out prompts."""

    @property
    def num_calls(self) -> int:
        """Generator calls that each group of the task makes in a round of synchronous training."""
        return 1 if self.episodes is None else self.episodes.num_rounds

    def at_temperature(self, temperature: float) -> "OpenTask":
        """Return the same task with another sampling temperature."""
        rollout = self.config.rollout.model_copy(update={"temperature": temperature})
        config = self.config.model_copy(update={"rollout": rollout})
        episodes = None if self.episodes is None else replace(self.episodes, config=config)
        return replace(self, config=config, episodes=episodes)


async def open_tasks(
    config: Config,
    tokenizer: Tokenizer,
    plugins: Plugins,
    log: Path | None = None,
    prompts: Mapping[str, LeveledPrompts] = MappingProxyType({}),
    on_respawn: OnRespawn = log_respawn,
) -> Mapping[str, OpenTask]:
    """Open the tasks of a run, by name.

    Environment processes write to `log`, or to the standard error stream. `prompts` has those of tasks whose prompts are
    already open. `on_respawn` is called after the sandbox of a task died and was replaced. Raise `SandboxUnavailable` if this
    machine cannot confine a process, and `ValueError` if prompts, a reward or an environment cannot be used.
    """
    opened: dict[str, OpenTask] = {}
    async with AsyncExitStack() as undo:
        for name, data in config.data.tasks.items():
            section = data.key(name)
            task_config, task_plugins = config.of_task(data), plugins_of_data(plugins, section)
            try:
                leveled = prompts.get(name) or open_prompts(
                    name, data, make_encoder(data, tokenizer), config.seed, task_plugins
                )
                scoring, episodes = await _start(task_config, tokenizer, task_plugins, on_respawn, log)
            except BrokenRules as error:
                raise within(error, section) from None
            task = OpenTask(config=task_config, prompts=leveled, stream=leveled.stream, scoring=scoring, episodes=episodes)
            opened[name] = task
            undo.push_async_callback(task.close)
        undo.pop_all()
    return opened


async def _start(
    config: Config, tokenizer: Tokenizer, plugins: Plugins, on_respawn: OnRespawn, log: Path | None = None
) -> tuple[Scoring, Episodes | None]:
    """Start the rewards, and the environment if there is one."""
    scoring = Scoring(config, plugins, on_respawn)
    try:
        await scoring.start()
        if config.data.environment is None:
            return scoring, None
        return scoring, await start_episodes(config, tokenizer, scoring.score, plugins, log)
    except BaseException:  # including cancellation
        await scoring.close()
        raise


IN_FLIGHT = 128
"""Maximum number of concurrent completions, but at least those of one prompt."""


class RecordEvaluation(Protocol):
    """A function that records the groups of an evaluation."""

    def __call__(
        self, name: str, groups: Sequence[Group], decode: Callable[[list[int]], str], /, *, environment: str | None
    ) -> None:
        """Record groups of a set; `decode` maps sampled tokens to the text that rewards receive."""


class EvaluationSets:
    """The evaluation sets of a run. The prompts and rewards of a set are loaded on its first use."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        plugins: Plugins,
        tasks: Mapping[str, OpenTask],
        on_respawn: OnRespawn = log_respawn,
    ) -> None:
        """Keep the arguments without loading anything. Sets that do not define their own data use the `tasks` of the run."""
        self._on_respawn = on_respawn
        self._config, self._tokenizer, self._plugins = config, tokenizer, plugins
        self._decode = partial(tokenizer.decode_completion, stop=config.rollout.stop, keep_stop=config.rollout.keep_stop)
        self._of_run = tasks
        self._own: dict[str, OpenData] = {}
        self._prompts: dict[tuple[str, int], list[Prompt]] = {}
        self._opening = asyncio.Lock()

    async def evaluate(
        self,
        name: str | None,
        generate: Generate,
        num_prompts: int | None = None,
        *,
        record: RecordEvaluation | None = None,
    ) -> EvaluationResult:
        """Sample and score completions for the prompts of a set, by default its `num_prompts`.

        `record` records the groups of the first `logging.evaluation_prompts` prompts. Raise `ScorerError` if the reward failed
        on every completion, and `ValueError` if there is no such set, or it cannot be used.
        """
        eval_set = self._config.evaluation_set(name)
        if num_prompts is not None:
            eval_set = eval_set.model_copy(update={"num_prompts": num_prompts})
        opened = await self._open(eval_set)
        key = eval_set.name, eval_set.num_prompts
        if key not in self._prompts:  # generating them can take seconds
            held_out = partial(opened.stream.heldout, eval_set.num_prompts, split=eval_set.split, key=eval_set.key)
            try:
                self._prompts[key] = await asyncio.to_thread(held_out)
            except BrokenRules as error:
                raise within(error, f"{eval_set.key}.data") if eval_set.has_own_data else error from None
        prompts = self._prompts[key]
        seed = derive_seed(self._config.seed, zlib.crc32(eval_set.name.encode()))

        async def complete(prompt: Prompt) -> Group:
            requests = evaluation_requests(prompt, eval_set, seed, self._config.rollout)
            return await roll_out(prompt, requests, generate, opened.scoring.score, self._decode, self._tokenizer.decode_raw)

        async def answer(prompts: Sequence[Prompt]) -> Sequence[Group]:
            if opened.episodes is None:
                return await asyncio.gather(*map(complete, prompts))
            return await opened.episodes.answer(
                prompts,
                generate,
                num_samples=eval_set.num_samples,
                max_new_tokens=eval_set.max_new_tokens,
                temperature=eval_set.temperature,
                seed=seed,
            )

        groups = await answer_prompts(eval_set, prompts, answer)
        if record is not None and (recorded := groups[: self._config.logging.evaluation_prompts]):
            environment = eval_set.data.environment
            function = None if environment is None else environment.name
            await asyncio.to_thread(record, eval_set.name, recorded, self._decode, environment=function)
        return evaluation_result(eval_set, groups)

    async def close(self) -> None:
        """Stop the processes of sets that have their own data."""
        for opened in self._own.values():
            await opened.close()
        self._own.clear()

    async def _open(self, eval_set: EvaluationSet) -> OpenData:
        if not eval_set.has_own_data:
            return self._of_run[eval_set.task]
        async with self._opening:
            if eval_set.name not in self._own:
                rollout = self._config.rollout.model_copy(update={"max_new_tokens": eval_set.max_new_tokens})
                config = self._config.model_copy(update={"data": eval_set.data, "rollout": rollout})
                plugins = plugins_within(self._plugins, eval_set.key)
                try:
                    stream = make_stream(eval_set.data, self._tokenizer, config.seed, plugins, is_trained_on=False)
                except BrokenRules as error:
                    raise within(error, f"{eval_set.key}.data") from None
                scoring, episodes = await _start(config, self._tokenizer, plugins, self._on_respawn)
                self._own[eval_set.name] = OpenData(stream=stream, scoring=scoring, episodes=episodes)
        return self._own[eval_set.name]


async def answer_prompts(
    eval_set: EvaluationSet, prompts: Sequence[Prompt], answer: Callable[[Sequence[Prompt]], Awaitable[Sequence[Group]]]
) -> list[Group]:
    """Answer the prompts of a set, at most `IN_FLIGHT` completions at the same time, and return their groups."""
    size = max(1, IN_FLIGHT // eval_set.num_samples)
    return [group for start in range(0, len(prompts), size) for group in await answer(prompts[start : start + size])]


def evaluation_requests(
    prompt: Prompt, eval_set: EvaluationSet, seed: int, rollout: RolloutConfig | None = None
) -> list[GenerationRequest]:
    """Return the requests for one prompt of a set, only one if greedy, with the stop texts of `rollout`. Seeds never change."""
    rollout = rollout or RolloutConfig()
    sampling = SamplingParams(
        max_new_tokens=eval_set.max_new_tokens,
        temperature=eval_set.temperature,
        seed=None,
        stop=rollout.stop_texts,
        stop_ids=rollout.stop_ids,
    )
    if eval_set.temperature == 0:
        return [GenerationRequest(token_ids=prompt.token_ids, sampling=sampling)]
    seeds = (derive_seed(seed, prompt.index, n) for n in range(eval_set.num_samples))
    return [GenerationRequest(token_ids=prompt.token_ids, sampling=replace(sampling, seed=own)) for own in seeds]


def evaluation_result(eval_set: EvaluationSet, groups: Sequence[Group]) -> EvaluationResult:
    """Compute the result of an evaluation from the scored completions of each prompt; raise `ScorerError` if there are none."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    errors = [failure.error for group in groups for failure in group.failures]
    if not rollouts:
        raise scorer_failed(f"all {len(errors)} completions of the evaluation", errors[0])
    statistics: Mapping[str, float] = evaluation_statistics(
        [[rollout.reward for rollout in group.rollouts] for group in groups],
        num_samples=eval_set.num_samples,
        pass_k=eval_set.pass_k,
        solved_from=eval_set.solved_from,
    )
    versions = [rollout.sampled.versions for rollout in rollouts]
    newest = [int(sampled.max()) for sampled in versions]
    oldest = min(int(sampled.min()) for sampled in versions)
    return EvaluationResult(
        task=eval_set.name,
        version=min(newest),
        mean=statistics["mean"],
        num_prompts=len(groups),
        response_len_mean=float(np.mean(list(map(len, versions)))),
        num_errors=len(errors),
        num_unscored_prompts=sum(not group.rollouts for group in groups),
        first_error=errors[0] if errors else "",
        num_truncated=sum(rollout.finish_reason == "length" for rollout in rollouts),
        num_unjudged=sum(TRUNCATED in rollout.reward_parts for rollout in rollouts),
        num_samples=eval_set.num_samples,
        statistics=statistics,
        is_pinned=oldest == max(newest),
        environment={name: total / num for name, (total, num) in summed_metrics(groups).items()},
    )


def evaluation_statistics(
    rewards: Sequence[Sequence[float]], *, num_samples: int, pass_k: Sequence[int], solved_from: float
) -> dict[str, float]:
    """Return `mean`, `avg@n` and `pass@k` by name, each with the half-width of its 95 % interval as `<name>_ci95`.

    avg@n is the fraction of completions that solve their prompt, averaged over prompts; it is omitted for n = 1. Prompts with
    fewer than k rewards are excluded from pass@k. `rewards` are those of each prompt, without completions whose reward failed;
    at least one prompt has a reward. A completion solves its prompt with a reward of at least `solved_from`.

    Prompts are treated as independent draws from a population, and the completions of one prompt as a cluster. Each statistic
    is therefore a mean over prompts with the standard error of a mean of independent prompts (arXiv:2411.00640, sections 2.1
    and 2.2).
    """
    scored = [values for values in rewards if values]
    statistics = _with_interval("mean", [float(np.mean(values)) for values in scored])
    solved = [(len(values), sum(value >= solved_from - TOLERANCE for value in values)) for values in scored]
    if num_samples > 1:
        statistics |= _with_interval(f"avg@{num_samples}", [num_solved / num for num, num_solved in solved])
    for k in pass_k:
        enough = [pass_at_k(num, num_solved, k) for num, num_solved in solved if num >= k]
        statistics |= _with_interval(f"pass@{k}", enough) if enough else {}
    return statistics


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Return the unbiased estimate of pass@k, the probability that at least one of k samples solves a prompt.

    With c solutions in n samples, it is 1 - C(n - c, k) / C(n, k), the fraction of k-subsets that contain a solution
    (arXiv:2107.03374, equation 1).
    """
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def _with_interval(name: str, values_N: Sequence[float]) -> dict[str, float]:
    """Return the mean over prompts and, for at least two prompts, the half-width of its 95 % interval."""
    mean = float(np.mean(values_N))
    if len(values_N) < 2:
        return {name: mean}
    return {name: mean, f"{name}_ci95": Z_95 * float(np.std(values_N, ddof=1)) / math.sqrt(len(values_N))}
