"""The page of `titanrl board` in a browser. Skipped without the package playwright and Debian's Chromium."""

import asyncio
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.record import NEEDLE, write_run
from tests.commands.test_board import KEY
from tests.metrics.test_report import ATTACK, completion, group
from tests.recorded import record, record_group
from tests.run.test_explanation import written
from tests.serving.servers import Server, serving
from titanrl.base.control import listen
from titanrl.commands.runs import explained
from titanrl.metrics.report import write_report
from titanrl.metrics.run_directory import RunLock
from titanrl.serving.runs import Board

playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
TABS = ("Overview", "All metrics", "Rollouts", "Evaluations", "Timeline", "Events", "Configuration")
SIZES = [(1400, "light"), (400, "light"), (1400, "dark"), (400, "dark")]


def add_steps(run: Path, first: int, last: int, rate: float = 0.01) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        for step in range(first, last + 1):
            values = {
                "reward/mean": rate * step,
                "reward/answer": rate * step,
                "policy/entropy": 1 / step,
                "time/generate_s": 0.2,
                "time/train_s": 0.3,
                "time/step_s": 0.5,
                "reward/num_errors": 1,
                "reward/num_completions": 8,
            }
            file.write(json.dumps({"step": step, "time": time.time(), "version": step, **values}) + "\n")


