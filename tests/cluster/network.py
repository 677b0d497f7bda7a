"""Hosts of an emulated cluster: network namespaces of this machine, connected by an isolated switch."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def missing(*commands: str, packages: str) -> str:
    """Return why such a cluster cannot be started on this machine; empty if it can.

    Args:
        commands: commands that it needs.
        packages: packages of Debian that have them.
    """
    if os.geteuid():
        return "needs root, for network namespaces"
    if absent := [command for command in commands if shutil.which(command, path=PATH) is None]:
        return f"needs {', '.join(absent)} (apt-get install {packages})"
    probe = f"titanrl{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"needs the right to make network namespaces ({made.stderr.strip()})"
    subprocess.run(["ip", "netns", "del", probe], check=False)
    return ""


@contextlib.contextmanager
def firewall(space: str, *rule: str) -> Iterator[None]:
    """Make a host, given by its namespace, refuse some connections from others while the body runs."""
    if shutil.which("iptables", path=PATH) is None:
        pytest.skip("needs iptables (apt-get install iptables)")
    inside = ["ip", "netns", "exec", space, "iptables", "-w"]
    subprocess.run([*inside, "-A", "INPUT", "-i", "eth0", "-p", "tcp", *rule], check=True)
    try:
        yield
    finally:
        subprocess.run([*inside, "-D", "INPUT", "-i", "eth0", "-p", "tcp", *rule], check=True)


class Network:
    """The switch and its hosts, from `start` to `stop`."""

    def __init__(self, prefix: str) -> None:
        """Create nothing yet; `prefix` starts the names of the namespaces, so that two test runs do not disturb each other."""
        self.prefix = prefix
        self._hosts: dict[str, int] = {}  # numbers of their cables, because names of interfaces are short

    def start(self) -> None:
        """Create the switch."""
        self._ip("netns", "add", f"{self.prefix}-sw")
        self._ip("-n", f"{self.prefix}-sw", "link", "add", "br0", "type", "bridge")
        self._ip("-n", f"{self.prefix}-sw", "link", "set", "br0", "up")

    def add(self, host: str, address: str, names: Mapping[str, str]) -> None:
        """Connect a host.

        Args:
            host: its name.
            address: its address.
            names: addresses of the names that it knows.
        """
        space, switch = self.space(host), f"{self.prefix}-sw"
        self._hosts[host] = number = len(self._hosts)
        self._ip("netns", "add", space)
        self._ip("-n", switch, "link", "add", f"v{number}", "type", "veth", "peer", "name", "eth0", "netns", space)
        self._ip("-n", switch, "link", "set", f"v{number}", "master", "br0", "up")
        self._ip("-n", space, "link", "set", "lo", "up")
        self._ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
        self._ip("-n", space, "link", "set", "eth0", "up")
        files = Path("/etc/netns", space)
        files.mkdir(parents=True)
        lines = "".join(f"{address} {name}\n" for name, address in names.items())
        (files / "hosts").write_text(f"127.0.0.1 localhost\n{lines}")
        (files / "resolv.conf").write_text("")

    def space(self, host: str) -> str:
        """Return the name of the namespace of a host."""
        return f"{self.prefix}-{host}"

    def pull_cable(self, host: str) -> None:
        """Disconnect a host from the network; its processes continue."""
        self._ip("-n", f"{self.prefix}-sw", "link", "set", f"v{self._hosts[host]}", "down")

    def plug_in(self, host: str) -> None:
        """Reconnect a host to the network."""
        self._ip("-n", f"{self.prefix}-sw", "link", "set", f"v{self._hosts[host]}", "up")

    def on(self, host: str, *command: str) -> list[str]:
        """Return the command that runs another command on a host, with the processes of this machine visible."""
        inner = f'hostname {host}; exec "$@"'
        return ["ip", "netns", "exec", self.space(host), "unshare", "--uts", "bash", "-c", inner, "sh", *command]

    def machine(self, host: str, *command: str, prepare: str = "true") -> list[str]:
        """Return the command that runs another command on a separate machine, with the network and the name of a host.

        SIGKILL to it is a loss of power.

        Args:
            host: its name.
            command: program and arguments, which become the first process of the machine.
            prepare: shell command that changes the machine before.
        """
        spaces = ["unshare", "--uts", "--ipc", "--pid", "--mount", "--fork", "--kill-child=KILL", "--mount-proc"]
        inner = f'hostname {host}; mount -t tmpfs tmpfs /dev/shm; {prepare}; exec "$@"'
        return ["ip", "netns", "exec", self.space(host), *spaces, "bash", "-c", inner, "sh", *command]

    def processes(self) -> list[str]:
        """Return the ids of the processes on all hosts."""
        pids = []
        for host in self._hosts:
            done = subprocess.run(["ip", "netns", "pids", self.space(host)], capture_output=True, text=True, check=True)
            pids += done.stdout.split()
        return pids

    def stop(self) -> None:
        """Delete the namespaces."""
        for host in ("sw", *self._hosts):
            subprocess.run(["ip", "netns", "del", self.space(host)], capture_output=True, check=False)
            shutil.rmtree(f"/etc/netns/{self.space(host)}", ignore_errors=True)

    def _ip(self, *arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, env=os.environ | {"PATH": PATH})
