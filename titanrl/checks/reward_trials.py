"""Trial calls of user-defined rewards before a run starts, on a sample of the prompts.

A reward in the sandbox is called there, a trusted one in this process. A return value that can never be a reward is an error.
An exception is only a warning, because the sample completions are not those of the policy.
"""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

from titanrl.base.plugins import Plugin, Plugins
from titanrl.carriers.rewards import Answers, BoundReward
from titanrl.carriers.scores import DENIED, INVALID, Score
from titanrl.config.errors import BrokenRule, BrokenRules
from titanrl.config.schema import Config
from titanrl.processes.confine import SandboxUnavailable
from titanrl.processes.respawns import RespawnLimitError
from titanrl.processes.sandbox import SandboxDied
from titanrl.rewards.scorers import custom
from titanrl.rewards.scoring import reward_specs, weighted
from titanrl.rewards.scoring_pool import ScoringPool
from titanrl.rewards.trusted import TrustedReward, in_thread

TIMEOUT_S = 10.0
"""Longest trial of a reward, in seconds, unless `sandbox.timeout_s` is shorter."""
_FIX = (
    "return a finite number, TokenRewards or a mapping of parts for every completion; return 0 for a wrong answer, and raise "
    "an exception if the reward is unknown"
)


def try_rewards(config: Config, plugins: Plugins, entry: Mapping[str, Any], section: str, *, load_s: float) -> list[str]:
    """Call each user-defined reward of a task once, with two completions, and return warnings.

    Rewards that cannot be loaded are skipped: another check names them.

    Args:
        config: Configuration whose section `data` has the rewards.
        plugins: User-defined objects by key relative to this configuration.
        entry: Data of a prompt.
        section: Configuration section with the rewards, for messages.
        load_s: Time limit for loading the rewards, in seconds. Rewards that take longer are skipped, too.

    Raises:
        BrokenRules: A reward returned something else than a reward, or needs what the sandbox denies.
    """
    answers = sample_answers(entry, with_tokens=config.data.environment is None)
    limit_s = min(config.sandbox.timeout_s, TIMEOUT_S)
    scores = asyncio.run(_scores(config, plugins, answers, limit_s, load_s))
    broken: list[BrokenRule] = []
    warnings = []
    for name, of_reward in scores.items():
        reward, key = config.data.reward_parts[name], f"{section}.rewards.{name}"
        scored = [weighted({name: score}, {name: reward}, answers, index) for index, score in enumerate(of_reward)]
        errors = [(index, one.error.removeprefix(f"{name}: ")) for index, one in enumerate(scored) if one.reward is None]
        if not errors:
            continue
        index, error = errors[0]
        sample = f"for the sample completion {answers.completions[index]!a:.60}"
        if DENIED in error:
            rule, _, fix = error.partition("; ")
            broken.append(BrokenRule(values={key: reward.function}, rule=f"{rule} ({sample})", fix=fix.rstrip(")")))
        elif of_reward[index].status == "ok" or error.startswith(INVALID):
            broken.append(BrokenRule(values={key: reward.function}, rule=f"{error} ({sample})", fix=_FIX))
        else:
            warnings.append(
                f"{key}: the reward failed {sample} ({error}). If it fails on real completions, they have no reward."
            )
    if broken:
        raise BrokenRules(*broken)
    return warnings


def sample_answers(entry: Mapping[str, Any], *, with_tokens: bool = True) -> Answers:
    """Return a right and a wrong completion of a prompt. Each character is a token.

    Args:
        entry: Data of the prompt.
        with_tokens: False in an environment, where tokens cannot be located in the text.
    """
    texts = (f"<answer>{entry.get('answer') or 'a sample'}</answer>", "I do not know.")
    return Answers(
        entry=entry,
        completions=texts,
        num_tokens=tuple(map(len, texts)),
        finish_reasons=("stop", "length"),
        token_ids=tuple([ord(char) for char in text] for text in texts),
        decode_raw=lambda ids: "".join(map(chr, ids)),
        decode=(lambda ids: "".join(map(chr, ids))) if with_tokens else None,
    )


async def _scores(config: Config, plugins: Plugins, answers: Answers, limit_s: float, load_s: float) -> dict[str, list[Score]]:
    """Return the scores of the answers by each user-defined reward that can be loaded."""
    scores: dict[str, list[Score]] = {}
    for name, reward in config.data.reward_parts.items():
        if reward.trusted:
            key = f"data.rewards.{name}"
            try:
                loading = in_thread(partial(custom, plugins.get(key) or Plugin(key=key, name=reward.function)))
                function = await asyncio.wait_for(loading, load_s)
            except Exception:  # importing a module may raise anything
                continue
            scores[name] = await TrustedReward(BoundReward(name, function), limit_s).score(answers)
    if specs := [spec for spec in reward_specs(config, plugins) if spec.is_custom]:
        pool = ScoringPool(specs, config.sandbox.model_copy(update={"timeout_s": limit_s, "num_processes": len(specs)}))
        try:
            await asyncio.wait_for(pool.start(), load_s)
            found = await asyncio.gather(*(pool.score(answers, reward=index) for index in range(len(specs))))
            scores |= {spec.name: own for spec, own in zip(specs, found, strict=True)}
        except (RespawnLimitError, SandboxDied, SandboxUnavailable, TimeoutError, ValueError):
            return scores
        finally:
            await pool.close()
    return scores
