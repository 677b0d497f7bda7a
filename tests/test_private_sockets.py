"""Only this user can connect to the sockets of Monarch, of process groups and of a generator's ranks."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.listeners import exposed, listeners, reachable_by_nobody

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
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
from titanrl.launch.hosts import local_host
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
    """Fails if a later Monarch protects its sockets; `titanrl.private_sockets` can then be removed."""
    result = in_child(SPAWN.format(host="this_host"))
    assert "@" in result.stdout, result.stdout + result.stderr


@pytest.mark.parametrize("allowed", ["0", "1"])
def test_host_with_open_sockets_is_rejected_unless_allowed(allowed: str) -> None:
    program = """
from monarch.actor import this_host
this_host()  # before its sockets could be made private
from titanrl.launch.hosts import local_host
from titanrl.private_sockets import OpenSocketsError
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
from tests.listeners import listeners
from titanrl.launch.fleet import _loopback_store
store = _loopback_store()
print(sorted(listeners([os.getpid()])))
"""
    output = in_child(program).stdout
    assert output.startswith("['tcp 127.0.0.1:"), output
    assert output.count("tcp") == 1
