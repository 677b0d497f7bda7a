"""Templates: what forks inherit, how they exit, processes without a template, and templates shared by several runs."""

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import psutil
import pytest

from tests.processes import template_loads
from titanrl.config.sections import FaultsConfig
from titanrl.launch.assembly import Fleet, local_host
from titanrl.launch.supervision import ActorDiedError, OnEvent, Supervisor, Watchdog
from titanrl.processes.actors import Actor, concurrent_endpoint
from titanrl.processes.machine import THREADS
from titanrl.processes.templates import BASE, SHARED, Template, close_early, digest_of_imports, shared_template, start_early
from titanrl.processes.temporary import private_folder


class Scribe(Actor):
    """Reports the state of its process."""

    @concurrent_endpoint
    async def look(self) -> dict[str, Any]:
        loads = sys.modules.get("tests.processes.template_loads")
        return {
            "pid": os.getpid(),
            "parent": os.getppid(),
            "loader": None if loads is None else loads.loader,
            "again": None if loads is None else loads.again,
            "folder": os.getcwd(),
            "draws": (random.random(), float(np.random.random())),
            "colour": os.environ.get("COLOUR"),
            "is_deaf": signal.getsignal(signal.SIGTERM) == signal.SIG_IGN,
        }


class ModeCounter(Actor):
    """Counts how often its process suspends torch's dispatch modes."""

    @concurrent_endpoint
    async def count(self) -> int:
        """Return the number since the first call."""
        from torch.utils import _python_dispatch as dispatch

        if not isinstance(dispatch._disable_current_modes, Mock):
            dispatch._disable_current_modes = Mock(wraps=dispatch._disable_current_modes)
        return int(dispatch._disable_current_modes.call_count)


def with_fleet(folder: Path, work: Callable[[Fleet, Supervisor], Awaitable[None]], on_event: OnEvent | None = None) -> None:
    """Run a coroutine with a fleet; stop it afterwards. With `on_event`, stopped processes are noticed after 1 s."""

    async def run() -> None:
        (folder / "logs").mkdir(exist_ok=True)
        watchdog = None if on_event is None else Watchdog(FaultsConfig(min_stall_s=1), folder)
        supervisor = Supervisor(on_event, watchdog)
        fleet = Fleet(folder, supervisor, faults=FaultsConfig(max_respawns=1))
        try:
            await work(fleet, supervisor)
        finally:
            supervisor.expect_deaths()
            await asyncio.gather(fleet.stop(10), return_exceptions=True)
            await supervisor.reap(10)

    asyncio.run(run())


async def spawn(fleet: Fleet, role: str, num_procs: int = 1, **environment: str) -> Any:
    """Spawn scribes as forks of the template `scribe`."""
    template = await fleet.template("scribe")
    return fleet.spawn(role, local_host(), num_procs, environment, (), template).spawn("scribe", Scribe)


