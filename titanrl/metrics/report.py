"""The page of `titanrl board`, frozen into one file that opens in any browser without a server: reports and comparisons."""

import base64
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from titanrl.base.files import replace_text
from titanrl.carriers.record import encode
from titanrl.metrics.reading import TrainedSegment
from titanrl.metrics.views import MAX_POINTS, Json, RunView, readable, whole_group

FIRST_BYTES = 1_000_000
"""Size limit for sampled groups from the start of the run, in bytes of JSON."""
NEWEST_BYTES = 1_500_000
"""Size limit for sampled groups from the end of the run, in bytes of JSON."""
EVALUATION_BYTES = 1_000_000
"""Size limit for samples of evaluations, in bytes of JSON."""
CURVE_BYTES = 2_000_000
"""Size limit for the curves of a run, in bytes of JSON. Above it, they have fewer points."""
MAX_TOKENS = 400
"""Tokens of a completion in a file."""


def page_file(name: str) -> str:
    """Return a file of the page: `board.html`, `board.css` or `board.js`."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def write_report(run_dir: Path, summary: Mapping[str, str]) -> Path:
    """Write `report.html` from the files in `run_dir`, and return its path.

    Args:
        run_dir: Run directory. All its files are optional.
        summary: Text by label. The entry `outcome` is shown below the title, the others below the charts.
    """
    view = RunView(run_dir, run_dir.resolve().name)
    run = frozen_run(view)
    run["run"]["outcome"] = summary.get("outcome", "")
    run["run"]["facts"] |= {label: text for label, text in summary.items() if label != "outcome"}
    report = run_dir / "report.html"
    write_page(report, {"page": f"#/run/{view.name}", "name": view.name, "runs": {view.name: run}})
    return report


def write_page(path: Path, data: Json) -> None:
    """Write the page with its data.

    Raises:
        OSError: The file cannot be written.
    """
    style, script = page_file("board.css"), page_file("board.js")
    rules = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:"
    # "<" is escaped, so that no data can close the element that contains them.
    text = encode(data).replace("<", "\\u003c")
    page = page_file("board.html")
    for old, new in (
        ('<meta charset="utf-8">', f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{rules}">'),
        ('<link rel="stylesheet" href="/board.css">', f"<style>{style}</style>"),
        ("null</script>", f"{text}</script>"),
        ('<script type="module" src="/board.js"></script>', f'<script type="module">{script}</script>'),
    ):
        before, found, after = page.partition(old)
        assert found, f"board.html has no {old}"
        page = before + new + after
    replace_text(path, page)


def _hash(text: str) -> str:
    """Return the source by which a content security policy allows a text, and no other one."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def frozen_run(view: RunView, *, curves_only: bool = False) -> Json:
    """Return what the page of a run shows, within size limits: the first and the newest groups, and the newest evaluations."""
    charts = view.charts([])
    size = MAX_POINTS
    while size > 25 and len(json.dumps(charts)) > CURVE_BYTES:
        size //= 2
        charts = view.charts([], size)
    if curves_only:
        return {"charts": charts}
    groups, total = _groups(view)
    samples = view.record.evaluations()
    kept = list(_within(EVALUATION_BYTES, (whole_group(view.record, each, max_tokens=0) for each in reversed(samples))))[::-1]
    sets = dict.fromkeys(sample.set or "" for sample in samples)
    timeline = view.timeline()
    note = "" if len(groups) == total else f"the first and the newest of {total} recorded groups"
    return {
        "run": view.overview(),
        "charts": charts,
        "rollouts": {"groups": groups, **view.record.values_of("rollouts")},
        "evaluations": {"tables": {name: view.evaluations(name) for name in sets}, "groups": kept},
        "timeline": timeline if timeline["processes"] else None,
        "events": view.recent_events(),
        "config": view.configuration(),
        "note": note,
    }


def _groups(view: RunView) -> tuple[list[Json], int]:
    """Return the first and the newest groups, and the number of all."""
    record = view.record
    hits, advantages = record.search().of_groups(), record.advantages()
    trained: dict[int, list[TrainedSegment]] = defaultdict(list)
    for segment in record.trained() if len(hits) else ():
        trained[segment.index].append(segment)

    def whole(numbers: range) -> Iterable[Json]:
        for number in numbers:
            for hit in readable(hits[number : number + 1]):
                if hit is not None:
                    index = hit.group.index
                    yield whole_group(
                        record, hit.group, trained.get(index, ()), advantages.get(index, ()), max_tokens=MAX_TOKENS
                    )

    first = list(_within(FIRST_BYTES, whole(range(len(hits)))))
    newest = list(_within(NEWEST_BYTES, whole(range(len(hits) - 1, len(first) - 1, -1))))
    return [*first, *reversed(newest)], len(hits)


def _within(limit: int, values: Iterable[Any]) -> Iterable[Any]:
    """Yield values as long as their JSON texts are within a limit in bytes."""
    for value in values:
        limit -= len(json.dumps(value))
        if limit < 0:
            return
        yield value
