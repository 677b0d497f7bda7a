"""Dumps: rollouts survive write and replay unchanged, and a resumed run leaves no duplicates."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet

from titanrl import GRPO
from titanrl.carriers.dumps import (
    COLUMNS,
    DumpBatches,
    DumpError,
    DumpInfo,
    DumpReader,
    DumpWriter,
    _json,
    broken_rules,
    fingerprint,
)
from titanrl.carriers.supports import supports_of
from titanrl.carriers.types import Completion, Group, Prompt, Rollout, ScorerFailure, Segment, Turn
from titanrl.config import Config, ConfigError
from titanrl.launch.preflight import preflight

INFO = DumpInfo(run="sums", groups_per_step=2, tokenizer=fingerprint({"a": 0, "b": 1}), vocabulary=2)
PAGE = Path(__file__).parents[2] / "docs/howto/dump.md"


def segment(token_ids: Sequence[int], num_prompt: int, version: int = 4) -> Segment:
    num = len(token_ids) - num_prompt
    return Segment(
        token_ids=np.array(token_ids),
        mask=np.array([False] * num_prompt + [True] * num),
        logprobs=np.array([0.0] * num_prompt + [-0.1, float("nan"), -1 / 3][:num], np.float32),
        versions=np.array([-1] * num_prompt + [version] * num),
    )


def group(index: int, reward: float = 0.1) -> Group:
    """Return a group with an episode of two segments, an episode of one segment, and a failed episode."""
    parts = {"right": 1.0, "turns": 0.1 + 0.2}
    first = Rollout(
        segments=(segment([5, 6, 7, 1], 2), segment([8, 9, 1], 1)),
        reward=reward,
        reward_parts=parts,
        finish_reason="stop",
        turns=(
            Turn(segment=0, end=3, reward=0.1),
            Turn(segment=0, end=4, reward=0.0),
            Turn(segment=1, end=3, reward=0.25, state=-(2**63)),
        ),
        token_rewards=np.array([0.1, 0.0, 1 / 3, 0.25 - 1 / 3]),
        metrics={"calls": 1 / 3},
    )
    supports = supports_of([np.array(ids, np.int32) for ids in ([], [], [1, 4])], 70)
    experts = np.array([[[0, 5], [7, 1]], [[5, 2], [1, 3]], [[255, 255], [255, 255]]], np.uint8)
    truncated = replace(segment([5, 6, 1], 2), supports=supports, experts=experts)
    second = Rollout(segments=(truncated,), reward=1.0, reward_parts={}, finish_reason="length")
    failed = Completion(
        token_ids=np.array([7, 7]),
        logprobs=np.array([-0.5, -0.25], np.float32),
        versions=np.array([4, 5]),
        finish_reason="abort",
    )
    return Group(
        prompt=Prompt(index=index, task="sums", text="1+1=", token_ids=(5, 6), entry={"answer": "2", "metadata": {"a": [1]}}),
        rollouts=(first, second),
        generate_s=1.5,
        score_s=0.1,
        failures=(ScorerFailure(completion=failed, error="timeout: 5 s", outcome="timeout"),),
        conversations=(({"role": "user", "content": "1+1="},), ({"role": "user", "content": "é"},)),
        counts={"episodes": 3},
    )


def comparable(value: object) -> object:
    """Convert a carrier to values that compare equal only if all bits are equal."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.tobytes())
    if isinstance(value, tuple | list):
        return [comparable(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: comparable(getattr(value, name)) for name in value.__dataclass_fields__}
    return value


def dump(folder: Path, batches: Sequence[Sequence[int]], *, spare: Sequence[int] = ()) -> DumpBatches:
    """Write a dump with these batches, two groups per file, and additional groups outside any batch."""
    writer, order = DumpWriter(folder, worker=0), DumpBatches(folder)
    order.begin(INFO, step=0, next_index=0, in_flight=())
    for step, batch in enumerate(batches, 1):
        writer.write([(group(index), "kept") for index in batch])
        order.add(step, step - 1, batch, ())
    for index in spare:
        writer.write([(group(index), "no signal")])
    return order


def saved(folder: Path) -> list[int]:
    """Return the prompt index of each row, sorted."""
    files = sorted((folder / "rollouts").iterdir())
    return sorted(index for path in files for index in parquet.read_table(path)["index"].to_pylist())


def test_group_survives_write_and_read_unchanged(tmp_path: Path) -> None:
    dump(tmp_path, [[3, 0], [2, 9]], spare=[1])
    reader = DumpReader(tmp_path)
    assert (reader.num_steps, reader.num_groups, reader.info) == (2, 4, INFO)
    for place, index in enumerate([3, 0, 2, 9]):
        expected = replace(group(index), prompt=replace(group(index).prompt, index=place))
        assert comparable(reader.group(place)) == comparable(expected)


def test_docs_list_all_columns_with_types(tmp_path: Path) -> None:
    (path,) = [DumpWriter(tmp_path, worker=0).write([(group(0), "kept")])]
    table = parquet.read_table(path)
    assert table.column_names == list(COLUMNS)
    assert {path.suffix, parquet.ParquetFile(path).metadata.row_group(0).column(0).compression} == {".parquet", "ZSTD"}
    described: dict[str, str] = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0].startswith("`"):
            described |= dict.fromkeys((name.strip(" `") for name in cells[0].split(",")), cells[1])
    names = {"JSON": "string", "timestamp": "timestamp[us, tz=UTC]", "float64": "double"}
    lists = {
        "int32": "list<element: int32>",
        "int64": "list<element: int64>",
        "uint16": "list<element: uint16>",
        "float32": "list<element: float>",
        "bool": "list<element: bool>",
    }
    names |= {f"list of {kind}": name for kind, name in lists.items()} | {"list of float64": "list<element: double>"}
    found = {field.name: str(field.type) for field in table.schema}
    assert {name: names.get(kind, kind) for name, kind in described.items() if name in found} == found


