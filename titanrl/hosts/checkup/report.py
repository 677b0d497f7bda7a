"""Report of a host for `titanrl doctor --config`: its versions, devices, memory and files.

This module must not import torch or Monarch, because their versions may differ between hosts.
"""

import hashlib
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from titanrl.base.choices import DeviceKind
from titanrl.config.device import missing_for
from titanrl.config.packages import installed_version, packages
from titanrl.config.sizes import host_bytes

MISSING = "missing"
"""State of a path that does not exist on a host."""
_CGROUPS = ("/sys/fs/cgroup", "/sys/fs/cgroup/memory")
_LIMITS = ("memory.max", "memory.limit_in_bytes")
_MAX_FILES = 10_000
"""Number of files per folder whose names and sizes are compared."""
_DIGESTED = (".json", ".jinja", ".txt", ".model", ".yaml")
"""Suffixes of a model's small files, whose contents are also compared."""
_MAX_DIGESTED_BYTES = 20_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRequest:
    """Request for a host's report.

    Example: `ReportRequest(device="cpu", folders={"model.path": "/models/a"}, token_file="/runs/.doctor", token="6f1c")`
    """

    device: DeviceKind
    """Kind of the run's devices."""
    folders: Mapping[str, str]
    """Files and folders that every host must see, by configuration key."""
    token_file: str
    """File that the controller has written into `output_dir`."""
    token: str
    """Content of that file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """State of one host."""

    name: str
    """Host name, as reported by the machine."""
    versions: Mapping[str, str]
    """Versions of Python and of the installed packages."""
    device_problem: str | None
    """Missing prerequisite of the device; None if there is none."""
    devices: Sequence[str]
    """Names of the accelerators; empty on CPU."""
    cores: int
    """Number of CPU cores that this process may use."""
    memory: int
    """Bytes of memory that a run may use: the machine's memory, or the lowest limit on this process."""
    limited_by: str
    """Description of that limit; empty if it is the machine's memory."""
    shared_memory: int | None
    """Free bytes of `/dev/shm`; None if it cannot be written."""
    files: Mapping[str, str]
    """Digest, `missing` or an error, by configuration key."""
    shares_runs: bool
    """True if this host sees the file that the controller has written into `output_dir`."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a report from a line of JSON."""
        return cls(**json.loads(text))

    def dump(self) -> str:
        """Return the report as a line of JSON."""
        return json.dumps(asdict(self))


def report(request: ReportRequest) -> HostReport:
    """Return the report of this host."""
    memory, limited_by = memory_limit()
    folder = Path("/dev/shm")
    return HostReport(
        name=socket.gethostname(),
        versions=versions(request.device),
        device_problem=missing_for(request.device),
        devices=accelerators(request.device),
        cores=len(os.sched_getaffinity(0)),
        memory=memory,
        limited_by=limited_by,
        shared_memory=shutil.disk_usage(folder).free if os.access(folder, os.W_OK) else None,
        files={key: digest_of(Path(path)) for key, path in request.folders.items()},
        shares_runs=_content(Path(request.token_file)) == request.token,
    )


def versions(device: DeviceKind) -> dict[str, str]:
    """Return the versions of Python, TitanRL and the packages for a kind of device. TitanRL's includes a digest of its code."""
    names = [package.name for package in packages(device)]
    found = {name: version for name in names if (version := installed_version(name)) is not None}
    code = _digest_of_files(Path(__file__).parents[2], "*.py", contents=True)
    own = f"{installed_version('titanrl') or 'not installed'} (code {code[:8]})"
    return {"python": platform.python_version(), "titanrl": own} | found


def accelerators(device: DeviceKind) -> list[str]:
    """Return the names of the accelerators of this host."""
    if device == "npu":
        return sorted(entry.name for entry in Path("/dev").glob("davinci[0-9]*"))
    if device != "cuda" or shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return [] if found.returncode else found.stdout.strip().splitlines()


def memory_limit() -> tuple[int, str]:
    """Return the bytes of memory that this host's processes may use, and the limit's name; empty if it is the machine."""
    limits = {host_bytes(): ""}
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits[soft] = "ulimit -v, of each process"
    for line in (_content(Path("/proc/self/cgroup")) or "").splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds in ("", "memory"):
            limits |= _cgroup_limits(path)
    lowest = min(limits)
    return lowest, limits[lowest]


def _cgroup_limits(path: str) -> dict[int, str]:
    """Return the memory limits of a cgroup and its parents. A container sees its own cgroup as the root."""
    found = {}
    parts = Path(path.lstrip("/"))
    for root in _CGROUPS:
        for folder in (parts, *parts.parents):
            for name in _LIMITS:
                text = (_content(Path(root, folder, name)) or "").strip()
                if text.isdecimal():
                    found[int(text)] = "the memory limit of its cgroup"
    return found


def digest_of(path: Path) -> str:
    """Return a digest of a file or folder, `missing` if it does not exist, or the error if it cannot be read."""
    try:
        if path.is_file():
            return _digest(f"{path.stat().st_size}".encode())
        if not path.is_dir():
            return MISSING
        return _digest_of_files(path, "*", contents=False)
    except OSError as error:
        return f"{error.strerror}"


def _digest_of_files(folder: Path, pattern: str, *, contents: bool) -> str:
    """Return a digest of file names and sizes, and of contents: of all files, or only of a model's small files."""
    found = hashlib.sha256()
    files = sorted(file for file in folder.rglob(pattern) if file.is_file())[:_MAX_FILES]
    for file in files:
        size = file.stat().st_size
        found.update(f"{file.relative_to(folder)} {size}\n".encode())
        if contents or (file.suffix in _DIGESTED and size < _MAX_DIGESTED_BYTES):
            found.update(file.read_bytes())
    return found.hexdigest()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _content(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
