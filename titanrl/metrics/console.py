"""Console output of a run: a live display on a terminal, plain lines elsewhere."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

import rich.console
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from titanrl.base.choices import ConsoleMode
from titanrl.carriers.types import StepMetrics
from titanrl.metrics.series import count, duration, number, phase_seconds, sparkline

LAYOUT_WIDTHS = (0, 72, 128)
"""Minimum terminal widths for one, two and three columns in the live display."""
PLAIN_EVERY_STEPS = 10
"""Interval in steps between the rows of plain mode. The first and the last step are always printed."""
PLAIN_EVERY_S = 5.0
"""Plain mode also prints a step if this many seconds have passed since its last line."""
HEADER_EVERY_ROWS = 20
"""Plain mode repeats the table header after this many rows."""
LOSS = "loss/train"
"""Metric that identifies a step of supervised fine-tuning."""
KL_TEACHER = "policy/kl_teacher"
"""Metric that identifies a step of distillation."""
SPARKLINE_STEPS = 24
"""Number of most recent steps in the sparkline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Activity:
    """A phase outside the steps, such as loading a model."""

    name: str
    detail: str
    since: float
    done: int = 0
    total: int = 0
    """0 if the total is unknown."""


class Console:
    """Prints the progress of a run to stdout and its warnings to stderr.

    The mode `live` redraws one display in place, `plain` prints aligned lines without control codes, and `off` prints warnings
    only. `auto` selects `live` on a terminal and `plain` everywhere else, including notebooks. A live display hides the cursor
    until `close` is called, so use the console as a context manager or call `close` yourself.
    """

    def __init__(
        self,
        mode: ConsoleMode,
        *,
        total_steps: int,
        title: str = "TitanRL",
        out: rich.console.Console | None = None,
        err: rich.console.Console | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Prepare the console without printing anything.

        Args:
            mode: One of `auto`, `live`, `plain`, `off`.
            total_steps: Number of the run's last step.
            title: Title of the live display.
            out: Destination of progress, stdout by default.
            err: Destination of warnings, stderr by default.
            clock: Function that returns the current time in seconds.
        """
        self._mode = resolve(mode)
        self._out = out or _default_console(live=self._mode == "live", stderr=False)
        self._err = err or _default_console(live=self._mode == "live", stderr=True)
        self._clock = clock
        self._started = clock()
        self._total_steps = total_steps
        self._title = title
        self._activity: _Activity | None = None
        self._phase: str | None = None
        self._shown_at = -PLAIN_EVERY_S
        self._rows = 0
        # The live display reads these from another thread, so they are replaced, never mutated.
        self._last: StepMetrics | None = None
        self._curve: tuple[float, ...] = ()  # mean rewards, or losses in supervised fine-tuning
        self._step_ends: tuple[tuple[float, int], ...] = ()
        self._evaluations: Mapping[str, tuple[float, float]] = {}
        self._failures: Mapping[str, str] = {}  # of the last evaluation of each set
        self._live: Live | None = None
        if self._mode == "live":
            self._live = Live(get_renderable=self._render, console=self._out, refresh_per_second=4, auto_refresh=True)

    def phase(self, name: str, detail: str = "") -> None:
        """End the current phase and start one outside the training steps, such as "loading trainer"."""
        self._end_activity()
        self._activity = _Activity(name=name, detail=detail, since=self._clock())
        if self._mode == "plain":
            self._timed(f"{name:<20}  {detail}")
        self._refresh()

    def progress(self, name: str, done: int, total: int, detail: str = "") -> None:
        """Show the progress of a phase with a known number of iterations, such as the warm start."""
        if self._activity is None or self._activity.name != name:
            self._end_activity()
            self._activity = _Activity(name=name, detail=detail, since=self._clock())
        self._activity = _Activity(name=name, detail=detail, since=self._activity.since, done=done, total=total)
        if self._mode == "plain" and (done == total or self._clock() - self._shown_at >= PLAIN_EVERY_S):
            self._timed(f"{name:<20}  {done}/{total}  {detail}")
        self._start_live()

    def current_phase(self, name: str | None) -> None:
        """Set the phase that the live display shows, None between phases; pass this to `PhaseTimer` as `on_change`."""
        self._phase = name

    def step(self, metrics: StepMetrics) -> None:
        """Show the metrics of a finished step."""
        self._end_activity()
        learned = metrics.values.get("reward/mean", metrics.values.get(LOSS))
        if learned is not None:
            self._curve = (*self._curve, learned)[-SPARKLINE_STEPS:]
        self._step_ends = (*self._step_ends, (self._clock(), metrics.step))[-50:]
        first = self._last is None
        self._last = metrics
        if self._mode == "plain" and (first or self._is_due(metrics.step)):
            self._row(metrics)
        self._start_live()

    def evaluation(self, task: str, version: int, mean: float, failures: str = "") -> None:
        """Show the mean reward of one evaluation set.

        Args:
            task: Name of the set.
            version: Evaluated policy version.
            mean: Mean reward.
            failures: Description of the completions that are missing from the mean; empty if none are.
        """
        first = self._evaluations.get(task, (mean, mean))[0]
        self._evaluations = {**self._evaluations, task: (first, mean)}
        self._failures = {**self._failures, task: failures}
        if self._mode == "plain":
            self._timed(f"held-out {task}: mean reward {mean:.3f} at version {version}{f' ({failures})' if failures else ''}")
        self._start_live()

    def heldout_loss(self, version: int, loss: float) -> None:
        """Show the loss on held-out examples."""
        first = self._evaluations.get("loss", (loss, loss))[0]
        self._evaluations = {"loss": (first, loss)}
        if self._mode == "plain":
            self._timed(f"held-out loss {loss:.4f} at version {version}")
        self._start_live()

    def note(self, text: str) -> None:
        """Print an informational line."""
        if self._mode == "plain":
            self._timed(text)
        else:
            self._print(Text(text))

    def warn(self, text: str) -> None:
        """Print a warning on stderr, in every mode."""
        # If stderr is a terminal, rich must print the warning above the live display, or one would overwrite the other.
        target = self._out if self._live is not None and self._err.is_terminal else self._err
        target.print(Text(f"warning: {text}", style="yellow"), soft_wrap=True)

    def done(self, lines: Iterable[str]) -> None:
        """Close the live display and print the closing lines of the run."""
        self.close()
        for line in lines:
            self._print(Text(line))

    def close(self) -> None:
        """Stop the live display, leave its last state on the terminal, and restore the cursor."""
        self._end_activity()
        live, self._live = self._live, None
        if live is not None and live.is_started:
            live.stop()

    def __enter__(self) -> Self:
        """Return the console itself; leaving the context calls `close`."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the console."""
        self.close()

    # Writing

    def _print(self, text: Text) -> None:
        if self._mode != "off":
            self._out.print(text, soft_wrap=True)

    def _timed(self, text: str) -> None:
        """Print a line of plain mode, prefixed with the time elapsed since the start."""
        self._shown_at = self._clock()
        self._print(Text(f"{duration(self._shown_at - self._started):>9}  {text}".rstrip()))

    def _start_live(self) -> None:
        if self._live is not None:
            self._live.start()

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.start()
            self._live.refresh()

    def _end_activity(self) -> None:
        """End the current phase; live mode prints its duration. Plain mode printed the phase when it started."""
        activity, self._activity = self._activity, None
        if activity is not None and self._live is not None:
            took = duration(self._clock() - activity.since)
            self._print(Text.assemble((f"{took:>9}  ", "dim"), f"{activity.name}  ", (activity.detail, "dim")))

    # Plain mode

    def _is_due(self, step: int) -> bool:
        waited = self._clock() - self._shown_at
        return step % PLAIN_EVERY_STEPS == 0 or step == self._total_steps or waited >= PLAIN_EVERY_S

    def _row(self, metrics: StepMetrics) -> None:
        cells = self._cells(metrics)
        if self._rows % HEADER_EVERY_ROWS == 0:
            self._print(Text(f"{'elapsed':>9}  " + "  ".join(cells)))
        self._rows += 1
        self._timed("  ".join(f"{cell:>{len(name)}}" for name, cell in cells.items()))

    def _cells(self, metrics: StepMetrics) -> dict[str, str]:
        """Return the cells of a row by column name. Each name is padded to the width of its widest cell."""
        values = metrics.values
        step = {"       step": f"{metrics.step}/{self._total_steps}"}
        if LOSS in values:
            return step | {
                "   loss": number(values[LOSS], ".4f"),
                " mean10": number(self._recent_mean(), ".4f"),
                "heldout": number(self._heldout(), ".4f"),
                " epoch": number(values.get("data/epoch"), ".2f"),
                "grad_norm": number(values.get("grad/norm"), ".3g"),
                "learning_rate": number(values.get("optim/lr"), ".2e"),
                "train_tok/s": _rate(values.get("perf/train_tokens_per_s")),
                "step_s": number(_step_seconds(values), ".2f"),
            }
        return step | {
            "reward": number(values.get("reward/mean"), ".3f"),
            "mean10": number(self._recent_mean(), ".3f"),
            "heldout": number(self._heldout(), ".3f"),
            "length": number(values.get("tokens/response_len_mean"), ".1f"),
            "entropy": number(values.get("policy/entropy"), ".3f"),
            "grad_norm": number(values.get("grad/norm"), ".3g"),
            "mismatch": number(values.get("mismatch/logprob_abs_mean"), ".1e"),
            **({"kl_teacher": number(values[KL_TEACHER], ".3f")} if KL_TEACHER in values else {"stale": _staleness(values)}),
            "gen_tok/s": _rate(values.get("perf/gen_tokens_per_s")),
            "train_tok/s": _rate(values.get("perf/train_tokens_per_s")),
            "step_s": number(_step_seconds(values), ".2f"),
            "sync_s": number(_sync_seconds(values), ".3f"),
        }

    # Live mode

    def _render(self) -> RenderableType:
        blocks: list[RenderableType] = []
        if self._last is not None:
            step = self._last.step
            blocks += [self._bar(step, self._total_steps, self._clocks(step)), self._table(self._last.values)]
        if self._activity is not None:
            blocks.append(self._activity_line(self._activity))
        return Panel(Group(*blocks), title=self._title, title_align="left", border_style="dim") if blocks else Text()

    def _bar(self, done: int, total: int, detail: str) -> Table:
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        bar = ProgressBar(total=total, completed=done, complete_style="cyan", finished_style="green")
        row.add_row(Text(f"{done}/{total}", style="bold"), bar, Text(detail, style="dim"))
        return row

    def _clocks(self, step: int) -> str:
        parts = [] if self._phase is None else [self._phase]
        parts.append(duration(self._clock() - self._started))
        (first_s, first), (last_s, last) = self._step_ends[0], self._step_ends[-1]
        if last > first and step < self._total_steps:
            parts.append(f"{duration((last_s - first_s) / (last - first) * (self._total_steps - step))} left")
        return ", ".join(parts)

    def _activity_line(self, activity: _Activity) -> RenderableType:
        elapsed = duration(self._clock() - activity.since)
        if activity.total:
            return self._bar(activity.done, activity.total, f"{activity.name}  {activity.detail}  {elapsed}")
        text = Text.assemble((activity.name, "bold"), f"  {activity.detail}  ", (elapsed, "dim"))
        return Spinner("line", text=text)

    def _table(self, values: Mapping[str, float]) -> RenderableType:
        tables = [_pairs(rows) for rows in (self._learning(values), self._update(values), self._speed(values))]
        columns = sum(self._out.width >= width for width in LAYOUT_WIDTHS)
        grids = []
        for start in range(0, len(tables), columns):
            grid = Table.grid(padding=(0, 4, 0, 0))
            grid.add_row(*tables[start : start + columns])
            grids.append(grid)
        return Group(*grids)

    def _learning(self, values: Mapping[str, float]) -> dict[str, str]:
        name, spec = ("loss", ".4f") if LOSS in values else ("reward", ".3f")
        rows = {
            name: number(values.get(LOSS, values.get("reward/mean")), spec),
            "  10-step mean": number(self._recent_mean(), spec),
            "": sparkline(self._curve, ascii_only=self._out.options.ascii_only),
        }
        for task, (first, last) in self._evaluations.items():
            rows[f"held-out {task}"] = f"{first:{spec}} -> {last:{spec}}"
            if failures := self._failures.get(task):
                rows[f"  of {task}"] = failures.partition(";")[0]
        if LOSS in values:
            return rows | {"epoch": number(values.get("data/epoch"), ".2f")}
        return rows | {"response length": f"{number(values.get('tokens/response_len_mean'), '.1f')} tokens"}

    def _update(self, values: Mapping[str, float]) -> dict[str, str]:
        if LOSS in values:
            return {
                "gradient norm": number(values.get("grad/norm"), ".3g"),
                "learning rate": number(values.get("optim/lr"), ".2e"),
                "tokens trained": _rate(values.get("tokens/trained")),
            }
        return {
            "entropy": number(values.get("policy/entropy"), ".3f"),
            "gradient norm": number(values.get("grad/norm"), ".3g"),
            "logprob mismatch": number(values.get("mismatch/logprob_abs_mean"), ".1e"),
            "  max": number(values.get("mismatch/logprob_abs_max"), ".1e"),
            **(
                {"KL from teacher": number(values[KL_TEACHER], ".3f")}
                if KL_TEACHER in values
                else {"max staleness": _staleness(values)}
            ),
        }

    def _speed(self, values: Mapping[str, float]) -> dict[str, str]:
        phases = "  ".join(f"{name} {seconds:.2f}" for name, seconds in phase_seconds(values).items())
        if LOSS in values:
            return {
                "trainer": f"{_rate(values.get('perf/train_tokens_per_s'))} tokens/s",
                "step": f"{number(_step_seconds(values), '.2f')} s",
                "phases": phases,
            }
        return {
            "generator": f"{_rate(values.get('perf/gen_tokens_per_s'))} tokens/s",
            "trainer": f"{_rate(values.get('perf/train_tokens_per_s'))} tokens/s",
            "step": f"{number(_step_seconds(values), '.2f')} s",
            "weight sync": f"{number(_sync_seconds(values), '.3f')} s",
            "phases": phases,
        }

    def _recent_mean(self) -> float | None:
        recent = self._curve[-10:]
        return sum(recent) / len(recent) if recent else None

    def _heldout(self) -> float | None:
        """Return the latest held-out loss, or the latest mean reward averaged over the evaluation sets."""
        last = [last for _, last in self._evaluations.values()]
        return sum(last) / len(last) if last else None


def resolve(mode: ConsoleMode) -> Literal["live", "plain", "off"]:
    """Resolve `auto` to `live` if stdout is a terminal with cursor control, else to `plain`."""
    if mode != "auto":
        return mode
    can_move = sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    return "live" if can_move else "plain"


def _step_seconds(values: Mapping[str, float]) -> float | None:
    return values.get("time/step_s", sum(phase_seconds(values).values()) or None)


def _sync_seconds(values: Mapping[str, float]) -> float | None:
    parts = [values[name] for name in ("sync/push_s", "sync/pull_s") if name in values]
    return sum(parts) if parts else None


def _staleness(values: Mapping[str, float]) -> str:
    return number(values.get("staleness/max"), ".0f")


def _rate(value: float | None) -> str:
    return "-" if value is None else count(value)


def _pairs(rows: Mapping[str, str]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows.items():
        grid.add_row(Text(name), Text(value))
    return grid


def _default_console(*, live: bool, stderr: bool) -> rich.console.Console:
    if live:
        return rich.console.Console(stderr=stderr)
    # Without these arguments, FORCE_COLOR or a notebook would add control codes to plain lines.
    return rich.console.Console(stderr=stderr, force_terminal=False, force_jupyter=False, color_system=None)
