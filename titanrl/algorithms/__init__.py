"""Pure functions of the algorithm: advantages, loss weights, packing, batch plans, losses, corrections and log-probabilities.

`advantages`, `batch_plan`, `loss_weights`, `packing` and `schedule` do not import torch, so the controller starts faster. The
other modules compute with tensors.
"""
