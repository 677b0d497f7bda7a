"""torchtitan's module-level device, set before its other modules copy it. `tests/models/test_titan.py` checks it."""

import torch
import torchtitan.tools.utils as titan_utils

from titanrl.device import Device


def prepare_torchtitan(device: Device) -> None:
    """Set torchtitan's device; call before the process imports anything else of torchtitan.

    torchtitan 0.3.0 assumes `cuda` if it finds no accelerator, and its modules copy the value when they are imported.
    """
    if device.kind == "npu":
        import torch_npu  # noqa: F401 - registers the device and its process-group backend with torch
    assert {"device_type", "device_module"} <= vars(titan_utils).keys(), "torchtitan moved its device globals"
    titan_utils.device_type = device.kind
    titan_utils.device_module = torch.get_device_module(device.kind)
