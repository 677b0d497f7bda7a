"""What each kind of device can do, found out without importing torch."""

import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DeviceKind = Literal["cpu", "cuda", "npu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One kind of device, as the rest of the code needs to know it."""

    kind: DeviceKind
    """Name torch uses for it."""
    backend: str
    """Process-group backend."""
    visible_devices: str | None
    """Environment variable that says which devices a process sees; None where there is nothing to choose."""
    attention: Literal["dense", "flex"]
    """Attention of packed rows: a dense mask with SDPA, or FlexAttention's block mask."""


DEVICES: dict[DeviceKind, Device] = {
    "cpu": Device(kind="cpu", backend="gloo", visible_devices=None, attention="dense"),
    "cuda": Device(kind="cuda", backend="nccl", visible_devices="CUDA_VISIBLE_DEVICES", attention="flex"),
    "npu": Device(kind="npu", backend="hccl", visible_devices="ASCEND_RT_VISIBLE_DEVICES", attention="dense"),
}


def resolve_device(name: Literal["auto", "cpu", "cuda", "npu"]) -> Device:
    """The device a run uses; `auto` takes the first whose driver and torch build are both there: NPU, CUDA, CPU.

    Raises:
        ValueError: the device asked for is not usable on this machine.
    """
    if name == "auto":
        return next(DEVICES[kind] for kind in ("npu", "cuda", "cpu") if missing_for(kind) is None)
    missing = missing_for(name)
    if missing is not None:
        raise ValueError(f"device: {name} cannot be used here: {missing}; set device to auto or cpu")
    return DEVICES[name]


def missing_for(kind: DeviceKind) -> str | None:
    """What this machine lacks for a device, or None if it lacks nothing."""
    if kind == "npu":
        if not Path("/dev/davinci_manager").exists():
            return "no Ascend driver (/dev/davinci_manager)"
        return None if importlib.util.find_spec("torch_npu") else "the package torch-npu is not installed"
    if kind == "cuda":
        if not Path("/dev/nvidiactl").exists():
            return "no NVIDIA driver (/dev/nvidiactl)"
        version = importlib.metadata.version("torch")
        return f"the installed torch {version} is a CPU build" if version.endswith("+cpu") else None
    return None


def num_threads(num_processes: int, *, num_taken: int = 0) -> int:
    """CPU threads each of some processes may use so that together they do not exceed the cores, less those taken: at least 1.

    More threads than cores make OpenMP's barriers spin against each other, which costs far more than it brings.
    """
    return max(1, (len(os.sched_getaffinity(0)) - num_taken) // num_processes)
