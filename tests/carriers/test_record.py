"""Parts of the record: order of writes, limit, and what a killed process leaves."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from titanrl.carriers import record as record_module
from titanrl.carriers.record import BackgroundRecord, RecordFile, parts_of, read_lines

COLUMNS = {"token_ids": np.array([5, 6, 7], np.int32), "logprobs": np.array([-0.5, -1.0, -2.0], np.float32)}


def numbers(run_dir: Path, kind: str = "rollouts") -> list[int]:
    return [line["number"] for part in parts_of(run_dir, kind) for line in read_lines(part.path) if "number" in line]


def test_line_has_the_place_and_checksum_of_its_columns(tmp_path: Path) -> None:
    file = RecordFile(tmp_path, "rollouts", "rollout_0", 10**6)
    file.append(({"number": 0}, COLUMNS), ({"number": 1}, COLUMNS))
    (part,) = parts_of(tmp_path)
    assert part.path == tmp_path / "record" / "rollouts-rollout_0.000000.jsonl"
    header, first, second = read_lines(part.path)
    assert (header["format"], header["pid"], header["dropped"]) == (1, os.getpid(), 0)
    # Three int32 and three float32: 24 bytes. The checksum was computed with Python's zlib over these bytes.
    assert first["columns"] == {"at": 0, "count": 3, "crc32": 2997228057, "types": {"token_ids": "<i4", "logprobs": "<f4"}}
    assert second["columns"]["at"] == 24
    assert part.columns.stat().st_size == 48


def test_each_process_begins_another_part(tmp_path: Path) -> None:
    for number in range(3):
        file = RecordFile(tmp_path, "rollouts", "rollout_0", 10**6)
        file.append(({"number": number}, {}))
        file.close()
    RecordFile(tmp_path, "rollouts", "rollout_1", 10**6).append(({"number": 3}, {}))
    assert [(part.process, part.number) for part in parts_of(tmp_path)] == [
        ("rollout_0", 0),
        ("rollout_0", 1),
        ("rollout_0", 2),
        ("rollout_1", 0),
    ]
    assert numbers(tmp_path) == [0, 1, 2, 3]


def test_records_of_one_call_are_divided_into_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_module, "PENDING_BYTES", 300)
    RecordFile(tmp_path, "rollouts", "rollout_0", 8_000).append(*(({"number": number}, COLUMNS) for number in range(20)))
    parts = parts_of(tmp_path)
    assert len(parts) > 2
    assert numbers(tmp_path) == list(range(20))
    for part in parts:
        lines = [line for line in read_lines(part.path) if "number" in line]
        assert [line["columns"]["at"] for line in lines] == [24 * number for number in range(len(lines))]
        assert part.columns.stat().st_size == 24 * len(lines)


def test_limit_deletes_the_middle_and_counts_it(tmp_path: Path) -> None:
    file = RecordFile(tmp_path, "rollouts", "rollout_0", 80_000)  # 8 parts of 10 kB
    for number in range(200):
        file.append(({"number": number, "text": "x" * 500}, COLUMNS))
    sizes = [path.stat().st_size for path in (tmp_path / "record").iterdir()]
    assert sum(sizes) < 90_000, "at most one part more than the limit, while it is written"
    kept = numbers(tmp_path)
    assert kept[0] == 0
    assert kept[-1] == 199
    assert 80 < len(kept) < 150
    *_, newest = parts_of(tmp_path)
    assert next(read_lines(newest.path))["dropped"] == 200 - len(kept)


def test_limit_counts_parts_of_earlier_processes(tmp_path: Path) -> None:
    for life in range(30):
        file = RecordFile(tmp_path, "rollouts", "rollout_0", 16_000)
        file.append(({"number": life, "text": "x" * 1000}, {}))
        file.close()
    kept = numbers(tmp_path)
    assert kept[0] == 0
    assert kept[-1] == 29
    assert len(kept) < 20
    assert next(read_lines(parts_of(tmp_path)[-1].path))["dropped"] == 30 - len(kept)


def write_forever(run_dir: Path) -> None:
    file = RecordFile(run_dir, "rollouts", "rollout_0", 10**12)
    for number in range(10**9):
        file.append(({"number": number, "text": "x" * 200_000}, {"token_ids": np.arange(number % 100, dtype=np.int32)}))


def is_written(run_dir: Path) -> bool:
    """Return True if there is a record. Do not read on, as the writer may be faster than the reader."""
    return any("number" in line for part in parts_of(run_dir) for line in read_lines(part.path))


def test_killed_writer_leaves_whole_records(tmp_path: Path) -> None:
    writer = multiprocessing.get_context("fork").Process(target=write_forever, args=(tmp_path,))
    writer.start()
    deadline = time.monotonic() + 60
    while not is_written(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    (part,) = parts_of(tmp_path)
    with part.path.open("ab") as file:
        file.write(b'{"number": 1000000, "te')  # as if it had been killed in the middle of a write
    RecordFile(tmp_path, "rollouts", "rollout_0", 10**9).append(({"number": -1}, {}))
    found = numbers(tmp_path)
    assert found == [*range(len(found) - 1), -1]
    for line in read_lines(part.path):
        if "columns" in line:
            end = line["columns"]["at"] + 4 * line["columns"]["count"]
            assert not end or end <= part.columns.stat().st_size  # the first record has no tokens


def test_error_on_a_full_disk_names_the_file(tmp_path: Path) -> None:
    file = RecordFile(tmp_path, "rollouts", "rollout_0", 10**6)
    file.append(({"number": 0}, {}))
    file._lines = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        file.append(({"number": 1}, {}))
    file.append(({"number": 2}, {}))
    assert [len(list(read_lines(part.path))) for part in parts_of(tmp_path)] == [2, 2]
    assert numbers(tmp_path) == [0, 2]


def test_non_finite_values_become_null(tmp_path: Path) -> None:
    RecordFile(tmp_path, "rollouts", "rollout_0", 10**6).append(({"number": 0, "nested": [{"x": float("nan")}]}, {}))
    (part,) = parts_of(tmp_path)
    assert list(read_lines(part.path))[1]["nested"] == [{"x": None}]


def test_background_record_writes_without_waiting(tmp_path: Path) -> None:
    background = BackgroundRecord(RecordFile(tmp_path, "spans", "trainer_0", 10**6))
    for number in range(100):
        background.put({"number": number}, COLUMNS)
    background.flush()
    assert numbers(tmp_path, "spans") == list(range(100))
    background.put({"number": 100})
    background.flush()
    assert numbers(tmp_path, "spans") == list(range(101))


def test_records_beyond_the_queue_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_module, "MAX_QUEUED", 10)
    monkeypatch.setattr(record_module, "BATCH_S", 5.0)
    background = BackgroundRecord(RecordFile(tmp_path, "spans", "trainer_0", 10**6))
    for number in range(50):
        background.put({"number": number})
    background.flush()
    lines = [line for part in parts_of(tmp_path) for line in read_lines(part.path)]
    kept, lost = numbers(tmp_path, "spans"), sum(line.get("lost", 0) for line in lines)
    assert len(kept) + lost == 50
    assert lost >= 35


def test_full_disk_ends_a_background_record_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = RecordFile(tmp_path, "spans", "trainer_0", 10**6)
    file.append(({"number": 0}, {}))
    file._lines = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    background = BackgroundRecord(file)
    for number in (1, 2):
        background.put({"number": number})
        background.flush()
    assert [entry.message for entry in caplog.records] == [
        "nothing more is recorded: [Errno 28] No space left on device: '/dev/full'"
    ]


def test_record_that_cannot_be_encoded_does_not_block_later_flushes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    background = BackgroundRecord(RecordFile(tmp_path, "spans", "trainer_0", 10**6))
    for value in (object(), 1):
        background.put({"number": value})
        background.flush()
    assert [entry.message for entry in caplog.records] == [
        "nothing more is recorded: Object of type object is not JSON serializable"
    ]
