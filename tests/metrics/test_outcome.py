from pathlib import Path

import pytest

from titanrl.metrics.outcome import relative


def test_paths_are_shown_as_the_user_would_type_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "checkout/docs/notebooks"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    assert relative(folder / "runs/demo") == Path("runs/demo")
    assert relative(tmp_path / "checkout/runs/demo") == Path("../../runs/demo")
    assert relative(Path("/srv/runs")) == Path("/srv/runs")
