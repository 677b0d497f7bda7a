"""The report of a run, `report.html`: a single file that opens in any browser, without a server or network access."""

import base64
import gzip
import json
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from titanrl.base.files import replace_text
from titanrl.metrics.run_directory import read_lines, read_metrics
from titanrl.metrics.series import Rows, by_step, count, first_and_last_five, heldout_tasks, phase_seconds, series

TEMPLATE = Path(__file__).with_name("report_template.html.j2")
FIRST_BYTES = 1_000_000
"""Size limit for sampled groups from the start of the run, in bytes of JSON."""
NEWEST_BYTES = 1_500_000
"""Size limit for sampled groups from the end of the run, in bytes of JSON."""
MAX_COMPLETIONS = 64
"""Completions shown per group."""
MAX_TOKENS = 400
"""Tokens shown per completion."""
MAX_CHARS = 4000
"""Characters shown of a prompt or an error, and characters of a completion that the search covers."""


class Figure(NamedTuple):
    """A key figure at the top of the report."""

    label: str
    value: str
    note: str


def write_report(run_dir: Path, summary: Mapping[str, str]) -> Path:
    """Write `report.html` from the files in `run_dir`, and return its path.

    Args:
        run_dir: Run directory. `metrics.jsonl`, `rollouts.jsonl`, `advantages.jsonl` and `config.yaml` are all optional.
        summary: Text by label. The entry `outcome` is shown below the title, the others below the key figures.
    """
    # Imported here because both are slow to import and needed only for the report.
    import jinja2

    from titanrl.metrics.curves import draw_curves

    metrics, config = run_dir / "metrics.jsonl", run_dir / "config.yaml"
    rows = by_step(read_metrics(metrics)) if metrics.exists() else []
    samples, total = _sampled_groups(run_dir / "rollouts.jsonl", _advantages_by_index(run_dir / "advantages.jsonl"))
    curves = draw_curves(rows)
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        name=run_dir.resolve().name,
        outcome=summary.get("outcome", ""),
        facts={label: text for label, text in summary.items() if label != "outcome"},
        figures=_figures(rows),
        config=config.read_text(encoding="utf-8") if config.exists() else "",
        curves=curves,
        charts=_for_script([curve.figure for curve in curves]),
        plotly=_packed_plotly() if curves else "",
        samples=_for_script(samples) if samples else "",
        has_rollouts=not series(rows, "loss/train"),
        samples_note=f"Showing {'all' if len(samples) == total else 'the first and the newest of'} {total} recorded groups.",
    )
    report = run_dir / "report.html"
    replace_text(report, page)
    return report


def _for_script(items: Sequence[str]) -> str:
    """Join JSON texts to a JSON array. Escape "<", so that no data can close the script element that contains the array."""
    return f"[{','.join(items)}]".replace("<", "\\u003c")


