"""A process with one actor for tests, started and stopped like the processes of a session."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from monarch.actor import ProcMesh

from titanrl.launch.assembly import Fleet, local_host
from titanrl.launch.supervision import Supervisor
from titanrl.processes.actors import Actor


@asynccontextmanager
async def running_patient(
    actor: type[Actor], logs: Path, supervisor: Supervisor, *, stop_s: float = 20.0, may_hang: bool = False
) -> AsyncIterator[tuple[ProcMesh, Any]]:
    """Start a process `patient_0` with an actor, and stop it at the end.

    Args:
        actor: Its class.
        logs: Folder of its log.
        supervisor: Supervisor of the process.
        stop_s: Limit of an orderly stop.
        may_hang: Kill the process if it does not stop in time; otherwise this is an error.
    """
    fleet = Fleet(logs, supervisor)
    procs = fleet.spawn("patient", local_host(), 1, {}, ())
    try:
        yield procs, procs.spawn("patient", actor)
    finally:
        closing = time.monotonic()
        supervisor.expect_deaths()
        await asyncio.gather(fleet.stop(stop_s), return_exceptions=may_hang)
        if may_hang:
            await supervisor.reap(2)
        assert time.monotonic() - closing < stop_s + 20, "a process that hangs does so for minutes"
