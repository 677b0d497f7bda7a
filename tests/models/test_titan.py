"""The private parts of torchtitan that we rely on are still where they were."""

import subprocess
import sys
from importlib.metadata import version

TAKES_THE_DEVICE = """
from titanrl.device import DEVICES
from titanrl.models.titan import prepare_torchtitan
prepare_torchtitan(DEVICES["cpu"])
import torch
import torchtitan.distributed.parallel_dims as parallel_dims
import torchtitan.tools.utils as utils
assert parallel_dims.device_type == "cpu" and utils.device_module is torch.cpu
"""


def test_torchtitan_is_the_version_our_shims_were_written_for() -> None:
    assert version("torchtitan") == "0.3.0"


def test_torchtitan_takes_the_device_it_is_told() -> None:
    subprocess.run([sys.executable, "-c", TAKES_THE_DEVICE], check=True)  # torchtitan reads it once per process
