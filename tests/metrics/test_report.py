import json
import re
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from titanrl.config import Config, dump_config
from titanrl.metrics import report as report_module
from titanrl.metrics.curves import MAX_POINTS, thin
from titanrl.metrics.report import write_report
from titanrl.metrics.run_directory import RunDirectory, append_line
from titanrl.metrics.series import by_step, phase_seconds
from titanrl.types import StepMetrics

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
ATTACK = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>&amp;\u2028"


class Page(HTMLParser):
    """Elements and texts of a page as a browser's parser sees them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        inside = self.open[-1] if self.open else ""
        (self.scripts if inside == "script" else self.texts).append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)

    @property
    def groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = json.loads(self.scripts[0])
        return groups


def completion(text: str, reward: float, num_tokens: int = 2) -> dict[str, Any]:
    tokens, logprobs = ["a"] * num_tokens, [-0.12345] * num_tokens
    parts = {"text": text, "reward": reward, "num_tokens": num_tokens, "finish_reason": "stop"}
    return {**parts, "tokens": tokens, "logprobs": logprobs}


def group(version: int, index: int, *completions: dict[str, Any], prompt: str = "1 + 1 =") -> dict[str, Any]:
    head = {"version": version, "index": index, "task": "chain_sum", "prompt": prompt, "answer": "2"}
    return {**head, "completions": list(completions)}


def step_metrics(step: int) -> StepMetrics:
    values = {
        "reward/mean": step / 100,
        "tokens/response_len_mean": 12.0,
        "tokens/response_len_max": 26.0,
        "policy/entropy": 1.0 / step,
        "mismatch/logprob_abs_mean": 1e-6,
        "mismatch/logprob_abs_max": 2e-5,
        "time/generate_s": 0.125,
        "time/train_s": 0.25,
        "grad/norm": 0.5,
        "group/zero_variance_frac": 0.25,
        "perf/gen_tokens_per_s": 9000.0,
        "perf/train_tokens_per_s": 18000.0,
    }
    return StepMetrics(step=step, version=step, values=values)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    with RunDirectory(tmp_path / "quickstart") as directory:
        yield directory


def test_a_whole_run_has_every_curve_and_its_figures(run: RunDirectory) -> None:
    run.log(StepMetrics(step=0, version=0, values={"eval/chain_sum/mean": 0.25}))
    for step in range(1, 101):
        run.log(step_metrics(step))
    run.log(StepMetrics(step=100, version=100, values={"eval/chain_sum/mean": 0.96}))
    started = time.process_time()
    path = write_report(run.path, {"outcome": "It learned to add.", "Model": "runs/quickstart/model"})
    assert time.process_time() - started < 3.0
    assert path == run.path / "report.html"
    page = Page(path.read_text())
    assert page.count("svg") == page.count("figure") == 9
    texts = [text.strip() for text in page.texts]
    for expected in (
        "quickstart",
        "It learned to add.",
        "runs/quickstart/model",
        "0.030 \u2192 0.980",  # means of steps 1 to 5 and 96 to 100
        "0.250 \u2192 0.960",
        "steps 0 and 100",
        "0.38 s",
        "9.0k tokens/s",
        "2.0e-05",
        "median 0.38 s, longest 0.38 s",
    ):
        assert expected in texts


def test_the_page_refers_to_nothing_outside_of_itself(run: RunDirectory) -> None:
    run.log(step_metrics(1))
    append_line(run.rollouts, group(0, 0, completion("2", 1.0)))
    text = write_report(run.path, {}).read_text()
    assert re.findall(r"(?i)\b(?:https?|ftp|file):|url\((?!#)|@import", re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)) == []
    for tag, attributes in Page(text).tags:
        assert tag not in ("link", "img", "iframe", "object", "base")
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#"), (tag, attributes)
    assert "default-src 'none'" in text


def test_markup_in_prompts_completions_and_summary_stays_text(run: RunDirectory) -> None:
    append_line(run.rollouts, group(0, 0, completion(ATTACK, 1.0), completion("3", 0.0), prompt=ATTACK))
    run.write_config(dump_config(Config.model_validate({"name": "quickstart", "num_steps": 1, "data": {"task": ATTACK}})))
    page = Page(write_report(run.path, {"outcome": ATTACK, ATTACK: ATTACK}).read_text())
    assert page.count("script") == 2  # the data and the browser
    assert page.count("img") == 0
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert page.groups[0]["prompt"] == ATTACK
    assert page.groups[0]["completions"][0]["text"] == ATTACK
    assert "<" not in page.scripts[0]
    assert "innerHTML" not in page.scripts[1]
    assert "".join(page.texts).count("document.title='owned'") >= 3


def test_advantages_are_those_of_the_configured_algorithm(run: RunDirectory) -> None:
    append_line(
        run.rollouts, group(0, 0, completion("2", 1.0), completion("3", 0.0), completion("4", 0.0), completion("5", 0.0))
    )
    by_method = {}
    for method in ("dr_grpo", "rloo"):
        config = Config.model_validate({"name": "quickstart", "num_steps": 1, "algorithm": {"advantage": method}})
        run.write_config(dump_config(config))
        (shown,) = Page(write_report(run.path, {}).read_text()).groups
        by_method[method] = [completion["advantage"] for completion in shown["completions"]]
    assert by_method["dr_grpo"] == [0.75, -0.25, -0.25, -0.25]
    assert by_method["rloo"] == [1.0, -0.3333, -0.3333, -0.3333]


def test_a_group_that_a_resumed_run_sampled_again_is_shown_once_and_new(run: RunDirectory) -> None:
    for version, text in ((0, "first"), (1, "old"), (1, "new")):
        append_line(run.rollouts, group(version, version, completion(text, 1.0)))
    page = Page(write_report(run.path, {}).read_text())
    assert [shown["completions"][0]["text"] for shown in page.groups] == ["first", "new"]
    assert any("All 2 recorded groups." in text for text in page.texts)


def test_a_long_run_keeps_its_first_and_newest_groups_and_the_file_small(run: RunDirectory) -> None:
    completions = [completion("x" * 5_000, 1.0, num_tokens=500) for _ in range(8)]
    for version in range(100):
        append_line(run.rollouts, group(version, version, *completions))
    path = write_report(run.path, {})
    assert path.stat().st_size < 5_000_000
    page = Page(path.read_text())
    versions = [shown["version"] for shown in page.groups]
    assert versions[0] == 0
    assert versions[-1] == 99
    assert 20 < len(versions) < 100
    assert any("The first and the newest of 100 recorded groups." in text for text in page.texts)
    cut = page.groups[0]["completions"][0]
    assert cut["cut"]
    assert len(cut["tokens"]) == len(cut["logprobs"]) == report_module.MAX_TOKENS


def test_a_run_that_ended_before_its_first_step_has_a_report_too(run: RunDirectory) -> None:
    page = Page(write_report(run.path, {"outcome": "The generator ran out of memory."}).read_text())
    assert page.count("svg") == 0
    assert page.count("script") == 0
    assert any("The run ended before its first step." in text for text in page.texts)


def test_a_curve_without_data_is_left_out_and_nulls_are_gaps(run: RunDirectory) -> None:
    for step, reward in ((1, 0.5), (2, float("nan")), (3, 0.7)):
        run.log(StepMetrics(step=step, version=step, values={"reward/mean": reward, "mismatch/logprob_abs_max": 0.0}))
    page = Page(write_report(run.path, {}).read_text())
    assert [attributes["aria-label"] for tag, attributes in page.tags if tag == "svg"] == ["Reward", "Log-probability mismatch"]
    assert "0.600 to 0.600, means of the first and last five steps" in page.texts


def test_a_very_long_run_is_drawn_with_means_of_neighbours() -> None:
    points = [(float(step), float(step % 2)) for step in range(10 * MAX_POINTS)]
    thinned = thin(points)
    assert len(thinned) == MAX_POINTS
    assert thinned[0] == (4.5, 0.5)
    assert thin(points[:MAX_POINTS]) == points[:MAX_POINTS]


def test_rows_of_one_step_are_one_row_and_the_newer_value_wins() -> None:
    lines = [{"step": 1, "a": 1.0}, {"step": 0, "a": 0.0}, {"step": 1, "a": 2.0, "b": 3.0}]
    assert by_step(lines) == [{"step": 0, "a": 0.0}, {"step": 1, "a": 2.0, "b": 3.0}]


def test_the_total_of_a_step_is_not_one_of_its_phases() -> None:
    assert phase_seconds({"time/train_s": 1.0, "time/step_s": 3.0, "sync/push_s": 4.0}) == {"train": 1.0}


def test_every_metric_that_is_shown_is_explained() -> None:
    folder = Path(report_module.__file__).parent
    shown = {name for file in folder.glob("*.py") for name in re.findall(r'"([a-z]+/[a-z_]+[a-z])"', file.read_text())}
    explained = DOCS.read_text()
    assert len(shown) > 10
    assert [name for name in sorted(shown) if f"`{name}`" not in explained and not name.startswith("time/")] == []
