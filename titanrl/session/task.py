"""Prompts and rewards of a configuration, for custom loops."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from titanrl.base.plugins import Plugins, plugins_of_data
from titanrl.carriers.rewards import Answers, Scored, scorer_failed
from titanrl.carriers.types import EvaluationResult, Prompt
from titanrl.config.schema import Config
from titanrl.data.mixture import Draw, make_mixture
from titanrl.data.streams import make_encoder, open_prompts
from titanrl.data.tokenizer import Tokenizer
from titanrl.rollout.open_tasks import EvaluationSets, OpenTask, open_tasks
from titanrl.session.sampling import Sample, SamplingClient


class Task:
    """Prompts and rewards configured in the sections `data` and `sandbox`; create one with `Session.task`.

    Example:
        task = await session.task()
        prompts = task.prompts(32)
        groups = await session.sampling.sample(prompts, num_samples=8)
        rewards = await task.rewards(prompts, groups)
    """

    def __init__(self, config: Config, tokenizer: Tokenizer, plugins: Plugins) -> None:
        """Open the prompts; `start` loads the rewards.

        Raises:
            ValueError: The data cannot be used.
        """
        self._prompts = {
            name: open_prompts(name, data, make_encoder(data, tokenizer), config.seed, plugins_of_data(plugins, data.key(name)))
            for name, data in config.data.tasks.items()
        }
        self._config, self._tokenizer, self._plugins = config, tokenizer, plugins
        self._mixture, self._draws = make_mixture(config, plugins), list[Draw]()
        self._tasks: Mapping[str, OpenTask] = {}

    async def start(self) -> None:
        """Load the rewards, and start their sandbox processes.

        Raises:
            SandboxUnavailable: This machine cannot confine a process.
            ValueError: A reward cannot be loaded.
        """
        self._tasks = await open_tasks(self._config, self._tokenizer, self._plugins, prompts=self._prompts)
        self._sets = EvaluationSets(self._config, self._tokenizer, self._plugins, self._tasks)

    def prompts(self, num: int, *, start: int = 0) -> list[Prompt]:
        """Return `num` training prompts from position `start` of the prompt stream, which is reshuffled every epoch.

        With `data.mixture`, the tasks alternate in the ratio of their weights. A curriculum stays at its first level, because
        it receives no rewards.
        """
        streams = list(self._prompts.values())
        while self._mixture.has_state and len(self._draws) < start + num:
            self._draws.append(self._mixture.draw(len(self._draws)))
        draws = {index: self._draws[index] if self._draws else Draw(index) for index in range(start, start + num)}
        return [streams[draw.task].prompt(index, draw.level, draw.stream_index) for index, draw in draws.items()]

    def heldout(self, num: int, *, task: str | None = None) -> list[Prompt]:
        """Return the first held-out prompts of a task; None means the first task.

        Raises:
            ValueError: There are none, or fewer than `num`, or there is no such task.
        """
        name = next(iter(self._prompts)) if task is None else task
        if name not in self._prompts:
            raise ValueError(f"task: no such task (got {name!r}). Choose one of {', '.join(self._prompts)}.")
        prompts = self._prompts[name].stream.heldout(num)
        if len(prompts) < num:
            raise ValueError(
                f"num: task {name} has {len(prompts)} held-out prompts (got {num}). Lower it, or raise data.heldout_fraction."
            )
        return [replace(prompt, task=name) for prompt in prompts]

    async def score(self, prompts: Sequence[Prompt], groups: Sequence[Sequence[Sample]]) -> list[list[Scored]]:
        """Score the samples of each prompt. A `Scored` has the reward and its parts, or the error of a failed reward."""
        return await asyncio.gather(
            *(
                self._tasks[prompt.task].scoring.score(
                    Answers(
                        entry=prompt.entry,
                        completions=tuple(sample.text for sample in group),
                        num_tokens=tuple(len(sample.tokens) for sample in group),
                        finish_reasons=tuple(sample.finish_reason for sample in group),
                        token_ids=tuple(sample.tokens.tolist() for sample in group),
                        decode=self._tokenizer.decode,
                        decode_raw=self._tokenizer.decode_raw,
                    )
                )
                for prompt, group in zip(prompts, groups, strict=True)
            )
        )

    async def rewards(self, prompts: Sequence[Prompt], groups: Sequence[Sequence[Sample]]) -> list[list[float]]:
        """Return the reward of each sample of each prompt.

        Raises:
            ScorerError: The reward failed on a sample. `score` returns such errors instead.
        """
        scored = await self.score(prompts, groups)
        errors = [score.error for group in scored for score in group if score.reward is None]
        if errors:
            raise scorer_failed(f"{len(errors)} of {sum(map(len, groups))} samples", errors[0])
        return [[score.reward for score in group if score.reward is not None] for group in scored]

    async def evaluate(
        self, client: SamplingClient, num_prompts: int | None = None, *, name: str | None = None
    ) -> EvaluationResult:
        """Sample completions of an evaluation set, and score them.

        Args:
            client: Client of the model to evaluate.
            num_prompts: Number of prompts; the set's `num_prompts` by default.
            name: Evaluation set; None means the first, which is the default set unless it was left out.

        Raises:
            ScorerError: The reward failed on every completion.
            ValueError: There is no such set, or its data cannot be used.
        """
        subset = self._sets.named(name)
        if num_prompts is not None:
            subset = replace(subset, num_prompts=num_prompts)
        return await self._sets.evaluate(subset, client.generate)

    async def close(self) -> None:
        """Stop the reward processes."""
        await self._sets.close()
        for task in self._tasks.values():
            await task.close()
