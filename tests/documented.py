"""Names in docs/metrics.md."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

TEXT = (Path(__file__).parents[1] / "docs/metrics.md").read_text()


def undocumented(rows: Iterable[Mapping[str, object]]) -> set[str]:
    """Return the metrics in lines of `metrics.jsonl` that the page does not describe."""
    names = re.findall(r"^\| `([^`]+)` \|", TEXT, re.MULTILINE)
    patterns = [re.compile(re.sub(r"<\w+>", "[^/]+", name)) for name in names]
    written = {name for row in rows for name in row if "/" in name}
    return {name for name in written if not any(pattern.fullmatch(name) for pattern in patterns)}
