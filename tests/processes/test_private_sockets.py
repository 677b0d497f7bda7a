"""Only this user can connect to the sockets of Monarch, of process groups and of a generator's ranks."""

import asyncio
import multiprocessing
import os
import pickle
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import pytest

from tests.foreign import ROOT_ONLY, nobody_does, nobody_listens, nobody_sends, shared_folder
from tests.listeners import exposed, listeners, reachable_by_nobody
from tests.processes import template_loads
from tests.processes.test_templates import STAND_IN
from titanrl.config import load_config
from titanrl.generator.lockstep import _of_own_user
from titanrl.launch.assembly import Fleet
from titanrl.launch.preflight import broken_rules
from titanrl.launch.supervision import Supervisor
from titanrl.processes.bootstrap import Order
from titanrl.processes.machine import HOST_FOLDER
from titanrl.processes.templates import SHARED, Template, digest_of_imports, shared_template
from titanrl.processes.variables import broken_by_templates
from titanrl.replay import ReplayClosedError
from titanrl.replay.owner import Link, Server
from titanrl.weights.transport import HostTransport

ATTACK = """
import sys
from monarch.actor import Actor, attach_to_workers, endpoint

class Intruder(Actor):
    @endpoint
    async def user(self) -> int:
        import os
        return os.getuid()

host = attach_to_workers(ca="trust_all_connections", workers=["ipc://" + sys.argv[1]])
print("executed as", host.spawn_procs(per_host={"procs": 1}).spawn("intruder", Intruder).user.call_one().get(timeout=10))
"""


def in_child(program: str, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], env=os.environ | environment, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip


