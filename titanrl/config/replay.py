"""The section `replay` of the configuration: how many groups of a batch are replayed, and which."""

from collections.abc import Iterator
from typing import Annotated, Literal, get_args

from pydantic import Field

from titanrl.config.algorithm import AlgorithmConfig
from titanrl.config.errors import BrokenRule
from titanrl.config.section import Bytes, Count, OrImportPath, Section

ReplayPriority = Literal["advantage", "variance", "reward", "recency"]
"""Built-in priorities of groups."""


class ReplayConfig(Section):
    """Replay of groups that earlier batches contained."""

    fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of each batch that is replayed, in addition to `rollout.groups_per_step` new groups; 0 turns replay off. The number
    of replayed groups is rounded. A batch has fewer of them while fewer are stored or young enough."""
    capacity: Count = 64
    """Number of groups to store. The oldest one is removed when it is exceeded."""
    priority: Annotated[str, OrImportPath(get_args(ReplayPriority))] = "advantage"
    """Priority of a group: mean absolute advantage, variance of its rewards, mean reward, `recency` (1 / (1 + age)), or the
    import path of a function (docs/howto/replay_groups.md)."""
    alpha: Annotated[float, Field(ge=0.0, le=10.0)] = 0.6
    """Exponent of priorities; 0 draws uniformly."""
    beta: Annotated[float, Field(ge=0.0, le=10.0)] = 0.4
    """Exponent of importance weights at the first step. They multiply the loss weights of replayed groups."""
    beta_end: Annotated[float, Field(ge=0.0, le=10.0)] = 1.0
    """Exponent of importance weights at the last step; it changes linearly."""
    max_uses: Annotated[int, Field(ge=2, le=1_000_000)] | None = None
    """Number of batches that may contain a group, its first one included; null sets no limit."""
    max_age: Count = 8
    """Maximum age of a replayed token, in steps."""
    shard_memory_bytes: Bytes = 4 << 30
    """Memory for groups in each rollout worker, which stores those that it made. Groups beyond it are moved to memory-mapped
    files in the run directory."""

    def num_replayed(self, groups_per_step: int) -> int:
        """Return the number of replayed groups per batch of `groups_per_step` new groups."""
        return round(groups_per_step * self.fraction / (1.0 - self.fraction))


def broken_by_replay(
    replay: ReplayConfig, algorithm: AlgorithmConfig, groups_per_step: int, max_staleness: int
) -> Iterator[BrokenRule]:
    """Yield the rules that replay breaks in a run with this objective, number of new groups and bound of their age."""
    if not replay.fraction:
        defaults = ReplayConfig(shard_memory_bytes=replay.shard_memory_bytes)  # which has an effect without replay
        if replay != defaults:
            unused = {f"replay.{key}": value for key, value in replay if value != getattr(defaults, key)}
            yield BrokenRule(
                values={"replay.fraction": replay.fraction, **unused},
                rule="the keys of replay have no effect without replayed groups",
                fix="set replay.fraction, for example to 0.5, or remove the others",
            )
        return
    if replay.max_age <= max_staleness:
        yield BrokenRule(
            values={"replay.max_age": replay.max_age, "max_staleness": max_staleness},
            rule="a group can be as old as max_staleness when it is new, and is older when it is replayed",
            fix=f"set replay.max_age to at least {max_staleness + 1}",
        )
    num_replayed = replay.num_replayed(groups_per_step)
    if not 1 <= num_replayed <= replay.capacity:
        yield BrokenRule(
            values={
                "replay.fraction": replay.fraction,
                "replay.capacity": replay.capacity,
                "rollout.groups_per_step": groups_per_step,
            },
            rule=f"a batch must replay between 1 and replay.capacity groups, and these values give {num_replayed}",
            fix=f"set replay.capacity to at least {num_replayed}" if num_replayed else "raise replay.fraction",
        )
    is_declared = algorithm.loss_traits.ratio != "undeclared"
    if is_declared and not (algorithm.ratio_starts_at_sampler or algorithm.correction.is_on):
        yield BrokenRule(
            values={"replay.fraction": replay.fraction, "algorithm.loss": algorithm.loss},
            rule="with replayed tokens the loss must contain the ratio to the sampling policy, or a correction for it",
            fix="set algorithm.correction, or algorithm.proximal to sampler with a loss that has a ratio, such as ppo",
        )
