"""Limit on replacements: the run fails if its parts keep dying."""

import time
from collections import deque
from collections.abc import Callable

from titanrl.base.errors import TitanRLError
from titanrl.config.faults import FaultsConfig


class RespawnLimitError(TitanRLError):
    """Parts of the run kept dying; the message names them and the last cause."""


class Respawns:
    """Counts replacements within the last `faults.respawn_window_s` seconds, over all sessions of a run."""

    def __init__(self, config: FaultsConfig, now: Callable[[], float] = time.monotonic) -> None:
        """Start without replacements; `now` is a clock in seconds."""
        self._limit, self._window_s, self._now = config.max_respawns, config.respawn_window_s, now
        self._last: deque[tuple[float, str]] = deque()

    @property
    def num_recent(self) -> int:
        """Number of replacements in the window that ends with the most recent one, which is included."""
        return len(self._last)

    @property
    def limit(self) -> int:
        """Number of replacements allowed within the window."""
        return self._limit

    def add(self, part: str, cause: str) -> None:
        """Count a replacement that is about to start.

        Args:
            part: part to replace, such as `generator_0`.
            cause: cause of its death.

        Raises:
            RespawnLimitError: The window already has `faults.max_respawns` replacements.
        """
        now = self._now()
        while self._last and self._last[0][0] <= now - self._window_s:
            self._last.popleft()
        if len(self._last) >= self._limit:
            raise RespawnLimitError(self._text(part, cause))
        self._last.append((now, part))

    def _text(self, part: str, cause: str) -> str:
        if not self._limit:
            return cause
        parts = [earlier for _, earlier in self._last]
        counts = ", ".join(f"{name} {parts.count(name)} times" for name in dict.fromkeys(parts))
        return (
            f"faults.max_respawns: {part} ended after {len(parts)} replacements within {self._window_s:g} s ({counts}; got "
            f"{self._limit}). Last cause: {cause}"
        )
