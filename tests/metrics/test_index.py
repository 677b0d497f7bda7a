"""The search of `RunRecord` in files that grow, are replaced and are damaged."""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titanrl.base.files import DamagedError, replace_text
from titanrl.carriers.record import RecordFile, parts_of
from titanrl.metrics import reading
from titanrl.metrics.reading import Followed, Hits, RunRecord
from titanrl.metrics.run_directory import RunDirectory


def completion(text: str = "", reward: float | None = 0.0, **values: Any) -> dict[str, Any]:
    return {"text": text, "reward": reward, "outcome": "reward_error" if reward is None else "ok", **values}


def group(number: int, *completions: dict[str, Any], **values: Any) -> dict[str, Any]:
    fields = {"time": float(number), "index": number, "version": number // 2, "status": "kept", "prompt": f"prompt {number}"}
    return {**fields, **values, "completions": completions or (completion(f"answer {number}"),)}


def write(run_dir: Path, *groups: dict[str, Any], kind: str = "rollouts", process: str = "rollout_0") -> None:
    file = RecordFile(run_dir, kind, process, 10**9)
    file.append(*((each, {}) for each in groups))
    file.close()


def places(hits: Hits) -> list[tuple[int, int]]:
    return [(hit.group.index, hit.number) for hit in hits]


def test_empty_columns_are_read_before_there_is_a_file_for_columns(tmp_path: Path) -> None:
    trained = {"time": 0.0, "step": 1, "version": 0, "index": 0, "segment": 0}
    RecordFile(tmp_path, "trained", "trainer_0", 10**6).append((trained, {"weights": np.empty(0, np.float32)}))
    (segment,) = RunRecord(tmp_path).trained()
    assert {name: column.tolist() for name, column in segment.columns().items()} == {"weights": []}


def test_group_of_one_prompt_is_the_one_that_was_sampled_last(tmp_path: Path) -> None:
    write(tmp_path, group(1, completion("first")), group(11), group(1, completion("again"), time=20.0))
    (found,) = RunRecord(tmp_path).groups(1)
    assert found.completions[0].text == "again"
    assert RunRecord(tmp_path).groups(2) == []


def test_text_is_found_in_prompts_completions_messages_and_errors(tmp_path: Path) -> None:
    call = {"role": "assistant", "tool_calls": [{"arguments": {"path": "Deep/File"}}]}
    write(
        tmp_path,
        group(0, completion("the Answer"), completion("other"), prompt="a question"),
        group(1, completion("x", messages=[{"role": "user", "content": "hello"}, call]), prompt="answer me"),
        group(2, completion("y", None, error="ZeroDivisionError"), completion('quoted "z"\n\\ \u00e9\U0001f600')),
    )
    run = RunRecord(tmp_path)
    assert places(run.search("ANSWER")) == [(0, 0), (1, 0)]
    assert places(run.search("a question")) == [(0, 0), (0, 1)]
    assert places(run.search("deep/file")) == places(run.search("hello")) == [(1, 0)]
    assert places(run.search("zerodivision")) == [(2, 0)]
    for text in ('"Z"', "\n", "\\", "\u00e9", "\U0001f600", '"z"\n\\ \u00e9'):
        assert places(run.search(text)) == [(2, 1)], text
    # In every line, but not in a text of it.
    for text in ("completions", "role", "null", "}", "\ud800", "\\n"):
        assert places(run.search(text)) == [], text


def test_text_is_found_in_lines_of_earlier_versions(tmp_path: Path) -> None:
    write(tmp_path, group(0, completion("caf\u00e9")))
    (part,) = parts_of(tmp_path)
    first, new = part.path.read_bytes().splitlines(keepends=True)
    old = json.dumps({**json.loads(new), "index": 1}).encode() + b"\n"  # with escapes
    assert (b"caf\xc3\xa9" in new, b"caf\\u00e9" in old) == (True, True)
    part.path.write_bytes(first + new + old)
    assert places(RunRecord(tmp_path).search("CAF\u00e9")) == [(0, 0), (1, 0)]


def test_all_conditions_must_be_met(tmp_path: Path) -> None:
    parts: list[dict[str, float | None]] = [{"format": 1.0, "length": -2.0}, {"format": 0.0}, {"format": None}]
    completions = [completion("a", 1.0, reward_parts=parts[0]), completion("b", 0.25, reward_parts=parts[1])]
    write(
        tmp_path,
        *(group(number, *completions, completion("c", None, reward_parts=parts[2])) for number in range(4)),
        group(4, task="chess", environment="game.py:Chess", status="no signal"),
    )
    lines = [{"step": step, "index": number, "advantages": []} for step, number in ((1, 0), (2, 1), (3, 0))]
    (tmp_path / "advantages.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = RunRecord(tmp_path)
    assert len(run.search()) == 13
    assert places(run.search(reward=(0.5, None))) == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert places(run.search(reward=(None, 0.5), index=(1, 2))) == [(1, 1), (2, 1)]
    assert places(run.search(parts={"format": (None, 0.5)}, version=(1, 1))) == [(2, 1), (3, 1)]
    assert places(run.search(parts={"format": (1, 1), "length": (None, None)}, index=(3, None))) == [(3, 0)]
    assert places(run.search(outcome="reward_error", index=(None, 0))) == [(0, 2)]
    assert places(run.search(status="no signal")) == places(run.search(task="chess")) == [(4, 0)]
    assert places(run.search(environment="game.py:Chess")) == [(4, 0)]
    assert places(run.search("b", step=(3, 4))) == [(0, 1)]
    assert places(run.search("b", step=(1, 2))) == [(0, 1), (1, 1)]
    assert places(run.search(status="other")) == places(run.search(parts={"other": (None, None)})) == []


def test_slices_and_groups_of_hits_are_read_when_used(tmp_path: Path) -> None:
    write(tmp_path, *(group(number, completion("a"), completion("b")) for number in range(3)))
    hits = RunRecord(tmp_path).search()
    assert places(hits[-3:]) == [(1, 1), (2, 0), (2, 1)]
    assert places(hits.of_groups()) == [(0, 0), (1, 0), (2, 0)]
    assert (hits[3].completion.text, hits[3].group.prompt, hits[3].group.process) == ("b", "prompt 1", "rollout_0")
    with pytest.raises(IndexError):
        hits[6]
    shutil.rmtree(tmp_path / "record")
    assert len(hits) == 6
    with pytest.raises(DamagedError, match=r"cannot be read: .*Search again"):
        hits[0]
    assert len(RunRecord(tmp_path).search().of_groups()) == 0


def test_samples_of_evaluations_are_separate(tmp_path: Path) -> None:
    write(tmp_path, group(0))
    samples = [group(number, set=name, version=version) for version in (2, 1) for name in ("hard", "easy") for number in (1, 0)]
    write(tmp_path, *samples, group(0, completion("again"), set="hard", version=1, time=9.0), kind="evaluations")
    run = RunRecord(tmp_path)
    hard = run.search(kind="evaluations", set="hard")
    assert [(hit.group.version, hit.group.index, hit.completion.text) for hit in hard] == [
        (1, 0, "again"),
        (1, 1, "answer 1"),
        (2, 0, "answer 0"),
        (2, 1, "answer 1"),
    ]
    assert len(run.search()) == 1
    assert len(run.search(kind="evaluations", step=(None, None))) == 0


def test_search_follows_lines_and_parts_of_a_running_run(tmp_path: Path) -> None:
    run = RunRecord(tmp_path)
    assert len(run.search()) == 0
    file = RecordFile(tmp_path, "rollouts", "rollout_0", 10**9)
    file.append((group(0), {}))
    assert places(run.search()) == [(0, 0)]
    file.append((group(1), {}))
    write(tmp_path, group(2), process="rollout_1")
    assert places(run.search("answer")) == [(0, 0), (1, 0), (2, 0)]
    (part, *_) = parts_of(tmp_path, "rollouts")
    line = json.dumps(group(3)).encode() + b"\n"
    with part.path.open("ab", buffering=0) as half:
        half.write(line[:40])
        assert len(run.search()) == 3
        half.write(line[40:])
    assert places(run.search("answer 3")) == [(3, 0)]
    part.path.unlink()  # as the size limit does
    assert places(run.search()) == [(2, 0)]


def test_group_that_was_sampled_again_is_found_as_sampled_last(tmp_path: Path) -> None:
    write(tmp_path, group(5, completion("first"), time=1.0), process="rollout_1")
    run = RunRecord(tmp_path)
    assert places(run.search("first")) == [(5, 0)]
    write(tmp_path, group(5, completion("second"), time=2.0), process="rollout_0")
    assert places(run.search("first")) == []
    assert [hit.completion.text for hit in run.search()] == ["second"]


def test_rolled_back_groups_are_no_longer_found(tmp_path: Path) -> None:
    RunDirectory(tmp_path).close()
    write(tmp_path, *map(group, range(6)))
    run = RunRecord(tmp_path)
    before = run.search()
    assert len(before) == 6
    RunDirectory(tmp_path, resume_step=1, resume_index=4, resume_in_flight=[1]).close()
    write(tmp_path, group(1, completion("sampled again"), time=9.0))
    after = run.search()
    assert [(hit.group.index, hit.completion.text) for hit in after] == [
        (0, "answer 0"),
        (1, "sampled again"),
        (2, "answer 2"),
        (3, "answer 3"),
    ]
    with pytest.raises(DamagedError, match="Search again"):
        before[2]


def test_lines_replaced_in_place_are_detected(tmp_path: Path) -> None:
    write(tmp_path, group(1), group(2))
    (part,) = parts_of(tmp_path)
    run = RunRecord(tmp_path)
    hits = run.search()
    part.path.write_bytes(part.path.read_bytes().replace(b"answer 2", b"other 22"))
    with pytest.raises(DamagedError, match="other bytes"):
        hits[1]
    assert [hit.completion.text for hit in run.search()] == ["answer 1", "other 22"]
    part.path.write_bytes(part.path.read_bytes()[:300])  # cut
    assert places(run.search()) == [(1, 0)]


@pytest.mark.parametrize(
    "line",
    [
        b"[]",
        b'"\xff"',
        b"[" * 100_000,
        b'{"index": 1e400, "version": 1, "completions": []}',
        b'{"index": %d, "version": 1, "completions": []}' % 2**63,
        b'{"index": ' + b"9" * 5000 + b', "version": 1, "completions": []}',
        b'{"index": 1, "version": 1, "completions": [{"reward": "high"}]}',
        b'{"index": 1, "version": 1, "completions": [{"reward_parts": {"a": []}}]}',
        b'{"index": 1, "version": 1, "completions": {"0": {}}}',
        b'{"index": 1, "version": 1, "status": {}, "completions": [{}]}',
    ],
)
def test_damaged_lines_are_left_out(line: bytes, tmp_path: Path) -> None:
    write(tmp_path, group(0))
    (part,) = parts_of(tmp_path)
    part.path.write_bytes(part.path.read_bytes() + line + b"\n" + json.dumps(group(2)).encode() + b"\n")
    (tmp_path / "advantages.jsonl").write_bytes(line + b"\n")
    run = RunRecord(tmp_path)
    assert places(run.search()) == [(0, 0), (2, 0)]
    assert places(run.search("answer", index=(2, 2))) == [(2, 0)]
    assert places(run.search(step=(None, None))) == []


def test_line_of_which_only_other_fields_are_damaged_is_refused(tmp_path: Path) -> None:
    write(tmp_path, group(0), group(1, completion("answer 1", turns="none")))
    hits = RunRecord(tmp_path).search("answer")
    assert (len(hits), hits[0].completion.text) == (2, "answer 0")
    with pytest.raises(DamagedError, match="damaged line"):
        hits[1]


def test_lines_are_searched_in_chunks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(reading, "SCAN_BYTES", 400)
    write(tmp_path, *map(group, range(40)))
    run = RunRecord(tmp_path)
    assert places(run.search("answer")) == [(number, 0) for number in range(40)]
    assert places(run.search("answer 3", index=(5, None), version=(None, 16))) == [(number, 0) for number in range(30, 34)]
    assert places(run.search("answer 7")) == [(7, 0)]


def test_two_readers_follow_a_writer(tmp_path: Path) -> None:
    num_groups = 400
    file = RecordFile(tmp_path, "rollouts", "rollout_0", 10**9)
    is_done = threading.Event()
    counts: list[list[int]] = [[], []]

    def read(of_reader: list[int]) -> None:
        run = RunRecord(tmp_path)
        while not is_done.is_set():
            of_reader.append(len(run.search("answer")))
        of_reader.append(len(run.search("answer")))

    readers = [threading.Thread(target=read, args=(of_reader,)) for of_reader in counts]
    for reader in readers:
        reader.start()
    for number in range(num_groups):
        file.append((group(number), {}))
    is_done.set()
    for reader in readers:
        reader.join()
    for of_reader in counts:
        assert of_reader == sorted(of_reader)
        assert of_reader[-1] == num_groups


def test_threads_share_an_index(tmp_path: Path) -> None:
    write(tmp_path, *map(group, range(200)))
    run = RunRecord(tmp_path)
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(len(run.search("answer")))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [200] * 4


def test_appended_objects_are_read_once_and_again_after_the_file_was_replaced(tmp_path: Path) -> None:
    path, resets = tmp_path / "metrics.jsonl", list[int]()
    followed = Followed(path)

    def appended(text: str = "") -> list[dict[str, Any]]:
        if text:
            with path.open("a") as file:
                file.write(text)
        return list(followed.objects(lambda: resets.append(1)))

    assert appended() == []
    assert appended('{"step": 1}\n{"step": 2}\n{"st') == [{"step": 1}, {"step": 2}]
    assert appended('ep": 3}\nnot json\n[4]\n{"step": 5}\n') == [{"step": 3}, {"step": 5}]
    assert appended() == []
    resets.clear()
    replace_text(path, '{"step": 1}\n')
    assert appended() == [{"step": 1}]
    assert resets == [1]
