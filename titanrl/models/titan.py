"""The one place that reaches into torchtitan's private parts. `tests/models/test_titan.py` fails when they move."""

import torch
import torchtitan.tools.utils as titan_utils

from titanrl.device import Device


def prepare_torchtitan(device: Device) -> None:
    """Tell torchtitan 0.3.0 which device it is on; call before any other torchtitan import of the process.

    Without an accelerator it assumes `cuda`, and modules copy the value when they are imported.
    """
    if device.kind == "npu":
        import torch_npu  # noqa: F401 - registers the device and its process-group backend with torch
    assert {"device_type", "device_module"} <= vars(titan_utils).keys(), "torchtitan moved its device globals"
    titan_utils.device_type = device.kind
    titan_utils.device_module = torch.get_device_module(device.kind)
