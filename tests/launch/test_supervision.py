"""Deadlines, errors and deaths, with real actors."""

import asyncio
import atexit
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import monarch.actor
import pytest
from monarch.actor import ActorError, ProcMesh, this_host

from titanrl.actors import Actor, RemoteError, StoppedError, concurrent_endpoint, endpoint, is_stop
from titanrl.launch.fleet import Fleet
from titanrl.launch.supervision import PROCESS_FAILED, ActorDiedError, DeadlineError, Supervisor


class Trace:
    """Makes a file when it is deleted."""

    def __init__(self, file: Path) -> None:
        self._file = str(file)

    def __del__(self, make: Callable[[str], None] = os.mknod) -> None:
        make(self._file)


TRACES: list[Trace] = []


class Patient(Actor):
    """Does what can go wrong."""

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def fail(self) -> None:
        raise ValueError("data.task=sums: no such task")

    @concurrent_endpoint
    async def fail_unpicklably(self) -> None:
        error = OSError("broken pipe")
        error.handle = (x for x in ())  # type: ignore[attr-defined]
        raise error

    @endpoint
    async def leak_cancellation(self) -> None:
        raise asyncio.CancelledError

    @endpoint
    async def exit(self) -> None:
        raise SystemExit(3)

    @endpoint
    async def give_up(self) -> None:
        raise StoppedError("the engine was closed")

    @endpoint
    async def leave_traces(self, folder: Path) -> None:
        TRACES.append(Trace(folder / "taken apart"))
        atexit.register((folder / "handled").touch)
        sys.stdout.write("last words")

    @concurrent_endpoint
    async def hang(self) -> None:
        await asyncio.Event().wait()


Scenario = Callable[[Supervisor, ProcMesh, Any], Coroutine[Any, Any, None]]


def with_patient(tmp_path: Path, scenario: Scenario) -> None:
    async def run() -> None:
        supervisor = Supervisor()
        fleet = Fleet(tmp_path, supervisor)
        procs = fleet.spawn("patient", this_host(), 1, {}, ())
        try:
            await scenario(supervisor, procs, procs.spawn("patient", Patient))
        finally:
            supervisor.expect_deaths()
            await fleet.stop(20)

    asyncio.run(run())


def test_every_kind_of_error_reaches_the_caller_and_the_actor_survives(tmp_path: Path) -> None:
    async def scenario(supervisor: Supervisor, procs: ProcMesh, patient: Any) -> None:
        with pytest.raises(ValueError, match=r"data\.task=sums: no such task"):
            await supervisor.ask("fail", patient.fail.call_one(), 30)
        with pytest.raises(RemoteError, match="broken pipe"):
            await supervisor.ask("fail", patient.fail_unpicklably.call_one(), 30)
        for stray in (patient.leak_cancellation, patient.exit):
            with pytest.raises(RemoteError):
                await supervisor.ask("stray", stray.call_one(), 30)
        assert await supervisor.ask("pid", patient.pid.call_one(), 30) > 0

    with_patient(tmp_path, scenario)
    assert "no such task" in (tmp_path / "patient_0.log").read_text()


def test_request_to_a_stopped_engine_is_logged_without_traceback(tmp_path: Path) -> None:
    async def scenario(supervisor: Supervisor, procs: ProcMesh, patient: Any) -> None:
        with pytest.raises(StoppedError, match="the engine was closed"):
            await supervisor.ask("give_up", patient.give_up.call_one(), 30)

    with_patient(tmp_path, scenario)
    assert is_stop(ActorError(StoppedError("the engine was closed"), "asked from elsewhere"))
    assert not is_stop(ActorError(ValueError("wrong"), "asked from elsewhere"))
    log = (tmp_path / "patient_0.log").read_text()
    assert "give_up did not finish: StoppedError('the engine was closed')" in log
    assert "Traceback" not in log


