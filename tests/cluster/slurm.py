"""A Slurm cluster of three nodes on this machine, each with a separate network, host name, process table and shared memory.

It needs root, network namespaces, and Slurm (`apt-get install slurm-wlm munge`), and changes nothing of this machine's network.
Several slurmd on one host name do not do, because every host of a run listens on the port of its name.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.cluster import network
from tests.cluster.network import PATH, Network

NODES = ("n1", "n2", "n3")
CONTROLLER = "ctl"
PREFIX = f"titanrl{os.getpid()}"
"""Names of the namespaces, so that two test runs do not disturb each other."""
UP_S = 60.0
"""Limit for the start of the cluster, in seconds."""
COMMANDS = ("slurmctld", "slurmd", "sbatch", "squeue", "scancel", "srun", "munged", "ip", "unshare")

_SLURM_CONF = """\
ClusterName=tiny
SlurmctldHost=ctl
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
MpiDefault=none
KillWait=3
ReturnToService=2
JobRequeue=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
NodeName=n[1-3] CPUs=2 RealMemory=4000 State=UNKNOWN
PartitionName=cpu Nodes=n[1-3] Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Return why the cluster cannot be started on this machine; empty if it can."""
    return network.missing(*COMMANDS, packages="slurm-wlm munge iproute2")


class Cluster:
    """The cluster, from `start` to `stop`."""

    def __init__(self, folder: Path) -> None:
        """Start nothing yet; `folder` is for state, logs and the sockets of munge."""
        self.folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}  # by node, or name of the service
        self._network = Network(PREFIX)
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}

    def start(self) -> None:
        """Make the namespaces, start Slurm in them, and wait until every node is idle."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "state").mkdir(exist_ok=True)
        (self.folder / "slurm.conf").write_text(_SLURM_CONF.format(folder=self.folder))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self._make_network()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        munge = ["munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket", f"--key-file={key}"]
        munge += [f"--pid-file={self.folder}/munged.pid", f"--log-file={self.folder}/munged.log"]
        munge += [f"--seed-file={self.folder}/munged.seed"]
        self._start("munged", munge)
        self._wait("munge", lambda: (self.folder / "munge.socket").exists())
        self._start("slurmctld", self.on(CONTROLLER, "slurmctld", "-D", "-f", str(self.folder / "slurm.conf")))
        for node in NODES:
            self.start_node(node)
        self.wait_until_idle()

    def wait_until_idle(self) -> None:
        """Wait until every node can take a job."""
        self._wait("idle nodes", lambda: self.states() == dict.fromkeys(NODES, "idle"))

    def start_node(self, node: str) -> None:
        """Start a node: slurmd, isolated like a separate machine by namespaces."""
        self._start(node, self.machine(node, "sh", "-c", f"slurmd -D -f {self.folder}/slurm.conf -N {node}; true"))

    def kill_node(self, node: str) -> None:
        """Simulate a power loss of a machine: the kernel kills every process on it immediately."""
        self._processes.pop(node).kill()

    def pull_cable(self, node: str) -> None:
        """Disconnect a node from the network; its processes continue."""
        self._network.pull_cable(node)

    def plug_in(self, node: str) -> None:
        """Reconnect a node to the network."""
        self._network.plug_in(node)

    def on(self, host: str, *command: str) -> list[str]:
        """Return the command that runs another command on a host, with the processes of this machine visible."""
        return self._network.on(host, *command)

    def machine(self, node: str, *command: str, prepare: str = "true") -> list[str]:
        """Return the command that runs another command on a separate machine with the network and name of a node."""
        return self._network.machine(node, *command, prepare=prepare)

    def slurm(self, *command: str) -> str:
        """Run a Slurm command; return its output."""
        done = subprocess.run(
            self.on(CONTROLLER, *command), env=self.environment, capture_output=True, text=True, timeout=30, check=False
        )
        return done.stdout.strip()

    def states(self) -> dict[str, str]:
        """Return the state of each node."""
        lines = self.slurm("sinfo", "--noheader", "--Node", "--format=%N %t").splitlines()
        return dict(line.split() for line in lines if len(line.split()) == 2)

    def jobs(self) -> list[str]:
        """Return the running and waiting jobs, as `id state`."""
        return self.slurm("squeue", "--noheader", "--format=%i %T").splitlines()

    def processes(self, *marks: str) -> list[str]:
        """Return the command lines on all nodes that contain one of the given texts."""
        found = []
        for pid in self._network.processes():  # others may use this machine, too
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                found += [f"{pid} {line}"] if any(mark in line for mark in marks) else []
        return found

    def stop(self) -> None:
        """Kill every process, and delete the namespaces."""
        for process in reversed(self._processes.values()):
            process.send_signal(signal.SIGKILL)
        for process in self._processes.values():
            process.wait()
        self._network.stop()

    def _make_network(self) -> None:
        addresses = {host: f"10.77.0.{number}" for number, host in enumerate((CONTROLLER, *NODES), start=1)}
        self._network.start()
        for host, address in addresses.items():
            self._network.add(host, address, addresses)

    def _start(self, name: str, command: Sequence[str]) -> None:
        log = (self.folder / f"{name}.out").open("ab")
        self._processes[name] = subprocess.Popen(
            command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )

    def _wait(self, what: str, is_true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + UP_S
        while not is_true():
            assert time.monotonic() < deadline, f"no {what} within {UP_S:g} s; read the logs in {self.folder}"
            time.sleep(0.2)
