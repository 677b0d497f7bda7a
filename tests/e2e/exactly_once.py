"""Check a run directory for properties that kills and resumes must preserve."""

import json
import pickle
from collections import Counter
from typing import Any

from tests.e2e.conftest import Finished
from titanrl.metrics.reading import open_run
from titanrl.replay.groups import BufferState

OVERLAPPING = (
    "max_staleness=1",
    "rollout.window=0.5",
    "algorithm.updates_per_publish=2",
    "replay={fraction: 0.5, capacity: 16, max_age: 8}",
    "generator.on_update=continue",
    "logging.rollouts_per_step=8",
)
"""Overrides of an asynchronous run with a window, two updates per publication, and replay."""


def trained_positions(run: Finished) -> list[int]:
    """Return the positions of all prompts that were trained on; the run must set `logging.rollouts_per_step=8`."""
    lines = (run.run_dir / "advantages.jsonl").read_text().splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    assert Counter(row["step"] for row in rows) == {row["step"]: 8 for row in run.steps}
    return [row["index"] for row in rows]


def check_every_prompt_once(run: Finished) -> None:
    """Compare the trained prompts with the last checkpoint and the dropped ones, and the counts and files with both."""
    last = run.steps[-1]
    trained = trained_positions(run)
    folder = run.run_dir / "checkpoints" / f"step-{last['step']}"
    state = pickle.loads((folder / "groups" / "records.pkl").read_bytes())
    assert isinstance(state, BufferState)
    waiting = [group.record.index for group in state.ready]
    kept = [*trained, *waiting, *state.in_flight]
    assert len(kept) == len(set(kept)), "a prompt is trained on twice"
    dropped = set(range(state.next_index)) - set(kept)
    drops = [event for event in run.events() if event["kind"] == "drop"]
    assert {event["reason"] for event in drops} <= {"no signal"}, "only a batch in which no group has a signal is dropped"
    assert len(dropped) == sum(event["groups"] for event in drops)
    assert max(kept) < state.next_index
    finished = [*trained, *dropped]

    recorded = {row["index"]: row for row in run.rollouts()}
    assert len(recorded) == len(run.rollouts()), "a group is recorded twice"
    assert recorded.keys() >= {*finished, *waiting}
    completions = [completion for index in finished for completion in recorded[index]["completions"]]
    assert last["count/prompts"] == len(finished)
    assert last["count/rollouts"] == len(completions)
    assert last["count/generated_tokens"] == sum(completion["num_tokens"] for completion in completions)
    steps = [row["count/trained_tokens"] for row in run.steps]
    assert steps == sorted(steps)
    check_files(run)


def check_files(run: Finished) -> None:
    """Check that no line is missing, torn or duplicated."""
    assert [row["step"] for row in run.steps] == list(range(1, len(run.steps) + 1))
    for name in ("metrics", "advantages", "events"):
        for line in (run.run_dir / f"{name}.jsonl").read_text().splitlines():
            json.loads(line)
    for group in open_run(run.run_dir).groups():
        group.tokens()
    once = [event for event in run.events() if event["kind"] in ("publication", "checkpoint", "drop")]
    keys = [(event["kind"], event.get("step", event.get("version")), event.get("reason")) for event in once]
    assert len(set(keys)) == len(keys)
    versions = [event["version"] for event in once if event["kind"] == "publication"]
    assert versions == sorted(versions)
