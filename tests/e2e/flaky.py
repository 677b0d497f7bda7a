"""An environment that fails for a share of its episodes, which a hash selects, and logs each failure."""

import asyncio
import zlib
from pathlib import Path

from titanrl.environments import Done, Episode, Message, Observation

ERRORS, HANGS, REWARDS = 0.2, 0.1, 0.1
"""Shares of episodes that raise and that hang, and of rewards that fail."""


def share(*parts: object) -> float:
    """Return a number from 0 to 1 that depends only on the arguments."""
    return zlib.crc32(repr(parts).encode()) / 2**32


class Flaky:
    """Asks the question; the answer is scored by the configuration."""

    numbers: dict[str, int] = {}  # noqa: RUF012  # number of episodes per task

    def __init__(self, log: str) -> None:
        """Write a line to a log at the end of each training episode."""
        self.log = Path(log)

    def note(self, outcome: str) -> None:
        with self.log.open("a") as log:
            log.write(f"{outcome} {self.index}\n")

    async def reset(self, episode: Episode) -> Observation:
        number = Flaky.numbers[episode.task_id] = Flaky.numbers.get(episode.task_id, 0) + 1
        self.place = share(episode.task_id, number)
        self.index = episode.task_id.rpartition("/")[2]
        self.is_training = "/training/" in episode.task_id
        return Observation(messages=[{"role": "user", "content": episode.question}])

    async def step(self, message: Message) -> Observation | Done:
        if self.is_training and self.place < ERRORS:
            self.note("environment_error")
            raise RuntimeError("flaky")
        if self.is_training and self.place < ERRORS + HANGS:
            self.note("timeout")
            await asyncio.sleep(3600)
        if self.is_training and self.place < ERRORS + HANGS + REWARDS:
            self.note("reward_error")
            return Done(rewards={"bonus": float("nan")})
        if self.is_training:
            self.note("ok")
        return Done()

    async def close(self) -> None:
        pass
