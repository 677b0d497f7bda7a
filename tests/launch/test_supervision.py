"""Deadlines, errors and deaths, with real actors."""

import asyncio
import atexit
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import monarch.actor
import psutil
import pytest
from monarch._rust_bindings.monarch_hyperactor.config import reload_config_from_env
from monarch.actor import ActorError, ProcMesh

from tests.launch.patients import running_patient
from titanrl.base.errors import TitanRLError, describe
from titanrl.launch.assembly import POLL, Fleet, local_host
from titanrl.launch.supervision import PROCESS_FAILED, ActorDiedError, DeadlineError, Replaceable, Supervisor
from titanrl.processes.actors import Actor, RemoteError, StoppedError, concurrent_endpoint, endpoint, is_stop, portable


class Trace:
    """Creates a file when it is deleted."""

    def __init__(self, file: Path) -> None:
        self._file = str(file)

    def __del__(self, make: Callable[[str], None] = os.mknod) -> None:
        make(self._file)


TRACES: list[Trace] = []


class NotQuiteError(BaseException):
    """Like torch's CheckpointException, not an Exception, and with arguments that it does not pass on."""

    def __init__(self, file: str) -> None:
        super().__init__("missing", file)


class Patient(Actor):
    """Actor whose endpoints fail in many ways."""

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

    @concurrent_endpoint
    async def end_process(self) -> None:
        os._exit(3)

    @endpoint
    async def interrupt_a_task(self) -> None:
        async def interrupted() -> None:
            raise KeyboardInterrupt

        await asyncio.create_task(interrupted())

    @endpoint
    async def fail_like_torch(self) -> None:
        raise NotQuiteError("__0_0.distcp")

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
        async with running_patient(Patient, tmp_path, supervisor) as (procs, patient):
            await scenario(supervisor, procs, patient)

    asyncio.run(run())


def test_every_kind_of_error_reaches_the_caller_and_the_actor_survives_until_it_is_stopped(tmp_path: Path) -> None:
    log = tmp_path / "patient_0.log"

    async def scenario(supervisor: Supervisor, procs: ProcMesh, patient: Any) -> None:
        with pytest.raises(StoppedError, match="the engine was closed"):
            await supervisor.ask("give_up", patient.give_up.call_one(), 30)
        assert "give_up did not finish: StoppedError('the engine was closed')" in log.read_text()
        assert "Traceback" not in log.read_text(), "a stopped engine is no error"
        with pytest.raises(ValueError, match=r"data\.task=sums: no such task") as failed:
            await supervisor.ask("fail", patient.fail.call_one(), 30)
        place = f"raised in patient_0; traceback: {log}"
        assert describe(failed.value) == f"ValueError: data.task=sums: no such task ({place})"
        with pytest.raises(RemoteError, match="broken pipe") as failed:
            await supervisor.ask("fail", patient.fail_unpicklably.call_one(), 30)
        assert describe(failed.value) == f"RemoteError: OSError: broken pipe ({place})"
        with pytest.raises(RemoteError, match=r"NotQuiteError: \('missing', '__0_0\.distcp'\)\nraised in patient_0"):
            await supervisor.ask("fail", patient.fail_like_torch.call_one(), 30)
        for stray in (patient.leak_cancellation, patient.exit):
            with pytest.raises(RemoteError):
                await supervisor.ask("stray", stray.call_one(), 30)
        assert await supervisor.ask("pid", patient.pid.call_one(), 30) > 0
        await supervisor.ask("patient.leave_traces", patient.leave_traces.call_one(tmp_path), 60)

    with_patient(tmp_path, scenario)
    assert "no such task" in log.read_text()
    # A stopped process runs its exit handlers, but not the shutdown of its interpreter.
    assert (tmp_path / "handled").exists()
    assert log.read_text().endswith("last words")
    assert not (tmp_path / "taken apart").exists()


def test_error_of_a_nested_request_reaches_the_caller() -> None:
    nested = ActorError(ActorError(ValueError("no room"), "asked by a shard"), "asked by a worker")
    error = portable(nested)
    assert is_stop(ActorError(StoppedError("the engine was closed"), "asked from elsewhere"))
    assert not is_stop(ActorError(ValueError("wrong"), "asked from elsewhere"))
    assert (type(error), str(error)) == (ValueError, "no room")
    assert is_stop(ActorError(ActorError(StoppedError("the engine was closed"), "asked by a shard"), "asked by a worker"))