def _packed_plotly() -> str:
    """Return plotly.js, gzipped and base64-encoded: 2 MB instead of 5. The page decompresses it."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


def _figures(rows: Rows) -> list[Figure]:
    figures = []
    if rewards := series(rows, "reward/mean"):
        first, last = first_and_last_five(rewards)
        figures.append(Figure("Mean reward", f"{first:.3f} \u2192 {last:.3f}", "means of the first and last five steps"))
    for task in heldout_tasks(rows):
        if points := series(rows, f"eval/{task}/mean"):
            (start, before), (end, after) = points[0], points[-1]
            note = f"mean reward at steps {start} and {end}"
            failed, total = (series(rows, f"eval/{task}/{name}") for name in ("num_errors", "num_completions"))
            if any(number for _, number in (*failed[:1], *failed[-1:])):
                counts = [f"{failed[at][1]:.0f} of {total[at][1]:.0f}" for at in (0, -1)]
                note += f"; {' and '.join(counts)} completions had no reward and are not in the mean"
            figures.append(Figure(f"Held-out {task}", f"{before:.3f} \u2192 {after:.3f}", note))
    if losses := series(rows, "loss/train"):
        first, last = first_and_last_five(losses)
        figures.append(Figure("Training loss", f"{first:.3f} \u2192 {last:.3f}", "means of the first and last five steps"))
    if losses := series(rows, "loss/eval"):
        (start, before), (end, after) = losses[0], losses[-1]
        note = f"nats per token at steps {start} and {end}"
        figures.append(Figure("Held-out loss", f"{before:.3f} \u2192 {after:.3f}", note))
    if rows:
        figures.append(Figure("Steps", f"{rows[-1]['step']}", f"policy version {rows[-1]['version']}"))
    if seconds := [sum(phases.values()) for row in rows if (phases := phase_seconds(row))]:
        figures.append(Figure("Step time", f"{median(seconds):.2f} s", "median over steps"))
    if rates := series(rows, "perf/gen_tokens_per_s"):
        figures.append(Figure("Generation", count(median(rate for _, rate in rates)), "tokens per second while busy, median"))
    if mismatch := series(rows, "mismatch/logprob_abs_max"):
        largest = max(value for _, value in mismatch)
        figures.append(Figure("Largest mismatch", f"{largest:.1e}", "nats on one token, trainer vs. generator"))
    return figures


def _advantages_by_index(path: Path) -> dict[int, list[float]]:
    """Return the advantages by group index. A resumed run can train on a group again; the last line of a group wins."""
    return {row["index"]: row["advantages"] for row in read_lines(path)} if path.exists() else {}


def _sampled_groups(path: Path, advantages: Mapping[int, Sequence[float]]) -> tuple[list[str], int]:
    """Return the first and the newest groups as JSON texts, and the total number of groups.

    A resumed run can sample a group again; the last line of a group wins.
    """
    first: dict[int, str] = {}
    newest: deque[tuple[int, str]] = deque()
    first_bytes = newest_bytes = 0
    seen = set()
    for row in read_lines(path) if path.exists() else ():
        index = row["index"]
        text = json.dumps(_group(row, advantages.get(index, ())), separators=(",", ":"))
        seen.add(index)
        if not newest and first_bytes + len(text) <= FIRST_BYTES:
            first[index] = text
            first_bytes += len(text)
            continue
        newest.append((index, text))
        newest_bytes += len(text)
        while newest_bytes > NEWEST_BYTES:
            newest_bytes -= len(newest.popleft()[1])
    return list((first | dict(newest)).values()), len(seen)


def _group(row: Mapping[str, Any], advantages: Sequence[float]) -> dict[str, Any]:
    """Return the data that the page shows for a group. `advantages` has no entries for completions whose reward failed."""
    rewards = [completion["reward"] for completion in row["completions"] if completion["reward"] is not None]
    # If the counts differ, some rollouts were left out of training. Which ones is not recorded, so no advantage is shown.
    recorded = iter(advantages if len(advantages) == len(rewards) else ())
    completions = [
        _completion(completion, None if completion["reward"] is None else next(recorded, None))
        for completion in row["completions"]
    ]
    return {
        "version": row["version"],
        "index": row["index"],
        "task": row["task"],
        "prompt": row["prompt"][:MAX_CHARS],
        "answer": row["answer"],
        "mean": fmean(rewards) if rewards else None,
        "completions": completions[:MAX_COMPLETIONS],
    }


def _completion(completion: Mapping[str, Any], advantage: float | None) -> dict[str, Any]:
    reward, logprobs = completion["reward"], completion["logprobs"][:MAX_TOKENS]
    return {
        "text": completion["text"][:MAX_CHARS],
        "reward": None if reward is None else round(reward, 4),
        "error": completion.get("error", "")[:MAX_CHARS],
        "advantage": None if advantage is None else round(advantage, 4),
        "num_tokens": completion["num_tokens"],
        "finish_reason": completion["finish_reason"],
        "tokens": completion["tokens"][:MAX_TOKENS],
        "logprobs": [None if logprob is None else round(logprob, 3) for logprob in logprobs],
        "cut": len(completion["tokens"]) > MAX_TOKENS,
    }
