"""`.ci/check_prose.py` reports each kind of violation."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.blocks import ROOT


@pytest.fixture(scope="module")
def prose() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_prose", ROOT / ".ci/check_prose.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.py", 'def f():\n    """What the passes reply."""\n', "noun clause"),
        ("a.py", 'class C:\n    x: int\n    """Whether it runs."""\n', "noun clause"),
        ("a.py", 'def f():\n    """The sum of both."""\n', "does not start with a verb"),
        ("a.py", "x = 1  # computed a" + "new\n", "phrase"),
        ("page.md", "No" + "body reads it.\n", "phrase"),
    ],
)
def test_prose_check_reports(prose: ModuleType, tmp_path: Path, name: str, text: str, problem: str) -> None:
    (tmp_path / name).write_text(text)
    assert problem in "".join(prose.check(tmp_path / name))


def test_prose_check_accepts_plain_docstrings(prose: ModuleType, tmp_path: Path) -> None:
    source = [
        "class C:",
        '    """A slot."""',
        "    def f(self):",
        '        """Return the sum."""',
        "    @property",
        "    def n(self):",
        '        """Number of slots."""',
    ]
    (tmp_path / "a.py").write_text("\n".join(source))
    assert list(prose.check(tmp_path / "a.py")) == []
