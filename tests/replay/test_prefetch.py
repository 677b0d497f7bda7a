"""Batches drawn in advance."""

import threading
import time

import numpy as np
import pytest
import torch

from titanrl.replay import EmptyReplayError, Prefetch, PrioritizedReplay


def filled(seed: int = 0) -> PrioritizedReplay:
    replay = PrioritizedReplay(100, seed=seed)
    replay.extend({"x": torch.arange(100), "y": np.arange(100)})
    return replay


def test_batches_are_returned_in_draw_order() -> None:
    plain, replay = filled(), filled()
    with Prefetch(replay, 8, depth=3) as batches:
        for _, batch in zip(range(10), batches, strict=False):
            assert batch.handles.tolist() == plain.sample(8).handles.tolist()


def test_next_batch_is_drawn_before_it_is_requested() -> None:
    replay = PrioritizedReplay(4, alpha=1.0, eps=0.0)
    replay.extend(np.arange(2), [1.0, 0.0])
    with Prefetch(replay, 50, depth=1) as batches:
        next(batches)
        batches._batches[0].result()  # drawn
        replay.update_priorities([0, 1], [0.0, 1.0])
        assert set(next(batches).payload) == {0}  # the priorities of its draw
        assert set(next(batches).payload) == {1}


def test_next_raises_the_error_of_a_draw() -> None:
    with Prefetch(PrioritizedReplay(4), 2, timeout_s=0.01) as batches, pytest.raises(EmptyReplayError, match="no item"):
        next(batches)


def test_draw_waits_for_a_writer() -> None:
    replay = PrioritizedReplay(4)
    with Prefetch(replay, 2, timeout_s=20) as batches:
        threading.Timer(0.05, replay.put, [np.ones(2)]).start()
        assert next(batches).payload.shape == (2, 2)


def test_closed_iterator_stops_and_leaves_no_thread() -> None:
    started = time.monotonic()
    with Prefetch(filled(), 2, depth=2) as batches:
        next(batches)
    assert list(batches) == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]
    assert time.monotonic() - started < 10


def test_depth_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"depth: .*got 0"):
        Prefetch(filled(), 2, depth=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is available")
def test_memory_cannot_be_pinned_without_cuda() -> None:
    with pytest.raises(ValueError, match=r"pin_memory: CUDA is not available"):
        Prefetch(filled(), 2, pin_memory=True)


@pytest.mark.gpu
def test_tensors_are_pinned() -> None:
    with Prefetch(filled(), 8, pin_memory=True) as batches:
        payload = next(batches).payload
    assert payload["x"].is_pinned()
    assert (payload["x"].to("cuda", non_blocking=True).cpu().numpy() == payload["y"]).all()
