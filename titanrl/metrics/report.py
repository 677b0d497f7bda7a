"""The page that a run leaves behind: `report.html`, one file that opens anywhere, without a server or a network."""

import json
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from titanrl.algorithms.advantages import group_advantages
from titanrl.config import AlgorithmConfig, load_config
from titanrl.metrics.run_directory import read_metrics, read_rollouts, replace_text
from titanrl.metrics.series import Rows, by_step, first_and_last_five, heldout_tasks, phase_seconds, series
from titanrl.metrics.text import count

TEMPLATE = Path(__file__).with_name("report_template.html.j2")
FIRST_BYTES = 1_000_000
"""Sampled groups shown from the start of the run, in bytes of the page."""
NEWEST_BYTES = 2_500_000
"""Sampled groups shown from its end."""
MAX_COMPLETIONS = 64
"""Completions shown of one group."""
MAX_TOKENS = 400
"""Tokens shown of one completion."""
MAX_CHARS = 4000
"""Characters shown of a prompt, and kept of a completion for the search."""


class Figure(NamedTuple):
    """One of the large numbers at the top."""

    label: str
    value: str
    note: str


def write_report(run_dir: Path, summary: Mapping[str, str]) -> Path:
    """Write `report.html` from what lies in `run_dir`, and return its path.

    Args:
        run_dir: A run directory; each of `metrics.jsonl`, `rollouts.jsonl` and `config.yaml` may be missing.
        summary: `outcome`, one sentence that says what was learned; anything else is listed as label and text.
    """
    # Slow to import, and only needed here.
    import jinja2

    from titanrl.metrics.curves import draw_curves

    metrics, config = run_dir / "metrics.jsonl", run_dir / "config.yaml"
    rows = by_step(read_metrics(metrics)) if metrics.exists() else []
    algorithm = load_config(config).algorithm if config.exists() else AlgorithmConfig()
    samples, total = _sampled_groups(run_dir / "rollouts.jsonl", algorithm)
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        name=run_dir.resolve().name,
        outcome=summary.get("outcome", ""),
        facts={label: text for label, text in summary.items() if label != "outcome"},
        figures=_figures(rows),
        config=config.read_text(encoding="utf-8") if config.exists() else "",
        curves=draw_curves(rows),
        # Without "<", nothing in the data can end the script element that holds it.
        samples=f"[{','.join(samples)}]".replace("<", "\\u003c") if samples else "",
        samples_note=_samples_note(len(samples), total),
    )
    report = run_dir / "report.html"
    replace_text(report, page)
    return report


def _figures(rows: Rows) -> list[Figure]:
    figures = []
    if rewards := series(rows, "reward/mean"):
        first, last = first_and_last_five(rewards)
        figures.append(Figure("Reward", f"{first:.3f} \u2192 {last:.3f}", "means of the first and last five steps"))
    for task in heldout_tasks(rows):
        if points := series(rows, f"eval/{task}/mean"):
            (first_step, before), (last_step, after) = points[0], points[-1]
            figures.append(
                Figure(f"Held-out {task}", f"{before:.3f} \u2192 {after:.3f}", f"steps {first_step} and {last_step}")
            )
    if rows:
        figures.append(Figure("Steps", f"{rows[-1]['step']}", f"policy version {rows[-1]['version']}"))
    if seconds := [sum(phases.values()) for row in rows if (phases := phase_seconds(row))]:
        figures.append(Figure("Step time", f"{median(seconds):.2f} s", "median over steps"))
    if rates := series(rows, "perf/gen_tokens_per_s"):
        figures.append(Figure("Generator", f"{count(median(rate for _, rate in rates))} tokens/s", "median over steps"))
    if mismatch := series(rows, "mismatch/logprob_abs_max"):
        largest = max(value for _, value in mismatch)
        figures.append(Figure("Largest mismatch", f"{largest:.1e}", "nats on one token, trainer against generator"))
    return figures


def _sampled_groups(path: Path, algorithm: AlgorithmConfig) -> tuple[list[str], int]:
    """The first and the newest groups as JSON texts, and how many groups there are.

    A resumed run samples some groups once more; the newer line of a group wins.
    """
    first: dict[tuple[Any, ...], str] = {}
    newest: deque[tuple[tuple[Any, ...], str]] = deque()
    first_bytes = newest_bytes = 0
    keys = set()
    for row in read_rollouts(path) if path.exists() else ():
        key, text = (row["version"], row["task"], row["index"]), json.dumps(_group(row, algorithm), separators=(",", ":"))
        keys.add(key)
        if not newest and first_bytes + len(text) <= FIRST_BYTES:
            first[key] = text
            first_bytes += len(text)
            continue
        newest.append((key, text))
        newest_bytes += len(text)
        while newest_bytes > NEWEST_BYTES:
            newest_bytes -= len(newest.popleft()[1])
    return list((first | dict(newest)).values()), len(keys)


def _group(row: Mapping[str, Any], algorithm: AlgorithmConfig) -> dict[str, Any]:
    rewards_G = [completion["reward"] for completion in row["completions"]]
    # Of the REINFORCE++ methods, before they are standardized: the report does not know the batch.
    advantages_G = group_advantages(rewards_G, algorithm.advantage, std_ddof=algorithm.std_ddof, pass_k=algorithm.pass_k)
    pairs = zip(row["completions"], advantages_G, strict=True)
    return {
        "version": row["version"],
        "index": row["index"],
        "task": row["task"],
        "prompt": row["prompt"][:MAX_CHARS],
        "answer": row["answer"],
        "mean": fmean(rewards_G),
        "completions": [_completion(completion, advantage) for completion, advantage in pairs][:MAX_COMPLETIONS],
    }


def _completion(completion: Mapping[str, Any], advantage: float) -> dict[str, Any]:
    logprobs = completion["logprobs"][:MAX_TOKENS]
    return {
        "text": completion["text"][:MAX_CHARS],
        "reward": round(completion["reward"], 4),
        "advantage": round(advantage, 4),
        "num_tokens": completion["num_tokens"],
        "finish_reason": completion["finish_reason"],
        "tokens": completion["tokens"][:MAX_TOKENS],
        "logprobs": [None if logprob is None else round(logprob, 3) for logprob in logprobs],
        "cut": len(completion["tokens"]) > MAX_TOKENS,
    }


def _samples_note(shown: int, total: int) -> str:
    return f"All {total} recorded groups." if shown == total else f"The first and the newest of {total} recorded groups."
