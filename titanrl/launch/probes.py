"""Liveness checks: whether a request makes progress, and whether a process responds at all."""

import asyncio
import contextlib
from collections.abc import Awaitable

from titanrl.actors import ActorError, SupervisionError, resolve
from titanrl.launch.deadlines import Pace

PROGRESS_S = PROBE_S = 10.0
"""Limits of the two checks, in seconds."""


async def progress_of(pace: Pace) -> object:
    """Return the progress value of a request; None if it is unknown."""
    if pace.progress is None:
        return None
    with contextlib.suppress(TimeoutError, SupervisionError):
        return await asyncio.wait_for(resolve(pace.progress()), PROGRESS_S)
    return None


async def responds(probe: Awaitable[object]) -> bool:
    """Return True if a probe gets a reply within `PROBE_S`; False on timeout or if the process is dead."""
    try:
        await asyncio.wait_for(resolve(probe), PROBE_S)
    except (TimeoutError, ActorError, SupervisionError):
        return False
    return True
