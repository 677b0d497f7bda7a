"""RL algorithms as pure functions: advantages, loss weights, packing, batch plans, losses, corrections and log-probabilities.

`advantages`, `batch_plan`, `contracts` and `packing` do not import torch, so the controller starts faster. The
tensor modules, such as `losses` and `objective`, run on the trainer.
"""
