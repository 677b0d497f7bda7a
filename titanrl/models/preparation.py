"""Prepare torch and torchtitan: the device of torchtitan's modules, and models without random initialization."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torchtitan.tools.utils as titan_utils
from torch import nn
from torch.overrides import TorchFunctionMode

from titanrl.config.device import Device

DRAWS = frozenset({"bernoulli_", "exponential_", "kaiming_uniform_", "log_normal_", "normal_", "random_", "uniform_"})
"""Names of the operations that fill a tensor with random numbers, as seen by a `TorchFunctionMode`."""


def prepare_torchtitan(device: Device) -> None:
    """Set torchtitan's device. Call this before the process imports any other torchtitan module.

    torchtitan 0.3.0 assumes `cuda` if it finds no accelerator, and its modules copy the value on import.
    `tests/models/test_preparation.py` checks that this works.
    """
    if device.kind == "npu":
        import torch_npu  # noqa: F401 - registers the device and its process-group backend with torch
    assert {"device_type", "device_module"} <= vars(titan_utils).keys(), "torchtitan moved its device globals"
    titan_utils.device_type = device.kind
    titan_utils.device_module = torch.get_device_module(device.kind)


class WithoutDraws(TorchFunctionMode):
    """Context that fills parameters with zeros instead of random numbers, because a checkpoint overwrites them.

    Drawing 0.6 billion values in bfloat16 takes 8 s on two CPU cores, and minutes on a busy CPU.

    Buffers and constant values, such as norm weights, are initialized as usual. The state of the random-number generators does
    not change, so later draws do not depend on the size of the model.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a torch function; fill the tensor with zeros instead if the function would draw the values of a parameter."""
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")
        if isinstance(target, nn.Parameter) and func.__name__ in DRAWS:
            with torch.no_grad():
                return target.zero_()
        return func(*args, **kwargs)
