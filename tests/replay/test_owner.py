"""Rows of shared storage, and lists of work."""

import numpy as np
import pytest

from titanrl.replay import ReplayClosedError, Shard
from titanrl.replay.owner import Owner, OwnerSettings, Rows, WorkList


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_row_shards_follow_from_sequence_numbers() -> None:
    rows = Rows(4, 2, 2)
    assert rows.per_shard == 3
    assert (rows.assign(0, numbers(0, 1, 2, 3)) // 3).tolist() == [0, 1, 0, 1]
    assert rows.num_missing(numbers(4, 5)) == 0
    assert rows.num_missing(numbers(4, 6)) == 1  # both in shard 0, which has one spare row


def test_row_is_reused_after_its_writer_and_its_readers_have_finished() -> None:
    rows = Rows(2, 1, 1)
    first = rows.assign(0, numbers(0, 1))
    rows.end_writes(first)
    ticket = rows.pin(1, first[[0, 0]])
    rows.end_writes(rows.assign(0, numbers(2)))
    assert rows.num_missing(numbers(3)) == 0
    rows.end_writes(rows.assign(0, numbers(3)))
    assert rows.num_missing(numbers(4, 5)) == 0  # in place of 2 and 3
    assert first[0] not in rows[numbers(0, 1)]
    rows.unpin(ticket)
    rows.unpin(ticket)  # no effect
    rows.assign(0, numbers(4, 5))
    assert rows.assign(0, numbers(6)) == first[0]


def test_late_write_of_an_overtaken_reservation_is_detected() -> None:
    rows = Rows(1, 1, 1)
    late = rows.assign(0, numbers(0))
    current = rows.assign(1, numbers(1))
    assert late != current
    assert rows.is_written_by(numbers(0, 1), np.concatenate((late, current))).tolist() == [True, True]
    assert rows.num_missing(numbers(2)) == 1
    rows.end_session(0)
    assert rows.num_missing(numbers(2)) == 0
    with pytest.raises(ReplayClosedError):
        rows.assign(0, numbers(2))


def test_ending_a_session_frees_its_rows() -> None:
    rows = Rows(4, 1, 4)
    held = rows.assign(7, numbers(0, 1, 2, 3))
    rows.end_writes(held[:2])
    rows.pin(7, held[:2])
    rows.assign(8, numbers(4, 5, 6, 7))
    assert rows.num_missing(numbers(8)) == 1
    assert rows.describe() == "writers hold 6 rows, readers 2"
    assert rows.written_by(7)[1].tolist() == sorted(held[2:].tolist())
    rows.end_session(7)
    assert rows.num_missing(numbers(8, 9, 10, 11)) == 0
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
            spare=2,
            num_work=3,
            shards=shards,
            host="here",
            address=None,
            key=b"",
        )
    )
    owner.undo(0, "take_work", owner.take_work(0, 2, None, 0.0))
    indices, handles, rows = owner.take_work(0, 3, None, 0.0)
    assert (indices.tolist(), handles.tolist()) == ([0, 1, 2], [2, 3, 4])
    assert owner.commit(0, handles, rows, None, None) == 0
    owner.undo(0, "draw", owner.draw(0, 8, 0.0))
    owner.undo(0, "reserve", owner.reserve(0, 2, None, 0.0))
    assert owner._rows.describe() == "writers hold 0 rows, readers 0"
    assert owner.verbs()["stats"](0).num_expired == 4
