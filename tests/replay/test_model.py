"""Prioritized replay compared with a short reference model: all operations, in any order."""

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from titanrl.replay import EmptyReplayError, PrioritizedReplay

CAPACITY, MAX_STALENESS = 5, 2
OPTIONS: Any = {"alpha": 0.5, "beta": (0.7, 0.1), "beta_steps": 10, "eps": 1e-3, "max_staleness": MAX_STALENESS}


class Model:
    """A list of every item ever reserved."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.highest, self.version, self.now = 1.0, 0, 0.0
        self.num_expired = self.num_stale_commits = self.num_stale_updates = 0

    def reserve(self, lease_s: float | None = None) -> None:
        until = np.inf if lease_s is None else self.now + lease_s
        self.items.append({"value": None, "priority": None, "version": 0, "is_gone": False, "until": until})

    def lives(self, handle: int) -> bool:
        return handle >= len(self.items) - CAPACITY and not self.items[handle]["is_gone"]

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for handle, item in enumerate(self.items):
            if self.lives(handle) and item["priority"] is None and item["until"] <= self.now:
                item["is_gone"], self.num_expired = True, self.num_expired + 1

    def commit(self, handle: int, value: int, priority: float, version: int) -> bool:
        item = self.items[handle]
        if not self.lives(handle) or item["priority"] is not None:
            self.num_stale_commits += 1
            return False
        item.update(value=value, priority=priority, version=version)
        self.highest = max(self.highest, priority)
        return True

    def update(self, handle: int, priority: float) -> bool:
        if not self.lives(handle) or self.items[handle]["priority"] is None:
            self.num_stale_updates += 1
            return False
        self.items[handle]["priority"] = priority
        self.highest = max(self.highest, priority)
        return True

    def committed(self) -> dict[int, dict[str, Any]]:
        return {h: item for h, item in enumerate(self.items) if item["priority"] is not None and self.lives(h)}

    def leaves(self) -> dict[int, float]:
        fresh = {h: item for h, item in self.committed().items() if item["version"] >= self.version - MAX_STALENESS}
        return {handle: (item["priority"] + 1e-3) ** 0.5 for handle, item in fresh.items()}


PRIORITY, VERSION = st.floats(0, 1e3), st.integers(0, 8)


class AgainstModel(RuleBasedStateMachine):
    """The buffer behaves like the list for any order of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.create()

    def create(self) -> None:
        self.replay = PrioritizedReplay(CAPACITY, **OPTIONS)
        self.replay._clock = lambda: self.model.now

    def some(self, data: st.DataObject) -> int:
        """Draw a handle, often of an item that was overwritten."""
        return data.draw(st.integers(max(0, len(self.model.items) - 8), len(self.model.items) - 1))

    @rule(values=st.lists(st.integers(0, 99), max_size=12), priority=st.none() | PRIORITY, version=st.none() | VERSION)
    def extend(self, values: list[int], priority: float | None, version: int | None) -> None:
        first, highest = len(self.model.items), self.model.highest
        for place, value in enumerate(values):
            self.model.reserve()
            used = highest if priority is None else priority
            self.model.commit(first + place, value, used, self.model.version if version is None else version)
        given = None if priority is None else [priority] * len(values)
        handles = self.replay.extend(np.array(values, np.int64), given, version)
        assert handles.tolist() == list(range(first, len(self.model.items)))

    @rule(count=st.integers(1, 5), lease_s=st.none() | st.integers(1, 5))
    def reserve(self, count: int, lease_s: float | None) -> None:
        for _ in range(count):
            self.model.reserve(lease_s)
        handles = self.replay.reserve(count, lease_s=lease_s)
        assert handles.tolist() == list(range(len(self.model.items)))[-count:]

    @rule(seconds=st.integers(1, 4))
    def pass_time(self, seconds: int) -> None:
        self.model.pass_time(seconds)
        self.replay.stats()  # every verb that depends on leases ends those that are over

    @precondition(lambda self: self.model.items)
    @rule(data=st.data(), value=st.integers(0, 99), priority=PRIORITY, version=VERSION)
    def commit(self, data: st.DataObject, value: int, priority: float, version: int) -> None:
        handles = sorted({self.some(data), self.some(data)})
        num_stale = sum(not self.model.commit(handle, value, priority, version) for handle in handles)
        count = len(handles)
        assert self.replay.commit(handles, np.array([value] * count), [priority] * count, [version] * count) == num_stale

    @precondition(lambda self: self.model.items)
    @rule(data=st.data())
    def update(self, data: st.DataObject) -> None:
        changes = [(self.some(data), data.draw(PRIORITY)) for _ in range(data.draw(st.integers(1, 6)))]
        num_stale = sum(not self.model.update(*change) for change in changes)
        assert self.replay.update_priorities(*map(list, zip(*changes, strict=True))) == num_stale

    @precondition(lambda self: self.model.items)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        handle = self.some(data)
        assert self.replay.release([handle]) == (not self.model.lives(handle))
        self.model.items[handle]["is_gone"] = True

    @rule(version=VERSION)
    def set_version(self, version: int) -> None:
        self.model.version = max(self.model.version, version)
        self.replay.set_version(version)

    @rule(step=st.integers(0, 12))
    def set_step(self, step: int) -> None:
        self.replay.set_step(step)
        assert self.replay.beta == pytest.approx(0.7 - 0.06 * min(step, 10))

    @rule()
    def restore(self) -> None:
        state = pickle.loads(pickle.dumps(self.replay.state_dict()))
        self.create()
        self.replay.load_state_dict(state)

    @invariant()
    def same_distribution(self) -> None:
        leaves, stats = self.model.leaves(), self.replay.stats()
        assert (stats.num_items, stats.num_expired) == (len(self.model.committed()), self.model.num_expired)
        assert stats.num_stale_commits == self.model.num_stale_commits
        assert stats.num_stale_updates == self.model.num_stale_updates
        if not leaves:
            with pytest.raises(EmptyReplayError, match="too old" if stats.num_items else "no item"):
                self.replay.sample(1)
            return
        batch = self.replay.sample(20)
        rows = zip(batch.handles, batch.payload, batch.versions, batch.probabilities, batch.weights, strict=True)
        for handle, value, version, p, weight in rows:
            assert (value, version) == (self.model.items[handle]["value"], self.model.items[handle]["version"])
            assert p == pytest.approx(leaves[handle] / sum(leaves.values()), rel=1e-9)
            assert weight == pytest.approx((leaves[handle] / min(leaves.values())) ** -self.replay.beta, rel=1e-5)


TestAgainstModel = AgainstModel.TestCase
TestAgainstModel.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
