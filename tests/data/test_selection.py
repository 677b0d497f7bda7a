"""A resumed run continues only on the data that it was trained on, unless other data are asked for."""

from dataclasses import replace
from pathlib import Path

import pytest

from titanrl.config.errors import ConfigError
from titanrl.data.entries import Selection, check_recorded, record_data

FOUND = Selection(key="data.path", source="/data/a.jsonl", num_training=3, digest="aa")


def test_changed_contents_are_refused_unless_accepted(tmp_path: Path) -> None:
    record_data(tmp_path, [FOUND, Selection(key="data.task", source="chain_sum", num_training=3)])
    assert check_recorded(tmp_path, [FOUND], accepts_changes=False) == []
    changed = replace(FOUND, digest="bb")
    with pytest.raises(ConfigError, match=r"--resume: data\.path: the data differ .*/data/a.jsonl.* --accept-changed-data"):
        check_recorded(tmp_path, [changed], accepts_changes=False)
    assert check_recorded(tmp_path, [changed], accepts_changes=True) == [
        "data.path: the data differ from those that the run was trained on (/data/a.jsonl; --accept-changed-data)"
    ]


def test_moved_data_and_named_changes_are_accepted(tmp_path: Path) -> None:
    record_data(tmp_path, [FOUND])
    assert check_recorded(tmp_path, [replace(FOUND, source="/data/b.jsonl")], accepts_changes=False) == []
    other = replace(FOUND, source="/data/b.jsonl", digest="bb")
    (remark,) = check_recorded(tmp_path, [other], accepts_changes=False)
    assert remark.endswith("now /data/b.jsonl, before /data/a.jsonl")


def test_run_without_a_record_is_resumed(tmp_path: Path) -> None:
    assert check_recorded(tmp_path, [FOUND], accepts_changes=False) == []
    (tmp_path / "data.json").write_text("[1")
    with pytest.raises(ConfigError, match="the record of the data cannot be read"):
        check_recorded(tmp_path, [FOUND], accepts_changes=False)