@pytest.mark.parametrize("is_killed", [True, False])
def test_death_fails_all_requests_of_its_run_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool) -> None:
    monkeypatch.setenv(POLL, "1s")  # as in runs over several hosts; on one machine, torchmonarch would report it in an hour
    reload_config_from_env()

    async def scenario(supervisor: Supervisor, procs: ProcMesh, patient: Any) -> None:
        pid = await supervisor.ask("pid", patient.pid.call_one(), 30)
        waiting = asyncio.create_task(supervisor.ask("patient.hang", patient.hang.call_one(), 60))
        # torchmonarch reports a kill ten seconds later, for most actor meshes, to the supervisor of that time; an exit soon.
        late: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        loop, take = asyncio.get_running_loop(), [monarch.actor.unhandled_fault_hook]

        def hear(failure: Any) -> None:
            take[0](failure)
            loop.call_soon_threadsafe(late.put_nowait, (failure.mesh_name.partition("-")[0], failure.report()))

        monarch.actor.unhandled_fault_hook = hear
        await asyncio.sleep(0.1)  # the request is sent
        os.kill(pid, signal.SIGKILL) if is_killed else patient.end_process.broadcast()
        with pytest.raises(ActorDiedError, match=rf"patient_0 \(process {pid}\) exited"):
            await asyncio.wait_for(waiting, 45)
        following = Supervisor()
        take[0], monarch.actor.unhandled_fault_hook = monarch.actor.unhandled_fault_hook, hear
        told = [await asyncio.wait_for(late.get(), 60)]
        assert await following.ask("nothing", asyncio.sleep(2.0, "as before"), 60) == "as before"
        told += [late.get_nowait() for _ in range(late.qsize())]
        assert {mesh for mesh, _ in told} <= {"setup", "logger", "patient"}
        assert all(PROCESS_FAILED in report for _, report in told)

    with_patient(tmp_path, scenario)


def test_process_whose_event_loop_ends_exits(tmp_path: Path) -> None:
    async def scenario(supervisor: Supervisor, procs: ProcMesh, patient: Any) -> None:
        with pytest.raises(ActorDiedError, match=r"patient_0 .* exited"):
            await supervisor.ask("patient.interrupt_a_task", patient.interrupt_a_task.call_one(), 60)

    with_patient(tmp_path, scenario)
    log = (tmp_path / "patient_0.log").read_text()
    assert "raise KeyboardInterrupt" in log
    assert log.endswith("the event loop ended: KeyboardInterrupt; this process exits\n")


async def test_every_actor_on_another_machine_reports_its_role() -> None:
    supervisor, ended = Supervisor(), asyncio.Queue[str]()
    supervisor.watch("rollout_1_0", 17, "far")
    supervisor.watch("rollout_10_0", 18, "far")
    for role in ("rollout_1", "rollout_10"):
        end, probe = partial(ended.put_nowait, role), partial(asyncio.sleep, 0)
        supervisor.replace(role, Replaceable(on_death=lambda cause, end=end: end(), probe=probe, is_up=lambda: True))

    def report(mesh: str, text: str) -> None:
        monarch.actor.unhandled_fault_hook(SimpleNamespace(mesh_name=mesh, report=lambda: text))  # type: ignore[arg-type]

    for mesh in ("setup-1a", "interface-1a", "rollout_2-1a", "rollout_10_shard-1a", "rollout_1-1a"):
        report(mesh, f"{PROCESS_FAILED} failed")
    assert [await asyncio.wait_for(ended.get(), 10) for _ in range(2)] == ["rollout_10", "rollout_1"]
    assert ended.empty()
    assert supervisor.failure is None
    supervisor.expect_deaths()


