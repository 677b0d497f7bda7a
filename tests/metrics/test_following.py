"""Lines are read once, also while they are written, and again if their file is replaced."""

from pathlib import Path

import pytest

from titanrl.base.files import replace_text
from titanrl.metrics import following
from titanrl.metrics.following import Follower


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_only_appended_whole_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    assert follower.take() == ([], False)
    append(path, '{"step": 1}\n{"step": 2}\n{"st')
    assert follower.take() == ([{"step": 1}, {"step": 2}], False)
    assert follower.take() == ([], False)
    append(path, 'ep": 3}\nnot json\n[4]\n{"step": 5}\n')
    assert follower.take() == ([{"step": 3}, {"step": 5}], False)


def test_replaced_file_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, '{"step": 1}\n{"step": 2}\n')
    follower = Follower(path)
    assert len(follower.take()[0]) == 2
    replace_text(path, '{"step": 1}\n')
    assert follower.take() == ([{"step": 1}], True)
    assert follower.take() == ([], False)


def test_long_file_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "READ_BYTES", 30)
    path = tmp_path / "metrics.jsonl"
    append(path, "".join(f'{{"step": {n}}}\n' for n in range(10)))
    follower = Follower(path)
    found = []
    while rows := follower.take()[0]:
        assert len(rows) < 5
        found += [row["step"] for row in rows]
    assert found == list(range(10))