def test_rows_have_outcome_and_status(tmp_path: Path) -> None:
    rows = parquet.read_table(DumpWriter(tmp_path, worker=3).write([(group(5), "filtered")])).to_pylist()
    assert [(row["rollout"], row["outcome"], row["reward"], row["status"]) for row in rows] == [
        (0, "ok", 0.1, "filtered"),
        (1, "ok", 1.0, "filtered"),
        (2, "timeout", None, "filtered"),
    ]
    assert rows[0]["segment_lengths"] == [4, 3]
    assert json.loads(rows[0]["messages"]) == [{"role": "user", "content": "1+1="}]


def test_text_with_lone_surrogates_is_written(tmp_path: Path) -> None:
    whole = group(0)
    odd = replace(whole, prompt=replace(whole.prompt, text="a\ud800b", entry={"answer": "\udfff"}))
    rows = parquet.read_table(DumpWriter(tmp_path, worker=0).write([(odd, "kept")])).to_pylist()
    assert rows[0]["question"] == "a?b"
    assert json.loads(rows[0]["entry"]) == {"answer": "\udfff"}


def test_resume_removes_rollouts_to_be_sampled_again(tmp_path: Path) -> None:
    order = dump(tmp_path, [[0, 1], [2, 3], [4, 6]], spare=[5, 7, 8])
    (tmp_path / "rollouts" / "000000009-1-0.partial").write_bytes(b"torn")
    with (tmp_path / "batches.jsonl").open("a") as file:
        file.write('{"step": 4, "ver')  # by a process that was killed
    order.begin(INFO, step=2, next_index=6, in_flight=(4,))
    assert saved(tmp_path) == [index for index in (0, 1, 2, 3, 5) for _ in range(3)]
    assert DumpReader(tmp_path).batches == [[0, 1], [2, 3]]
    order.drop(lambda index: index == 5)
    assert saved(tmp_path) == [index for index in (0, 1, 2, 3) for _ in range(3)]
    order.begin(INFO, step=0, next_index=0, in_flight=())
    assert (saved(tmp_path), DumpReader(tmp_path).batches) == ([], [])


def test_newest_attempt_of_a_group_is_replayed(tmp_path: Path) -> None:
    order, writer = dump(tmp_path, []), DumpWriter(tmp_path, worker=0)
    writer.write([(group(0, reward=0.5), "kept"), (group(1), "kept")])
    DumpWriter(tmp_path, worker=1).write([(group(0, reward=0.75), "kept")])
    order.add(1, 0, [0, 1], ())
    reader = DumpReader(tmp_path)
    assert [reader.group(place).rollouts[0].reward for place in (0, 1)] == [0.75, 0.1]


def rollout_config(**rollout: object) -> Config:
    return Config.model_validate({"name": "replayed", "num_steps": 1, "rollout": {"groups_per_step": 2, **rollout}})


