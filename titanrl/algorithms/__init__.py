"""Pure functions of the algorithm: advantages, loss weights, packing, batch plans, losses and log-probabilities.

`losses` and `logprobs` work on tensors and import torch; the other modules import none, so that the controller stays light.
"""
