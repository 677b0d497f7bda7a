"""`prepare_torchtitan` sets the module-level device that the installed torchtitan uses."""

import subprocess
import sys
from importlib.metadata import version

TAKES_THE_DEVICE = """
from titanrl.config.device import DEVICES
from titanrl.models.titan import prepare_torchtitan
prepare_torchtitan(DEVICES["cpu"])
import torch
import torchtitan.distributed.parallel_dims as parallel_dims
import torchtitan.tools.utils as utils
assert parallel_dims.device_type == "cpu" and utils.device_module is torch.cpu
"""


def test_torchtitan_version_matches_our_patches() -> None:
    assert version("torchtitan") == "0.3.0"


def test_torchtitan_uses_prepared_device() -> None:
    subprocess.run([sys.executable, "-c", TAKES_THE_DEVICE], check=True)  # torchtitan reads it once per process
