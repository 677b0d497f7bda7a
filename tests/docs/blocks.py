"""Extract the code blocks of README, CONTRIBUTING, AGENTS, docs/ and examples/, and tell which of them the tests run.

A block is a fence that names its language; `text` marks blocks that are not code. A comment `<!-- not run: REASON -->` above a
fence excludes it. A fence with `title="NAME"` is a file of that name, which the other blocks of its page can use.
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted((ROOT / "examples").rglob("*.md"))
FENCE = re.compile(r"```(\w*)(?: title=\"([^\"]+)\")?")
NOT_RUN = re.compile(r"<!-- not run: .{8,} -->")
LANGUAGES = {"json", "python", "sh", "text", "yaml"}


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced code block."""

    page: Path
    line: int
    language: str
    title: str
    text: str
    is_run: bool

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page in order; raise AssertionError for a fence without a known language."""
    lines = page.read_text(encoding="utf-8").splitlines()
    blocks: list[Block] = []
    opened: tuple[int, str, str, bool] | None = None
    for number, line in enumerate(lines, start=1):
        if not line.startswith("```"):
            continue
        if opened is None:
            match = FENCE.fullmatch(line)
            assert match, f"{page}:{number}: write ```LANGUAGE, and a title if it is a file: {line}"
            assert match[1] in LANGUAGES, f"{page}:{number}: the tests know {sorted(LANGUAGES)} (got {match[1]!r})"
            above = lines[number - 2] if number > 1 else ""
            opened = (number, match[1], match[2] or "", not NOT_RUN.fullmatch(above))
        else:
            start, language, title, is_run = opened
            text = "\n".join(lines[start : number - 1]) + "\n"
            blocks.append(Block(page=page, line=start, language=language, title=title, text=text, is_run=is_run))
            opened = None
    assert opened is None, f"{page}: the fence of line {opened[0]} is not closed"
    return blocks


def all_blocks(language: str) -> list[Block]:
    """Return the executed blocks of a language from all pages."""
    return [block for page in PAGES for block in blocks_of(page) if block.language == language and block.is_run]


def indented_blocks(page: Path) -> Iterator[int]:
    """Yield the first line number of each block that is indented instead of fenced."""
    is_fenced = False
    lines = ["", *page.read_text(encoding="utf-8").splitlines()]
    for number, (before, line) in enumerate(itertools.pairwise(lines), start=1):
        is_fenced ^= line.lstrip().startswith("```")
        if not is_fenced and line.startswith("    ") and not before.strip():
            yield number


def shell_lines(block: Block) -> list[str]:
    """Return the commands of a shell block, without comments."""
    lines = [line.split(" #")[0].strip() for line in block.text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]
