"""Replay buffers: the run's buffer of slots, records and storage shards, and standalone prioritized buffers."""

from titanrl.replay.batches import (
    EmptyReplayError,
    Prefetch,
    ReplayBatch,
    ReplayClosedError,
    ReplayFullError,
    ReplayOptions,
    ReplayStats,
)
from titanrl.replay.owner import Shard
from titanrl.replay.prioritized import PrioritizedReplay
from titanrl.replay.shared import SharedReplay, Work, serve_shard

__all__ = [
    "EmptyReplayError",
    "Prefetch",
    "PrioritizedReplay",
    "ReplayBatch",
    "ReplayClosedError",
    "ReplayFullError",
    "ReplayOptions",
    "ReplayStats",
    "Shard",
    "SharedReplay",
    "Work",
    "serve_shard",
]
