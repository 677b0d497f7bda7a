"""Helpers for the tests of the scoring pool: a reward that executes completions, and pools that use it."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.processes.processes import children
from titanrl.base.plugins import Plugin
from titanrl.carriers.rewards import Answers, RewardSpec, Score
from titanrl.config.sections import SandboxConfig
from titanrl.rollout.scoring import ScoringPool

CONFIG = SandboxConfig(timeout_s=20.0, num_processes=2, memory_bytes=1 << 29)
HASTY = CONFIG.model_copy(update={"timeout_s": 2.0})
"""For answers that reach the limit, and others that share it, even on a busy machine."""


def own(path: str, *, bounds: tuple[float, float] = (0.0, 1.0)) -> RewardSpec:
    """Return the specification of a custom reward."""
    plugin = Plugin(key="data.rewards.answer", name=path)
    kwargs = {"plugin": plugin}
    return RewardSpec(
        name="answer", factory="titanrl.carriers.rewards:custom_reward", kwargs=kwargs, bounds=bounds, is_custom=True
    )


CARELESS = own("careless_verifier:run")
CARELESS_VERIFIER = '''
import os, sys

def run(text, entry):
    """Execute the completion and return the `reward` that it sets, 1 by default."""
    scope = {"entry": entry, "text": text}
    exec(text, scope)
    return scope.get("reward", 1.0)
'''
Answer = tuple[str, dict[str, Any]]
"""Text of a completion, and the entry of its prompt."""
RIGHT: Answer = ("reward = 1.0", {})
WRONG: Answer = ("reward = 0.0", {})
FOREVER = "while True: pass"


def together(*answers: Answer) -> Answers:
    """Combine the answers to a group of one prompt."""
    entries = [entry for _, entry in answers] or [{}]
    assert all(entry == entries[0] for entry in entries)
    texts = tuple(text for text, _ in answers)
    return Answers(entry=entries[0], completions=texts, num_tokens=(1,) * len(texts), finish_reasons=("stop",) * len(texts))


class Bench:
    """A started pool with its event loop, for synchronous tests."""

    def __init__(self, spec: RewardSpec, config: SandboxConfig = CONFIG) -> None:
        before = children(os.getpid())
        self.runner = asyncio.Runner()
        self.pool = ScoringPool([spec], config)
        self.runner.run(self.pool.start())
        (self.zygote,) = children(os.getpid()) - before

    def score(self, *answers: Answer) -> list[Score]:
        return self.runner.run(self.pool.score(together(*answers)))

    def close(self) -> None:
        self.runner.run(self.pool.close())
        self.runner.close()


@asynccontextmanager
async def started(config: SandboxConfig = CONFIG) -> AsyncIterator[ScoringPool]:
    pool = ScoringPool([CARELESS], config)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def rewards(scores: list[Score]) -> list[float | None]:
    """Return the reward of each score; None for those that failed."""
    return [score.parts.get("answer") for score in scores]


def statuses(scores: list[Score]) -> list[str]:
    return [score.status for score in scores]
