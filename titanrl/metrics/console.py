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

from titanrl.carriers.types import StepMetrics
from titanrl.config.sections import ConsoleMode
from titanrl.metrics.reading import count, duration, fixed, phase_seconds, sparkline

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
TEACHER_TOO_LONG = "tokens/teacher_too_long_frac"
"""Metric that identifies a step of distillation."""
SPARKLINE_STEPS = 24
"""Number of most recent steps in the sparkline."""
RECENT_MEAN, HELDOUT_MEAN, SYNC = "mean of the last ten steps", "mean over the evaluation sets", "push and pull"
"""Quantities that are not metrics."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A quantity of a step on the console. Example: `Quantity("grad/norm", ".3g", "grad_norm", "gradient norm")`."""

    metric: str
    spec: str
    """Format specification; empty for a count with a metric suffix."""
    column: str = ""
    """Column of plain mode, padded to the width of its widest cell; empty for none."""
    label: str = ""
    """Row of the live display; empty for none."""
    unit: str = ""
    """Unit in the live display."""

    def text(self, values: Mapping[str, float]) -> str:
        """Return the formatted value; `-` if it is missing."""
        value = values.get(self.metric)
        return "-" if value is None else fixed(value, self.spec) if self.spec else count(value)


_NORM = Quantity("grad/norm", ".3g", "grad_norm", "gradient norm")
_TRAINER = Quantity("perf/train_tokens_per_s", "", "train_tok/s", "trainer", " tokens/s")
_STEP = Quantity("time/step_s", ".2f", "step_s", "step", " s")
_SAMPLED = (
    Quantity("reward/mean", ".3f", "reward", "reward"),
    Quantity(RECENT_MEAN, ".3f", "mean10", "  10-step mean"),
    Quantity(HELDOUT_MEAN, ".3f", "heldout"),
    Quantity("tokens/response_len_mean", ".1f", "length", "response length", " tokens"),
)
_UPDATE = (
    Quantity("policy/entropy", ".3f", "entropy", "entropy"),
    _NORM,
    Quantity("mismatch/logprob_abs_mean", ".1e", "mismatch", "logprob mismatch"),
    Quantity("mismatch/logprob_abs_max", ".1e", "", "  max"),
)
_SPEED = (
    Quantity("perf/gen_tokens_per_s", "", "gen_tok/s", "generator", " tokens/s"),
    _TRAINER,
    _STEP,
    Quantity(SYNC, ".3f", "sync_s", "weight sync", " s"),
)
REINFORCEMENT = (_SAMPLED, (*_UPDATE, Quantity("staleness/max", ".0f", "stale", "max staleness")), _SPEED)
DISTILLATION = (_SAMPLED, (*_UPDATE, Quantity(KL_TEACHER, ".3f", "kl_teacher", "KL from teacher")), _SPEED)
FINE_TUNING = (
    (
        Quantity(LOSS, ".4f", "   loss", "loss"),
        Quantity(RECENT_MEAN, ".4f", " mean10", "  10-step mean"),
        Quantity(HELDOUT_MEAN, ".4f", "heldout"),
        Quantity("data/epoch", ".2f", " epoch", "epoch"),
    ),
    (
        _NORM,
        Quantity("optim/lr", ".2e", "learning_rate", "learning rate"),
        Quantity("tokens/trained", "", "", "tokens trained"),
    ),
    (_TRAINER, _STEP),
)
"""Quantities on the console, in the order of both modes, by block of the live display."""


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
        """Prepare the console without printing anything. Progress goes to `out` (stdout), warnings to `err` (stderr)."""
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
        if self._live is not None:
            self._live.start()
            self._live.refresh()

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
        is_due = first or metrics.step % PLAIN_EVERY_STEPS == 0 or metrics.step == self._total_steps
        if self._mode == "plain" and (is_due or self._clock() - self._shown_at >= PLAIN_EVERY_S):
            self._row(metrics)
        self._start_live()

    def evaluation(self, task: str, version: int, mean: float, failures: str = "") -> None:
        """Show the mean reward of one evaluation set. `failures` describes the completions that are missing from the mean."""
        first = self._evaluations.get(task, (mean, mean))[0]
        self._evaluations = {**self._evaluations, task: (first, mean)}
        self._failures = {**self._failures, task: failures}
        if self._mode == "plain":
            self._timed(
                f"held-out {task}: mean reward {fixed(mean)} at version {version}{f' ({failures})' if failures else ''}"
            )
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
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # Writing

    def _print(self, text: Text) -> None:
        if self._mode != "off":
            self._out.print(text, soft_wrap=True)

    def _timed(self, text: str) -> None:
        self._shown_at = self._clock()
        self._print(Text(f"{duration(self._shown_at - self._started):>9}  {text}".rstrip()))

    def _start_live(self) -> None:
        if self._live is not None:
            self._live.start()

    def _end_activity(self) -> None:
        """End the current phase; live mode prints its duration. Plain mode printed the phase when it started."""
        activity, self._activity = self._activity, None
        if activity is not None and self._live is not None:
            took = duration(self._clock() - activity.since)
            self._print(Text.assemble((f"{took:>9}  ", "dim"), f"{activity.name}  ", (activity.detail, "dim")))

    def _row(self, metrics: StepMetrics) -> None:
        """Print a row of plain mode. The name of a column is padded to the width of its widest cell."""
        values = self._known(metrics.values)
        cells = {"       step": f"{metrics.step}/{self._total_steps}"}
        for quantity in (quantity for block in _blocks(values) for quantity in block if quantity.column):
            cells[quantity.column] = quantity.text(values)
        if self._rows % HEADER_EVERY_ROWS == 0:
            self._print(Text(f"{'elapsed':>9}  " + "  ".join(cells)))
        self._rows += 1
        self._timed("  ".join(f"{cell:>{len(name)}}" for name, cell in cells.items()))

    # Live mode

    def _render(self) -> RenderableType:
        blocks: list[RenderableType] = []
        if self._last is not None:
            step = self._last.step
            blocks += [self._bar(step, self._total_steps, self._clocks(step)), self._table(self._last.values)]
        if (activity := self._activity) is not None:
            elapsed = duration(self._clock() - activity.since)
            if activity.total:
                blocks.append(self._bar(activity.done, activity.total, f"{activity.name}  {activity.detail}  {elapsed}"))
            else:
                text = Text.assemble((activity.name, "bold"), f"  {activity.detail}  ", (elapsed, "dim"))
                blocks.append(Spinner("line", text=text))
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

    def _table(self, values: Mapping[str, float]) -> RenderableType:
        """Return the blocks of learning, of the update and of speed, in as many columns as fit."""
        known, tables = self._known(values), list[Table]()
        for block in _blocks(known):
            rows: list[tuple[str, str]] = []
            for quantity in block:
                if quantity.label:
                    rows.append((quantity.label, f"{quantity.text(known)}{quantity.unit}"))
                if quantity.metric == RECENT_MEAN:
                    rows.append(("", sparkline(self._curve, ascii_only=self._out.options.ascii_only)))
                    for task, (first, last) in self._evaluations.items():
                        rows.append((f"held-out {task}", f"{first:{quantity.spec}} -> {last:{quantity.spec}}"))
                        if failures := self._failures.get(task):
                            rows.append((f"  of {task}", failures.partition(";")[0]))
            table = Table.grid(padding=(0, 2, 0, 0))
            table.add_column(style="dim", no_wrap=True)
            table.add_column(overflow="fold")
            for row in rows:
                table.add_row(*map(Text, row))
            tables.append(table)
        phases = "  ".join(f"{name} {seconds:.2f}" for name, seconds in phase_seconds(values).items())
        tables[-1].add_row(Text("phases"), Text(phases))
        columns = sum(self._out.width >= width for width in LAYOUT_WIDTHS)
        grids = []
        for start in range(0, len(tables), columns):
            grid = Table.grid(padding=(0, 4, 0, 0))
            grid.add_row(*tables[start : start + columns])
            grids.append(grid)
        return Group(*grids)

    def _known(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of a step with the quantities that the console computes from them and from earlier steps."""
        heldout, sync = [last for _, last in self._evaluations.values()], ("sync/push_s", "sync/pull_s")
        summed = {
            RECENT_MEAN: (self._curve[-10:], len(self._curve[-10:])),
            HELDOUT_MEAN: (heldout, len(heldout)),
            SYNC: ([values[name] for name in sync if name in values], 1),
            "time/step_s": ([seconds for seconds in phase_seconds(values).values() if seconds], 1),
        }
        return {name: sum(parts) / number for name, (parts, number) in summed.items() if parts} | dict(values)


def resolve(mode: ConsoleMode) -> Literal["live", "plain", "off"]:
    """Resolve `auto` to `live` if stdout is a terminal with cursor control, else to `plain`."""
    if mode != "auto":
        return mode
    can_move = sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    return "live" if can_move else "plain"


def _blocks(values: Mapping[str, float]) -> Iterable[Iterable[Quantity]]:
    """Return the quantities of a step: learning, update, speed."""
    return FINE_TUNING if LOSS in values else DISTILLATION if TEACHER_TOO_LONG in values else REINFORCEMENT


def _default_console(*, live: bool, stderr: bool) -> rich.console.Console:
    if live:
        return rich.console.Console(stderr=stderr)
    # Without these arguments, FORCE_COLOR or a notebook would add control codes to plain lines.
    return rich.console.Console(stderr=stderr, force_terminal=False, force_jupyter=False, color_system=None)
