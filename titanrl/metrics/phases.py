"""Where the seconds of a step go."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PhaseTimer:
    """Wall seconds by named phase, for one thread of control.

    A phase inside another interrupts it, so each second counts once and the phases of a step add up to its wall time.

    Example: `with timer.phase("train"): ...`, then `timer.take() == {"time/train_s": 0.11}`.
    """

    def __init__(
        self, on_change: Callable[[str | None], None] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`on_change` is told the current phase, None between phases; `clock` gives seconds."""
        self._on_change = on_change
        self._clock = clock
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}
        self._charged_until = clock()

    @property
    def current(self) -> str | None:
        """Innermost open phase, None between phases."""
        return self._open[-1] if self._open else None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the seconds of the body to `name`."""
        self._charge()
        self._open.append(name)
        self._announce()
        try:
            yield
        finally:
            self._charge()
            closed = self._open.pop()
            assert closed == name, f"phases {name} and {closed} overlap without one inside the other"
            self._announce()

    def take(self) -> dict[str, float]:
        """Seconds by metric name since the last call, `{"time/<phase>_s": ...}`; an open phase goes on from zero."""
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
