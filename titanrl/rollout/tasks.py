"""The tasks of a run, opened: prompts, rewards and environment of each."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from titanrl.config.errors import BrokenRules, within
from titanrl.config.mixture import key_of
from titanrl.config.schema import Config
from titanrl.data.levels import LeveledPrompts, open_prompts
from titanrl.data.mixture import Draw
from titanrl.data.tokenizer import Tokenizer
from titanrl.plugins import Plugins, plugins_of_data
from titanrl.rollout.episodes import Episodes, start_episodes
from titanrl.rollout.scoring import Scoring
from titanrl.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTask:
    """A task whose rewards and environment are started."""

    config: Config
    """Configuration of its groups."""
    prompts: LeveledPrompts
    """Prompts by level, and held-out prompts."""
    scoring: Scoring
    """Rewards."""
    episodes: Episodes | None
    """Episodes, if it has an environment."""

    def prompt(self, index: int, draw: Draw) -> Prompt:
        """Return the prompt of a group at a position of the run."""
        return self.prompts.prompt(index, draw.level, draw.place)

    @property
    def num_calls(self) -> int:
        """Number of calls of the generators that each of its groups makes in a round."""
        return 1 if self.episodes is None else self.episodes.num_rounds

    async def close(self) -> None:
        """Stop its processes."""
        await self.scoring.close()
        if self.episodes is not None:
            await self.episodes.environments.close()


async def open_tasks(
    config: Config,
    tokenizer: Tokenizer,
    plugins: Plugins,
    log: Path | None = None,
    prompts: Mapping[str, LeveledPrompts] = MappingProxyType({}),
) -> Mapping[str, OpenTask]:
    """Open the tasks of a run, by name.

    Args:
        config: Configuration of the run.
        tokenizer: Tokenizer of the policy.
        plugins: The user's objects.
        log: File for the output of environment processes; None is the standard error stream.
        prompts: Prompts by task, if they are open.

    Raises:
        SandboxUnavailable: This machine cannot confine a process.
        ValueError: The prompts, a reward or an environment cannot be used.
    """
    opened: dict[str, OpenTask] = {}
    for name, data in config.data.tasks.items():
        section = key_of(name, data)
        own, of_task = config.of_task(data), plugins_of_data(plugins, section)
        try:
            scoring = Scoring(own, of_task)
            await scoring.start()
            leveled = prompts.get(name) or open_prompts(name, data, tokenizer, config.seed, of_task)
            episodes = None
            if data.environment is not None:
                episodes = await start_episodes(own, tokenizer, scoring.score, of_task, log)
        except BrokenRules as error:
            raise within(error, section) from None
        opened[name] = OpenTask(config=own, prompts=leveled, scoring=scoring, episodes=episodes)
    return opened