def ended(pid: int) -> bool:
    """Return True if there is no such process, or its parent has not reaped it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_forks_share_loaded_modules_but_not_environments(tmp_path: Path) -> None:
    async def work(fleet: Fleet, supervisor: Supervisor) -> None:
        fleet.prepare("scribe", {"COLOUR": "of the template"}, template_loads.note)
        scribes = [await spawn(fleet, "scribe_0", 2, COLOUR="red"), await spawn(fleet, "scribe_1", COLOUR="blue")]
        seen = [look for scribe in scribes for _, look in (await supervisor.ask("scribe.look", scribe.look.call(), 60)).items()]
        assert [look["colour"] for look in seen] == ["red", "red", "blue"]
        assert len({look["loader"] for look in seen}) == len({look["parent"] for look in seen}) == 1
        assert all(look["loader"] == look["parent"] != os.getpid() for look in seen)
        assert len({look["pid"] for look in seen}) == 3
        assert {look["folder"] for look in seen} == {os.getcwd()}
        for draws in zip(*(look["draws"] for look in seen), strict=True):
            assert len(set(draws)) == 3
        assert not any(look["is_deaf"] for look in seen)

    with_fleet(tmp_path, work)


def test_killed_template_kills_its_forks_and_is_replaced(tmp_path: Path) -> None:
    async def work(fleet: Fleet, supervisor: Supervisor) -> None:
        fleet.prepare("scribe", {}, template_loads.note)
        scribe = await spawn(fleet, "scribe_0")
        look = await supervisor.ask("scribe.look", scribe.look.call_one(), 60)
        os.kill(look["parent"], signal.SIGKILL)
        with pytest.raises(ActorDiedError, match="scribe_0_0"):
            await supervisor.ask("scribe.wait", asyncio.Event().wait(), 30)
        path = await fleet.template("scribe")
        assert path is not None, "another template has replaced it"
        assert await fleet.template("scribe") == path
        os.kill(fleet._templates["scribe"].pid, signal.SIGKILL)
        while await fleet.template("scribe") is not None:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert await fleet.template("scribe") is None, "faults.max_respawns is 1"
        fleet.prepare("scribe", {}, template_loads.note)
        assert await fleet.template("scribe") is not None

    with_fleet(tmp_path, work)


def test_stopped_template_is_replaced_and_its_forks_continue(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []

    async def work(fleet: Fleet, supervisor: Supervisor) -> None:
        fleet.prepare("scribe", {}, template_loads.note)
        first = await spawn(fleet, "scribe_0")
        look = await supervisor.ask("scribe.look", first.look.call_one(), 60)
        os.kill(look["parent"], signal.SIGSTOP)
        while await fleet.template("scribe") is not None:  # the kernel stops it when it is scheduled
            await asyncio.sleep(0.01)
        second = await supervisor.ask("scribe.look", (await spawn(fleet, "scribe_1")).look.call_one(), 60)
        assert second["parent"] == os.getpid(), "meanwhile, processes import themselves"
        while not any(event["kind"] == "respawn" for event in events):
            await asyncio.sleep(0.05)
        third = await supervisor.ask("scribe.look", (await spawn(fleet, "scribe_2")).look.call_one(), 60)
        assert third["parent"] not in (look["parent"], os.getpid())
        again = await supervisor.ask("scribe.look", first.look.call_one(), 60)
        assert (again["pid"], again["parent"]) == (look["pid"], look["parent"])
        # The template reaps its fork; otherwise the fleet waits for the end of the fork until its limit.
        os.kill(look["parent"], signal.SIGCONT)

    with_fleet(tmp_path, work, lambda kind, **fields: events.append({"kind": kind, **fields}))
    assert [event["kind"] for event in events] == ["stall", "fault", "respawn"]
    assert events[0]["actor"] == "template_scribe"
    assert events[2]["part"] == "template_scribe"
    assert "template_scribe rank 0 was stopped by a signal" in events[2]["cause"]


# A base, from which the templates of roles are forked


def descendants(pid: int) -> set[int]:
    """Return the ids of the processes below a process."""
    return {child.pid for child in psutil.Process(pid).children(recursive=True)}


def test_templates_of_roles_share_what_their_base_has_imported(tmp_path: Path) -> None:
    async def work(fleet: Fleet, supervisor: Supervisor) -> None:
        fleet.prepare(BASE, {"COLOUR": "of the base"}, template_loads.note)
        fleet.prepare("scribe", {"COLOUR": "of the template"}, template_loads.note_again)
        scribes = [await spawn(fleet, "scribe_0", 2, COLOUR="red"), await spawn(fleet, "scribe_1")]
        seen = [look for scribe in scribes for _, look in (await supervisor.ask("scribe.look", scribe.look.call(), 60)).items()]
        base, template = (fleet._templates[kind].pid for kind in (BASE, "scribe"))
        assert {look["loader"] for look in seen} == {base}
        assert {look["again"] for look in seen} == {(template, "of the template")}
        assert {look["parent"] for look in seen} == {template}
        assert psutil.Process(template).ppid() == base
        assert psutil.Process(base).ppid() == os.getpid()
        assert [look["colour"] for look in seen[:2]] == ["red", "red"]

    with_fleet(tmp_path, work)


def test_messages_are_unpickled_without_torch_also_where_a_template_has_imported_it(tmp_path: Path) -> None:
    async def work(fleet: Fleet, supervisor: Supervisor) -> None:
        fleet.prepare("scribe", {}, template_loads.load_torch)
        template = await fleet.template("scribe")
        counter: Any = fleet.spawn("scribe_0", local_host(), 1, {}, (), template).spawn("counter", ModeCounter)
        assert [await supervisor.ask("counter", counter.count.call_one(), 60) for _ in range(3)] == [0, 0, 0]

    with_fleet(tmp_path, work)


def test_killed_template_of_a_role_is_reaped_and_replaced_from_the_same_base(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []

    async def work(fleet: Fleet, supervisor: Supervisor) -> None:
        fleet.prepare(BASE, {}, template_loads.note)
        fleet.prepare("other", {}, template_loads.note_again)
        fleet.prepare("scribe", {}, template_loads.note_again)
        scribe = await spawn(fleet, "scribe_0")
        look = await supervisor.ask("scribe.look", scribe.look.call_one(), 60)
        assert await fleet.template("other") is not None
        base, other = fleet._templates[BASE].pid, fleet._templates["other"].pid
        os.kill(look["parent"], signal.SIGKILL)
        with pytest.raises(ActorDiedError, match="scribe_0_0"):
            await supervisor.ask("scribe.wait", asyncio.Event().wait(), 30)
        assert await asyncio.to_thread(wait_until, lambda: not psutil.pid_exists(look["parent"])), "no zombie remains"
        assert await fleet.template("scribe") is not None
        assert (fleet._templates[BASE].pid, fleet._templates["other"].pid) == (base, other)
        assert psutil.Process(fleet._templates["scribe"].pid).ppid() == base

    with_fleet(tmp_path, work, lambda kind, **fields: events.append({"kind": kind, **fields}))
    assert [event["part"] for event in events if event["kind"] == "respawn"] == ["template_scribe"]


def test_death_of_the_base_ends_the_whole_tree_which_is_replaced_once(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []

    async def work(fleet: Fleet, supervisor: Supervisor) -> None:
        fleet.prepare(BASE, {}, template_loads.note)
        for kind in ("scribe", "other"):
            fleet.prepare(kind, {}, template_loads.note_again)
        scribe = await spawn(fleet, "scribe_0")
        await supervisor.ask("scribe.look", scribe.look.call_one(), 60)
        assert await fleet.template("other") is not None
        base = fleet._templates[BASE].pid
        tree = descendants(base)
        assert len(tree) == 3
        os.kill(base, signal.SIGKILL)
        with pytest.raises(ActorDiedError, match="scribe_0_0"):
            await supervisor.ask("scribe.wait", asyncio.Event().wait(), 30)
        assert await asyncio.to_thread(wait_until, lambda: all(map(ended, tree)))
        while fleet._templates[BASE].pid == base:
            await asyncio.sleep(0.01)
        for kind in ("scribe", "other"):
            assert await fleet.template(kind) is not None, "faults.max_respawns is 1"
            assert psutil.Process(fleet._templates[kind].pid).ppid() == fleet._templates[BASE].pid != base
        await supervisor.start_over([])
        await fleet.retire_all_but([])
        again = await supervisor.ask("scribe.look", (await spawn(fleet, "scribe_1")).look.call_one(), 60)
        assert again["loader"] == fleet._templates[BASE].pid

    with_fleet(tmp_path, work, lambda kind, **fields: events.append({"kind": kind, **fields}))
    assert [event["part"] for event in events if event["kind"] == "respawn"] == ["template_base"]


@pytest.mark.parametrize(
    ("base", "load"),
    [
        (template_loads.note, template_loads.start_thread),
        (template_loads.fail, template_loads.note_again),
    ],
)
def test_process_imports_itself_if_a_template_of_the_tree_cannot_fork(
    base: Callable[[], None], load: Callable[[], None], tmp_path: Path
) -> None:
    async def work(fleet: Fleet, supervisor: Supervisor) -> None:
        fleet.prepare(BASE, {}, base)
        fleet.prepare("scribe", {}, load)
        assert await fleet.template("scribe") is None
        look = await supervisor.ask("scribe.look", (await spawn(fleet, "scribe_0")).look.call_one(), 60)
        assert look["parent"] == os.getpid()
        assert not fleet._templates["scribe"].was_killed

    with_fleet(tmp_path, work)


OWNER = """
import asyncio, sys
from pathlib import Path
from tests.processes import template_loads
from titanrl.processes.templates import Template
async def work():
    folder = Path(sys.argv[1])
    base = Template({}, template_loads.note, folder / "base.log")
    template = Template({}, template_loads.note_again, folder / "scribe.log", base=base.path)
    assert await template.is_ready()
    print(base.pid, template.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(work())
"""


@pytest.mark.parametrize("stopped", [(), (0, 1)])
def test_tree_ends_with_the_process_that_started_it(stopped: tuple[int, ...], tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as owner:
        tree = [int(pid) for pid in owner.stdout.readline().split()]
        for index in stopped:
            os.kill(tree[index], signal.SIGSTOP)
        owner.kill()
    assert wait_until(lambda: all(map(ended, tree)))


VARIABLES = """
import ctypes, os, sys
import torch, torch._dynamo
from titanrl.processes.templates import _adopt
calls = []
compiled = torch.compile(lambda value: value + 1, backend=lambda graph, inputs: calls.append(1) or graph.forward)
_adopt({"TORCHDYNAMO_DISABLE": "1", "MALLOC_MMAP_THRESHOLD_": str(32 << 20)})
compiled(torch.ones(2))
assert not calls, "compiled functions of the base must run eagerly"
libc = ctypes.CDLL(None)
class Statistics(ctypes.Structure):  # hblks: number of mappings
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]
libc.mallinfo2.restype = Statistics
libc.malloc.restype = ctypes.c_void_p
before = libc.mallinfo2().hblks
libc.malloc(ctypes.c_size_t(16 << 20))
assert libc.mallinfo2().hblks == before, "16 MiB must come from the heap, not from a mapping"
"""


def test_variables_that_were_read_before_the_fork_are_applied() -> None:
    done = subprocess.run([sys.executable, "-c", VARIABLES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_process_imports_everything_itself_if_its_template_cannot_fork(tmp_path: Path) -> None:
    loads = {"scribe": template_loads.fail, "crashing": template_loads.crash, "threaded": template_loads.start_thread}

    async def work(fleet: Fleet, supervisor: Supervisor) -> None:
        for kind, load in loads.items():
            fleet.prepare(kind, {}, load)
        assert [await fleet.template(kind) for kind in loads] == [None] * 3
        look = await supervisor.ask("scribe.look", (await spawn(fleet, "scribe_0")).look.call_one(), 60)
        assert look["parent"] == os.getpid()

    with_fleet(tmp_path, work)
    reasons = ("no module named vllm", "illegal instruction in libtorch", "the imports started 1 threads")
    for kind, reason in zip(loads, reasons, strict=True):
        assert reason in (tmp_path / f"template_{kind}.log").read_text()


@pytest.mark.parametrize("change", ["none", "variable", "imports", "killed"])
def test_template_that_started_early_is_used_unless_it_would_import_something_else(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(fleet: Fleet, supervisor: Supervisor) -> None:
        unused = start_early({}, template_loads.note)
        early = start_early({}, template_loads.say)
        assert unused is not None
        assert ended(unused)
        assert early is not None
        if change == "variable":
            monkeypatch.setenv("COLOUR", "green")
        elif change == "killed":
            os.kill(early, signal.SIGKILL)
            assert wait_until(lambda: ended(early))
        fleet.prepare("scribe", {}, template_loads.note if change == "imports" else template_loads.say)
        look = await supervisor.ask("scribe.look", (await spawn(fleet, "scribe_0")).look.call_one(), 60)
        assert (look["loader"] == early) == (change == "none")
        assert ended(early) == (change != "none")
        lines = (tmp_path / "template_scribe.log").read_text().splitlines()
        assert [line.split()[-1] for line in lines] == ([] if change == "imports" else ["imports", "warning"])

    with_fleet(tmp_path, work)


def test_early_template_that_is_not_used_ends() -> None:
    early = start_early({}, template_loads.say)
    assert early is not None
    close_early()
    assert ended(early)


def test_shared_template_needs_no_early_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = private_folder()
    monkeypatch.setenv(SHARED, str(folder.path))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder.path / digest_of_imports({}, template_loads.note)))
        assert start_early({}, template_loads.note) is None


STAND_IN = """
import os, sys
from titanrl.processes.bootstrap import stand_in
stand_in(sys.argv[1], os.getppid())
print('no fork')
"""


def test_stand_in_returns_if_nothing_listens(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", STAND_IN, str(tmp_path / "nothing")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "no fork\n")


async def test_stand_in_runs_itself_if_the_template_is_stopped(tmp_path: Path) -> None:
    """The template continues afterwards, and must not run the process a second time."""
    (tmp_path / "ending.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('once ')\n")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
        "TITANRL_PROCESS": "scribe_0",
        "TITANRL_ANNOUNCEMENTS": str(tmp_path / "announcements"),
    }
    template = Template(environment, template_loads.use_ending, tmp_path / "template.log")
    assert await template.is_ready()
    os.kill(template.pid, signal.SIGSTOP)
    program = f"from titanrl.processes import bootstrap; bootstrap.FORK_S = 0.3\n{STAND_IN}"
    with (tmp_path / "output").open("w+") as output:  # a pipe would stay open in the socket of the stopped template
        command = [sys.executable, "-c", program, template.path]
        call = partial(subprocess.call, command, env=environment, stdout=output, stderr=output, timeout=30)
        assert await asyncio.to_thread(call) == 0
    assert (tmp_path / "output").read_text() == (
        f"{template.path}: no fork within 0.3 s, so this process imports its packages itself\nno fork\n"
    )
    os.kill(template.pid, signal.SIGCONT)
    again = [sys.executable, "-c", STAND_IN, template.path]  # the template serves in order
    assert await asyncio.to_thread(partial(subprocess.call, again, env=environment, timeout=30)) == 0
    assert (tmp_path / "ran").read_text() == "once "
    template.close()


@pytest.mark.parametrize(
    ("end", "code"), [("os._exit(3)", 3), ("os.kill(os.getpid(), 9)", -9), ("os.abort()", -6), ("kill stand-in", -9)]
)
async def test_stand_in_and_fork_exit_together(end: str, code: int, tmp_path: Path) -> None:
    """The program of the fork is a module that replaces Monarch's."""
    (tmp_path / "ending.py").write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        + (f"{end}\n" if end.startswith("os") else "print('up', flush=True)\ntime.sleep(60)\n")
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
        "TITANRL_PROCESS": "scribe_0",
        "TITANRL_ANNOUNCEMENTS": str(tmp_path / "announcements"),
    }
    template = Template(environment, template_loads.use_ending, tmp_path / "template.log")
    assert await template.is_ready()
    stand_in = subprocess.Popen([sys.executable, "-c", STAND_IN, template.path], env=environment, stdout=subprocess.PIPE)
    assert stand_in.stdout is not None
    if not end.startswith("os"):
        assert await asyncio.to_thread(stand_in.stdout.readline) == b"up\n"  # the fork writes where its stand-in would
        stand_in.kill()
    assert await asyncio.to_thread(stand_in.wait, 30) == code
    fork = int((tmp_path / "pid").read_text())
    assert await asyncio.to_thread(wait_until, lambda: ended(fork))
    stand_in.stdout.close()
    template.close()


