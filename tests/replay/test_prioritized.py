"""Prioritized replay: probabilities, weights, handles, payloads and saved states."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from titanrl.replay import EmptyReplayError, PrioritizedReplay


def filled(priorities: Any, **options: Any) -> PrioritizedReplay:
    """Return a full buffer whose item i is the number i."""
    replay = PrioritizedReplay(len(priorities), **options)
    replay.extend(np.arange(len(priorities)), priorities)
    return replay


def chi_square_z(counts: Any, expected: Any) -> float:
    """Return the deviation of the chi-square statistic from its mean, in standard deviations."""
    degrees = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * degrees))


def test_draws_follow_the_priorities() -> None:
    priorities = np.random.default_rng(0).lognormal(size=10_000)
    replay = filled(priorities, alpha=0.6, eps=0.0)
    counts = np.zeros(10_000)
    for _ in range(100):
        np.add.at(counts, replay.sample(10_000).handles, 1)
    exact = priorities**0.6 / (priorities**0.6).sum()
    assert abs(chi_square_z(counts, 1e6 * exact)) < 2.5  # p > 0.01
    noise = np.sqrt(2 / np.pi * 1e6 * exact).sum() / 2e6  # expected total variation of a perfect sampler
    assert abs(counts / 1e6 - exact).sum() / 2 < 1.05 * noise


def test_probabilities_and_weights_follow_the_formula() -> None:
    priorities = np.random.default_rng(1).random(1000)
    replay = filled(priorities, alpha=0.7, beta=0.5, eps=1e-3)
    leaves = (priorities + 1e-3) ** 0.7
    exact = leaves / leaves.sum()
    unscaled = (1000 * exact) ** -0.5
    batch = replay.sample(5000)
    np.testing.assert_allclose(batch.probabilities, exact[batch.handles], rtol=1e-12)
    np.testing.assert_allclose(batch.weights, (unscaled / unscaled.max())[batch.handles], atol=1e-6)
    assert batch.weights.max() <= 1.0


def test_setting_alpha_recomputes_leaves_from_priorities() -> None:
    replay = filled(np.array([1.0, 3.0]), alpha=0.0, eps=0.0)
    replay.alpha = 1.0
    assert {(handle, p) for handle, p in zip(*draws(replay, 100), strict=True)} == {(0, 0.25), (1, 0.75)}


def draws(replay: PrioritizedReplay, count: int) -> tuple[list[int], list[float]]:
    batch = replay.sample(count)
    return batch.handles.tolist(), batch.probabilities.tolist()


def test_oldest_items_are_overwritten() -> None:
    replay = PrioritizedReplay(10_000)
    for start in range(0, 25_000, 1000):
        handles = replay.extend(np.arange(start, start + 1000))
        assert handles.tolist() == list(range(start, start + 1000))
    assert len(replay) == 10_000
    batch = replay.sample(50_000)
    assert batch.handles.min() >= 15_000
    assert (batch.payload == batch.handles).all()


def test_sequence_numbers_exceed_32_bits() -> None:
    replay = filled(np.ones(8))
    state = replay.state_dict()
    state["owners"] += 2**31 - 8
    state["next"] += 2**31 - 8
    replay.load_state_dict(state)
    handles = replay.extend(np.arange(4))
    assert handles.tolist() == [2**31, 2**31 + 1, 2**31 + 2, 2**31 + 3]
    assert len(replay) == 8
    assert replay.update_priorities(handles, np.full(4, 2.0)) == 0
    assert set(replay.sample(500).handles) == set(range(2**31 - 4, 2**31 + 4))


@pytest.mark.parametrize("capacity", [50, 40_000])
def test_restored_buffer_repeats_the_next_draws(capacity: int) -> None:
    rng = np.random.default_rng(2)
    replay = PrioritizedReplay(capacity, beta_steps=100, seed=5)
    for _ in range(30):
        replay.extend({"x": rng.random((2000, 3)), "name": [str(n) for n in range(2000)]})
        batch = replay.sample(64)
        replay.update_priorities(batch.handles, rng.lognormal(sigma=3, size=64))
    replay.set_step(40)
    state = pickle.loads(pickle.dumps(replay.state_dict()))
    restored = PrioritizedReplay(capacity, alpha=0.1, beta=0.0)
    restored.load_state_dict(state)
    for _ in range(10):
        one, other = replay.sample(100), restored.sample(100)
        for name in ("handles", "weights", "probabilities"):
            assert (getattr(one, name) == getattr(other, name)).all()
        assert (one.payload["x"] == other.payload["x"]).all()
        assert one.payload["name"] == other.payload["name"]
        for buffer in (replay, restored):
            buffer.update_priorities(one.handles, one.probabilities)
            buffer.put({"x": np.ones(3), "name": "new"})
    assert replay.stats() == restored.stats()


def test_payload_keeps_its_nesting_and_types() -> None:
    replay = PrioritizedReplay(4)
    payload = {
        "obs": {"image": torch.arange(12, dtype=torch.bfloat16).reshape(3, 2, 2), "state": np.arange(3, dtype=np.int8)},
        "text": ["a", [1, 2], {"b": 3}],
    }
    replay.extend(payload)
    batch = replay.sample(20)
    assert batch.payload["obs"]["image"].dtype == torch.bfloat16
    assert batch.payload["obs"]["state"].dtype == np.int8
    for row, handle in enumerate(batch.handles.tolist()):
        assert torch.equal(batch.payload["obs"]["image"][row], payload["obs"]["image"][handle])  # type: ignore[index]
        assert batch.payload["obs"]["state"][row] == handle
        assert batch.payload["text"][row] == payload["text"][handle]


def test_sampled_payload_is_a_copy() -> None:
    replay = filled(np.ones(3))
    replay.sample(10).payload[:] = -1
    assert replay.sample(10).payload.min() >= 0


def test_tensors_with_a_gradient_are_detached() -> None:
    replay = PrioritizedReplay(2)
    replay.extend(torch.ones(2, 3, requires_grad=True))
    assert not replay.sample(1).payload.requires_grad


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({"x": np.zeros((2, 3)), "y": np.zeros(3)}, r"payload\.x: 2, payload\.y: 3"),
        ({"x": np.zeros((2, 3))}, r"keys changed \(got payload\.x\)\. Use .* payload\.x, payload\.y"),
        ({"x": np.zeros((2, 4)), "y": np.zeros(2)}, r"payload\.x: .*got float64 \[4\].*float64 \[3\]"),
        ({"x": np.zeros((2, 3), np.float32), "y": np.zeros(2)}, r"payload\.x: .*got float32 \[3\]"),
        ({"x": 1.0, "y": np.zeros(2)}, r"payload\.x: must hold one row per item \(got float\)"),
        ({}, "no leaves"),
    ],
)
def test_payload_that_does_not_fit_is_refused(payload: Any, message: str) -> None:
    replay = PrioritizedReplay(4)
    replay.extend({"x": np.zeros((2, 3)), "y": np.zeros(2)})
    with pytest.raises(ValueError, match=message):
        replay.extend(payload)
    assert len(replay) == replay.stats().num_reserved == 2


def test_error_of_an_empty_buffer_names_the_reason() -> None:
    replay = PrioritizedReplay(4, eps=0.0)
    replay.reserve(3)
    with pytest.raises(EmptyReplayError, match=r"no item was committed \(3 are reserved\)"):
        replay.sample(1)
    replay.extend([1], [0.0])
    with pytest.raises(EmptyReplayError, match="every priority is 0"):
        replay.sample(1, timeout_s=0.01)


def test_same_seed_gives_the_same_draws() -> None:
    one, other, third = (filled(np.arange(1.0, 1001.0), seed=seed) for seed in (7, 7, 8))
    assert draws(one, 100) == draws(other, 100) != draws(third, 100)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda replay: replay.sample("two"), r"batch_size: must be an integer >= 1 \(got str 'two'\)"),
        (lambda replay: replay.sample(2, timeout_s="soon"), "timeout_s: must be a finite number"),
        (lambda replay: replay.reserve(1.5), r"num_items: must be an integer >= 1 and <= 4 \(got 1.5\)"),
        (lambda replay: replay.reserve(1, lease_s="a"), "lease_s: must be a finite number > 0"),
        (lambda replay: replay.set_step("x"), "step: must be an integer"),
        (lambda replay: replay.set_version(None), r"version: must be an integer >= 0 \(got NoneType None\)"),
        (lambda replay: replay.update_priorities("x", [1.0]), "handles: not numbers"),
        (lambda replay: replay.update_priorities([0], ["high"]), "priorities: not numbers"),
        (lambda replay: replay.release([[0], [0, 1]]), "handles: not numbers"),
        (lambda replay: replay.extend({"x": np.zeros(2)}, priorities="high"), "priorities: not numbers"),
        (lambda replay: replay.extend({"x": np.zeros(2)}, versions="new"), "versions: not numbers"),
        (lambda replay: replay.load_state_dict({}), "state: not the state of a replay buffer"),
        (lambda replay: replay.load_state_dict(None), "state: not the state of a replay buffer"),
        (lambda replay: PrioritizedReplay("many"), r"capacity: must be an integer >= 1 \(got str 'many'\)"),
        (lambda replay: PrioritizedReplay(4, alpha="x"), "alpha: must be a finite number"),
        (lambda replay: PrioritizedReplay(4, beta=("a", 1.0)), "beta: must be a finite number"),
        (lambda replay: PrioritizedReplay(4, max_staleness=0.5), "max_staleness: must be an integer"),
        (lambda replay: PrioritizedReplay(4, alpha=-1), "alpha: "),
        (lambda replay: PrioritizedReplay(4, beta=(0.4, -1.0)), "beta: "),
        (lambda replay: PrioritizedReplay(4, beta_steps=0), "beta_steps: "),
        (lambda replay: PrioritizedReplay(4, eps=-1), "eps: "),
        (lambda replay: PrioritizedReplay(4, initial_priority=0), "initial_priority: "),
        (lambda replay: replay.update_priorities([0, 1], [1.0]), "priorities: "),
        (lambda replay: replay.update_priorities([0, 1], [1.0, np.nan]), "priorities: "),
        (lambda replay: replay.update_priorities([0, 1], [1.0, np.inf]), "priorities: "),
        (lambda replay: replay.update_priorities([0, 1], [[1.0, 1.0]]), "priorities: "),
        (lambda replay: replay.update_priorities([-1, 0], [1.0, 1.0]), "handles: "),
        (lambda replay: replay.update_priorities([0, 2], [1.0, 1.0]), "handles: "),
        (lambda replay: replay.update_priorities([[0], [1]], [1.0, 1.0]), "handles: "),
        (lambda replay: replay.load_state_dict(filled(np.ones(3)).state_dict()), r"capacity: .*got 4.* Use 3"),
    ],
)
def test_wrong_argument_is_named_and_changes_nothing(call: Callable[[PrioritizedReplay], Any], message: str) -> None:
    replay = PrioritizedReplay(4)
    replay.extend({"x": np.arange(2.0)})
    before = replay.stats()
    with pytest.raises((TypeError, ValueError), match=message):
        call(replay)
    assert replay.stats() == before
    assert set(replay.sample(10).probabilities) == {0.5}
