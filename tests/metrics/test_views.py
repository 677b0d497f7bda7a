"""Pages of runs: curves, states, findings, groups and timelines."""

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.foreign import ROOT_ONLY, as_nobody, shared_folder
from tests.metrics.test_report import DOCS, completion, group
from tests.recorded import record, record_group
from titanrl.carriers.record import FOLDER, HOST, encode
from titanrl.metrics.run_directory import RunLock
from titanrl.metrics.views import MAX_POINTS, MAX_STATES, MetricTable, RunView, attention, find_runs, unit_of


def write_metrics(run_dir: Path, *lines: dict[str, Any]) -> RunView:
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return RunView(run_dir, run_dir.name)


def write_events(run_dir: Path, *events: dict[str, Any]) -> RunView:
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "events.jsonl").open("a") as file:
        file.writelines(json.dumps({"time": float(number), **event}) + "\n" for number, event in enumerate(events))
    return RunView(run_dir, run_dir.name)


def test_table_follows_a_file_and_merges_the_lines_of_a_step(tmp_path: Path) -> None:
    write_metrics(tmp_path, {"step": 1, "a": 1.0}, {"step": 3, "a": 3.0, "b": None})
    table = MetricTable(tmp_path / "metrics.jsonl")
    table.refresh()
    assert table.names == ["a"]
    write_metrics(tmp_path, {"step": 2, "a": 2.0}, {"step": 1, "c": 9.0}, {"step": 3, "a": 4.0})
    table.refresh()
    assert table.points("a") == [(1.0, 1.0), (2.0, 2.0), (3.0, 4.0)]
    assert table.points("c") == [(1.0, 9.0)]
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": 5.0}\n')  # as after a resume
    table.refresh()
    assert table.points("a") == [(1.0, 5.0)]


