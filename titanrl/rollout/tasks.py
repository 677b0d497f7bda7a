"""Opens the tasks of a run: loads the prompts, and starts the rewards and environments."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from titanrl.base.plugins import Plugins, plugins_of_data
from titanrl.carriers.types import Prompt
from titanrl.config.errors import BrokenRules, within
from titanrl.config.mixture import key_of
from titanrl.config.schema import Config
from titanrl.data.levels import LeveledPrompts, open_prompts
from titanrl.data.mixture import Draw
from titanrl.data.tokenizer import Tokenizer
from titanrl.processes.sandbox import OnRespawn, log_respawn
from titanrl.rewards.scoring import Scoring
from titanrl.rollout.episodes import Episodes, start_episodes


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTask:
    """A task with its prompts loaded and its rewards and environment started."""

    config: Config
    """Configuration that applies to the groups of the task."""
    prompts: LeveledPrompts
    """Training prompts by level, and held-out prompts."""
    scoring: Scoring
    """Rewards of the task."""
    episodes: Episodes | None
    """Plays the episodes; None without an environment."""

    def prompt(self, index: int, draw: Draw) -> Prompt:
        """Return the prompt of the group at a position of the run."""
        return self.prompts.prompt(index, draw.level, draw.stream_index)

    @property
    def num_calls(self) -> int:
        """Number of generator calls that each group of the task makes in a round."""
        return 1 if self.episodes is None else self.episodes.num_rounds

    async def close(self) -> None:
        """Stop the processes of the task."""
        await self.scoring.close()
        if self.episodes is not None:
            await self.episodes.environments.close()


async def open_tasks(
    config: Config,
    tokenizer: Tokenizer,
    plugins: Plugins,
    log: Path | None = None,
    prompts: Mapping[str, LeveledPrompts] = MappingProxyType({}),
    on_respawn: OnRespawn = log_respawn,
) -> Mapping[str, OpenTask]:
    """Open the tasks of a run, by name.

    Args:
        config: Configuration of the run.
        tokenizer: Tokenizer of the policy.
        plugins: User-defined objects.
        log: File for the output of environment processes; None for the standard error stream.
        prompts: Prompts by task name, for tasks whose prompts are already open.
        on_respawn: Called after the sandbox of a task died and was replaced.

    Raises:
        SandboxUnavailable: This machine cannot confine a process.
        ValueError: The prompts, a reward or an environment cannot be used.
    """
    opened: dict[str, OpenTask] = {}
    for name, data in config.data.tasks.items():
        section = key_of(name, data)
        own, of_task = config.of_task(data), plugins_of_data(plugins, section)
        try:
            scoring = Scoring(own, of_task, on_respawn)
            await scoring.start()
            leveled = prompts.get(name) or open_prompts(name, data, tokenizer, config.seed, of_task)
            episodes = None
            if data.environment is not None:
                episodes = await start_episodes(own, tokenizer, scoring.score, of_task, log)
        except BrokenRules as error:
            raise within(error, section) from None
        opened[name] = OpenTask(config=own, prompts=leveled, scoring=scoring, episodes=episodes)
    return opened
