"""Rows of shared storage, and lists of work."""

import numpy as np
import pytest

from titanrl.replay import ReplayClosedError, Shard
from titanrl.replay.owner import Owner, OwnerSettings, Rows, WorkList


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def next_free(rows: Rows, first: int, count: int, within: int) -> list[int] | None:
    found = rows.next_free(first, count, within)
    return None if found is None else found.tolist()


def test_rows_in_use_are_skipped() -> None:
    rows = Rows(6)
    assert next_free(rows, 0, 4, 4) == [0, 1, 2, 3]
    rows.assign(0, numbers(0, 1, 2, 3))
    assert next_free(rows, 4, 2, 4) == [4, 5]
    assert next_free(rows, 4, 3, 4) is None
    rows.end_writes(numbers(0, 2, 3))
    assert next_free(rows, 4, 3, 4) == [4, 5, 6]  # rows 4, 5 and 0
    assert next_free(rows, 6, 3, 4) == [6, 8, 9]  # without row 1
    assert next_free(rows, 6, 4, 4) == [8, 9, 10, 11]  # 6 would be overwritten by 10
    assert next_free(rows, 6, 5, 6) == [6, 8, 9, 10, 11]


def test_row_is_reused_after_its_writer_and_its_readers_have_finished() -> None:
    rows = Rows(3)
    rows.assign(0, numbers(0, 1))
    rows.end_writes(numbers(0, 1))
    ticket = rows.pin(1, numbers(0, 0))
    rows.assign(0, numbers(2))
    rows.end_writes(numbers(2))
    assert next_free(rows, 3, 1, 2) == [4]
    assert rows.are_free(numbers(3, 4, 5)).tolist() == [False, True, True]
    rows.unpin(ticket)
    rows.unpin(ticket)  # no effect
    assert next_free(rows, 3, 1, 2) == [3]


def test_reservation_is_written_by_its_session_until_it_ends() -> None:
    rows = Rows(2)
    rows.assign(0, numbers(0))
    rows.assign(1, numbers(1))
    assert rows.are_written(numbers(0, 1)).tolist() == [True, True]
    assert rows.are_written(numbers(0, 1, 2), 0).tolist() == [True, False, False]
    assert next_free(rows, 2, 1, 1) is None
    assert rows.end_session(0).tolist() == [0]
    assert next_free(rows, 2, 1, 1) == [2]
    with pytest.raises(ReplayClosedError):
        rows.assign(0, numbers(2))


def test_ending_a_session_frees_its_rows() -> None:
    rows = Rows(8)
    rows.assign(7, numbers(0, 1, 2, 3))
    rows.end_writes(numbers(0, 1))
    rows.pin(7, numbers(0, 1))
    rows.assign(8, numbers(4, 5, 6, 7))
    assert next_free(rows, 8, 1, 4) is None
    assert rows.describe() == "writers hold 6 rows, readers 2"
    assert rows.end_session(7).tolist() == [2, 3]
    assert next_free(rows, 8, 4, 4) == [8, 9, 10, 11]
    assert rows.describe() == "writers hold 4 rows, readers 0"


def test_work_of_ended_reservations_is_handed_out_first() -> None:
    work = WorkList(5)
    assert work.take(numbers(10, 11, 12)).tolist() == [0, 1, 2]
    work.finish(numbers(11))
    work.recover(lambda open_numbers: open_numbers == 12)
    assert (work.num_available, len(work.reserved)) == (3, 1)
    assert work.take(numbers(13, 14)).tolist() == [0, 3]
    assert work.state() == {"next": 4, "returned": [0, 2, 3]}
    restored = WorkList(5)
    restored.load(4, [0, 2, 3])
    assert restored.take(numbers(1, 2, 3, 4)).tolist() == [0, 2, 3, 4]


def test_unread_reply_is_undone() -> None:
    shards = (Shard("/dev/shm", "elsewhere"),)
    owner = Owner(
        OwnerSettings(
            capacity=4,
            options={},
            layout=b"",
            shard_bytes=0,
            rows_per_shard=6,
            spare=2,
            num_work=3,
            shards=shards,
            host="here",
            address=None,
            key=b"",
        )
    )
    owner.undo(0, "take_work", owner.take_work(0, 2, None, 0.0))
    indices, handles = owner.take_work(0, 3, None, 0.0)
    assert (indices.tolist(), handles.tolist()) == ([0, 1, 2], [2, 3, 4])
    assert owner.commit(0, handles, None, None) == 0
    owner.undo(0, "draw", owner.draw(0, 8, 0.0))
    owner.undo(0, "reserve", owner.reserve(0, 2, None, 0.0))
    assert owner._rows.describe() == "writers hold 0 rows, readers 0"
    assert owner.verbs()["stats"](0).num_expired == 4
