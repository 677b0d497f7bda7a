"""Supported device types and their availability on this machine, determined without importing torch."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from titanrl.base.choices import DeviceKind, DeviceName
from titanrl.config.packages import installed_version


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Properties of a device type."""

    kind: DeviceKind
    """torch's name of the device type."""
    backend: str
    """Process-group backend."""
    visible_devices: str | None
    """Environment variable that selects a process's devices; None if there is nothing to select."""
    attention: Literal["dense", "flex"]
    """Attention over packed rows: SDPA with a dense mask, or FlexAttention with a block mask."""


DEVICES: dict[DeviceKind, Device] = {
    "cpu": Device(kind="cpu", backend="gloo", visible_devices=None, attention="dense"),
    "cuda": Device(kind="cuda", backend="nccl", visible_devices="CUDA_VISIBLE_DEVICES", attention="flex"),
    "npu": Device(kind="npu", backend="hccl", visible_devices="ASCEND_RT_VISIBLE_DEVICES", attention="dense"),
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


def missing_for(kind: DeviceKind) -> str | None:
    """Return the prerequisite that this machine lacks for a device, or None if the device is usable.

    If torch is not installed, only the driver is checked; `titanrl.config.packages` reports missing packages.
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


def num_threads(num_processes: int, *, num_taken: int = 0) -> int:
    """Return the number of CPU threads per process, at least 1, for processes that share the available cores.

    With more threads than cores, OpenMP barriers spin against each other, which costs far more than extra threads gain.

    Args:
        num_processes: Number of processes that share the cores.
        num_taken: Number of cores to leave to other processes.
    """
    return max(1, (len(os.sched_getaffinity(0)) - num_taken) // num_processes)
