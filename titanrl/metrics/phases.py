"""Wall-clock time of a step, by phase."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PhaseTimer:
    """Stopwatch for named phases. Use one timer per asyncio task.

    A nested phase pauses the enclosing one. Each second is therefore counted once, and the phases of a step never add up to
    more than its wall-clock time.

    Example: `with timer.phase("train"): ...`, then `timer.take() == {"time/train_s": 0.11}`.
    """

    def __init__(
        self, on_change: Callable[[str | None], None] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Start without a phase.

        Args:
            on_change: Called with the name of each new phase, and with None between phases.
            clock: Function that returns the current time in seconds.
        """
        self._on_change = on_change
        self._clock = clock
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}
        self._charged_until = clock()

    @property
    def current(self) -> str | None:
        """Name of the innermost open phase, None between phases."""
        return self._open[-1] if self._open else None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent in the body of the `with` statement to the phase `name`."""
        self._charge()
        self._open.append(name)
        self._announce()
        try:
            yield
        finally:
            self._charge()
            closed = self._open.pop()
            assert closed == name, f"phases {name} and {closed} overlap, but neither contains the other"
            self._announce()

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase since the previous call, `{"time/<phase>_s": ...}`, and reset them to 0."""
        self._charge()
        taken = {f"time/{name}_s": seconds for name, seconds in self._seconds.items()}
        self._seconds = {}
        return taken

    def _charge(self) -> None:
        now = self._clock()
        if self._open:
            name = self._open[-1]
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._charged_until
        self._charged_until = now

    def _announce(self) -> None:
        if self._on_change is not None:
            self._on_change(self.current)
