"""Tables, compared with the carriers they are built from."""

import math
import pickle

import numpy as np

from tests.records import make_record
from titanrl.carriers.tables import HANDLE, SEQUENCE, RecordTable, RowTable, SequencePlan
from titanrl.carriers.types import GroupHandle, GroupRecord


def record(index: int, rewards: tuple[float, ...], parts: dict[str, tuple[float, ...]]) -> GroupRecord:
    return GroupRecord(
        index=index,
        task="sums",
        handle=GroupHandle(shard=index % 2, location=index + 10, serial=3),
        has_payload=index != 4,
        rewards=rewards,
        reward_parts=parts,
        prompt_len=5 + index,
        lengths=tuple(20 + index + g for g in range(len(rewards))),
        num_sampled=tuple(7 + g for g in range(len(rewards))),
        num_truncated=1,
        num_overlong=2,
        num_nonfinite=3,
        min_version=index - 1,
        max_version=index,
        generate_s=0.25,
        score_s=0.5,
    )


RECORDS = (
    record(7, (0.1, 1.0), {"answer": (0.1, 1.0)}),
    record(4, (0.5, 0.5, 0.5), {"answer": (0.5, 0.25, 0.5), "format": (0.0, 0.25, 0.0)}),
    record(5, (1.0,), {}),
)


def test_columns_match_records() -> None:
    table = pickle.loads(pickle.dumps(RecordTable.of(RECORDS)))
    assert len(table) == 3
    for column in (
        "index",
        "prompt_len",
        "num_truncated",
        "num_overlong",
        "num_nonfinite",
        "min_version",
        "max_version",
        "generate_s",
        "score_s",
    ):
        assert table.groups[column].tolist() == [vars_of(made)[column] for made in RECORDS], column
    assert table.groups["has_payload"].tolist() == [1, 0, 1]
    assert table.handles.dtype == HANDLE
    assert table.handles.tolist() == [(1, 17, 3), (0, 14, 3), (1, 15, 3)]
    assert table.rewards.tolist() == [0.1, 1.0, 0.5, 0.5, 0.5, 1.0]
    assert table.lengths.tolist() == [27, 28, 24, 25, 26, 25]
    assert table.num_sampled.tolist() == [7, 8, 7, 8, 9, 7]
    assert (table.starts.tolist(), table.group_of.tolist()) == ([0, 2, 5], [0, 0, 1, 1, 1, 2])
    assert parts_of(table) == {
        "answer": [0.1, 1.0, 0.5, 0.25, 0.5, None],
        "format": [None, None, 0.0, 0.25, 0.0, None],
    }


def parts_of(table: RecordTable) -> dict[str, list[float | None]]:
    """Parts of the reward, with None in place of NaN."""
    return {
        part: [None if math.isnan(value) else value for value in values.tolist()] for part, values in table.reward_parts.items()
    }


def vars_of(made: GroupRecord) -> dict[str, object]:
    return {name: getattr(made, name) for name in GroupRecord.__slots__}


def test_by_index_sorts_groups_and_rollouts() -> None:
    ordered, expected = RecordTable.of(RECORDS).by_index(), RecordTable.of(sorted(RECORDS, key=lambda made: made.index))
    assert ordered.groups.tolist() == expected.groups.tolist()
    for column in ("rewards", "lengths", "num_sampled"):
        assert getattr(ordered, column).tolist() == getattr(expected, column).tolist()
    assert parts_of(ordered) == parts_of(expected)
    assert expected.by_index() is expected


def test_groups_without_known_prefixes_share_prompts() -> None:
    tree = make_record(1, num_sampled=[4, 5], prefixes=((1, 4), (0, 0)))
    flat = make_record(2, num_sampled=[2, 3, 4], rewards=[1.0, 0.0], num_segments=(2, 1), prompt_len=5)
    for table in (RecordTable.of([tree, flat]), RecordTable.of([tree]) + RecordTable.of([flat])):
        assert table.take(np.array([0])).prefixes.tolist() == [(1, 4), (0, 0)]
        prefixes = table.take(np.array([1])).prefixes
        assert prefixes["num_shared"].tolist() == [4, 0, 4]
        assert np.argsort(prefixes["place"]).tolist() == [2, 0, 1]  # the longest of the first segments, then the others


def test_empty_table_has_no_groups() -> None:
    table = RecordTable.of([])
    assert (len(table), len(table.rewards), table.group_of.tolist()) == (0, 0, [])


def test_rows_iterate_as_sequence_plans() -> None:
    def plan(location: int) -> SequencePlan:
        handle = GroupHandle(shard=1, location=location, serial=1 << 40)
        return SequencePlan(
            handle=handle, segment=location + 1, length=9, advantage=-0.1 * location, weight=1 / 3, num_shared=2 * location
        )

    def table(weight: float, ends: list[int]) -> RowTable:
        handles = [(1, location, 1 << 40) for location in range(3)]
        columns = [
            (handle, location, location + 1, 9, -0.1 * location, weight, 2 * location, 0)
            for location, handle in enumerate(handles)
        ]
        return RowTable(np.array(columns, SEQUENCE), np.array(ends))

    arrived = pickle.loads(pickle.dumps(table(1 / 3, [2, 2, 3])))
    assert (len(arrived), list(arrived)) == (3, [(plan(0), plan(1)), (), (plan(2),)])
    assert arrived == table(1 / 3, [2, 2, 3])
    assert arrived != table(1 / 4, [2, 2, 3])
    assert arrived != table(1 / 3, [1, 2, 3])
    assert list(RowTable(np.empty(0, SEQUENCE), np.empty(0, np.int64))) == []


def test_group_takes_less_than_a_kilobyte() -> None:
    records = [record(index, (0.0, 1.0) * 4, {"answer": (0.0, 1.0) * 4}) for index in range(100)]
    assert len(pickle.dumps(RecordTable.of(records))) < 100 * 512
    assert np.asarray(RecordTable.of(records).rewards).nbytes == 100 * 64
