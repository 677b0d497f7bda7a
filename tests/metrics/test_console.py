import io
import subprocess
import sys

import pytest
import rich.console
import rich.text

from tests.simulated_clock import Clock
from titanrl.carriers.types import StepMetrics
from titanrl.metrics.console import Console, resolve
from titanrl.metrics.steps import PhaseTimer

VALUES = {
    "reward/mean": 0.25,
    "tokens/response_len_mean": 14.25,
    "policy/entropy": 0.5,
    "grad/norm": 1.5,
    "mismatch/logprob_abs_mean": 1.5e-6,
    "mismatch/logprob_abs_max": 3.5e-5,
    "staleness/max": 2.0,
    "perf/gen_tokens_per_s": 9120.0,
    "perf/train_tokens_per_s": 34_000.0,
    "time/generate_s": 0.5,
    "time/train_s": 0.25,
    "sync/push_s": 0.01,
    "sync/pull_s": 0.02,
}

SUPERVISED = {
    "loss/train": 1.25,
    "data/epoch": 0.5,
    "tokens/trained": 1900.0,
    "grad/norm": 1.5,
    "optim/lr": 1e-5,
    "perf/train_tokens_per_s": 34_000.0,
    "time/train_s": 0.25,
}


def step(number: int, **changes: float) -> StepMetrics:
    return StepMetrics(step=number, version=number, values=VALUES | changes)


def terminal(width: int) -> rich.console.Console:
    return rich.console.Console(file=io.StringIO(), force_terminal=True, width=width, height=40, legacy_windows=False)


