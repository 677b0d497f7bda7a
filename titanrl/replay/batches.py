"""Data types, options and exceptions of the standalone replay buffers."""

from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from titanrl.base.errors import TitanRLError
from titanrl.replay.trees import Floats, Integers


class EmptyReplayError(TitanRLError):
    """No item could be sampled in time; the message gives the reason."""


class ReplayClosedError(TitanRLError):
    """The process that serves a buffer or one of its shards does not respond; the message names it."""


class ReplayFullError(TitanRLError):
    """No row of a shared buffer became free in time; the message says how many rows writers and readers hold."""


class ReplayOptions(TypedDict, total=False):
    """Optional settings of a prioritized buffer."""

    alpha: float
    """Exponent of priorities, 0.6 by default; 0 samples uniformly."""
    beta: float | tuple[float, float]
    """Exponent of importance weights, or its first and last value over `beta_steps` learner steps; (0.4, 1.0) by default."""
    beta_steps: int
    """Learner steps until the last value of beta; 100,000 by default."""
    eps: float
    """Term added to every priority, so that an item with priority 0 can still be sampled; 1e-8 by default."""
    initial_priority: float
    """Priority of new items until a higher priority has been set; 1 by default."""
    max_staleness: int | None
    """Items older than the current version minus this are never sampled; None, the default, samples items of any age."""
    seed: int
    """Seed of the draws; 0 by default."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Items drawn from a buffer, without their payload."""

    handles: Integers
    """Sequence numbers, `[B]`."""
    weights: npt.NDArray[np.float32]
    """Importance weights, `[B]`."""
    probabilities: Floats
    """Probabilities, `[B]`."""
    versions: Integers
    """Policy versions, `[B]`."""


@dataclass(frozen=True, slots=True)
class ReplayBatch:
    """Items drawn from a buffer, with replacement.

    Example: `ReplayBatch({"obs": ..., "action": ...}, handles=[17, 4], weights=[1.0, 0.6], probabilities=[0.1, 0.2],
    versions=[3, 2])`
    """

    payload: Any
    """Copies of the items, nested like the written payloads, with `[B]` as the first dimension."""
    handles: Integers
    """Sequence numbers of the items, `[B]`, for `update_priorities`."""
    weights: npt.NDArray[np.float32]
    """Importance weights, `[B]`; the largest possible one is 1."""
    probabilities: Floats
    """Probability of each item when it was drawn, `[B]`."""
    versions: Integers
    """Version of the policy that produced each item, `[B]`; by default the policy version at the time of writing."""


@dataclass(frozen=True, slots=True)
class ReplayStats:
    """Counters of a buffer since it was created."""

    num_items: int
    """Committed items in the buffer, including those that are too old or have a priority of zero."""
    capacity: int
    """Number of slots."""
    num_reserved: int
    """Handles that were reserved, including one for every written item."""
    num_committed: int
    """Items that were written."""
    num_sampled: int
    """Items that were drawn."""
    num_stale_updates: int
    """Priority updates for items that were overwritten or released."""
    num_stale_commits: int
    """Commits of reservations that were overwritten or released, or whose lease expired."""
    num_expired: int
    """Reservations that ended without a commit, because their lease expired or their writer died."""
    num_bytes: int
    """Bytes of the payload columns."""