def has_ended(pid: int) -> bool:
    """Return True if a process has exited, even if its parent has not reaped it yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_start_over_fails_requests_and_kills_all_but_kept_processes(tmp_path: Path) -> None:
    supervisor = Supervisor()
    fleet = Fleet(tmp_path, supervisor)
    patients = {role: fleet.spawn(role, local_host(), 1, {}, ()).spawn(role, Patient) for role in ("kept", "dropped")}
    pids = {role: await supervisor.ask("pid", patient.pid.call_one(), 60) for role, patient in patients.items()}
    waiting = [asyncio.create_task(supervisor.ask(f"{role}.hang", patients[role].hang.call_one(), 60)) for role in patients]
    await asyncio.sleep(0)
    await supervisor.start_over(["kept"])
    for reply in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(reply, ActorDiedError)
        assert "the run restarts (while waiting for: " in str(reply)
    assert has_ended(pids["dropped"])
    await fleet.retire_all_but(["kept"])
    assert supervisor.failure is None
    assert await supervisor.ask("pid", patients["kept"].pid.call_one(), 60) == pids["kept"]
    again = fleet.spawn("dropped", local_host(), 1, {}, ()).spawn("dropped", Patient)
    pid = await supervisor.ask("pid", again.pid.call_one(), 60)
    for role, doomed in (("dropped", pid), ("kept", pids["kept"])):
        hanging = asyncio.create_task(supervisor.ask("kept.hang", patients["kept"].hang.call_one(), 60))
        await asyncio.sleep(0)
        os.kill(doomed, signal.SIGKILL)
        with pytest.raises(ActorDiedError, match=rf"{role}_0 \(process {doomed}\) exited"):
            await hanging
        await supervisor.start_over(["kept"])
    supervisor.expect_deaths()
    await fleet.stop(20)


async def test_kept_part_that_dies_after_the_failure_is_replaced(tmp_path: Path) -> None:
    supervisor = Supervisor()
    fleet = Fleet(tmp_path, supervisor)
    patients = {role: fleet.spawn(role, local_host(), 1, {}, ()).spawn(role, Patient) for role in ("kept", "dropped")}
    pids = {role: await supervisor.ask("pid", patient.pid.call_one(), 60) for role, patient in patients.items()}
    causes: list[str] = []
    probe = patients["kept"].pid.call_one
    supervisor.replace("kept", Replaceable(on_death=causes.append, probe=probe, is_up=lambda: True))
    for role in ("dropped", "kept"):  # the first death ends the run, and the second is noticed before it restarts
        hanging = asyncio.create_task(supervisor.ask("kept.wait", asyncio.Event().wait(), 60))
        os.kill(pids[role], signal.SIGKILL)
        with pytest.raises(ActorDiedError, match="dropped_0"):
            await hanging
        while any(process.pid == pids[role] for process in supervisor._pidfds.values()):
            await asyncio.sleep(0.01)
    assert causes == []
    await supervisor.start_over(["kept"])
    assert causes == [f"kept_0 (process {pids['kept']}) exited"]
    await supervisor.start_over(["kept"])
    assert len(causes) == 1
    supervisor.expect_deaths()
    await fleet.stop(20)


def test_deadline_and_failed_guarded_call_fail_requests_with_their_cause(tmp_path: Path) -> None:
    async def scenario(supervisor: Supervisor, procs: ProcMesh, patient: Any) -> None:
        supervisor.guard("patient", "the first", patient.pid.call_one())
        assert await supervisor.ask("pid", patient.pid.call_one(), 30) > 0
        with pytest.raises(DeadlineError, match=r"no reply to 'patient\.hang' within 0\.2 s"):
            await supervisor.ask("patient.hang", patient.hang.call_one(), 0.2)
        supervisor.guard("patient", "rank 1", patient.fail.call_one())
        with pytest.raises(ActorDiedError, match=r"rank 1 failed: data\.task=sums: no such task .while waiting for: patient"):
            await supervisor.ask("patient.hang", patient.hang.call_one(), 30)

    with_patient(tmp_path, scenario)


async def test_guarded_call_of_killed_processes_does_not_replace_their_successors() -> None:
    causes: list[str] = []
    supervisor, late = Supervisor(), asyncio.get_running_loop().create_future()

    async def probe() -> None:
        pass

    supervisor.replace("kept", Replaceable(on_death=causes.append, probe=probe, is_up=lambda: True))
    supervisor.guard("kept", "rank 1", asyncio.shield(late))
    await asyncio.sleep(0)
    await supervisor.kill("kept")
    late.set_exception(OSError("undeliverable"))
    await asyncio.sleep(0.01)
    assert causes == []
    assert not supervisor._guards
    supervisor.expect_deaths()


async def test_process_that_cannot_be_killed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that waits in the kernel for a broken device."""
    monkeypatch.setattr("titanrl.launch.supervision.KILL_S", 0.1)
    monkeypatch.setattr("titanrl.launch.supervision._send", lambda number, pidfds: None)
    supervisor = Supervisor()
    with subprocess.Popen(["sleep", "60"]) as process:
        supervisor.watch("generator_0_0", process.pid)
        named = f"generator_0_0 (process {process.pid})"
        with pytest.raises(TitanRLError, match=rf"^{re.escape(named)}: killed, but did not exit within 0\.1 s"):
            await asyncio.wait_for(supervisor.kill("generator_0"), 5)
        supervisor.expect_deaths()
        assert await asyncio.wait_for(supervisor.reap(0.1), 5) == [named]
        process.kill()


