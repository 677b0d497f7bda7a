"""Pure functions of the algorithm: advantages, loss weights, packing, batch plans, losses, corrections and log-probabilities.

`advantages`, `packing`, `planning`, `schedule` and `weights` import no torch, so that the controller stays light; the other
modules work on tensors.
"""