# Shared templates


def test_digest_changes_with_whatever_imports_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    digest = partial(digest_of_imports, {"HF_HUB_OFFLINE": "1"}, template_loads.note)
    usual = digest()
    for name in ("TMPDIR", "XDG_RUNTIME_DIR", "MONARCH_CLIENT_TRACE_ID", SHARED):
        monkeypatch.setenv(name, str(tmp_path))
    assert digest() == usual
    for name in ("OMP_NUM_THREADS", THREADS):
        assert digest_of_imports({"HF_HUB_OFFLINE": "1", name: "4"}, template_loads.note) == usual
    others = [
        digest_of_imports({"HF_HUB_OFFLINE": "0"}, template_loads.note),
        digest_of_imports({"HF_HUB_OFFLINE": "1"}, template_loads.fail),
    ]
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    others.append(digest())
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.chdir(tmp_path)
    others.append(digest())
    assert len({usual, *others}) == 5


def test_digest_changes_with_the_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "__init__.py").touch()
    monkeypatch.setattr("titanrl.processes.templates.PACKAGE", tmp_path)
    before = digest_of_imports({}, template_loads.note)
    os.utime(tmp_path / "__init__.py", ns=(1, 1))
    assert digest_of_imports({}, template_loads.note) != before


def test_run_without_matching_template_imports_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert shared_template({}, template_loads.note) is None
    monkeypatch.setenv(SHARED, str(tmp_path))
    assert shared_template({}, template_loads.note) is None
    (tmp_path / digest_of_imports({}, template_loads.note)).touch()  # not a socket
    assert shared_template({}, template_loads.note) is None