async def test_long_report_of_a_fault_keeps_its_last_line() -> None:
    async def fail() -> None:
        raise RuntimeError("Traceback " + "frame " * 500 + "KeyError: 'cause'")

    supervisor = Supervisor()
    supervisor.guard("patient", "rank 1", fail())
    with pytest.raises(ActorDiedError, match=r"^rank 1 failed: Traceback (frame )+.*\.\.\. .*KeyError: 'cause' .while waiting"):
        await supervisor.ask("a reply", asyncio.Event().wait(), 30)
    supervisor.expect_deaths()


async def test_process_that_does_not_exit_is_killed_and_named() -> None:
    supervisor = Supervisor()
    with subprocess.Popen(["sleep", "600"]) as stubborn, subprocess.Popen(["true"]) as willing:
        supervisor.watch("stubborn_0", stubborn.pid)
        supervisor.watch("willing_0", willing.pid)
        supervisor.expect_deaths()
        assert await supervisor.reap(1.0) == [f"stubborn_0 (process {stubborn.pid})"]
        assert stubborn.wait() == -signal.SIGKILL
        assert await supervisor.reap(1.0) == []


async def test_process_killed_during_imports_is_named_immediately(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "importing")
    (tmp_path / "slow_module.py").write_text(
        f"open({str(tmp_path / 'importing')!r}, 'w').write('x')\nimport time\ntime.sleep(60)\n"
    )
    sys.path.append(str(tmp_path))
    supervisor = Supervisor()
    fleet = Fleet(tmp_path, supervisor)
    procs = fleet.spawn("patient", local_host(), 1, {}, ("slow_module",))
    starting = asyncio.create_task(supervisor.ask("start", procs.spawn("patient", Patient).pid.call_one(), 60))
    await asyncio.to_thread((tmp_path / "importing").read_text)
    pid = int((tmp_path / "patient_0.pid").read_text().split()[0])
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorDiedError, match=rf"patient_0 \(process {pid}\) exited"):
        await asyncio.wait_for(starting, 30)
    supervisor.expect_deaths()
    await asyncio.gather(fleet.stop(20), return_exceptions=True)


ORPHANED = """
import asyncio, os, sys
from pathlib import Path
from titanrl.launch.assembly import Fleet
from titanrl.launch.assembly import local_host
from titanrl.launch.supervision import Supervisor

async def run() -> None:
    fleet = Fleet(Path(sys.argv[1]), Supervisor())
    fleet.spawn("patient", local_host(), 3, {}, ())
    await asyncio.sleep(60)

asyncio.run(run())
"""


def test_processes_exit_with_a_controller_killed_during_startup(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ORPHANED, str(tmp_path)]) as controller:
        process, started = psutil.Process(controller.pid), list[psutil.Process]()
        while len(started) < 3:
            started = process.children()
        controller.kill()
    _, alive = psutil.wait_procs(started, timeout=30)
    assert alive == []


WAIT = """
import asyncio, sys
from titanrl.launch.supervision import Supervisor

async def run() -> None:
    supervisor = Supervisor()
    print("waiting", flush=True)
    print(await supervisor.ask("reply", asyncio.to_thread(sys.stdin.readline), 3.0))

asyncio.run(run())
"""


def test_suspended_time_does_not_count() -> None:
    with subprocess.Popen([sys.executable, "-c", WAIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(3.5)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.3)
        assert process.communicate("it is here\n")[0] == "it is here\n\n"


SUSPENDED = """
import asyncio, os, sys
from pathlib import Path
from tests.launch.test_supervision import Patient
from titanrl.launch.assembly import Fleet
from titanrl.launch.assembly import local_host, wait_for_stopped_processes
from titanrl.launch.supervision import Supervisor

async def run() -> None:
    supervisor = Supervisor()
    wait_for_stopped_processes()
    host = local_host()
    patient = Fleet(Path(sys.argv[1]), supervisor).spawn("patient", host, 1, {}, ()).spawn("patient", Patient)
    print(await supervisor.ask("pid", patient.pid.call_one(), 60), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    for _ in range(20):
        print(await supervisor.ask("pid", patient.pid.call_one(), 60), flush=True)
        await asyncio.sleep(0.5)
    os._exit(0)

asyncio.run(run())
"""


@pytest.mark.slow
def test_processes_survive_a_controller_suspended_for_minutes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SUSPENDED, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        pid = process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        time.sleep(130)  # Monarch gives up after 60 s and after 120 s
        process.send_signal(signal.SIGCONT)
        assert process.communicate("continue\n")[0] == pid * 20


async def test_process_that_exited_before_the_watch_is_dead() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    supervisor = Supervisor()
    supervisor.watch("patient_0", ended.pid)
    with pytest.raises(ActorDiedError, match="patient_0"):
        await supervisor.ask("patient.hang", asyncio.sleep(60), 60)
