"""Types of keys with a fixed set of values. Other modules import them instead of repeating the values."""

from typing import Literal

Dtype = Literal["float32", "bfloat16"]
FileDtype = Literal["float32", "bfloat16", "float16"]
DeviceKind = Literal["cpu", "cuda", "npu"]
DeviceName = Literal["auto", "cpu", "cuda", "npu"]

Proximal = Literal["sampler", "step_start", "interval_start"]
Reduction = Literal["sum", "token_mean", "sequence_mean", "sequence_mean_token_sum", "prompt_mean", "constant"]
LearningRateDecay = Literal["constant", "linear", "cosine"]
KLEstimator = Literal["k1", "k2", "k3", "k3_straight_through"]

TransportName = Literal["arena", "rdma", "store"]
Verify = Literal["off", "sampled", "full"]
ConsoleMode = Literal["auto", "live", "plain", "off"]
TrainOn = Literal["assistant", "last", "all"]
Program = Literal["train", "sft", "distill"]
"""Subcommands of `titanrl` that run a configuration."""
