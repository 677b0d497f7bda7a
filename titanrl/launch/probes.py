"""Questions to the processes of a run: does work go on, and does a process answer at all?"""

import asyncio
import contextlib
from collections.abc import Awaitable

from titanrl.actors import ActorError, SupervisionError, resolve
from titanrl.launch.deadlines import Pace

PROGRESS_S = PROBE_S = 10.0
"""Limits for the two questions."""


async def progress_of(pace: Pace) -> object:
    """Return how far the work is; None if that is not known."""
    if pace.progress is None:
        return None
    with contextlib.suppress(TimeoutError, SupervisionError):
        return await asyncio.wait_for(resolve(pace.progress()), PROGRESS_S)
    return None


async def answers(probe: Awaitable[object]) -> bool:
    """Return whether a process answers in time; one that has ended does not."""
    try:
        await asyncio.wait_for(resolve(probe), PROBE_S)
    except (TimeoutError, ActorError, SupervisionError):
        return False
    return True
