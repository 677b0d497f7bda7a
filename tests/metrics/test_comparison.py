"""Comparison of runs: variants, scores with intervals, differing keys, the page, and the command."""

import json
import math
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest

from tests.metrics.test_report import ATTACK, Page
from titanrl.base.errors import TitanRLError
from titanrl.commands.runs import compare
from titanrl.metrics import report
from titanrl.metrics.reading import RunRecord
from titanrl.metrics.report import UNKNOWN, differing_keys, read_runs, score, tables, variants_of


def write_run(folder: Path, config: str, *lines: dict[str, Any]) -> RunRecord:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RunRecord(folder)


def evaluated(*means: float, ci95: float = 0.04) -> list[dict[str, Any]]:
    return [{"step": 10 * k, "eval/sums/mean": mean, "eval/sums/mean_ci95": ci95} for k, mean in enumerate(means)]


@pytest.fixture
def records(tmp_path: Path) -> list[RunRecord]:
    """Three seeds of one setting, and another setting."""
    text = "seed: {}\nname: run{}\nalgorithm:\n  learning_rate: {}\n  loss: ppo\n"
    finals = (0.8, 0.9, 0.7)
    seeds = [write_run(tmp_path / f"s{n}", text.format(n, n, 1e-5), *evaluated(0.1, final)) for n, final in enumerate(finals)]
    return [*seeds, write_run(tmp_path / "fast", text.format(0, 9, 1e-4), *evaluated(0.2, 0.95, 0.5))]


def test_runs_that_differ_in_the_seed_are_one_variant(records: list[RunRecord]) -> None:
    variants = variants_of(read_runs(records))
    assert [variant.name for variant in variants] == ["s0 (3 seeds)", "fast"]
    assert differing_keys(variants) == {"algorithm.learning_rate": [1e-5, 1e-4]}


def test_final_score_has_the_interval_of_the_seeds_or_of_the_evaluation(records: list[RunRecord]) -> None:
    seeds, fast = variants_of(read_runs(records))
    found = score(seeds, "eval/sums/mean")
    assert found.first == pytest.approx(0.1)
    assert found.final == pytest.approx(0.8)
    assert found.final_ci95 == pytest.approx(4.303 * stdev((0.8, 0.9, 0.7)) / math.sqrt(3))
    alone = score(fast, "eval/sums/mean")
    assert (alone.final, alone.final_ci95) == (0.5, 0.04)
    assert (alone.best, alone.best_step) == (0.95, 10)
    assert score(fast, "reward/mean") is None


def test_seconds_per_step_leave_out_evaluations_between_steps(tmp_path: Path) -> None:
    lines = [{"step": n, "reward/mean": 0.5, "time/step_s": float(n), "time/evaluate_s": 10.0 * n} for n in (1, 2, 3)]
    (table,) = tables(variants_of(read_runs([write_run(tmp_path / "run", "name: a\n", *lines)])), [])
    assert table.rows == [("run", "3", "2", "-")]


def test_runs_of_equal_seeds_are_different_variants(tmp_path: Path) -> None:
    # They differ in what the configuration does not contain, such as the code of a reward.
    text = "seed: {}\nnum_steps: 10\n"
    runs = [(0, 0.6), (0, 0.8), (1, 0.9)]
    records = [write_run(tmp_path / f"r{n}", text.format(seed), *evaluated(0.1, final)) for n, (seed, final) in enumerate(runs)]
    seeds, again = variants_of(read_runs(records))
    assert [seeds.name, again.name] == ["r0 (2 seeds)", "r1"]
    found = score(seeds, "eval/sums/mean")
    assert (found.num_seeds, found.best) == (2, pytest.approx(0.75))
    assert found.final_ci95 == pytest.approx(12.706 * stdev((0.6, 0.9)) / math.sqrt(2))
    alone = score(again, "eval/sums/mean")
    assert alone.final == pytest.approx(0.8)


def test_run_without_a_configuration_differs_in_no_key(records: list[RunRecord]) -> None:
    (records[0].path / "config.yaml").unlink()
    found = differing_keys(variants_of(read_runs(records)))
    assert found == {"algorithm.learning_rate": [UNKNOWN, 1e-5, 1e-4]}
    rate = {"kind": "learning_rate", "step": 2, "value": None, "number": 1}
    for record in records[:2]:
        (record.path / "events.jsonl").write_text(json.dumps(rate) + "\n")
    found = differing_keys(variants_of(read_runs(records)))
    assert found == {"algorithm.learning_rate": [UNKNOWN, "1e-05, from step 3 on the schedule", 1e-5, 1e-4]}


def test_change_during_the_run_is_a_difference(records: list[RunRecord]) -> None:
    change = {"kind": "set", "step": 4, "key": "algorithm.learning_rate", "value": 2e-05, "before": 1e-05, "by": "user"}
    (records[1].path / "events.jsonl").write_text(json.dumps(change) + "\n")
    variants = variants_of(read_runs(records[:3]))
    assert [variant.name for variant in variants] == ["s0 (2 seeds)", "s1"]
    assert differing_keys(variants) == {"algorithm.learning_rate": [1e-5, "1e-05, from step 5 on 2e-05"]}


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.706), (10, 2.228), (11, 2.201), (30, 2.042), (10_000, 1.960)])
def test_quantiles_of_students_t(freedom: int, quantile: float) -> None:
    assert report._t_975(freedom) == pytest.approx(quantile, abs=0.003)


