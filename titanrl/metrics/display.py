"""A run as a notebook shows it: its state, its curves, and the last samples, as HTML without scripts or network."""

import html
from collections.abc import Iterator, Sequence
from itertools import islice

from titanrl.base.files import DamagedError
from titanrl.metrics.reading import Hit, RunRecord
from titanrl.metrics.series import Points, Rows, ends_of, heldout_tasks, series

CURVES = {
    "reward/mean": "mean reward",
    "loss/train": "loss",
    "loss/eval": "held-out loss",
    "policy/kl_teacher": "KL from the teacher",
    "policy/entropy": "entropy",
    "grad/norm": "gradient norm",
    "mismatch/logprob_abs_max": "largest mismatch",
    "optim/lr": "learning rate",
    "time/step_s": "step time, s",
}
"""Curves by metric, after those of the evaluation sets."""
MAX_POINTS = 240
"""Points of a curve; longer ones are drawn as means of neighboring steps."""
WIDTH, HEIGHT, MARGIN = 240, 56, 4
"""Size of a curve in pixels."""
NUM_SAMPLES = 4
"""Newest completions shown, of different prompts."""
MAX_CHARS = 600
"""Characters shown of a prompt or a completion."""


def run_html(run: RunRecord, title: str, state: str) -> str:
    """Return the state, curves and last samples of a run. Every text of the run is escaped."""
    rows = run.metrics()
    curves = "".join(_curves(rows)) or "<p>No step yet.</p>"
    samples = "".join(islice(_samples(run), NUM_SAMPLES))
    return (
        f'<div class="titanrl"><p><b>{escaped(title)}</b>: {escaped(state)}</p>'
        f'<div style="display:flex;flex-wrap:wrap;gap:12px">{curves}</div>'
        f"{f'<p>Last samples</p>{samples}' if samples else ''}</div>"
    )


def curve_svg(points: Points, label: str) -> str:
    """Return a line of (step, value) pairs as an SVG, scaled between the lowest and the highest finite value."""
    size = -(-len(points) // MAX_POINTS)
    runs = [points[start : start + size] for start in range(0, len(points), size)]
    thinned = [(sum(step for step, _ in run) / len(run), sum(value for _, value in run) / len(run)) for run in runs]
    (first, _), (last, _), values = thinned[0], thinned[-1], [value for _, value in thinned]
    low, high = min(values), max(values)

    def place(value: float, start: float, end: float, length: int) -> float:
        return MARGIN + (length - 2 * MARGIN) * ((value - start) / (end - start) if end > start else 0.5)

    xy = [(place(step, first, last, WIDTH), HEIGHT - place(value, low, high, HEIGHT)) for step, value in thinned]
    shape = f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in xy)}"/>' if len(xy) > 1 else ""
    end = f'<circle cx="{xy[-1][0]:.1f}" cy="{xy[-1][1]:.1f}" r="2" fill="currentColor"/>'
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escaped(label)}" '
        f'fill="none" stroke="currentColor" stroke-width="1.5">{shape}{end}</svg>'
    )


def _curves(rows: Rows) -> Iterator[str]:
    heldout = {f"eval/{task}/mean": f"held-out {task}" for task in heldout_tasks(rows)}
    for name, label in (heldout | CURVES).items():
        if points := series(rows, name):
            first, last, covered = ends_of(points)
            text = f"{label}: {last:.4g}" if len(points) == 1 else f"{label}: {first:.4g} \u2192 {last:.4g} ({covered})"
            yield f"<figure style='margin:0'>{curve_svg(points, text)}<figcaption>{escaped(text)}</figcaption></figure>"


def _samples(run: RunRecord) -> Iterator[str]:
    hits: Sequence[Hit] = run.search().of_groups()
    for number in reversed(range(len(hits))):
        try:
            hit = hits[number]
        except DamagedError:  # deleted since the search, to keep the size limit
            continue
        completion, reward = hit.completion, hit.completion.reward
        score = "no reward" if reward is None else f"reward {reward:.3g}"
        prompt = _shortened(hit.group.rendered or hit.group.prompt)
        yield (
            f"<details open=''><summary>prompt {hit.group.index}, version {hit.group.version}, {score}</summary>"
            f"<pre style='white-space:pre-wrap'><span style='opacity:0.6'>{escaped(prompt)}</span>"
            f"{escaped(_shortened(completion.text))}</pre></details>"
        )


def escaped(text: str) -> str:
    """Return a text as HTML without markup, control characters and characters that reorder others."""
    return html.escape("".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in text))


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}..."
