"""A reward that takes 3 s when a process scores for the first time."""

import time
from collections.abc import Mapping
from typing import Any

SLEEP_S = 3.0
_has_slept = False


def slow(completion: str, entry: Mapping[str, Any]) -> float:
    """Return 0, at first late."""
    global _has_slept
    if not _has_slept:
        _has_slept = True
        time.sleep(SLEEP_S)
    return 0.0
