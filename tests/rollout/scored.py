"""Scores of two answers, as a rollout worker computes them."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from titanrl.carriers.rewards import Answers, Scored
from titanrl.config.data import DataConfig
from titanrl.config.schema import Config
from titanrl.config.sections import SandboxConfig
from titanrl.launch.extensions import plugins_of, with_objects
from titanrl.rollout.scoring import Scoring

SANDBOX = SandboxConfig(timeout_s=2.0, num_processes=2)
ANSWERS = Answers(
    entry={"question": "2 + 2 =", "answer": "4", "metadata": {"url": ""}},
    completions=("4", "five"),
    num_tokens=(2, 3),
    finish_reasons=("stop", "length"),
)


def score(
    config: Config,
    objects: Mapping[str, object],
    answers: Answers = ANSWERS,
    sandbox: SandboxConfig = SANDBOX,
) -> list[Scored]:
    """Score answers as a rollout worker does."""
    config = with_objects(config, objects)

    async def main() -> list[Scored]:
        scoring = Scoring(config.model_copy(update={"sandbox": sandbox}), plugins_of(config, objects))
        await scoring.start()
        try:
            return await scoring.score(answers)
        finally:
            await scoring.close()

    return asyncio.run(main())


def score_with(**rewards: object) -> list[Scored]:
    """Score the answers with Python objects as rewards."""
    return score(Config(name="a", num_steps=1), {"rewards": rewards})


def score_with_paths(rewards: Mapping[str, object]) -> list[Scored]:
    """Score the answers with rewards from the configuration."""
    data = DataConfig.model_validate({"rewards": rewards})
    return score(Config(name="a", num_steps=1, data=data), {})


def values(scores: Sequence[Scored]) -> list[float | None]:
    return [scored.reward for scored in scores]


def right(completion: str, entry: Mapping[str, Any]) -> float:
    return float(completion == entry["answer"])