class Tourist(Scribe):
    """Also reports the folder of temporary files."""

    @concurrent_endpoint
    async def place(self) -> tuple[int, str]:
        return os.getppid(), tempfile.gettempdir()


def test_fleet_forks_from_shared_template_and_survives_its_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = private_folder()
    monkeypatch.setenv(SHARED, str(folder.path))
    (tmp_path / "mine").mkdir()

    async def spawn(fleet: Fleet) -> Any:
        fleet.prepare("scribe", {}, template_loads.read_temporary_folder)
        template = await fleet.template("scribe")
        environment = {"TMPDIR": str(tmp_path / "mine")}
        return fleet.spawn("scribe_0", local_host(), 1, environment, (), template).spawn("scribe", Tourist)

    async def work(fleet: Fleet, supervisor: Supervisor) -> None:
        load = template_loads.read_temporary_folder
        shared = Template({}, load, tmp_path / "shared.log", folder.path / digest_of_imports({}, load))
        parent, place = await supervisor.ask("scribe.place", (await spawn(fleet)).place.call_one(), 60)
        assert parent not in (os.getpid(), 0)
        assert place == str(tmp_path / "mine")
        assert not (tmp_path / "template_scribe.log").exists(), "the fleet started no template"
        shared.close()
        assert await asyncio.to_thread(wait_until, lambda: ended(parent))
        with pytest.raises(ActorDiedError, match="scribe_0_0"):
            await supervisor.ask("scribe.wait", asyncio.Event().wait(), 30)
        await supervisor.start_over([])
        await fleet.retire_all_but([])
        parent, _ = await supervisor.ask("scribe.place", (await spawn(fleet)).place.call_one(), 60)
        assert parent == os.getpid(), "the socket remains, but nothing listens: the process imports itself"

    with_fleet(tmp_path, work)
    folder.delete()


def wait_until(is_true: Callable[[], bool]) -> bool:
    """Poll for 30 seconds; return True once the condition holds."""
    limit = time.monotonic() + 30
    while time.monotonic() < limit:
        if is_true():
            return True
        time.sleep(0.01)
    return False


def test_warm_rejects_wrong_config_and_ends_in_order() -> None:
    command = [sys.executable, "-m", "titanrl.commands.warm", "--config", "quickstart"]
    wrong = subprocess.run([*command, "num_stepps=3"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "did you mean num_steps" in wrong.stderr
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a path short enough for sockets
        environment = os.environ | {"TMPDIR": folder}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as warm:
            is_started = wait_until(lambda: len(list(Path(folder).glob("titanrl-*/*.log"))) == 5)
            templates = psutil.Process(warm.pid).children(recursive=True)
            warm.terminate()  # during the imports
            assert is_started
            assert templates
            assert warm.communicate()[1] == ""
        assert warm.returncode == 143
        assert psutil.wait_procs(templates, timeout=10)[1] == []
        assert [path.name for path in Path(folder).iterdir() if not path.name.startswith("torchinductor")] == []
