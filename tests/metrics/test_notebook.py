"""A run in a notebook: curves of a known shape, escaped texts, and what a broken record leaves out."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.recorded import record_group
from titanrl.carriers.types import StepMetrics
from titanrl.config import load_config
from titanrl.launch.supervision import ActorDiedError
from titanrl.metrics.reading import RunRecord
from titanrl.metrics.report import HEIGHT, MARGIN, NOTEBOOK_POINTS, WIDTH, curve_svg, run_html
from titanrl.metrics.run_directory import RunDirectory
from titanrl.session.sampling import Sample
from titanrl.session.session import Session

HOSTILE = "</pre><script>alert(1)</script>\x1b[2J&amp;"


def points_of(svg: str) -> list[tuple[float, float]]:
    found = re.search('points="([^"]*)"', svg)
    assert found
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in found[1].split())]


def test_curve_is_scaled_to_its_box() -> None:
    points = points_of(curve_svg([(1, 2.0), (2, 4.0), (3, 3.0)], "reward"))
    middle = (MARGIN + HEIGHT - MARGIN) / 2
    assert points == [(MARGIN, HEIGHT - MARGIN), (WIDTH / 2, MARGIN), (WIDTH - MARGIN, middle)]
    assert "polyline" not in curve_svg([(1, 2.0)], "one step")
    assert {y for _, y in points_of(curve_svg([(1, 2.0), (2, 2.0)], "flat"))} == {middle}


def test_long_curve_is_drawn_as_means_of_neighboring_steps() -> None:
    points = points_of(curve_svg([(step, float(step % 2)) for step in range(1, 100_001)], "reward"))
    assert len(points) <= NOTEBOOK_POINTS
    assert len(curve_svg([(step, 0.0) for step in range(100_000)], "reward")) < 10_000


@pytest.mark.parametrize("num_steps", [0, 1, 12])
def test_page_is_well_formed_and_escapes_every_text(tmp_path: Path, num_steps: int) -> None:
    directory = RunDirectory(tmp_path / "run")
    for step in range(1, num_steps + 1):
        values = {"reward/mean": 0.1 * step, f"eval/{HOSTILE}/mean": 0.5, "grad/norm": float("nan")}
        directory.log(StepMetrics(step=step, version=step, values=values))
    directory.close()
    for index in range(num_steps):
        completion = {"text": HOSTILE + "x" * 2_000, "num_tokens": 2, "reward": None if index % 2 else 1.0}
        line = {"index": index, "version": 1, "rendered": HOSTILE, "completions": [completion, completion]}
        record_group(tmp_path / "run", line)
    page = run_html(RunRecord(tmp_path / "run"), HOSTILE, "idle")
    assert "<script" not in page
    assert "\x1b" not in page
    root = ElementTree.fromstring(page)
    assert len(root.findall(".//svg")) == (2 if num_steps else 0), "none of a metric without numbers"
    summaries = [each.text for each in root.findall(".//summary")]
    assert len(summaries) == min(num_steps, 4)
    if num_steps == 12:
        assert summaries[:2] == ["prompt 11, version 1, no reward", "prompt 10, version 1, reward 1"]
        captions = [each.text for each in root.findall(".//figcaption")]
        assert captions[1] == "mean reward: 0.3 \u2192 1 (means of 5 steps)"


def test_objects_of_a_notebook_are_shown_in_one_short_line(tmp_path: Path) -> None:
    shown = repr(load_config("quickstart", ["seed=7"]))
    assert "seed=7" in shown
    assert "weights=" not in shown, "a section without changed keys"
    metrics = StepMetrics(step=3, version=2, values={"grad/norm": 1.0, "reward/mean": 0.51234, "sync/wait_s": 0.1})
    assert repr(metrics) == "<StepMetrics step=3 version=2: reward/mean=0.5123, 2 more values>"
    run = RunRecord(tmp_path)
    assert repr(run) == f"<RunRecord of {tmp_path}, no step yet>"
    directory = RunDirectory(tmp_path)
    directory.log(metrics)
    directory.close()
    assert repr(run) == f"<RunRecord of {tmp_path}, step 3>"
    many = np.arange(3)
    sample = Sample(prompt=many, tokens=many, logprobs=many, versions=many, text="9", finish_reason="stop")
    assert repr(sample) == "Sample(text='9', finish_reason='stop')"
    session: Any = object.__new__(Session)
    session._training, session._sampler, session.run_dir = None, SimpleNamespace(config=load_config("quickstart")), tmp_path
    supervisor = SimpleNamespace(failure=None)
    session._parts = SimpleNamespace(assembly=SimpleNamespace(shared=SimpleNamespace(supervisor=supervisor)))
    assert repr(session) == f"<Session for sampling in {tmp_path}>"
    assert repr(session.sampling) == "<SamplingClient of the newest version of quickstart>"
    supervisor.failure = ActorDiedError("rank 1 died")
    assert repr(session) == f"<Session for sampling in {tmp_path}, failed: rank 1 died>"
