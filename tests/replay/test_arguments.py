"""Wrong arguments of a replay buffer: one clear error, and the buffer stays as it was."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from titanrl.replay.prioritized import PrioritizedReplay


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda replay: replay.sample("two"), r"batch_size: must be an integer \(got str 'two'\)"),
        (lambda replay: replay.sample(2, timeout_s="soon"), "timeout_s: must be a number"),
        (lambda replay: replay.reserve(1.5), r"num_items: must be an integer \(got 1.5\)"),
        (lambda replay: replay.reserve(1, lease_s="a"), "lease_s: must be a number"),
        (lambda replay: replay.set_step("x"), "step: must be an integer"),
        (lambda replay: replay.set_version(None), r"version: must be an integer \(got NoneType None\)"),
        (lambda replay: replay.update_priorities("x", [1.0]), "handles: not numbers"),
        (lambda replay: replay.update_priorities([0], ["high"]), "priorities: not numbers"),
        (lambda replay: replay.release([[0], [0, 1]]), "handles: not numbers"),
        (lambda replay: replay.extend({"x": np.zeros(2)}, priorities="high"), "priorities: not numbers"),
        (lambda replay: replay.extend({"x": np.zeros(2)}, versions="new"), "versions: not numbers"),
        (lambda replay: replay.load_state_dict({}), "state: not the state of a replay buffer"),
        (lambda replay: replay.load_state_dict(None), "state: not the state of a replay buffer"),
        (lambda replay: PrioritizedReplay("many"), r"capacity: must be an integer \(got str 'many'\)"),
        (lambda replay: PrioritizedReplay(4, alpha="x"), "alpha: must be a number"),
        (lambda replay: PrioritizedReplay(4, beta=("a", 1.0)), "beta: must be a number"),
        (lambda replay: PrioritizedReplay(4, max_staleness=0.5), "max_staleness: must be an integer"),
    ],
)
def test_wrong_argument_is_named_and_changes_nothing(call: Callable[[PrioritizedReplay], Any], message: str) -> None:
    replay = PrioritizedReplay(4)
    replay.extend({"x": np.arange(2.0)})
    before = replay.stats()
    with pytest.raises((TypeError, ValueError), match=message):
        call(replay)
    assert replay.stats() == before
    assert len(replay.sample(3).handles) == 3