@pytest.mark.parametrize("count", [1, 2, MAX_POINTS, MAX_POINTS + 1, 100_000])
def test_curve_of_any_length_keeps_its_extremes(tmp_path: Path, count: int) -> None:
    table = MetricTable(tmp_path / "metrics.jsonl")
    for step in range(1, count + 1):
        table._add({"step": step, "time": 100.0 + step, "a": float(step % 7), "count/generated_tokens": step * 10})
    table._add({"step": count // 2 + 1, "a": 50.0})
    table.refresh = lambda: None  # type: ignore[method-assign]
    table._order = np.arange(count)
    found = table.charts(["a", "missing"])
    (axis,), curve = found["axes"], found["curves"]["a"]
    width = {1: 1, 2: 1, MAX_POINTS: 1, MAX_POINTS + 1: 2, 100_000: 256}[count]
    assert len(curve["mean"]) == len(axis["step"]) == math.ceil(count / width) <= MAX_POINTS
    assert max(curve.get("high", curve["mean"])) == 50.0
    assert all(place >= 1 for place in axis["step"])
    assert axis["time"][0] < axis["time"][-1] or count == 1
    assert axis["tokens"][-1] <= 10 * count
    values = [step % 7 for step in range(1, count + 1)]
    values[count // 2] = 50
    weights = np.diff([*range(0, count, width), count])
    assert np.average(curve["mean"], weights=weights) == pytest.approx(np.mean(values), rel=1e-4)


@pytest.mark.parametrize("seed", range(8))
def test_changes_of_a_growing_run_give_its_curves(seed: int, tmp_path: Path) -> None:
    random, file, names = np.random.default_rng(seed), tmp_path / "metrics.jsonl", ["a", "sometimes", "eval/x/mean"]
    lines: list[dict[str, Any]] = []
    table = MetricTable(file)
    shown: dict[str, dict[str, Any]] = {}
    state, num_whole = "", 0
    for _ in range(60):
        if random.random() < 0.05 and lines:  # a resume removes lines
            del lines[int(random.integers(len(lines))) :]
        step = max((line["step"] for line in lines), default=0)
        for _ in range(int(random.integers(0, 8))):
            step += int(random.integers(1, 3))
            lines.append({"step": step, "time": 9.0 + step, "a": float(random.normal()), "count/trained_tokens": 5 * step})
            if random.random() < 0.5:
                lines[-1]["sometimes"] = float(random.normal())
            if random.random() < 0.3:  # of an earlier step, which may have no other line
                lines.append({"step": max(1, step - int(random.integers(0, 9))), "eval/x/mean": float(random.normal())})
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        table.refresh()
        found, whole = table.charts(names, 20, state), table.charts(names, 20)
        state = found["state"]
        num_whole += all(curve["at"] == 0 for curve in found["curves"].values())
        known, shown = shown, {}
        for name, curve in found["curves"].items():
            shown[name] = {**curve, **found["axes"][curve["axis"]]}
            for key, part in shown[name].items():
                if isinstance(part, list) and key != "ends" and curve["at"]:
                    shown[name][key] = [*known[name][key][: curve["at"]], *part]
            expected = {**whole["curves"][name], **whole["axes"][whole["curves"][name]["axis"]]}
            assert all(shown[name][key] == expected[key] for key in expected if key not in ("at", "axis"))
    assert num_whole < 58


def test_ends_do_not_overlap_and_an_evaluation_has_no_means(tmp_path: Path) -> None:
    view = write_metrics(
        tmp_path, *[{"step": step, "reward/mean": float(step), "eval/sums/mean": step / 10} for step in (1, 2, 3)]
    )
    curves = view.charts([])["curves"]
    assert curves["reward/mean"]["ends"] == [1.0, 3.0, "first and last step"]
    assert curves["eval/sums/mean"]["ends"] == [0.1, 0.3, "steps 1 and 3"]


def test_units_are_those_of_the_documentation() -> None:
    table = DOCS.read_text().partition("## Names")[2].partition("\n## ")[0]
    documented = re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", table, re.MULTILINE)
    assert len(documented) > 60
    for name, unit in documented:
        shown = unit_of(re.sub(r"<\w+>", "2", name))
        assert shown in {unit.strip(), ""}, (name, unit, shown)


@pytest.mark.parametrize(
    ("end", "state"),
    [
        ({"code": 0, "cause": ""}, ("finished", None)),
        ({"code": 1, "cause": "no memory"}, ("failed", None)),
        ({"code": 143, "cause": "interrupted"}, ("interrupted", "SIGTERM")),
        ({"code": [143], "cause": "no number"}, ("failed", None)),
    ],
)
def test_state_of_a_run_that_ended(tmp_path: Path, end: dict[str, Any], state: tuple[str, str | None]) -> None:
    found = write_events(tmp_path, {"kind": "start"}, {"kind": "end", **end}).state()
    assert (found["state"], found["signal"], found["cause"]) == (*state, end["cause"])
    view, lock = write_events(tmp_path, {"kind": "resume", "step": 1}), RunLock(tmp_path)
    assert view.state()["state"] == "running"
    lock.release()
    assert view.state()["state"] == "failed"  # another process has the id of the killed one


@pytest.mark.parametrize(("lock", "state"), [(f"{2**30} {HOST}", "failed"), ("1 another-host", "unknown"), ("", "unknown")])
def test_killed_run_is_told_from_one_on_another_host(tmp_path: Path, lock: str, state: str) -> None:
    view = write_events(tmp_path, {"kind": "start"})
    (tmp_path / "run.lock").write_text(lock)
    assert view.state()["state"] == state


def titles(view: RunView) -> list[str]:
    view.table.refresh()
    return [note["title"] for note in attention(view.table, view.events)]


def test_healthy_run_needs_no_attention(tmp_path: Path) -> None:
    healthy = {"reward/num_errors": 0, "reward/num_completions": 64, "policy/entropy": 0.5, "time/step_s": 1.0}
    view = write_metrics(tmp_path, *[{"step": step, "reward/mean": step / 50, **healthy} for step in range(1, 41)])
    assert titles(view) == []


def test_planted_faults_are_named(tmp_path: Path) -> None:
    rows = [
        {
            "step": step,
            "reward/num_errors": 3,
            "reward/num_completions": 10,
            "policy/entropy": 1.0 / step**2,
            "group/zero_variance_frac": 0.9,
            "reward/mean": 1 - step / 50,
            "episode/timeout_frac": 0.1,
            "time/step_s": 30.0 if step == 20 else 1.0,
            "perf/trainer_idle_frac": 0.9,
            "perf/generator_idle_frac": 0.8,
            "episode/environment_s_mean": 0.5,
        }
        for step in range(1, 41)
    ]
    write_metrics(tmp_path, *rows)
    view = write_events(
        tmp_path,
        {"kind": "scorer_error", "error": "ZeroDivisionError"},
        {"kind": "stall", "actor": "rollout_0"},
        {"kind": "stall", "actor": "trainer", "endpoint": "close"},  # as the run ended
    )
    found = titles(view)
    assert found == [
        "The environment took too long: 10.0% of the episodes",
        "Rewards failed for 120 of 400 completions (30%)",
        "1 x a request missed its deadline",
        "The entropy has collapsed",
        "The mean reward has fallen",
        "Most groups teach nothing",
        "The rollouts are slow",
        "Slow steps: 1",
    ]
    assert "Most groups teach nothing" not in [each["title"] for each in attention(view.table, (), compares_rewards=False)]
    for advantage, is_told in (("dr_grpo", True), ("gae", False), ("own.py:advantage", False)):
        (tmp_path / "config.yaml").write_text(f"name: a\nalgorithm:\n  advantage: {advantage}\n")
        told = [each["title"] for each in RunView(tmp_path, "run").overview()["attention"]]
        assert ("Most groups teach nothing" in told) == is_told
    notes = {note["title"]: note for note in attention(view.table, view.events)}
    assert "ZeroDivisionError" in notes[found[1]]["text"]
    assert notes["The rollouts are slow"]["text"].endswith("They wait for the environment, which takes 0.5 s per episode.")
    assert notes["Slow steps: 1"]["link"] == "timeline?step=20"


def test_summary_reads_the_end_and_a_small_curve(tmp_path: Path) -> None:
    lines = [{"step": step, "reward/mean": step / 5000, "filler": "x" * 500} for step in range(1, 5001)]
    view = write_metrics(tmp_path, *lines, {"step": 5000, "eval/sums/mean": 0.75})
    (tmp_path / "config.yaml").write_text("name: a\nnum_steps: 6000\n")
    found = view.summary()
    assert (found["step"], found["num_steps"], found["score"], found["score_of"]) == (5000, 6000, 0.75, "sums")
    assert len(found["spark"]) > 50
    assert found["spark"] == sorted(found["spark"])
    assert write_metrics(tmp_path / "empty").summary()["score"] is None


def test_search_lists_groups_and_a_group_has_tokens_with_what_was_computed(tmp_path: Path) -> None:
    for index in range(40):
        text = "a needle here" if index == 7 else "hay"
        record_group(tmp_path, {**group(index, index, completion(text, 1.0), completion("no", 0.0)), "status": "kept"})
    view = RunView(tmp_path, "run")
    found = view.search("NEEDLE")
    assert (found["completions"], found["count"]) == (1, 1)
    assert found["groups"][0]["snippet"] == "a needle here"
    assert found["groups"][0]["found"] == [0]
    newest = view.search(reward=(0.5, None), limit=5)
    assert [each["index"] for each in newest["groups"]] == [39, 38, 37, 36, 35]
    assert [each["index"] for each in view.search(order="oldest", at=5, limit=2)["groups"]] == [5, 6]
    assert newest["status"] == ["kept"]
    whole = view.group(7, {})
    (segment,) = whole["completions"][0]["segments"]
    assert segment == {"texts": ["a", "a"], "logprobs": [-0.12345] * 2, "versions": [7, 7]}
    assert view.group(99, {}) is None


def test_answers_to_a_prompt_are_compared_over_versions(tmp_path: Path) -> None:
    for version in (0, 10):
        for index in (0, 1):
            sample = {"set": "sums", "index": index, "version": version, "prompt": f"p{index}", "rendered": f"<p{index}>"}
            record(tmp_path, "evaluations", {**sample, "completions": [completion(f"v{version}", version / 10)]})
    view = RunView(tmp_path, "run")
    table = view.evaluations()
    assert (table["sets"], table["set"], table["versions"]) == (["sums"], "sums", [0, 10])
    assert [row["rewards"] for row in table["prompts"]] == [[0.0, 1.0]] * 2
    answers = view.answers("sums", 1)
    assert answers["prompt"] == "<p1>"
    assert [(each["version"], each["completions"][0]["text"]) for each in answers["versions"]] == [(0, "v0"), (10, "v10")]


def test_timeline_marks_what_a_process_waits_for(tmp_path: Path) -> None:
    steps = [{"name": "step", "kind": "phase", "start": 10.0 * n, "seconds": 10.0, "step": n} for n in range(1, 6)]
    record(tmp_path, "spans", *steps, process="controller")
    record(
        tmp_path,
        "spans",
        {"name": "decode", "kind": "work", "start": 40.0, "seconds": 15.0},
        {"name": "wait for a request", "kind": "wait", "start": 55.0, "seconds": 5.0},
        process="generator_0_0",
    )
    found = RunView(tmp_path, "run").timeline(steps=2)
    assert (found["start"], found["end"], [mark["step"] for mark in found["steps"]]) == (40.0, 60.0, [4, 5])
    generator = next(process for process in found["processes"] if process["name"] == "generator_0_0")
    assert [(state["kind"], state["seconds"]) for state in generator["states"]] == [("busy", 15.0), ("wait", 5.0)]
    assert generator["busy"] == pytest.approx(0.75)
    assert generator["waits"] == [("wait for a request", pytest.approx(0.25))]
    assert RunView(tmp_path, "run").timeline(steps=1, step=2)["start"] == 20.0


def test_timeline_of_a_resumed_run_leaves_out_the_time_between_its_attempts(tmp_path: Path) -> None:
    for at, first in ((0.0, 1), (1000.0, 3)):
        record(tmp_path, "starts", {"time": at, "kind": "start"}, process="controller")
        steps = [{"name": "step", "kind": "phase", "start": at + 10.0 * n, "seconds": 10.0, "step": first + n} for n in (0, 1)]
        record(tmp_path, "spans", *steps, process="controller")
        work = {"name": "compute", "kind": "work", "start": at, "seconds": 5.0}
        record(tmp_path, "spans", work, process="trainer_0")
        record(tmp_path, "spans", work, process=f"trainer_{first}")
    found = RunView(tmp_path, "run").timeline(steps=3)
    assert (found["start"], found["end"], [mark["step"] for mark in found["steps"]]) == (1000.0, 1020.0, [3, 4])
    assert {process["name"] for process in found["processes"]} == {"controller", "trainer_0", "trainer_3"}
    found = RunView(tmp_path, "run").timeline(steps=3, step=2)
    assert (found["start"], found["end"]) == (10.0, 20.0)
    assert {process["name"] for process in found["processes"]} == {"controller", "trainer_0", "trainer_1"}


def test_periods_that_a_timeline_leaves_out_are_counted(tmp_path: Path) -> None:
    busy = [{"name": "decode", "kind": "work", "start": 2.0 * n, "seconds": 1.0 + n / 10_000} for n in range(1000)]
    record(tmp_path, "spans", *busy, process="generator_0_0")
    (process,) = RunView(tmp_path, "run").timeline()["processes"]
    assert len(process["states"]) <= MAX_STATES
    assert len(process["states"]) + process["left_out"] == 1999
    assert process["busy"] == pytest.approx(0.525, abs=0.001)


def test_configuration_shows_changed_keys_and_survives_another_version(tmp_path: Path) -> None:
    view = write_metrics(tmp_path)
    view.record.path.joinpath("config.yaml").write_text("name: a\nnum_steps: 3\ndata: {task: chain_sum}\nmax_staleness: 1\n")
    assert ["max_staleness", "1", "0"] in view.configuration()["changed"]
    view.record.path.joinpath("config.yaml").write_text("name: a\nno_such_key: 3\n")
    found = view.configuration()
    assert "another version" in found["problem"]
    assert "no_such_key" in found["text"]


def test_runs_are_found_in_a_folder_and_its_folders(tmp_path: Path) -> None:
    for name in ("a", "sweep/b", "sweep/c", "other/deep/d"):
        write_metrics(tmp_path / name)
    assert list(find_runs(tmp_path)) == ["a", "sweep/b", "sweep/c"]
    assert list(find_runs(tmp_path / "a")) == ["a"]


@ROOT_ONLY
def test_runs_of_other_users_do_not_hide_the_own_ones() -> None:
    with shared_folder() as folder:
        for name in ("own", "closed", "secret"):
            write_metrics(folder / name, {"step": 1})
            (folder / name / "config.yaml").write_bytes(b"name: a \xff\n")
        (folder / "closed").chmod(0o700)
        (folder / "listed").mkdir(mode=0o744)
        for file in (folder / "secret").iterdir():
            file.chmod(0o600)

        def look() -> bytes:
            found = find_runs(folder)
            return json.dumps({name: RunView(path, name).summary()["step"] for name, path in found.items()}).encode()

        with as_nobody(look) as found:
            assert json.loads(found.read()) == {"own": 1, "secret": 0}


def test_name_that_is_not_utf8_has_an_address(tmp_path: Path) -> None:
    write_metrics(folder := tmp_path / os.fsdecode(b"a\xff"))
    assert [RunView(folder, folder.name).name, *find_runs(tmp_path), *find_runs(folder)] == [r"a\xff"] * 3


def test_damaged_lines_and_values_do_not_break_a_page(tmp_path: Path) -> None:
    odd = [{"step": "x", "a": 1}, {"a": 2}, {"step": 10**30}]
    view = write_metrics(tmp_path, {"step": 1, "a": math.inf, "reward/mean": 0.5}, *odd)
    write_metrics(tmp_path, {"step": 1, "eval/a/mean": "0.5", "reward/mean": 10**400})
    (tmp_path / "metrics.jsonl").open("a").write("{broken\n[1]\n")
    (tmp_path / "events.jsonl").write_text('{"kind": 3}\n{"kind": "fault", "cause": null, "x": Infinity}\n{}\n')
    (tmp_path / "record").mkdir()
    shown = view.overview()
    assert shown["step"] == 1
    assert "Infinity" not in encode([shown, view.charts([]), view.recent_events(), view.summary()])


@pytest.mark.parametrize("kind", ["device", "fifo", "folder"])
def test_run_whose_files_are_no_regular_files_is_shown_without_waiting(kind: str, tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "events.jsonl", "config.yaml", "run.lock", f"{FOLDER}/rollouts-worker.0.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        if kind == "device":
            path.symlink_to("/dev/zero")
        elif kind == "fifo":
            os.mkfifo(path)
        else:
            path.mkdir()
    view = RunView(tmp_path, "odd")
    assert (view.summary()["state"], view.events, len(view.table)) == ("unknown", [], 0)
    assert view.charts(["reward/mean"])["curves"] == {}
    assert view.search("x")["count"] == 0