def test_deadline_error_names_the_request(tmp_path: Path) -> None:
    async def scenario(supervisor: Supervisor, procs: ProcMesh, patient: Any) -> None:
        await supervisor.ask("pid", patient.pid.call_one(), 30)
        with pytest.raises(DeadlineError, match=r"no reply to 'patient\.hang' within 0\.2 s"):
            await supervisor.ask("patient.hang", patient.hang.call_one(), 0.2)

    with_patient(tmp_path, scenario)


def test_death_ends_every_wait_of_its_run_only(tmp_path: Path) -> None:
    async def scenario(supervisor: Supervisor, procs: ProcMesh, patient: Any) -> None:
        pid = await supervisor.ask("pid", patient.pid.call_one(), 30)
        waiting = asyncio.create_task(supervisor.ask("patient.hang", patient.hang.call_one(), 60))
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ActorDiedError, match=rf"patient_0 \(process {pid}\) has ended"):
            await asyncio.wait_for(waiting, 15)
        # torchmonarch reports it ten seconds later, once per actor mesh, to the supervisor of that time.
        late: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        loop, following = asyncio.get_running_loop(), Supervisor()
        take = monarch.actor.unhandled_fault_hook

        def hear(failure: Any) -> None:
            take(failure)
            loop.call_soon_threadsafe(late.put_nowait, (failure.mesh_name.partition("-")[0], failure.report()))

        monarch.actor.unhandled_fault_hook = hear
        told = dict([await asyncio.wait_for(late.get(), 60) for _ in range(3)])
        assert told.keys() == {"setup", "logger", "patient"}
        assert all(PROCESS_FAILED in report for report in told.values())
        assert await following.ask("nothing", asyncio.sleep(0.1, "as before"), 5) == "as before"

    with_patient(tmp_path, scenario)


def test_failed_guarded_call_ends_every_wait_with_its_cause(tmp_path: Path) -> None:
    async def scenario(supervisor: Supervisor, procs: ProcMesh, patient: Any) -> None:
        supervisor.guard("the first", patient.pid.call_one())
        assert await supervisor.ask("pid", patient.pid.call_one(), 30) > 0
        supervisor.guard("rank 1", patient.fail.call_one())
        with pytest.raises(ActorDiedError, match=r"rank 1 failed: data\.task=sums: no such task .while waiting for: patient"):
            await supervisor.ask("patient.hang", patient.hang.call_one(), 30)

    with_patient(tmp_path, scenario)


def test_stopped_process_runs_exit_handlers_but_no_interpreter_shutdown(tmp_path: Path) -> None:
    async def scenario(supervisor: Supervisor, procs: ProcMesh, patient: Any) -> None:
        await supervisor.ask("patient.leave_traces", patient.leave_traces.call_one(tmp_path), 60)

    with_patient(tmp_path, scenario)
    assert (tmp_path / "handled").exists()
    assert (tmp_path / "patient_0.log").read_text().endswith("last words")
    assert not (tmp_path / "taken apart").exists()


def test_process_that_does_not_end_is_killed_and_named() -> None:
    async def run() -> None:
        supervisor = Supervisor()
        with subprocess.Popen(["sleep", "600"]) as stubborn, subprocess.Popen(["true"]) as willing:
            supervisor.watch("stubborn_0", stubborn.pid)
            supervisor.watch("willing_0", willing.pid)
            supervisor.expect_deaths()
            assert await supervisor.reap(1.0) == [f"stubborn_0 (process {stubborn.pid})"]
            assert stubborn.wait() == -signal.SIGKILL
            assert await supervisor.reap(1.0) == []

    asyncio.run(run())


def test_process_that_ended_before_the_watch_counts_as_dead() -> None:
    async def run() -> None:
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        supervisor = Supervisor()
        supervisor.watch("patient_0", ended.pid)
        with pytest.raises(ActorDiedError, match="patient_0"):
            await supervisor.ask("patient.hang", asyncio.sleep(60), 60)

    asyncio.run(run())