def make_run(run: Path, rate: float) -> None:
    run.mkdir(parents=True)
    run.joinpath("config.yaml").write_text(
        f"name: {json.dumps(run.name)}\nnum_steps: 100\ndata: {{task: chain_sum}}\nalgorithm: {{learning_rate: {rate}}}\n"
    )
    add_steps(run, 1, 30, rate)
    for index in range(30):
        text = "wait, a needle" if index == 3 else ATTACK
        line = {**group(index, index, completion(text, 1.0), completion("no", 0.0)), "rendered": ATTACK, "status": "kept"}
        record_group(run, line)
        sample = {"set": "sums", "index": index % 3, "version": index // 3, "prompt": ATTACK, "rendered": ATTACK}
        record(run, "evaluations", {**sample, "completions": [completion(ATTACK, 0.5)]})
    steps = [{"name": "step", "kind": "phase", "start": 10.0 * n, "seconds": 10.0, "step": n} for n in range(1, 6)]
    record(
        run,
        "spans",
        *steps,
        {"name": "wait for rollouts", "kind": "wait", "start": 20.0, "seconds": 40.0},
        process="controller",
    )
    event = {"time": 1.0, "kind": "scorer_error", "step": 3, "error": ATTACK, "count": 1}
    run.joinpath("events.jsonl").write_text(
        json.dumps(event) + "\n" + json.dumps({"time": 2.0, "kind": "end", "code": 1, "cause": ATTACK}) + "\n"
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, rate in (("a", 0.01), ("b", 0.02), ("c<img src=x>", 0.03)):
        make_run(folder / name, rate)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    board = Board(folder, KEY, explained)
    with serving(board) as server:
        watching = asyncio.run_coroutine_threadsafe(board.watch(), server.loop)
        yield server
        server.loop.call_soon_threadsafe(board.close)
        watching.result(10)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Any]:
    """Return a function that opens a page; at the end, no page may have logged an error or left this machine."""
    problems: list[str] = []
    contexts = []

    def open_page(url: str, width: int = 1400, scheme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: None if is_local(request.url) else problems.append(request.url))
        page.on("dialog", lambda dialog: problems.append("a dialog"))
        page.goto(url)
        page.wait_for_selector("h1")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


def is_local(url: str) -> bool:
    return url.startswith(("http://127.0.0.1:", "file:", "data:", "blob:"))


def address(server: Server) -> str:
    return f"{server.url}/#key={KEY}"


def check_page(page: Any) -> None:
    """Check that the page fits its width, shows no markup of data, and has no serious finding of axe."""
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("main img").count() == 0
    assert page.title() != "owned"
    try:
        from axe_playwright_python.sync_playwright import Axe
    except ImportError:
        return
    found = Axe().run(page).response["violations"]
    serious = [(each["id"], each["nodes"][0]["html"][:200]) for each in found if each["impact"] in ("serious", "critical")]
    assert serious == []


@pytest.mark.parametrize(("width", "scheme"), SIZES)
def test_every_page_fits_and_is_accessible(server: Server, opened: Any, width: int, scheme: str) -> None:
    page = opened(address(server), width, scheme)
    page.wait_for_selector("text=3 runs")
    check_page(page)
    page.get_by_role("link", name="a", exact=True).click()
    page.wait_for_selector("text=Why it failed")
    assert ATTACK in page.locator(".cause").inner_text()
    assert "Rewards failed for" in page.locator(".attention").inner_text()
    for tab in TABS:
        page.get_by_role("navigation", name="Parts of the run").get_by_role("link", name=tab, exact=True).click()
        page.wait_for_function("tab => document.querySelector('.tabs a[aria-current]').textContent === tab", arg=tab)
        page.wait_for_timeout(200)
        check_page(page)


def test_page_changes_within_two_seconds_of_a_step(server: Server, opened: Any, folder: Path) -> None:
    page = opened(address(server))
    page.get_by_role("link", name="b", exact=True).click()
    page.wait_for_selector("text=step 30 of 100")
    page.wait_for_selector("#live.on")
    for step in (31, 32, 33):
        started = time.monotonic()
        add_steps(folder / "b", step, step)
        page.wait_for_selector(f"text=step {step} of 100", timeout=5000)
        assert time.monotonic() - started < 2.0
        page.wait_for_timeout(300)
    page.wait_for_function("document.querySelectorAll('.chart path').length > 0")
    followed = curves(page)
    page.reload()
    page.wait_for_selector(".chart path")
    page.wait_for_timeout(500)
    assert followed == curves(page)


def test_page_asks_a_run_for_its_status_only_after_it_was_steered(tmp_path: Path, opened: Any) -> None:
    run, asked, state = tmp_path / "runs" / "s", list[str](), ["training"]
    make_run(run, 0.01)
    run.joinpath("events.jsonl").write_text(json.dumps({"time": 1.0, "kind": "start", "step": 0}) + "\n")
    lock = RunLock(run)

    def answer(request: Any) -> dict[str, Any]:
        asked.append(request["action"])
        return {"step": 30, "state": state[0], "text": f"{state[0]} after step 30", "keys": {"rate": 0.1}}

    board = Board(tmp_path / "runs", KEY, explained)
    with serving(board) as server:
        watching = asyncio.run_coroutine_threadsafe(board.watch(), server.loop)
        control = server.run(listen(run, answer))
        page = opened(address(server))
        page.get_by_role("link", name="s", exact=True).click()
        page.get_by_role("button", name="Pause").wait_for()
        page.wait_for_selector("#live.on")
        add_steps(run, 31, 31)
        page.wait_for_selector("text=step 31 of 100")
        assert asked == ["status"]
        state[0] = "paused"
        with (run / "events.jsonl").open("a") as file:
            file.write(json.dumps({"time": 2.0, "kind": "paused", "step": 31}) + "\n")
        page.get_by_role("button", name="Continue").wait_for()
        page.wait_for_selector("text=paused after step 30")
        assert asked == ["status", "status"]
        server.loop.call_soon_threadsafe(control.close)
        server.loop.call_soon_threadsafe(board.close)
        watching.result(10)
    lock.release()


def curves(page: Any) -> list[str]:
    """Return the curves that are drawn."""
    return page.evaluate("Array.from(document.querySelectorAll('.chart path'), (path) => path.getAttribute('d'))")


def test_rollouts_are_searched_filtered_and_opened(server: Server, opened: Any) -> None:
    page = opened(address(server))
    page.goto(f"{server.url}/#/run/a/rollouts")
    page.wait_for_selector("text=60 completions in 30 groups")
    page.get_by_label("Search texts").fill("A NEEDLE")
    page.wait_for_selector("text=1 completions in 1 groups")
    assert page.locator(".snippet mark").inner_text() == "a needle"
    page.get_by_label("Search texts").fill("")
    page.get_by_label("reward from").fill("0.5")
    page.wait_for_selector("text=30 completions in 30 groups")
    page.get_by_label("version to").fill("4")
    page.wait_for_selector("text=5 completions in 5 groups")
    assert "version_to=4" in page.url
    page.locator("details.group summary").first.click()
    page.wait_for_selector(".tok")
    assert "rgba" in page.locator(".tok").first.evaluate("node => getComputedStyle(node).backgroundColor")
    for coloring in ("version", "mismatch", "advantage", "none"):
        page.get_by_label("Color tokens by").select_option(coloring)
    page.locator(".tok").first.click()
    assert "probability" in page.locator(".explained:visible").inner_text()
    check_page(page)


def test_three_runs_are_overlaid_after_the_keys_that_differ(server: Server, opened: Any) -> None:
    page = opened(address(server))
    page.wait_for_selector("text=3 runs")
    for box in page.locator("td.pick input").all():
        box.check()
    page.get_by_role("button", name="Overlay").click()
    page.wait_for_selector("h2:has-text('Keys that differ')")
    assert page.locator("h2").first.inner_text() == "Keys that differ"
    assert "algorithm.learning_rate" in page.locator("table").first.inner_text()
    page.wait_for_selector(".chart .legend li:nth-child(3)")
    check_page(page)


def test_page_is_used_with_the_keyboard_only(server: Server, opened: Any) -> None:
    page = opened(address(server))
    page.wait_for_selector("text=3 runs")

    def tab_to(condition: str) -> None:
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate(f"(node => {condition})(document.activeElement)"):
                return
        raise AssertionError(f"no element can be reached with {condition}")

    tab_to("node.textContent === 'a'")
    page.keyboard.press("Enter")
    page.wait_for_selector(".plot path")
    tab_to("node.classList.contains('plot')")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert "step 2" in page.locator(".tip").inner_text()
    tab_to("node.closest('.figures, .facts, nav, header, .chart') && node.classList.contains('plot')")
    page.evaluate("document.querySelector('.tabs a').focus()")
    tab_to("node.textContent === 'Rollouts'")
    page.keyboard.press("Enter")
    page.wait_for_selector("details.group")
    tab_to("node.matches('details.group summary')")
    page.keyboard.press("Enter")
    page.wait_for_selector(".tok")
    tab_to("node.querySelector('.tok') && node.matches('.text')")
    page.keyboard.press("ArrowRight")
    assert "probability" in page.locator(".explained:visible").inner_text()


def test_page_without_the_key_says_where_it_is(server: Server, browser: Any) -> None:
    page = browser.new_page()
    page.goto(server.url)
    page.wait_for_selector("text=titanrl board printed")
    page.close()


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (400, "dark")])
def test_report_is_the_same_page_without_a_server(folder: Path, opened: Any, width: int, scheme: str) -> None:
    page = opened(f"file://{write_report(folder / 'a', {'outcome': ATTACK})}", width, scheme)
    for tab in TABS:
        page.get_by_role("navigation", name="Parts of the run").get_by_role("link", name=tab, exact=True).click()
        page.wait_for_timeout(300)
        check_page(page)
    page.goto(page.url.partition("#")[0] + "#/run/a/rollouts")
    page.get_by_label("Search texts").fill("a needle")
    page.wait_for_selector("text=1 completions in 1 groups")
    page.locator("details.group summary").first.click()
    assert page.locator("mark").count() >= 1