def text_of(console: rich.console.Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_plain_mode_prints_a_header_and_aligned_rows(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    console = Console("plain", total_steps=100, clock=clock)
    clock.now = 12.0
    console.evaluation("chain_sum", 0, 0.27)
    console.step(step(1))
    evaluation, header, row = capsys.readouterr().out.splitlines()
    assert evaluation == "   12.0 s  held-out chain_sum: mean reward 0.270 at version 0"
    names = "elapsed step reward mean10 heldout length entropy grad_norm mismatch stale gen_tok/s train_tok/s step_s sync_s"
    assert header.split() == names.split()
    cells = "12.0 s 1/100 0.250 0.250 0.270 14.2 0.500 1.5 1.5e-06 2 9.1k 34k 0.75 0.030"
    assert row.split() == cells.split()
    assert len(row) == len(header)
    assert row.endswith("0.75   0.030")


def test_plain_mode_shows_first_every_tenth_and_last_step(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console("plain", total_steps=34, clock=Clock())
    for number in range(1, 35):
        console.step(step(number))
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row.split()[2] for row in rows] == ["1/34", "10/34", "20/34", "30/34", "34/34"]


def test_plain_mode_shows_every_slow_step(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    console = Console("plain", total_steps=100, clock=clock)
    for number in range(1, 4):
        clock.now += 60.0
        console.step(step(number))
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["1:00", "2:00", "3:00"]


def test_mean10_is_the_mean_of_the_last_ten_rewards(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console("plain", total_steps=20, clock=Clock())
    for number in range(1, 21):
        console.step(step(number, **{"reward/mean": number / 100}))
    assert capsys.readouterr().out.splitlines()[-1].split()[4] == "0.155"  # of 0.11 to 0.20


def test_plain_mode_shows_losses_of_fine_tuning(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console("plain", total_steps=100, clock=Clock())
    console.heldout_loss(0, 2.5)
    console.step(StepMetrics(step=1, version=1, values=SUPERVISED))
    evaluation, header, row = capsys.readouterr().out.splitlines()
    assert evaluation.endswith("held-out loss 2.5000 at version 0")
    names = "elapsed step loss mean10 heldout epoch grad_norm learning_rate train_tok/s step_s"
    assert header.split() == names.split()
    cells = "0.0 s 1/100 1.2500 1.2500 2.5000 0.50 1.5 1.00e-05 34k 0.25"
    assert row.split() == cells.split()
    assert len(row) == len(header)


def test_first_step_of_distillation_without_a_taught_task_prints_the_header_of_distillation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = Console("plain", total_steps=100, clock=Clock())
    taught = {"tokens/teacher_too_long_frac": 0.0}
    console.step(StepMetrics(step=1, version=1, values=taught))
    console.step(StepMetrics(step=2, version=2, values={**taught, "policy/kl_teacher": 0.305}))
    console.step(StepMetrics(step=10, version=10, values={**taught, "policy/kl_teacher": 0.305}))
    header, *_, row = capsys.readouterr().out.splitlines()
    assert row.index("0.305") + len("0.305") == header.index("kl_teacher") + len("kl_teacher")


def test_live_mode_shows_losses_of_fine_tuning() -> None:
    out = terminal(140)
    with Console("live", total_steps=100, out=out, clock=Clock()) as console:
        console.heldout_loss(0, 2.5)
        console.step(StepMetrics(step=1, version=1, values=SUPERVISED))
        console.heldout_loss(1, 1.5)
    shown = rich.text.Text.from_ansi(text_of(out)).plain
    for text in ("loss            1.2500", "held-out loss   2.5000 -> 1.5000", "learning rate   1.00e-05", "epoch"):
        assert text in shown
    assert "reward" not in shown


def test_missing_metrics_are_shown_as_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    Console("plain", total_steps=1, clock=Clock()).step(StepMetrics(step=1, version=1, values={}))
    assert capsys.readouterr().out.splitlines()[-1].split() == ["0.0", "s", "1/1", *("-" * 12)]


def test_plain_mode_prints_startup_phases(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    console = Console("plain", total_steps=1, clock=clock)
    console.phase("spawning", "trainer 1 rank")
    clock.now = 3.5
    console.phase("loading trainer")
    for done in (115, 230, 345, 460):
        clock.now += 2.5
        console.progress("warm start", done, 460, "loss 0.1")
    console.note("ready")
    console.done(["learned"])
    assert capsys.readouterr().out.splitlines() == [
        "    0.0 s  spawning              trainer 1 rank",
        "    3.5 s  loading trainer",
        "    8.5 s  warm start            230/460  loss 0.1",
        "   13.5 s  warm start            460/460  loss 0.1",
        "   13.5 s  ready",
        "learned",
    ]


def test_plain_mode_ignores_forced_color(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = Console("plain", total_steps=1)
    console.phase("spawning")
    console.step(step(1))
    console.warn("slow [generator]")
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err
    assert captured.err == "warning: slow [generator]\n"
    assert "warning" not in captured.out


def test_off_mode_prints_only_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    with Console("off", total_steps=1) as console:
        console.phase("spawning")
        console.progress("warm start", 1, 1)
        console.step(step(1))
        console.evaluation("chain_sum", 1, 0.5)
        console.note("a note")
        console.warn("a warning")
        console.done(["the end"])
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "warning: a warning\n"


def test_auto_mode_is_plain_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert not sys.stdout.isatty()
    assert resolve("auto") == "plain"
    assert resolve("live") == "live"


@pytest.mark.parametrize("width", [10, 20, 60, 100, 200])
def test_live_mode_draws_at_any_width_and_restores_the_cursor(width: int) -> None:
    out, clock = terminal(width), Clock()
    with Console("live", total_steps=20, title="TitanRL quickstart", out=out, err=out, clock=clock) as console:
        timer = PhaseTimer(on_change=console.current_phase, clock=clock)
        console.phase("spawning", "trainer 1 rank")
        console.progress("warm start", 230, 460, "loss 0.1")
        console.evaluation("chain_sum", 0, 0.27)
        for number in range(1, 21):
            with timer.phase("train"):
                clock.now += 0.5
                console.step(step(number))
        console.warn("careful")
        console.note("noted")
        console.evaluation("chain_sum", 20, 0.96)
        console.done(["learned"])
    text = text_of(out)
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert text.rstrip().endswith("learned")


def test_live_mode_shows_the_last_step() -> None:
    out, clock = terminal(200), Clock()
    with Console("live", total_steps=40, title="TitanRL quickstart", out=out, clock=clock) as console:
        console.evaluation("chain_sum", 0, 0.27)
        console.evaluation("chain_sum", 10, 0.5)
        for number in range(1, 11):
            clock.now += 2.0
            console.step(step(number, **{"reward/mean": number / 10}))
    final = text_of(out)
    plain = rich.text.Text.from_ansi(final).plain
    for expected in (
        "TitanRL quickstart",
        "10/40",
        "20.0 s, 1:00 left",
        "\u2581\u2582\u2583\u2583\u2584\u2585\u2586\u2586\u2587\u2588",
        "0.270 -> 0.500",
        "14.2 tokens",
        "9.1k tokens/s",
        "34k tokens/s",
        "generate 0.50  train 0.25",
        "0.030 s",
        "3.5e-05",
    ):
        assert expected in plain


def test_unused_live_mode_can_be_closed_twice() -> None:
    out = terminal(80)
    console = Console("live", total_steps=2, out=out)
    console.close()
    console.close()
    assert text_of(out) == ""


def test_importing_metrics_loads_no_heavy_library() -> None:
    modules = "console, reading, report, run_directory, steps, trackers"
    heavy = ("torch", "plotly", "jinja2", "monarch", "vllm", "transformers", "wandb", "tensorboard", "trackio")
    code = f"import sys; from titanrl.metrics import {modules}; print(sorted(set({heavy}) & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
