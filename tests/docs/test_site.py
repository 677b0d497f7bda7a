"""The site builds without a warning and needs no network."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, ROOT

LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` has built it, or built again if a file that it shows has changed since."""
    built, shown = ROOT / "site/built", [ROOT / "mkdocs.yml", *PAGES]
    shown += [path for folder in ("docs", "titanrl", ".ci") for path in (ROOT / folder).rglob("*") if path.suffix != ".pyc"]
    if built.exists() and built.stat().st_mtime > max(path.stat().st_mtime for path in shown if path.is_file()):
        return built.parent
    folder = tmp_path_factory.mktemp("site")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return folder


def test_the_site_has_every_page(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if not (site / page).is_file()} == set()
    assert len(pages) > 20


def test_the_site_loads_nothing_from_the_network(site: Path) -> None:
    loaded = re.compile(r"<(?:(?:script|img|iframe)\b[^>]* src|link\b[^>]*stylesheet[^>]* href)=\"?https?://[^>]+")
    assert {match[0] for page in site.rglob("*.html") for match in loaded.finditer(page.read_text())} == set()


def test_the_api_reference_documents_the_public_names(site: Path) -> None:
    text = (site / "api/run.html").read_text()
    for name in ("run.run.Run.step", "config.load.load_config", "session.training.TrainingClient.forward_backward"):
        assert f'id="titanrl.{name}"' in text, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_has_a_target(page: Path) -> None:
    links = [target for target in LINK.findall(page.read_text()) if not target.startswith(("http:", "https:"))]
    assert [target for target in links if not (page.parent / target).exists()] == []
