"""Hosts that commands of a user's function hold, over loopback. `tests/cluster` runs them in separate networks."""

import asyncio
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from titanrl.commands.doctor import examine
from titanrl.config import ConfigError, load_config
from titanrl.config.sizes import derive
from titanrl.hosts import kinds
from titanrl.hosts.holder import HostsError, Order
from titanrl.hosts.kinds import CommandHosts, broken_by_hosts, commands_of
from titanrl.models.directory import model_shape


def here(rank: int, command: Sequence[str], *, shell: str = "sh") -> list[str]:
    """Hold every host on this machine, with a shell between."""
    return [shell, "-c", 'exec "$@"', "sh", *command]


def waiting(rank: int, command: Sequence[str]) -> list[str]:
    """Hold no host."""
    return ["sleep", "60"]


def ending(rank: int, command: Sequence[str]) -> list[str]:
    """End the command of the second host at once."""
    return ["sh", "-c", "echo no such node; exit 3"] if rank else list(command)


def raising(rank: int, command: Sequence[str]) -> list[str]:
    """Have a node for the first host only."""
    return [["ssh"][rank], *command]


def text(rank: int, command: Sequence[str]) -> str:
    """Return a line instead of a list."""
    return f"ssh node{rank}"


def absent(rank: int, command: Sequence[str]) -> list[str]:
    """Return a program that does not exist."""
    return ["no-such-ssh", *command]


def order(function: str, folder: Path, *overrides: str) -> Order:
    config = load_config("configs/quickstart.yaml", [f"hosts.kind={__name__}:{function}", *overrides])
    return Order(config, "cpu", folder, lambda line: None)


async def test_hosts_start_are_lost_and_end(tmp_path: Path) -> None:
    hosts, lost = CommandHosts(order("here", tmp_path)), asyncio.Queue[tuple[str, str]]()
    hosts.on_lost = lambda name, cause: lost.put_nowait((name, cause))
    try:
        addresses = await hosts.start(["one", "two"])
        assert [address.partition("@ipc://")[0] for address in addresses] == ["one", "two"]
        processes = list(hosts._commands)
        for process in processes:
            assert hosts.leases.token not in Path(f"/proc/{process.pid}/cmdline").read_text()
        processes[1].send_signal(signal.SIGKILL)
        name, cause = await asyncio.wait_for(lost.get(), 30)
        assert re.fullmatch(rf"host {name} \(rank 1\) exited or is unreachable", cause)
        assert [hosts.has_ended(0), hosts.has_ended(1)] == [False, True]
    finally:
        await hosts.kill()
    assert [process.returncode for process in processes] == [0, -signal.SIGKILL]
    await hosts.kill()


def test_doctor_examines_the_hosts(tmp_path: Path) -> None:
    config = order("here", tmp_path, f"output_dir={tmp_path}/runs").config
    checkup = asyncio.run(examine(config, derive(config, model_shape(config)), "cpu", None, lambda line: None))
    assert [host.node.rpartition(":")[2] for host in checkup.hosts] == ["0", "1"]
    assert len(checkup.links) == 2
    assert not [problem for problem in checkup.problems if "differ" in str(problem)]


async def test_command_that_ends_too_early_is_named(tmp_path: Path) -> None:
    hosts = CommandHosts(order("ending", tmp_path))
    with pytest.raises(HostsError, match=r"the command of host 1 ended with code 3 .*host_1.log"):
        await hosts.start(["one", "two"])
    first = hosts._commands[0]
    await hosts.kill()
    assert first.returncode is not None
    assert (tmp_path / "host_1.log").read_text() == "no such node\n"


async def test_host_that_does_not_connect_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = CommandHosts(order("waiting", tmp_path, "timeouts.start_s=1"))
    with pytest.raises(HostsError, match=r"timeouts.start_s: hosts 0, 1 have not connected to .* \(got 1\)"):
        await hosts.start(["one", "two"])
    sleeping = hosts._commands[0]
    monkeypatch.setattr(kinds, "END_S", 0.1)
    await hosts.kill()
    assert sleeping.returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("here hosts.options={node: n1}", r"wrong signature: got an unexpected keyword argument 'node'"),
        ("raising", r"raised IndexError: list index out of range \(test_commands.py:\d+\) for host 1"),
        ("text", r'must return a list of strings, the command for host 0, but returned "ssh node0"'),
        ("absent", r"the program no-such-ssh is not on PATH"),
        ("missing", r"module tests.hosts.test_commands has no attribute 'missing'"),
    ],
)
def test_wrong_function_is_reported_before_a_start(
    function: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, *overrides = function.split(" ", 1)
    program = tmp_path / "ssh"
    program.write_text("")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    rules = list(broken_by_hosts(order(name, tmp_path, "device=auto", *overrides).config))
    assert list(rules[0].values) == ["hosts.kind"]
    assert re.match(said, rules[0].rule)
    assert "auto selects the device of this machine" in rules[1].rule  # the other rules are reported, too


def test_hosts_of_commands_need_a_trusted_network_and_a_device(tmp_path: Path) -> None:
    config = order("here", tmp_path, "device=auto").config
    rules = [list(broken.values) for broken in broken_by_hosts(config)]
    assert ["hosts.kind", "device"] in rules
    assert ["hosts.kind", "hosts.trusted_network"] in rules
    assert commands_of(config)[1][-2:] == ["read", "1"]
    assert commands_of(config)[1][-5] == sys.executable


def test_options_need_a_function() -> None:
    with pytest.raises(ConfigError, match=r"remove hosts.options, or name a function in hosts.kind"):
        load_config("configs/quickstart.yaml", ["hosts.options={nodes: [a]}"])