@ROOT_ONLY
def test_probe_of_another_user_finds_open_sockets(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as named, socket.socket(socket.AF_UNIX) as hidden:
        named.bind(f"\0titanrl-test-{os.getpid()}")
        named.listen()
        tmp_path.chmod(0o700)
        hidden.bind(str(tmp_path / "s"))
        hidden.listen()
        assert f"unix {tmp_path}/s" in listeners([os.getpid()])
        found = reachable_by_nobody([os.getpid()])
        assert f"@titanrl-test-{os.getpid()}" in found
        assert str(tmp_path / "s") not in found
        assert f"unix @titanrl-test-{os.getpid()}" in exposed([os.getpid()])


SPAWN = """
import os
from monarch.actor import this_host
from titanrl.launch.assembly import local_host
from tests.listeners import family, exposed, listeners

host = {host}()
mesh = host.spawn_procs(per_host={{"procs": 2}})
mesh.initialized.get()
pids = family(os.getpid())
print(len(pids), len(listeners(pids)) >= 3, sorted(exposed(pids)))
os._exit(0)
"""


def test_host_processes_listen_on_no_abstract_name() -> None:
    result = in_child(SPAWN.format(host="local_host"))
    assert result.stdout.splitlines()[-1:] == ["3 True []"], result.stdout + result.stderr


def test_check_detects_exposed_sockets_of_plain_monarch() -> None:
    """Fails if a later Monarch protects its sockets; `titanrl.processes.temporary` can then be removed."""
    result = in_child(SPAWN.format(host="this_host"))
    assert "@" in result.stdout, result.stdout + result.stderr


@pytest.mark.parametrize("allowed", ["0", "1"])
def test_host_with_open_sockets_is_rejected_unless_allowed(allowed: str) -> None:
    program = """
from monarch.actor import this_host
this_host()  # before its sockets could be made private
from titanrl.launch.assembly import local_host
from titanrl.processes.temporary import OpenSocketsError
import os
try:
    local_host()
    print("started")
except OpenSocketsError as error:
    print(error)
os._exit(0)
"""
    output = in_child(program, TITANRL_ALLOW_OPEN_SOCKETS=allowed).stdout
    if allowed == "1":
        assert output == "started\n"
    else:
        assert "every user of this machine could connect to the run's processes and execute code as you" in output
        assert "set TITANRL_ALLOW_OPEN_SOCKETS=1" in output


def test_process_group_store_listens_on_loopback_only() -> None:
    program = """
import os
from tests.listeners import family, listeners
from titanrl.launch.assembly import local_host
from titanrl.processes.actors import ProcessVariables

procs = local_host().spawn_procs(per_host={"procs": 1})
port = procs.spawn("variables", ProcessVariables).open_store.call_one().get(timeout=30)
print(port, *sorted(address for address in listeners(family(os.getpid())) if address.startswith("tcp")), flush=True)
os._exit(0)
"""
    result = in_child(program)
    port, *addresses = result.stdout.split(maxsplit=1)
    assert [address.strip() for address in addresses] == [f"tcp 127.0.0.1:{port}"], result.stdout + result.stderr


# Sockets whose folder another user can enter: each end refuses a process of another user at the other end


@pytest.fixture
def shared() -> Iterator[Path]:
    with shared_folder() as folder:
        yield folder


def open_to_all(path: Path) -> str:
    """Let every user connect to a socket, as if its folder were not private."""
    for folder in path.parents[:-2]:  # in /tmp
        folder.chmod(folder.stat().st_mode | 0o055)
    path.chmod(0o777)
    return str(path)


@ROOT_ONLY
async def test_template_refuses_another_user_and_serves_its_own(shared: Path) -> None:
    order = pickle.dumps(Order(environment={}, folder="/", controller=1))
    template = Template({}, template_loads.note, shared / "log", shared / "template")
    try:
        assert await template.is_ready()
        assert nobody_sends(open_to_all(shared / "template"), order) == b""
    finally:
        template.close()
    assert "a process of another user connected, which was refused" in (shared / "log").read_text()


@ROOT_ONLY
def test_process_sends_its_keys_to_no_template_of_another_user(shared: Path) -> None:
    with nobody_listens(shared / "template") as received:
        program = [sys.executable, "-c", STAND_IN, str(shared / "template")]
        done = subprocess.run(program, env=os.environ | {"KEY": "secret"}, capture_output=True, text=True, check=True)
        assert done.stdout == "no fork\n"
        assert "another user listens there" in done.stderr
        assert received.read() == b"got:"


@ROOT_ONLY
@pytest.mark.parametrize("kind", ["folder", "link", "mode"])
def test_shared_templates_in_a_folder_of_others_are_refused(
    kind: str, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`titanrl warm` has ended, and another user has created its folder again."""
    folder = shared / "titanrl-warm"
    monkeypatch.setenv(SHARED, str(folder))
    name = digest_of_imports({}, template_loads.note)

    def make() -> None:
        (tmp_path if kind == "link" else folder).mkdir(exist_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / name))

    if kind == "folder":
        nobody_does(make)
    elif kind == "link":
        folder.symlink_to(shared / "own")
        (shared / "own").mkdir(mode=0o700)
        make()
    else:
        make()
        folder.chmod(0o755)
    assert (folder / name).is_socket()
    assert shared_template({}, template_loads.note) is None
    (rule,) = broken_by_templates()
    assert str(rule).startswith(f'{SHARED}="{folder}": must be a folder of mode 0700 that belongs to you')
    assert rule in list(broken_rules(load_config("quickstart"), training=False, sampling=False))


@ROOT_ONLY
async def test_announcement_of_another_user_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    supervisor = Supervisor()
    fleet = Fleet(tmp_path, supervisor)
    path = fleet._announcements.path
    open_to_all(Path(path))
    nobody_sends(path, f"1 {socket.gethostname()} init_0".encode(), socket.SOCK_DGRAM)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not supervisor._pidfds
    supervisor.expect_deaths()
    await fleet.stop(1)
    assert "another user sent an announcement" in caplog.text


class Unpickled:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mknod, (str(self.file),)


@ROOT_ONLY
async def test_weight_receiver_unpickles_nothing_of_another_user(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOST_FOLDER, str(shared))
    message = pickle.dumps(Unpickled(shared / "executed"))
    network: Any = None
    transport = HostTransport(network)
    assert transport._lead() is not None
    assert transport._serving is not None
    await transport._serving
    path = open_to_all(transport._path)
    assert await asyncio.to_thread(nobody_sends, path, len(message).to_bytes(8, "little") + message) == b""
    assert not (shared / "executed").exists()


@ROOT_ONLY
def test_weight_reader_asks_no_receiver_of_another_user(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOST_FOLDER, str(shared))
    network: Any = None
    manifest: Any = None
    transport = HostTransport(network)
    with nobody_listens(transport._path) as received:
        with pytest.raises(ConnectionError, match="another user"):
            asyncio.run(transport._request(manifest))
        assert received.read() == b"got:"


@ROOT_ONLY
def test_replay_buffer_and_its_clients_refuse_another_user(shared: Path) -> None:
    mode = shared.stat().st_mode
    shared.chmod(0o700)  # a server refuses other folders
    Server(str(shared / "server"), b"key", {"add": lambda session, a, b: a + b})
    shared.chmod(mode)
    assert nobody_sends(open_to_all(shared / "server"), b"hello") == b""
    link = Link(str(shared / "server"), b"key", "server", 20.0)
    assert link.call("add", 1, 2) == 3
    link.close()
    with nobody_listens(shared / "evil") as received:
        with pytest.raises(ReplayClosedError, match="a process of another user listens there"):
            Link(str(shared / "evil"), b"key", "server", 20.0).call("add", 1, 2)
        assert received.read() == b"got:"


@ROOT_ONLY
def test_ranks_of_a_generator_refuse_another_user_even_with_the_key(shared: Path) -> None:
    key = secrets.token_bytes(32)
    with Listener(str(shared / "ranks"), family="AF_UNIX", authkey=key) as listener:
        open_to_all(shared / "ranks")
        client = threading.Thread(target=nobody_does, args=(lambda: Client(str(shared / "ranks"), "AF_UNIX", authkey=key),))
        client.start()
        with pytest.raises(multiprocessing.AuthenticationError, match="another user"):
            _of_own_user(listener.accept())
        client.join()
        own = threading.Thread(target=lambda: Client(str(shared / "ranks"), "AF_UNIX", authkey=key))
        own.start()
        assert not _of_own_user(listener.accept()).closed
        own.join()
