"""Actor settings derived from the configuration."""

from collections.abc import Sequence

from titanrl.base.choices import TransportName
from titanrl.config.schema import Config
from titanrl.replay.memory import ReplaySettings


def replay_settings(config: Config) -> ReplaySettings | None:
    """Return the buffer's replay settings; None if replay is disabled."""
    replay = config.replay
    if not replay.fraction:
        return None
    return ReplaySettings(
        capacity=replay.capacity,
        num_replayed=replay.num_replayed(config.rollout.groups_per_step),
        alpha=replay.alpha,
        max_uses=replay.max_uses,
        max_age=replay.max_age,
        by_recency=replay.priority == "recency",
        seed=config.seed,
    )


def transports(config: Config) -> Sequence[TransportName]:
    """Return the transports on which the trainer offers weights; each generator uses the first that reaches it."""
    if config.weights.transport != "auto":
        return (config.weights.transport,)
    return ("arena",) if config.hosts.kind == "local" else ("arena", "rdma")
