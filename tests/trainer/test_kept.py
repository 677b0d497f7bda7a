"""Log-probabilities that a rank keeps for a later loss."""

import pytest
import torch

from titanrl.carriers.tables import SequencePlan
from titanrl.carriers.types import GroupHandle
from titanrl.trainer.kept import KeptLogprobs


def sequence(slot: int, length: int, serial: int = 1, num_shared: int = 0) -> SequencePlan:
    handle = GroupHandle(shard=0, slot=slot, serial=serial)
    return SequencePlan(handle=handle, segment=2, length=length, advantage=1.0, weight=1.0, num_shared=num_shared)


def test_get_returns_values_in_layout_of_requested_rows() -> None:
    kept = KeptLogprobs()
    kept.put(3, [(sequence(0, 2), sequence(1, 3))], torch.tensor([[-1.0, -2.0, -3.0, -4.0, -5.0, -9.0]]))
    assert kept.get(3, [(sequence(1, 3),), (sequence(0, 2),)], 4).tolist() == [[-3, -4, -5, 0], [-1, -2, 0, 0]]
    assert kept.get(3, [], 4).tolist() == [[0, 0, 0, 0]]


def test_shared_prompt_is_kept_once() -> None:
    kept, row = KeptLogprobs(), (sequence(0, 3), sequence(1, 4, num_shared=2), sequence(2, 1))
    kept.put(3, [row], torch.tensor([[-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]]))
    assert kept.get(3, [row], 7).tolist() == [[-1, -2, -3, -4, -5, -6, 0]]


def test_other_version_or_reused_slot_raises_key_error() -> None:
    kept = KeptLogprobs()
    kept.put(3, [(sequence(0, 2),)], torch.zeros(1, 2))
    with pytest.raises(KeyError, match="no log-probabilities of version 4"):
        kept.get(4, [(sequence(0, 2),)], 2)
    with pytest.raises(KeyError, match="no log-probabilities of version 3"):
        kept.get(3, [(sequence(0, 2, serial=2),)], 2)
    kept.put(3, [(sequence(0, 1, serial=2),)], torch.ones(1, 1))
    assert kept.get(3, [(sequence(0, 1, serial=2),)], 1).tolist() == [[1]]
    kept.drop(3)
    with pytest.raises(KeyError):
        kept.get(3, [(sequence(0, 1, serial=2),)], 1)


def test_values_fit_rows_with_different_prompt_sharing() -> None:
    kept, alone, behind = KeptLogprobs(), sequence(1, 4), sequence(1, 4, num_shared=2)
    kept.put(3, [(sequence(0, 3), behind)], torch.tensor([[-1.0, -2.0, -3.0, -4.0, -5.0]]))
    # The shared part of a prompt has no sampled token, so its values do not matter.
    assert kept.get(3, [(alone,)], 5).tolist() == [[0, 0, -4, -5, 0]]
    kept.put(3, [(alone,)], torch.tensor([[-6.0, -7.0, -8.0, -9.0]]))
    assert kept.get(3, [(sequence(0, 3), behind)], 5).tolist() == [[-1, -2, -3, -8, -9]]


def test_values_can_be_added_and_dropped_by_version() -> None:
    first, second = KeptLogprobs(), KeptLogprobs()
    first.put(3, [(sequence(0, 2),)], torch.ones(1, 2))
    first.put(4, [(sequence(0, 2),)], torch.zeros(1, 2))
    second.add(first.of(3))
    assert second.get(3, [(sequence(0, 2),)], 2).tolist() == [[1, 1]]
    with pytest.raises(KeyError):
        second.get(4, [(sequence(0, 2),)], 2)
    first.drop_all_but([4])
    with pytest.raises(KeyError):
        first.get(3, [(sequence(0, 2),)], 2)
    assert first.get(4, [(sequence(0, 2),)], 2).tolist() == [[0, 0]]
