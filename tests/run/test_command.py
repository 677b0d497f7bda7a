"""The end of a run's process."""

import io
import os
import queue

import pytest
import rich.console

from titanrl.run.command import start_watchdog


@pytest.mark.parametrize(
    ("code", "cause", "message", "status"),
    [
        (0, "", "error: writing the report took more than 0.01 s\n", 1),
        (130, "interrupted", "error: interrupted (writing the report took more than 0.01 s)\n", 130),
    ],
)
def test_end_that_hangs_is_named_and_ends(
    code: int, cause: str, message: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    exits: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(os, "_exit", exits.put)
    err = rich.console.Console(file=io.StringIO(), soft_wrap=True)
    start_watchdog(code, cause, err, 0.01, "writing the report")
    assert exits.get(timeout=10) == status
    assert err.file.getvalue() == message  # type: ignore[attr-defined]


def test_end_in_time_is_not_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    exits: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(os, "_exit", exits.put)
    watchdog = start_watchdog(0, "", rich.console.Console(), 0.2, "closing")
    watchdog.cancel()
    watchdog.join(10)
    assert exits.empty()
