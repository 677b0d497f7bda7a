"""The record of a real run, compared with numbers computed here from its rewards, its tokens and its model."""

import json
import shutil
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
import transformers
from prometheus_client.parser import text_string_to_metric_families

from tests.collector import Collector
from tests.e2e import slow_once
from tests.e2e.conftest import Finished, Start
from tests.metrics.test_timeline import SCHEMA
from tests.ports import free_port
from titanrl.carriers.record import parts_of, read_lines
from titanrl.commands import runs
from titanrl.metrics.reading import RecordedGroup, RunRecord, TrainedSegment, open_run
from titanrl.metrics.timeline import Window, usages
from titanrl.run.explanation import explain

SETTINGS = ("num_steps=2", "checkpoint.every_steps=1", "logging.rollouts_per_step=8", "evaluation.num_prompts=8")
PLANTED = f"data.rewards={{answer: reasoning_gym, slow: {{function: '{slow_once.__file__}:slow', weight: 0.0}}}}"


@dataclass(frozen=True)
class Lived(Finished):
    """A finished run, and when its command was started and ended."""

    start: float
    end: float
    scraped: str
    """Metrics as Prometheus read them after the first step."""
    collector: Collector
    """Received spans and metrics."""


@pytest.fixture(scope="module")
def finished(start_run: Start, plain_run: Finished) -> Lived:
    start, port = time.time(), free_port()
    collector = Collector()
    telemetry = (f"logging.metrics_port={port}", f"logging.otlp_endpoint={collector.url}")
    command = start_run("recorded", *plain_run.as_start, *SETTINGS, PLANTED, "logging.evaluation_prompts=5", *telemetry)
    command.wait_for_step(1)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as response:
        scraped = response.read().decode()
    run = command.finish()
    collector.close()
    assert run.code == 0, run.output
    return Lived(run.code, run.output, run.run_dir, start, time.time(), scraped, collector)


