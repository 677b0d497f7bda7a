"""Liveness checks: whether a request makes progress, and whether a process responds at all."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from titanrl.launch.deadlines import Pace
from titanrl.processes.actors import ActorError, SupervisionError, resolve

PROGRESS_S = PROBE_S = 10.0
"""Limits of the two checks, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaceable:
    """Callbacks of a role whose processes are replaced together, instead of ending the run, when one dies or hangs."""

    on_death: Callable[[str], None]
    """Called with the cause of death, possibly more than once."""
    probe: Callable[[], Awaitable[object]]
    """Sends a request to which every process replies immediately unless it hangs."""
    is_up: Callable[[], bool]
    """Returns False while the processes are being started or replaced."""


async def unresponsive(parts: Mapping[str, Replaceable]) -> set[str]:
    """Return the roles that do not reply to a probe."""
    replies = await asyncio.gather(*(responds(part.probe()) for part in parts.values()))
    return {role for role, reply in zip(parts, replies, strict=True) if not reply}


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
