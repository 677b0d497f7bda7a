"""Checksums detect changed, swapped and outdated bytes."""

import pytest
import torch

from titanrl.weights.digest import digest

MIB = 1 << 20


def some_bytes(num_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("place", [0, 77, MIB // 2, MIB + 12])
@pytest.mark.parametrize("size", [MIB + 13])
def test_full_digest_detects_any_changed_byte(size: int, place: int) -> None:
    data = some_bytes(size)
    before = digest(data, "full", 1)
    data[place] += 1
    assert digest(data, "full", 1) != before


def test_full_digest_detects_swapped_blocks() -> None:
    data = some_bytes(MIB)
    halves = torch.cat([data[MIB // 2 :], data[: MIB // 2]])
    assert digest(data, "full", 1) != digest(halves, "full", 1)


def test_sampled_digest_covers_every_page_once_in_64_versions() -> None:
    data = some_bytes(MIB)
    changed = data.clone()
    changed[5 * 4096 + 3] += 1
    seen = [version for version in range(64) if digest(data, "sampled", version) != digest(changed, "sampled", version)]
    assert seen == [5]


def test_sampled_digest_covers_every_byte_of_small_weights() -> None:
    data = some_bytes(100_000)
    changed = data.clone()
    changed[54_321] += 1
    assert digest(data, "sampled", 3) != digest(changed, "sampled", 3)


def test_digest_can_be_off_and_data_can_be_empty() -> None:
    assert digest(some_bytes(10), "off", 1) is None
    nothing = torch.empty(0, dtype=torch.uint8)
    assert digest(nothing, "full", 1) == digest(nothing, "full", 2)