def test_loss_is_best_where_it_is_lowest_and_training_is_a_mean_of_last_steps(tmp_path: Path) -> None:
    lines = [{"step": step, "loss/train": value} for step, value in enumerate([3.0, 1.0, 2.0, 2.0, 2.5, 2.5], 1)]
    (variant,) = variants_of(read_runs([write_run(tmp_path / "a", "seed: 0\nnum_steps: 6\n", *lines)]))
    found = score(variant, "loss/train")
    assert (found.first, found.best, found.best_step) == (2.0, 1.0, 2)
    assert found.final == pytest.approx(7 / 3)
    assert found.final_ci95 is None


def test_runs_of_the_same_name_are_told_apart_by_their_parents(tmp_path: Path) -> None:
    line = {"step": 1, "reward/mean": 0.0}
    runs = read_runs([write_run(tmp_path / name, f"seed: 0\nx: {name}\n", line) for name in ("a/run", "b/run", "c")])
    assert [run.name for run in runs] == ["a/run", "b/run", "c"]


def test_keys_that_only_one_run_has_differ(tmp_path: Path) -> None:
    line = {"step": 1, "reward/mean": 0.0}
    texts = ("seed: 0\nmodel: {path: null}\n", "seed: 0\nmodel: {path: null}\ntask: {a: true}\n")
    variants = variants_of(read_runs([write_run(tmp_path / str(n), text, line) for n, text in enumerate(texts)]))
    assert tables(variants, [])[0].rows == [("task.a", "(not set)", "true")]


@pytest.mark.parametrize(
    ("config", "lines", "problem"),
    [
        ("a: 1", [], "has no metrics yet"),
        ("a: 1", [{"step": 1}, {"a": 1}], r"metrics\.jsonl, line 2: not a JSON object with a step"),
        ("a: 1", [{"step": "1"}, {"step": 2}], r"metrics\.jsonl, line 1: not a JSON object with a step"),
        ("[1]", [{"step": 1}], "must be a mapping"),
        ("{", [{"step": 1}], "cannot be read"),
        ("[" * 5000, [{"step": 1}], "cannot be read"),
    ],
)
def test_unusable_run_is_named(tmp_path: Path, config: str, lines: list[dict[str, Any]], problem: str) -> None:
    with pytest.raises(TitanRLError, match=problem):
        read_runs([write_run(tmp_path / "a", config, *lines)])


def test_values_that_are_no_finite_numbers_are_left_out(tmp_path: Path) -> None:
    values = [0.25, "0.5", 10**400, math.inf, None, [1]]
    lines = [{"step": step, "reward/mean": value} for step, value in enumerate(values, start=1)]
    found = variants_of(read_runs([write_run(tmp_path / "a", "", *lines)]))
    assert tables(found, ["reward/mean"])[0].rows == [("a", "0.25", "0.25", "0.25", "1")]


def test_command_prints_tables_json_and_a_page(
    records: list[RunRecord], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(record.path) for record in records]
    page, link = tmp_path / "page.html", tmp_path / "link.html"
    link.symlink_to(page)
    compare([*paths, "--html", str(link)])
    assert link.is_symlink()
    printed = capsys.readouterr().out
    assert "algorithm.learning_rate" in printed
    assert "0.8 \u00b1 0.25" in printed
    assert "0.5 \u00b1 0.04" in printed
    parsed = Page(page.read_text())
    compared = parsed.data["compare"]
    assert compared["variants"] == [{"name": "s0 (3 seeds)", "runs": ["s0", "s1", "s2"]}, {"name": "fast", "runs": ["fast"]}]
    assert compared["metrics"] == ["eval/sums/mean"]
    assert [table["title"] for table in compared["tables"]] == ["Keys that differ", "eval/sums/mean", "Steps and speed"]
    assert parsed.data["runs"]["fast"]["charts"]["curves"]["eval/sums/mean"]["mean"] == [0.2, 0.95, 0.5]
    compare([*paths, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["differing_keys"] == {"algorithm.learning_rate": {"s0 (3 seeds)": 1e-5, "fast": 1e-4}}
    assert [run["seed"] for run in found["variants"][0]["runs"]] == [0, 1, 2]
    assert found["variants"][1]["scores"]["eval/sums/mean"]["best"] == 0.95


def test_names_and_values_of_runs_are_escaped_in_the_page(tmp_path: Path) -> None:
    name = ATTACK.replace("/", "|")
    line = {"step": 1, "reward/mean": 0.0}
    for n in range(2):
        write_run(tmp_path / f"{name}{n}", f"seed: 0\nvalue: {json.dumps(ATTACK + str(n))}\n", line)
    page = tmp_path / "page.html"
    compare([str(tmp_path / f"{name}{n}") for n in range(2)] + ["--html", str(page)])
    parsed = Page(page.read_text())
    assert parsed.count("img") == 0
    assert parsed.count("script") == 2
    assert parsed.data["compare"]["tables"][0]["rows"] == [["value", ATTACK + "0", ATTACK + "1"]]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [(["missing"], "missing"), (["s0", "s0"], "given twice"), (["s0", "--metric", "nope"], "--metric: no run has 'nope'")],
)
def test_wrong_arguments_are_refused(
    records: list[RunRecord],
    tmp_path: Path,
    arguments: list[str],
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"^2$"):
        compare(arguments)
    assert problem in capsys.readouterr().err
