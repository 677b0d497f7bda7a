"""Imports of every rank, done once before ranks are forked."""

import gc
import importlib
import os

os.environ["OMP_NUM_THREADS"] = "1"  # set before torch is imported, or forked ranks inherit a thread pool without threads

from titanrl.config.device import DEVICES
from titanrl.models.preparation import prepare_torchtitan

gc.disable()
prepare_torchtitan(DEVICES["cpu"])

for module in (
    "titanrl.trainer.checkpoint",
    "titanrl.trainer.passes",
    "titanrl.models.decoder",
    "tests.trainer.apart",
    "tests.trainer.swaps",
    "tests.trainer.variants",
):
    importlib.import_module(module)
gc.freeze()  # ranks do not visit what they share
gc.enable()