@pytest.mark.slow
def test_long_run_opens_quickly_and_stays_small(tmp_path: Path, browser: Any) -> None:
    write_run(tmp_path / "long")
    with serving(Board(tmp_path, KEY, explained)) as server:
        page = browser.new_page()
        page.goto(address(server))
        page.wait_for_selector("text=1 run")
        figures = {}
        for name, path, ready in (
            ("open", "#/run/long", "text=step 5000"),
            ("metrics", "#/run/long/charts?q=m", ".legend b"),
            ("rollouts", "#/run/long/rollouts", "text=100,000 completions"),
        ):
            started = time.monotonic()
            page.evaluate("path => { location.hash = path; }", path)
            page.wait_for_selector(ready)
            figures[name] = time.monotonic() - started
        started = time.monotonic()
        page.get_by_label("Search texts").fill(NEEDLE.lower())
        page.wait_for_selector("text=1 completions in 1 groups")
        figures["needle"] = time.monotonic() - started
        heap = page.evaluate("performance.memory.usedJSHeapSize") / 1e6
        print({**figures, "heap_mb": heap})
        assert figures["open"] < 2
        assert figures["rollouts"] < 2
        assert figures["needle"] < 1
        assert heap < 300
        page.close()


def test_click_on_a_token_explains_its_loss(tmp_path: Path, opened: Any) -> None:
    run = written(tmp_path / "explained", "algorithm.preset=grpo")
    record_group(run, {"index": 17, "version": 1, "completions": [{"text": "aaaaaa", "num_tokens": 6, "reward": 1.0}]})
    board = Board(tmp_path, KEY, explained)
    with serving(board) as server:
        page = opened(address(server))
        page.goto(f"{server.url}/#/run/explained/rollouts")
        page.locator("details.group summary").first.click()
        page.locator(".tok").nth(2).click()
        page.wait_for_selector("text=share of the gradient")
        assert "1.49, clipped (high)" in page.locator(".explained:visible").inner_text()
        board.close()
