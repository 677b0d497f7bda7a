"""Containers of the emulated Kubernetes: real processes that run the command of a pod.

`Machines` gives each a network, a name, process ids and mounts of its own; `Processes` runs them beside this one.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from tests.cluster.network import PATH, Network
from tests.cluster.requests import NAMESPACE

REPO = Path(__file__).parents[2]
API_ADDRESS, API_PORT = "10.78.0.1", 6443
SECRETS = "/run/secrets/kubernetes.io/serviceaccount"
Json = dict[str, Any]
_LIBC = ctypes.CDLL(None, use_errno=True)


class Runtime(Protocol):
    """Starts the container of a pod."""

    def address(self, pod: Json) -> str:
        """Return the address of a pod."""

    def start(self, pod: Json, variables: Mapping[str, str], volumes: Mapping[str, Path | None]) -> subprocess.Popen[bytes]:
        """Start the command; `volumes` has the folder of each mount path, or None for one in memory."""

    def signal(self, process: subprocess.Popen[bytes], number: signal.Signals) -> None:
        """Send a signal to the first process of a container."""


class Processes:
    """Containers that are processes of this machine, each with a separate loopback address."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._addresses = folder, dict[str, str]()

    def address(self, pod: Json) -> str:
        network = f"127.{78 + os.getpid() % 100}.{os.getpid() // 100 % 250}"  # unique to this test run
        return self._addresses.setdefault(pod["metadata"]["name"], f"{network}.{len(self._addresses) + 1}")

    def start(self, pod: Json, variables: Mapping[str, str], volumes: Mapping[str, Path | None]) -> subprocess.Popen[bytes]:
        log = (self._folder / f"{pod['metadata']['name']}.log").open("ab")
        environment = {**os.environ, **variables}
        return subprocess.Popen(
            _command(pod),
            env=environment,
            cwd=self._folder,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_end_with_tests,
        )

    def signal(self, process: subprocess.Popen[bytes], number: signal.Signals) -> None:
        process.send_signal(number)


class Machines:
    """Containers that are isolated like separate machines, with a namespace for each kind of resource."""

    def __init__(self, folder: Path, network: Network) -> None:
        self._folder, self._network, self._addresses = folder, network, dict[str, str]()

    def address(self, pod: Json) -> str:
        name = pod["metadata"]["name"]
        if name not in self._addresses:
            self._addresses[name] = address = f"10.78.0.{len(self._addresses) + 11}"
            self._network.add(name, address, {name: address})  # pods do not know the names of others
        return self._addresses[name]

    def start(self, pod: Json, variables: Mapping[str, str], volumes: Mapping[str, Path | None]) -> subprocess.Popen[bytes]:
        name, container = pod["metadata"]["name"], pod["spec"]["containers"][0]
        mounts = ["mount -t tmpfs tmpfs /mnt", "mount -t tmpfs tmpfs /run"]
        if pod["spec"].get("automountServiceAccountToken", True):
            account = self._account(pod["spec"]["serviceAccountName"])
            mounts.append(f"mkdir -p {SECRETS} && mount --bind {account} {SECRETS}")
            variables = {**variables, "KUBERNETES_SERVICE_HOST": API_ADDRESS, "KUBERNETES_SERVICE_PORT": str(API_PORT)}
        for path, folder in volumes.items():
            if folder is not None:
                mounts.append(f"mkdir -p {path} && mount --bind {folder} {path}")
        prepare = " && ".join([*mounts, f"cd {container.get('workingDir', '/')}"])
        log = (self._folder / f"{name}.log").open("ab")
        return subprocess.Popen(
            self._network.machine(name, *_command(pod), prepare=f"{{ {prepare} || exit 1; }}"),
            env={"PATH": f"{Path(sys.executable).parent}:{PATH}", "PYTHONPATH": str(REPO), "HOME": "/root", **variables},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_end_with_tests,
        )

    def _account(self, name: str) -> Path:
        """Write the files that give a pod the permissions of a service account; return their folder."""
        account = self._folder / "accounts" / name
        account.mkdir(parents=True, exist_ok=True)
        (account / "token").write_text(f"account of {name}")
        (account / "namespace").write_text(NAMESPACE)
        (account / "ca.crt").write_bytes((self._folder / "ca.crt").read_bytes())
        return account

    def signal(self, process: subprocess.Popen[bytes], number: signal.Signals) -> None:
        for first in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(first), number)  # unshare, its parent, passes nothing on


def _end_with_tests() -> None:
    """Make the kernel kill this process when the tests exit, even if they are killed."""
    _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _command(pod: Json) -> list[str]:
    command: list[str] = pod["spec"]["containers"][0]["command"]
    return [sys.executable if command[0] == "python" else command[0], *command[1:]]


@contextlib.contextmanager
def in_namespace(space: str) -> Iterator[None]:
    """Create this thread's sockets in a network namespace while the body runs; do nothing if the name is empty."""
    if not space:
        yield
        return
    with open("/proc/thread-self/ns/net") as before, open(f"/run/netns/{space}") as wanted:
        assert _LIBC.setns(wanted.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
        try:
            yield
        finally:
            assert _LIBC.setns(before.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
