"""The section `replay`: reuse of groups from earlier batches."""

from collections.abc import Iterator
from typing import Annotated, Literal, get_args

from pydantic import Field

from titanrl.config.algorithm import AlgorithmConfig
from titanrl.config.errors import BrokenRule
from titanrl.config.section import Bytes, Count, OrImportPath, Section

ReplayPriority = Literal["advantage", "variance", "reward", "recency"]
"""Built-in priorities of groups."""


class ReplayConfig(Section):
    """Prioritized replay of groups from earlier batches."""

    fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of replayed groups in each batch, in addition to `rollout.groups_per_step` new groups; 0 disables replay. The
    number of replayed groups is rounded. A batch has fewer while not enough stored groups are recent enough (`max_age`)."""
    capacity: Count = 64
    """Maximum number of stored groups. When it is exceeded, the oldest group is removed."""
    priority: Annotated[str, OrImportPath(get_args(ReplayPriority))] = "advantage"
    """Sampling priority of a group: `advantage` (mean absolute advantage), `variance` of its rewards, mean `reward`, `recency`
    (1 / (1 + age)), or the import path of a custom function (docs/howto/replay_groups.md)."""
    alpha: Annotated[float, Field(ge=0.0, le=10.0)] = 0.6
    """Exponent of the priorities; 0 samples uniformly."""
    beta: Annotated[float, Field(ge=0.0, le=10.0)] = 0.4
    """Exponent of the importance weights at the first step. They multiply the loss weights of replayed groups, to correct for
    the prioritized sampling."""
    beta_end: Annotated[float, Field(ge=0.0, le=10.0)] = 1.0
    """Exponent of the importance weights at the last step; it changes linearly from `beta`."""
    max_uses: Annotated[int, Field(ge=2, le=1_000_000)] | None = None
    """Maximum number of batches that contain a group, including the first one; null sets no limit."""
    max_age: Count = 8
    """Maximum staleness of a replayed token, in steps."""
    shard_memory_bytes: Bytes = 4 << 30
    """Memory in bytes that each rollout worker uses for the groups it stores. Groups beyond it are moved to memory-mapped files
    in the run directory. Also applies without replay."""

    def num_replayed(self, groups_per_step: int) -> int:
        """Return the number of replayed groups per batch of `groups_per_step` new groups."""
        return round(groups_per_step * self.fraction / (1.0 - self.fraction))


def broken_by_replay(
    replay: ReplayConfig, algorithm: AlgorithmConfig, groups_per_step: int, max_staleness: int
) -> Iterator[BrokenRule]:
    """Yield the rules that replay breaks together with the objective, the number of new groups and the bound on staleness."""
    if not replay.fraction:
        defaults = ReplayConfig(shard_memory_bytes=replay.shard_memory_bytes)  # has an effect without replay
        if replay != defaults:
            unused = {f"replay.{key}": value for key, value in replay if value != getattr(defaults, key)}
            yield BrokenRule(
                values={"replay.fraction": replay.fraction, **unused},
                rule="the other keys of replay have no effect while fraction is 0",
                fix="set replay.fraction, for example to 0.5, or remove the others",
            )
        return
    if replay.max_age <= max_staleness:
        yield BrokenRule(
            values={"replay.max_age": replay.max_age, "max_staleness": max_staleness},
            rule="max_age must exceed max_staleness, because a replayed group is older than a new one",
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
            rule=f"a batch must replay between 1 and replay.capacity groups, but these values give {num_replayed}",
            fix=f"set replay.capacity to at least {num_replayed}" if num_replayed else "raise replay.fraction",
        )
    is_declared = algorithm.loss_traits.ratio != "undeclared"
    if is_declared and not (algorithm.ratio_starts_at_sampler or algorithm.correction.is_on):
        yield BrokenRule(
            values={"replay.fraction": replay.fraction, "algorithm.loss": algorithm.loss},
            rule="replay requires importance sampling: a loss with the ratio to the sampling policy, or a correction",
            fix="set algorithm.correction, or use a loss with a ratio, such as ppo, with algorithm.proximal set to sampler",
        )
