"""Copies that cast in the same pass: by torch, by `_stream` (bypassing the caches), and on a GPU."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.weights.processes import MemoryStore
from titanrl.processes.machine import THREADS
from titanrl.weights import _stream, transport
from titanrl.weights.records import Commit
from titanrl.weights.transport import Copies, CopyOut, Team, WeightPublisher, WeightReader, as_rows, copy_in, one_thread, split


def test_copy_casts_blocks_of_any_stride() -> None:
    source = torch.arange(12.0).view(3, 4)
    target = torch.zeros(2, 2, dtype=torch.bfloat16)
    asyncio.run(CopyOut().run(Copies([target], [source[1:, ::2]])))
    assert target.tolist() == [[4, 6], [8, 10]]
    copy_in(Copies([], []))


POOL = ThreadPoolExecutor(3)

TYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64]


Block = tuple[torch.Tensor, torch.Tensor]
"""A full tensor and a block of it."""


@st.composite
def blocks(draw: st.DrawFn, dtype: torch.dtype, shape: tuple[int, ...]) -> Block:
    """Draw a block of the given shape inside a larger tensor with permuted dimensions."""
    order = draw(st.permutations(range(len(shape))))
    margins = [(draw(st.integers(0, 3)), draw(st.integers(0, 3))) for _ in shape]
    room = [before + shape[dim] + after for dim, (before, after) in zip(order, margins, strict=True)]
    whole = torch.randn(room, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))).mul(50).abs().to(dtype)
    inside = whole[tuple(slice(before, before + shape[dim]) for dim, (before, _) in zip(order, margins, strict=True))]
    return whole, inside.permute(*(order.index(dim) for dim in range(len(shape))))


@given(st.data())
def test_streamed_copies_write_the_same_bytes_as_torch(data: st.DataObject) -> None:
    types = st.sampled_from(
        [(dtype, dtype) for dtype in TYPES] + [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)]
    )
    targets, sources, wholes, expected = [], [], [], []
    for target_dtype, source_dtype in data.draw(st.lists(types, min_size=1, max_size=3)):
        shape = (*data.draw(st.lists(st.integers(0, 4), max_size=2)), data.draw(st.integers(0, 700)))
        _, source = data.draw(blocks(source_dtype, shape))
        whole, target = data.draw(blocks(target_dtype, shape))
        by_torch = whole.clone()
        by_torch.as_strided(shape, target.stride(), target.storage_offset()).copy_(source)
        targets, sources, wholes, expected = [*targets, target], [*sources, source], [*wholes, whole], [*expected, by_torch]
    team = Team()
    team.num_threads, team._pool = 3, POOL
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "TEAM", team)
        patch.setattr(transport, "PIECE_BYTES", data.draw(st.integers(16, 2000)))
        patch.setattr(transport, "PART_PIECES", data.draw(st.integers(1, 3)))
        Copies(targets, sources, streamed_from_bytes=0).run()
    assert all(map(torch.equal, wholes, expected))


def test_pieces_are_no_larger_than_asked_and_rows_stay_together_where_they_fit() -> None:
    columns = torch.zeros(32, 1024, dtype=torch.bfloat16)[:, 512:]
    row = as_rows(torch.zeros(32, 512, dtype=torch.bfloat16), columns)
    whole = list(split(row, 3 * 1024))
    assert [piece.num_rows for piece in whole] == [3] * 10 + [2]
    assert whole[1].target - row.target == 3 * 512 * 2
    assert whole[1].source - row.source == 3 * 1024 * 2
    assert [piece.length for piece in split(row, 1000)][:2] == [500, 12]


@pytest.mark.parametrize(("share", "num_threads"), [(None, 1), ("1", 1), ("3", 3), ("8", 4)])  # of 4 cores
def test_copies_use_this_processs_share_of_the_cores(
    share: str | None, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "TEAM", Team())
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(4)))
    monkeypatch.delenv(THREADS, raising=False)
    if share is not None:
        monkeypatch.setenv(THREADS, share)
    source, target = torch.arange(1 << 22), torch.zeros(1 << 22, dtype=torch.int64)
    copies = Copies([target], [source])
    for _ in range(2):
        target.zero_()
        copies.run()
        assert torch.equal(target, source)
    assert transport.TEAM.num_threads == num_threads


def test_parts_are_copied_at_the_same_time_by_no_more_threads_than_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Barrier(2, timeout=60)
    monkeypatch.setattr(transport, "_stream", type("Spy", (), {"run": staticmethod(lambda part: both.wait())}))
    with ThreadPoolExecutor(3) as pool:
        team = Team()
        team.num_threads, team._pool = 4, pool
        team.run([np.zeros((1, 7), np.int64)] * 2)
        assert len(pool._threads) == 1


@pytest.mark.parametrize("first", [0, 1])
def test_streamed_casts_round_every_float32_as_torch_does(first: int) -> None:
    high, low = np.meshgrid(np.arange(1 << 16, dtype=np.uint32), np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32))
    source = torch.from_numpy((high << 16 | low).ravel()).view(torch.float32)[first:]
    target = torch.zeros(len(source) + 32, dtype=torch.bfloat16)[first + 5 :][: len(source)]
    assert as_rows(target, source) is not None
    Copies([target], [source], streamed_from_bytes=0).run()
    expected, is_nan = source.to(torch.bfloat16), source.isnan()
    assert torch.equal(target.view(torch.uint16)[~is_nan], expected.view(torch.uint16)[~is_nan])
    assert target[is_nan].isnan().all()


def test_long_rows_are_streamed_in_the_fewest_blocks() -> None:
    one = torch.zeros(4, 8, 512, dtype=torch.bfloat16)
    columns = torch.zeros(32, 1024, dtype=torch.bfloat16)[:, 512:]
    whole, strided = as_rows(one, one.clone()), as_rows(one.view(32, 512), columns)
    assert (whole.num_rows, whole.length, whole.item) == (1, 4 * 8 * 512, 2)
    assert (strided.num_rows, strided.length, strided.target_stride, strided.source_stride) == (32, 512, 1024, 2048)
    assert as_rows(one[..., :200], one[..., :200]) is None
    assert as_rows(one.mT, one.mT) is None
    assert as_rows(one[:, :4, :500], one[:, :4, :500]) is None
    assert as_rows(one, one.double()) is None


def test_torch_copies_small_weights_or_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(transport, "_stream", type("Spy", (), {"run": staticmethod(lambda table: calls.append(len(table)))}))
    source = torch.ones(1 << 20)
    Copies([torch.zeros(1 << 20)], [source]).run()
    assert calls == []
    Copies([torch.zeros(1 << 22), torch.zeros(1)], [torch.ones(1 << 22), torch.ones(1)]).run()
    assert sum(calls) == 16  # of 1 MB
    monkeypatch.setattr(transport, "_stream", None)
    target = torch.zeros(1 << 20)
    Copies([target], [source], streamed_from_bytes=0).run()
    assert torch.equal(target, source)


def test_table_of_wrong_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"table: size must be a multiple of 56 bytes \(got 48\)"):
        _stream.run(np.zeros(6, np.int64))


def test_thread_count_is_restored_after_an_exception() -> None:
    before = torch.get_num_threads()

    def fail() -> None:
        with one_thread():
            raise RuntimeError(f"broken with {torch.get_num_threads()} thread")

    with pytest.raises(RuntimeError, match="broken with 1 thread"):
        fail()
    assert torch.get_num_threads() == before


@pytest.mark.gpu
def test_failed_pin_leaves_no_error_for_the_next_kernel() -> None:
    device, data = torch.device("cuda"), torch.zeros(1 << 20, dtype=torch.uint8)
    transport.pin(data, device, read_only=False)
    with pytest.warns(UserWarning, match="cannot pin"):
        transport.pin(data, device, read_only=False)  # it is registered already
    assert torch.ones(3, device=device).sum().item() == 3.0
    for _ in range(2):
        transport.unpin(data.data_ptr())
    assert torch.ones(3, device=device).sum().item() == 3.0


@pytest.mark.gpu
def test_gpu_weights_are_published_and_pulled_while_kernels_run() -> None:
    device = torch.device("cuda")
    state = {"w": torch.randn(4096, 4096, device=device), "odd": torch.randn(129, 7, device=device)}
    store: Any = MemoryStore()
    publisher = WeightPublisher("run", 0, store, torch.bfloat16, ["arena"], "full")
    reader = WeightReader("run", store, "full")
    targets = {name: torch.zeros_like(value, dtype=torch.bfloat16) for name, value in state.items()}

    async def scenario(version: int) -> None:
        for value in state.values():
            value.mul_(1.5)  # still running when the copy starts
        manifest = await publisher.publish(version, state)
        expected = {name: value.to(torch.bfloat16) for name, value in state.items()}
        for value in state.values():
            value.zero_().add_(version)  # allowed once publish has returned
        (await reader.fetch(Commit(version, (manifest,)))).copy_into(targets)
        assert all(torch.equal(targets[name], expected[name]) for name in state)

    for version in range(4):
        asyncio.run(scenario(version))
