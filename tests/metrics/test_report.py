import base64
import hashlib
import json
import re
import time
from collections.abc import Iterator
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.recorded import record_group
from titanrl.carriers.types import StepMetrics
from titanrl.config import Config
from titanrl.config.load import dump
from titanrl.metrics import report as report_module
from titanrl.metrics.reading import by_step, phase_seconds
from titanrl.metrics.report import page_file, write_report
from titanrl.metrics.run_directory import RunDirectory

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
ATTACK = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>&amp;\u2028"


class Page(HTMLParser):
    """Elements and texts of a page, as an HTML parser sees them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.scripts: dict[str, str] = {}
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
        if inside == "script":
            name = self.tags[-1][1].get("id") or f"code {len(self.scripts)}"
            self.scripts[name] = self.scripts.get(name, "") + data
        else:
            self.texts.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)

    @property
    def data(self) -> dict[str, Any]:
        """The data in the page."""
        data: dict[str, Any] = json.loads(self.scripts["frozen"])
        return data

    @property
    def run(self) -> dict[str, Any]:
        """The data of its first run."""
        run: dict[str, Any] = next(iter(self.data["runs"].values()))
        return run

    @property
    def groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.run["rollouts"]["groups"]
        return groups


def completion(text: str, reward: float, num_tokens: int = 2) -> dict[str, Any]:
    return {"text": text, "reward": reward, "num_tokens": num_tokens, "finish_reason": "stop"}


def group(version: int, index: int, *completions: dict[str, Any], prompt: str = "1 + 1 =") -> dict[str, Any]:
    head = {"version": version, "index": index, "task": "chain_sum", "prompt": prompt, "answer": "2"}
    return {**head, "completions": list(completions)}


def step_metrics(step: int) -> StepMetrics:
    values = {
        "reward/mean": step / 100,
        "tokens/response_len_mean": 12.0,
        "tokens/response_len_max": 26.0,
        "environment/calls_mean": 0.5,
        "environment/late_mean": 1.0 - step / 100,
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
    with closing(RunDirectory(tmp_path / "quickstart")) as directory:
        yield directory


def test_finished_run_has_every_chart_and_figure(run: RunDirectory) -> None:
    run.log(StepMetrics(step=0, version=0, values={"eval/chain_sum/mean": 0.25}))
    for step in range(1, 101):
        run.log(step_metrics(step))
    run.log(StepMetrics(step=100, version=100, values={"eval/chain_sum/mean": 0.96}))
    started = time.process_time()
    path = write_report(run.path, {"outcome": "It learned to add.", "Model": "runs/quickstart/model"})
    assert time.process_time() - started < 3.0
    assert path == run.path / "report.html"
    shown = Page(path.read_text()).run["run"]
    assert (shown["name"], shown["outcome"], shown["step"]) == ("quickstart", "It learned to add.", 100)
    assert shown["facts"]["Model"] == "runs/quickstart/model"
    assert len(shown["panels"]) == 10
    assert {panel["title"]: list(panel["labels"].values()) for panel in shown["panels"]}[
        "Environment, means over episodes"
    ] == [
        "calls",
        "late",
    ]
    figures = {figure["label"]: (figure["value"], figure["note"]) for figure in shown["figures"]}
    assert figures["Held-out chain_sum"] == ("0.250 \u2192 0.960", "steps 0 and 100")
    assert figures["Mean reward in training"] == ("0.030 \u2192 0.980", "means of 5 steps")  # steps 1 to 5 and 96 to 100
    assert figures["Generation"][0] == "9,000 tokens/s"
    assert figures["Largest mismatch"][0] == "2.0e-05"


def test_page_loads_no_external_resources_and_runs_no_other_script(run: RunDirectory) -> None:
    run.log(step_metrics(1))
    record_group(run.path, group(0, 0, completion("2", 1.0)))
    text = write_report(run.path, {}).read_text()
    assert re.findall(r"(?i)\b(?:https?|ftp|file)://(?!www\.w3\.org/2000/svg)|url\((?!#)|@import", text) == []
    page = Page(text)
    for tag, attributes in page.tags:
        assert tag not in ("img", "iframe", "object", "base")
        assert not any(name.startswith("on") or name == "style" for name in attributes)
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:,")), (tag, attributes)
    (script,) = (code for name, code in page.scripts.items() if name != "frozen")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (rules,) = (attributes["content"] or "" for tag, attributes in page.tags if "http-equiv" in attributes)
    assert rules.startswith("default-src 'none'")
    assert f"script-src 'sha256-{digest}'" in rules
    assert "unsafe" not in rules


def test_markup_in_run_data_stays_text(run: RunDirectory) -> None:
    record_group(run.path, group(0, 0, completion(ATTACK, 1.0), completion("3", 0.0), prompt=ATTACK))
    run.config.write_text(
        dump(Config.model_validate({"name": "quickstart", "num_steps": 1, "data": {"task": ATTACK}}).model_dump())
    )
    page = Page(write_report(run.path, {"outcome": ATTACK, ATTACK: ATTACK}).read_text())
    assert page.count("script") == 2  # the data and the page
    assert page.count("img") == 0
    assert page.groups[0]["prompt"] == ATTACK
    assert page.groups[0]["completions"][0]["text"] == ATTACK
    assert page.run["run"]["outcome"] == page.run["run"]["facts"][ATTACK] == ATTACK
    assert "<" not in page.scripts["frozen"]


def test_script_never_makes_markup_of_data() -> None:
    code = page_file("board.js")
    banned = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|srcdoc|DOMParser|javascript:"
    assert re.findall(banned, code) == []


def test_report_shows_recorded_advantages_of_the_newest_step(run: RunDirectory) -> None:
    for index in range(3):
        record_group(run.path, group(0, index, completion("2", 1.0), completion("3", 0.0)))
    run.log_advantages(1, [(0, 0, (0.9, -0.9)), (1, 0, (0.5,))])  # group 1 lost a rollout
    run.log_advantages(2, [(0, 0, (0.12345, -0.5))])
    shown = [
        [item["advantage"] for item in found["completions"]] for found in Page(write_report(run.path, {}).read_text()).groups
    ]
    assert shown == [[0.12345, -0.5], [None, None], [None, None]]


def test_scorer_errors_are_shown_and_skipped_by_advantages(run: RunDirectory) -> None:
    failed = {**completion("?", 0.0), "reward": None, "error": "ZeroDivisionError: division by zero"}
    record_group(run.path, group(0, 0, completion("2", 1.0), failed, completion("3", 0.0)))
    record_group(run.path, group(0, 1, failed))
    run.log_advantages(1, [(0, 0, (0.5, -0.5))])
    mixed, lost = Page(write_report(run.path, {}).read_text()).groups
    assert [item["advantage"] for item in mixed["completions"]] == [0.5, None, -0.5]
    assert [item["error"] for item in mixed["completions"]] == ["", "ZeroDivisionError: division by zero", ""]
    assert (mixed["mean"], lost["mean"]) == (0.5, None)


def test_long_run_shows_first_and_newest_groups_in_a_bounded_file(run: RunDirectory) -> None:
    completions = [completion("x" * 5_000, 1.0, num_tokens=500) for _ in range(8)]
    for version in range(100):
        record_group(run.path, group(version, version, *completions))
    path = write_report(run.path, {})
    assert path.stat().st_size < 5_000_000
    page = Page(path.read_text())
    versions = [shown["version"] for shown in page.groups]
    assert versions[0] == 0
    assert versions[-1] == 99
    assert 20 < len(versions) < 100
    assert page.run["note"] == "the first and the newest of 100 recorded groups"
    cut = page.groups[0]["completions"][0]
    assert cut["cut"]
    assert cut["segments"][0]["texts"] == ["a"] * report_module.MAX_TOKENS
    assert cut["segments"][0]["logprobs"] == [-0.12345] * report_module.MAX_TOKENS


def test_curves_of_many_metrics_have_fewer_points(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_module, "CURVE_BYTES", 20_000)
    for step in range(1, 301):
        run.log(step_metrics(step))
    charts = Page(write_report(run.path, {}).read_text()).run["charts"]
    assert len(json.dumps(charts)) < 40_000
    assert 25 <= len(charts["curves"]["policy/entropy"]["mean"]) < 100


def test_run_without_steps_has_a_report(run: RunDirectory) -> None:
    page = Page(write_report(run.path, {"outcome": "The generator ran out of memory."}).read_text())
    assert page.run["run"]["panels"] == []
    assert page.run["charts"] == {"axes": [], "curves": {}}


def test_report_of_fine_tuning_shows_losses_and_no_rollouts(run: RunDirectory) -> None:
    run.log(StepMetrics(step=0, version=0, values={"loss/eval": 2.0}))
    for step in range(1, 4):
        run.log(StepMetrics(step=step, version=step, values={"loss/train": 2.0 - step / 2, "grad/norm": 1.0}))
    run.log(StepMetrics(step=3, version=3, values={"loss/eval": 0.75}))
    shown = Page(write_report(run.path, {"outcome": "loss fell"}).read_text()).run["run"]
    assert [panel["title"] for panel in shown["panels"]] == ["Loss", "Gradient norm"]
    figures = {figure["label"]: figure["value"] for figure in shown["figures"]}
    assert figures == {"Training loss": "1.500 \u2192 0.500", "Held-out loss": "2.000 \u2192 0.750"}
    assert not shown["has_rollouts"]


def test_lines_of_one_step_merge_into_one_row() -> None:
    lines = [{"step": 1, "a": 1.0}, {"step": 0, "a": 0.0}, {"step": 1, "a": 2.0, "b": 3.0}]
    assert by_step(lines) == [{"step": 0, "a": 0.0}, {"step": 1, "a": 2.0, "b": 3.0}]


def test_step_total_is_not_a_phase() -> None:
    assert phase_seconds({"time/train_s": 1.0, "time/step_s": 3.0, "sync/push_s": 4.0}) == {"train": 1.0}


def documented_metrics() -> list[str]:
    table = DOCS.read_text().partition("## Names")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)


def test_every_metric_in_the_code_is_documented() -> None:
    folder = Path(report_module.__file__).parent
    code = "".join(file.read_text() for file in [*folder.glob("*.py"), folder.parent / "run/generation.py"])
    shown = {name for name in re.findall(r'"([a-z]+/[a-z_]+[a-z])"', code) if not name.startswith("time/")}
    assert len(shown) > 10
    assert shown <= set(documented_metrics())


def test_every_documented_metric_occurs_in_the_code() -> None:
    package = Path(report_module.__file__).parents[1]
    code = "".join(file.read_text() for file in package.rglob("*.py"))

    def occurs(name: str) -> bool:
        first, *others = re.split(r"<\w+>", name)
        if not others:
            of_loss = re.fullmatch(r"policy/(\w+)_(frac|mean)", name)  # a loss returns these values by token
            return f'"{name}"' in code or (of_loss is not None and f'"{of_loss[1]}":' in code)
        *middle, last = others
        return (
            f'"{first}{{' in code
            and all(f'"{part.strip("/")}{{' in code for part in middle if part != "/")
            and f'{last}"' in code
        )

    assert len(documented_metrics()) > 40
    assert [name for name in documented_metrics() if not occurs(name)] == []
