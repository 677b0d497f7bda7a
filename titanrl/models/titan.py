"""Set torchtitan's module-level device before its other modules copy it. `tests/models/test_titan.py` checks that it works."""

import torch
import torchtitan.tools.utils as titan_utils

from titanrl.config.device import Device


def prepare_torchtitan(device: Device) -> None:
    """Set torchtitan's device. Call this before the process imports any other torchtitan module.

    torchtitan 0.3.0 assumes `cuda` if it finds no accelerator, and its modules copy the value on import.
    """
    if device.kind == "npu":
        import torch_npu  # noqa: F401 - registers the device and its process-group backend with torch
    assert {"device_type", "device_module"} <= vars(titan_utils).keys(), "torchtitan moved its device globals"
    titan_utils.device_type = device.kind
    titan_utils.device_module = torch.get_device_module(device.kind)
