"""Kinds of devices and their capabilities, determined without importing torch."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from titanrl.config.choices import DeviceKind, DeviceName
from titanrl.packages import installed_version


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Properties of one kind of device."""

    kind: DeviceKind
    """torch's name of the device type."""
    backend: str
    """Process-group backend."""
    visible_devices: str | None
    """Environment variable that selects the devices of a process; None if there is nothing to select."""
    attention: Literal["dense", "flex"]
    """Attention over packed rows: SDPA with a dense mask, or FlexAttention with a block mask."""


DEVICES: dict[DeviceKind, Device] = {
    "cpu": Device(kind="cpu", backend="gloo", visible_devices=None, attention="dense"),
    "cuda": Device(kind="cuda", backend="nccl", visible_devices="CUDA_VISIBLE_DEVICES", attention="flex"),
    "npu": Device(kind="npu", backend="hccl", visible_devices="ASCEND_RT_VISIBLE_DEVICES", attention="dense"),
}


def resolve_device(name: DeviceName) -> Device:
    """Return the device of a run; `auto` selects the first of NPU, CUDA and CPU that has a driver and a build of torch.

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
    """Return the missing prerequisite of a device on this machine, or None if the device is usable.

    While torch is not installed, the driver alone decides; `titanrl.packages` reports that torch is missing.
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
    """Return the CPU threads of each process, so that all of them together use the cores that are not taken; at least 1.

    With more threads than cores, OpenMP's barriers spin against each other, which costs far more than the threads gain.
    """
    return max(1, (len(os.sched_getaffinity(0)) - num_taken) // num_processes)
