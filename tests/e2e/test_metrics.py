"""Metrics of a real run, compared with their documentation."""

import json
import re

from tests.documented import TEXT, undocumented
from tests.e2e.conftest import Finished
from titanrl.metrics.reading import read_metrics


def test_every_metric_of_a_run_is_documented(plain_run: Finished) -> None:
    rows = read_metrics(plain_run.run_dir / "metrics.jsonl")
    assert len({name for row in rows for name in row}) > 40
    assert undocumented(rows) == set()


def test_every_event_of_a_run_is_documented(plain_run: Finished) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", TEXT.partition("## Events")[2], re.MULTILINE)
    fields = {kind: set(re.findall(r"`(\w+)`", text)) for kind, text in rows}
    events = [json.loads(line) for line in (plain_run.run_dir / "events.jsonl").read_text().splitlines()]
    assert {event["kind"] for event in events} >= {"start", "publication", "checkpoint"}
    for event in events:
        assert event.keys() - {"time", "kind"} <= fields[event["kind"]], event


def test_speed_metrics_of_a_run_are_plausible(plain_run: Finished) -> None:
    for row in plain_run.steps:
        assert 0.0 <= row["perf/trainer_idle_frac"] < 1.0
        assert 0.0 <= row["perf/generator_idle_frac"] < 1.0
        assert row["perf/gen_tokens_per_s"] > 0.0
        # The trainer processes at least the sampled tokens of a step while it is busy.
        assert row["perf/train_tokens_per_s"] * row["time/step_s"] > row["tokens/response_len_mean"]