def trained_groups(run: RunRecord, step: int) -> list[RecordedGroup]:
    """Return the groups of a step's batch; a synchronous batch is the next eight prompts."""
    return [group for group in run.groups() if group.index // 8 == step - 1]


def tokens_of(groups: Sequence[RecordedGroup], trained: TrainedSegment) -> Mapping[str, Any]:
    (group,) = (group for group in groups if group.index == trained.index)
    completion, segment = group.place_of(trained.segment)
    return group.tokens()[completion][segment]


def test_recorded_advantages_and_weights_equal_a_hand_computation(finished: Finished) -> None:
    run = open_run(finished.run_dir)
    for step in (1, 2):
        groups = trained_groups(run, step)
        assert len(groups) == 8
        num_tokens = sum(completion.num_tokens for group in groups for completion in group.completions)
        trained = [segment for segment in run.trained() if segment.step == step]
        # Groups whose rewards are all equal have no gradient, so they are not computed.
        with_signal = [group for group in groups if len({completion.reward for completion in group.completions}) > 1]
        assert with_signal
        assert [(segment.index, segment.segment) for segment in trained] == [
            (group.index, number) for group in with_signal for number in range(8)
        ]
        for segment in trained:
            (group,) = (group for group in groups if group.index == segment.index)
            rewards = [completion.reward for completion in group.completions]
            expected = rewards[segment.segment] - np.mean(rewards)  # type: ignore[arg-type, operator]
            columns = segment.columns()
            assert columns["advantages"] == pytest.approx(expected, abs=1e-6)
            assert columns["weights"] == pytest.approx(1.0 / num_tokens, rel=1e-6)  # a mean over all tokens of the batch
            assert (segment.version, segment.update, segment.mean_weight) == (step - 1, 0, 1.0)


def test_explained_losses_of_all_tokens_add_up_to_the_loss_of_the_step(finished: Finished) -> None:
    run = open_run(finished.run_dir)
    for step in (1, 2):
        indices = {segment.index for segment in run.trained() if segment.step == step}
        explained = [segment for index in indices for segment in explain(run, step, index)]
        total = sum(float(segment.columns["loss"].sum()) for segment in explained)
        assert total == pytest.approx(finished.steps[step - 1]["loss/policy"], abs=1e-6)
        groups = trained_groups(run, step)
        for segment in explained:
            (group,) = (group for group in groups if group.index == segment.index)
            tokens = group.tokens()[segment.segment][0]
            assert segment.columns["token_id"].tolist() == tokens["token_ids"][tokens["mask"]].tolist()


def test_recorded_log_probabilities_equal_those_of_transformers(finished: Finished, plain_run: Finished) -> None:
    run = open_run(finished.run_dir)
    groups = trained_groups(run, 1)
    model = transformers.AutoModelForCausalLM.from_pretrained(plain_run.run_dir / "checkpoints/final", dtype=torch.float64)
    differences = []
    for segment in (segment for segment in run.trained() if segment.step == 1):
        tokens, columns = tokens_of(groups, segment), segment.columns()
        token_ids = torch.tensor(tokens["token_ids"].astype(np.int64))[None]
        with torch.no_grad():
            logprobs = model(token_ids).logits[0, :-1].log_softmax(-1)
        positions = columns["positions"].astype(np.int64)
        assert positions.tolist() == np.flatnonzero(tokens["mask"]).tolist()
        expected = logprobs[positions - 1, token_ids[0, positions]].numpy()
        differences += [np.abs(columns["logprobs"] - expected), np.abs(columns["generator_logprobs"] - expected)]
        assert columns["generator_logprobs"].tolist() == tokens["logprobs"][positions].tolist()
        assert columns["versions"].tolist() == tokens["versions"][positions].tolist() == [0] * len(positions)
    assert np.concatenate(differences).mean() < 1e-6
    assert np.concatenate(differences).max() < 1e-5  # a float32 model


def test_evaluation_samples_of_two_versions_have_the_same_prompts(finished: Finished) -> None:
    run = open_run(finished.run_dir)
    samples = run.evaluations("chain_sum")
    assert [(sample.version, sample.index) for sample in samples] == [(0, n) for n in range(5)] + [(2, n) for n in range(5)]
    before, after = samples[:5], samples[5:]
    assert [sample.rendered for sample in before] == [sample.rendered for sample in after]
    assert all(sample.rendered.startswith(sample.prompt) for sample in samples)
    for sample in samples:
        (completion,) = sample.completions
        assert completion.reward == float(completion.text.endswith(f"<answer>{sample.answer}</answer>"))
        (segment,) = sample.tokens()[0]
        assert "".join(run.token_texts(segment["token_ids"])).startswith(sample.rendered)


def test_spans_and_named_waits_cover_the_lifetime_of_every_process(finished: Lived) -> None:
    run = open_run(finished.run_dir)
    processes = {process.name: process for process in run.processes()}
    assert processes.keys() == {"controller", "trainer_0", "generator_0_0", "rollout_0_0", "store_0"}
    whole = Window(min(process.start for process in processes.values()), max(process.end for process in processes.values()))
    shares = {usage.process: usage for usage in usages(processes.values(), run.spans(), whole)}
    assert {name: usage.unknown for name, usage in shares.items() if usage.unknown > 0.02} == {}
    controller = processes["controller"]
    seen = finished.end - finished.start  # on a busy machine, the kernel takes half a second to end a process
    assert seen - (controller.end - controller.start) < 0.02 * seen + 0.5
    for name, process in processes.items():  # the last output of a process is near its end
        log = finished.run_dir / "logs" / f"{name}.log"
        assert name == "controller" or log.stat().st_mtime < process.end + 0.02 * (process.end - process.start)


def test_planted_sleep_is_work_of_its_process_and_a_wait_of_the_others(finished: Lived) -> None:
    run = open_run(finished.run_dir)
    score = max((span for span in run.spans("rollout_0_0") if span.name == "score"), key=lambda span: span.seconds)
    assert 0.98 * slow_once.SLEEP_S < score.seconds < 2 * slow_once.SLEEP_S
    asleep = Window(score.start, score.start + score.seconds)
    shares = {usage.process: usage for usage in usages(run.processes(), run.spans(), asleep)}
    assert shares["rollout_0_0"].busy > 0.98
    assert shares["trainer_0"].waiting["idle"] > 0.98
    assert shares["generator_0_0"].waiting["idle"] > 0.95
    assert shares["controller"].waiting["wait for rollout.evaluate"] > 0.98
    assert sum(shares["store_0"].waiting.values()) > 0.95


def test_timeline_of_a_run_is_a_valid_trace(finished: Lived, tmp_path: Path) -> None:
    runs.timeline([str(finished.run_dir), "--output", str(tmp_path / "timeline.json")])
    trace = json.loads((tmp_path / "timeline.json").read_text())
    jsonschema.validate(trace, SCHEMA)
    events = trace["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "i"} >= {"step 1", "step 2", "checkpoint", "start"}
    assert sorted(event["args"]["version"] for event in events if event["ph"] == "f") == [0, 1, 2]


def test_recorded_spans_name_work_and_waits(finished: Lived) -> None:
    run = open_run(finished.run_dir)
    found = {(span.process, span.name) for span in run.spans()}
    assert found >= {
        ("controller", "rollout"),
        ("controller", "wait for trainer.optim_step"),
        ("trainer_0", "compute"),
        ("trainer_0", "push"),
        ("trainer_0", "idle"),
        ("generator_0_0", "decode"),
        ("generator_0_0", "pull"),
        ("controller", "prepare the run"),
        ("controller", "write the report"),
        ("rollout_0_0", "wait for a slot"),
        ("rollout_0_0", "wait for the generators"),
        ("rollout_0_0", "score"),
        ("store_0", "BufferActor.take_batch"),
        ("store_0", "wait for groups"),
        ("store_0", "wait for a free slot"),
    }
    steps = [span.step for span in run.spans("controller") if span.name == "step"]
    assert steps == [1, 2]
    assert [span.version for span in run.spans("trainer_0") if span.name == "push"] == [0, 1, 2]


def test_prometheus_scrapes_the_newest_step_and_live_processes(finished: Lived) -> None:
    samples = [sample for family in text_string_to_metric_families(finished.scraped) for sample in family.samples]
    assert {sample.labels["run"] for sample in samples if "run" in sample.labels} == {"recorded"}
    found = {
        (sample.name, *(text for name, text in sample.labels.items() if name != "run")): sample.value for sample in samples
    }
    step = found["titanrl_step",]
    (row,) = (row for row in finished.steps if row["step"] == step)
    metrics = {key[1]: value for key, value in found.items() if key[0] == "titanrl_metric"}
    wanted = {name: value for name, value in row.items() if "/" in name and not name.startswith("count/")}
    assert {name: metrics[name] for name in wanted} == wanted
    assert found["titanrl_count_total", "rollouts"] == 64 * step
    processes = {key[1]: value for key, value in found.items() if key[0] == "titanrl_process_up"}
    assert processes == dict.fromkeys(("trainer_0", "generator_0_0", "rollout_0_0", "store_0"), 1.0)
    assert found["titanrl_events_total", "fault"] == 0


def test_collector_receives_every_span_and_value_of_the_run(finished: Lived) -> None:
    run, received = open_run(finished.run_dir), finished.collector.spans
    roots = {span.id: span for span in received if not span.parent}
    assert [span.name for span in roots.values()] == ["rl.start_the_processes", "rl.step", "rl.step", "rl.finish"]
    assert all(span.trace == roots[span.parent].trace for span in received if span.parent)

    for process in run.processes():
        own = [span for span in received if span.resource["rl.process"] == process.name and span.name != "rl.finish"]
        recorded = run.spans(process.name)
        for sent, wanted in (
            ([span.start for span in own], [span.start for span in recorded]),
            ([span.seconds for span in own], [span.seconds for span in recorded]),
        ):
            assert len(sent) == len(wanted)
            assert np.abs(np.sort(sent) - np.sort(wanted)).max() < 1e-5
    processes = {span.resource["rl.process"] for span in received if span.trace == list(roots.values())[1].trace}
    assert processes == {"controller", "trainer_0", "generator_0_0", "rollout_0_0", "store_0"}
    points = {(point.name, round(point.time, 3)): point.value for point in finished.collector.points}
    for row in finished.steps:
        values = {f"rl.{name.replace('/', '.')}": value for name, value in row.items() if "/" in name and value is not None}
        assert {name: points[name, round(row["time"], 3)] for name in values} == values
    events = {name for root in roots.values() for name, _ in root.events}
    assert events >= {"rl.start", "rl.publication", "rl.checkpoint", "rl.end"}


def test_start_of_a_run_is_recorded(finished: Finished) -> None:
    (start,) = open_run(finished.run_dir).starts()
    assert (start["kind"], start["packages"]["numpy"]) == ("start", np.__version__)
    assert "titanrl.grpo" in start["command"]
    assert start["cores"] >= 1


def raw(run: RunRecord, kind: str) -> list[dict[str, Any]]:
    """Return the lines of a kind without what depends on the time."""
    lines = [line for part in parts_of(run.path, kind) for line in read_lines(part.path) if "index" in line]
    return [{**line, "time": 0, "generate_s": 0, "score_s": 0, "columns": 0} for line in lines]


def trained_values(run: RunRecord) -> list[dict[str, Any]]:
    """Return what the trainer recorded, without times and places."""
    return [
        segment.model_dump(exclude={"time", "place"}) | {name: column.tolist() for name, column in segment.columns().items()}
        for segment in run.trained()
    ]


def test_resumed_run_records_every_step_once(finished: Finished, start_run: Start) -> None:
    whole = replace(finished, run_dir=finished.run_dir.with_name("whole"))
    shutil.copytree(finished.run_dir, whole.run_dir)
    shutil.rmtree(finished.run_dir / "checkpoints/step-2")
    for part in parts_of(finished.run_dir, "trained"):
        with part.path.open("ab") as file:
            file.write(b'{"step":2,"upda')  # as a killed process leaves it
    resumed = start_run("recorded", "logging.otlp_endpoint=null", resume=True).finish()  # its collector has ended
    assert resumed.code == 0, resumed.output
    before, after = open_run(whole.run_dir), open_run(resumed.run_dir)
    for kind in ("rollouts", "trained", "evaluations"):
        assert sorted(raw(before, kind), key=repr) == sorted(raw(after, kind), key=repr), kind
    assert [start["kind"] for start in after.starts()] == ["start", "resume"]
    assert trained_values(before) == trained_values(after)
    assert [group.tokens()[0][0]["token_ids"].tolist() for group in before.groups()] == [
        group.tokens()[0][0]["token_ids"].tolist() for group in after.groups()
    ]