def problems(folder: Path, **rollout: object) -> str:
    return "\n".join(map(str, broken_rules(rollout_config(replay=folder, **rollout).rollout)))


def test_invalid_dump_is_rejected_for_replay(tmp_path: Path) -> None:
    assert "no dump.json. Give a folder that rollout.save has written." in problems(tmp_path / "absent")
    dump(tmp_path, [])
    assert "the dump has no batch" in problems(tmp_path)
    dump(tmp_path, [[0, 1]])
    assert problems(tmp_path) == ""
    assert "which have 2 groups each. Set rollout.groups_per_step to 2." in problems(tmp_path, groups_per_step=4)
    (tmp_path / "dump.json").write_text(json.dumps({"format": 7}))
    assert "the dump must have format 1, not 7" in problems(tmp_path)
    for content in ("[]", '{"format": 1}'):
        (tmp_path / "dump.json").write_text(content)
        assert "rollout.replay" in problems(tmp_path)
    (tmp_path / "dump.json").write_text("{")
    assert "dump.json cannot be read" in problems(tmp_path)


def test_missing_and_damaged_rollouts_are_reported_with_path(tmp_path: Path) -> None:
    dump(tmp_path, [[0, 1]])
    (path,) = (tmp_path / "rollouts").iterdir()
    reader = DumpReader(tmp_path)
    assert reader.group(0).rollouts
    path.unlink()
    with pytest.raises(DumpError, match="lists group 0, but has no rollouts of it"):
        DumpReader(tmp_path).group(0)


def test_dump_of_another_run_and_training_without_trainer_are_rejected(tmp_path: Path) -> None:
    dump(tmp_path, [[0, 1]])
    with pytest.raises(ConfigError, match="the folder holds the dump of another run"):
        GRPO(rollout_config(save=tmp_path))
    resumed = tmp_path / "run"
    resumed.mkdir()
    with pytest.raises(ConfigError, match="the folder holds the dump of another run"):
        GRPO(rollout_config(save=tmp_path), resume=resumed)
    with pytest.raises(ConfigError, match="--resume"):  # its own dump is no problem
        GRPO(rollout_config(save=tmp_path).model_copy(update={"name": "sums"}), resume=resumed)
    with pytest.raises(ConfigError, match=r"GRPO trains\s+fix: +use titanrl.run.generation.Generation"):
        GRPO(rollout_config().model_copy(update={"train": False}))


def test_preflight_rejects_folder_without_dump(tmp_path: Path) -> None:
    config = rollout_config(replay=tmp_path).model_copy(update={"output_dir": tmp_path, "cache_dir": tmp_path})
    with pytest.raises(ConfigError, match=r"rollout.replay.*\n.*no dump.json"):
        preflight(config, rollouts=False, sampling=False)


@pytest.mark.parametrize("line", ['{"step": \n', '{"step": 1}\n', '{"groups": 3}\n', "[]\n"])
def test_damaged_list_of_batches_is_reported_with_its_line(tmp_path: Path, line: str) -> None:
    dump(tmp_path, [[0, 1]])
    with (tmp_path / "batches.jsonl").open("a") as file:
        file.write(line)
    assert "line 2 of batches.jsonl is damaged" in problems(tmp_path)


def test_groups_without_rollouts_are_reported_before_the_start(tmp_path: Path) -> None:
    dump(tmp_path, [[0, 1], [2, 3]])
    first, second = sorted((tmp_path / "rollouts").iterdir())
    (tmp_path / "rollouts" / "notes.parquet").write_bytes(b"of another program")
    second.unlink()
    assert "lists groups without rollouts: 2 of 4, such as 2" in problems(tmp_path)
    first.write_bytes(first.read_bytes()[:100])
    assert "cannot be read" in problems(tmp_path)


def test_columns_that_earlier_versions_did_not_write_may_be_missing(tmp_path: Path) -> None:
    dump(tmp_path, [[0, 1]])
    (path,) = (tmp_path / "rollouts").iterdir()
    parquet.write_table(parquet.read_table(path).drop_columns(["experts", "experts_shape"]), path)
    assert problems(tmp_path) == ""
    assert DumpReader(tmp_path).group(1).rollouts[0].segments[0].experts is None


def test_keys_that_json_lacks_become_text() -> None:
    value = {"a": [{(1, 2): 1.5}], 3: {np.int64(4): b"c"}}
    assert json.loads(_json(value)) == {"a": [{"(1, 2)": 1.5}], "3": {"4": "b'c'"}}
