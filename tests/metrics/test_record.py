"""The recorder: what the files and the console say of failed rewards."""

from dataclasses import replace
from pathlib import Path

import pytest

from titanrl.carriers.types import EvaluationResult
from titanrl.metrics.console import Console
from titanrl.metrics.record import Recorder, evaluation_metrics
from titanrl.metrics.run_directory import RunDirectory, read_lines, read_metrics
from titanrl.metrics.trackers import Trackers

COMPLETE = EvaluationResult(task="sums", version=3, mean=0.2, num_prompts=5, response_len_mean=4.0, num_samples=2)
FAILED = replace(COMPLETE, num_errors=4, num_unscored_prompts=1, first_error="answer: KeyError: 'x'")


def test_failed_rewards_of_an_evaluation_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunDirectory(tmp_path) as directory:
        recorder = Recorder(directory, Trackers({}, print), Console("plain", total_steps=9))
        for step, result in enumerate((COMPLETE, FAILED, FAILED)):
            recorder.evaluation(step, result)
        events = [{key: row[key] for key in row if key != "time"} for row in read_lines(directory.events)]
        errors = [row["eval/sums/num_errors"] for row in read_metrics(directory.metrics)]
    printed = capsys.readouterr()
    first, second, _ = printed.out.splitlines()
    assert first.endswith("held-out sums: mean reward 0.200 at version 3")
    assert second.endswith("at version 3 (4 of 10 completions have no reward; mean over 4 of 5 prompts)")
    assert (
        printed.err.count("warning: evaluation sums: 4 of 10 completions have no reward; mean over 4 of 5 prompts (first error")
        == 1
    )
    event = {"kind": "scorer_error", "set": "sums", "count": 4, "completions": 10, "error": "answer: KeyError: 'x'"}
    assert events == [event | {"step": 1}, event | {"step": 2}]
    assert errors == [0.0, 4.0, 4.0]


def test_metrics_of_an_evaluation_have_the_denominator() -> None:
    assert evaluation_metrics(FAILED) == {
        "eval/sums/mean": 0.2,
        "eval/sums/response_len_mean": 4.0,
        "eval/sums/error_frac": 0.4,
        "eval/sums/num_errors": 4.0,
        "eval/sums/num_completions": 10.0,
        "eval/sums/truncated_frac": 0.0,
    }


def test_training_warns_once_of_failed_rewards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunDirectory(tmp_path) as directory:
        recorder = Recorder(directory, Trackers({}, print), Console("off", total_steps=9))
        for step in (1, 2):
            recorder.scorer_errors(step, step, 8, "boom")
        counts = [(row["count"], row["completions"]) for row in read_lines(directory.events)]
    assert counts == [(1, 8), (2, 8)]
    assert capsys.readouterr().err.count("1 of 8 completions have no reward and are excluded (first error: boom)") == 1
