"""Packed rollouts of uneven length, and the models that train on them. A benchmark sets torchtitan's device before it imports
this module.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from titanrl.algorithms.packing import pack
from titanrl.carriers.tables import SequencePlan
from titanrl.carriers.types import AdamParams, GroupHandle, Segment
from titanrl.config.device import Device
from titanrl.config.sections import TrainerConfig
from titanrl.config.sizes import ModelShape
from titanrl.models.directory import open_model
from titanrl.trainer.collate import PackedRows, collate
from titanrl.trainer.model import PolicyModel, build_model

ADAM = AdamParams(learning_rate=1e-5, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, max_grad_norm=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and its batch."""

    shape: ModelShape
    trainer: TrainerConfig
    num_microbatches: int
    """Micro-batches per optimizer step."""
    median_tokens: int
    """Median sequence length; lengths are log-normal with sigma 0.8, truncated at the row length."""


SMALL = ModelShape(
    hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=384, vocab_size=1024,
    tied_embeddings=True, max_positions=4096,
)  # fmt: skip


def rl_batches(case: Case) -> tuple[list[PackedRows], int, float]:
    """Return random micro-batches that fill a step's rows, their number of real tokens, and their packing efficiency."""
    config = case.trainer
    num_rows = case.num_microbatches * config.rows_per_microbatch
    lengths = long_tailed(num_rows * config.row_tokens, case.median_tokens, config.row_tokens, seed=1)
    while len(packed := pack(lengths, config.row_tokens)) > num_rows:
        lengths.pop()
    payload = {}
    random = np.random.default_rng(2)
    plans = []
    for location, length in enumerate(lengths):
        mask = np.arange(length) >= max(1, length // 4)
        segment = Segment(
            token_ids=random.integers(0, case.shape.vocab_size, length),
            mask=mask,
            logprobs=np.where(mask, -np.log(case.shape.vocab_size), 0.0).astype(np.float32),
            versions=np.where(mask, 0, -1),
        )
        handle = GroupHandle(shard=0, location=location, serial=0)
        payload[handle] = {0: segment}
        plans.append(SequencePlan(handle=handle, segment=0, length=length, advantage=float(random.normal()), weight=1e-4))
    rows = [tuple(plans[i] for i in row) for row in packed]
    step = config.rows_per_microbatch
    batches = [collate(rows[start : start + step], payload, config.row_tokens) for start in range(0, len(rows), step)]
    return batches, sum(lengths), sum(lengths) / (len(rows) * config.row_tokens)


def long_tailed(total: int, median: int, longest: int, seed: int) -> list[int]:
    """Draw log-normal lengths, clipped to `longest`, that sum to about `total` tokens."""
    random = np.random.default_rng(seed)
    lengths: list[int] = []
    while sum(lengths) < total:
        lengths.append(int(np.clip(random.lognormal(np.log(median), 0.8), 4, longest)))
    return lengths


def model_of(case: Case, folder: Path, device: Device) -> PolicyModel:
    """Build a model of the case's shape with random weights."""
    write_config(case.shape, folder)
    return build_model(open_model(folder), case.trainer, device)


def write_config(shape: ModelShape, folder: Path) -> None:
    """Write the config.json of a Qwen3 model of this shape."""
    hf = {
        "model_type": "qwen3", "vocab_size": shape.vocab_size, "hidden_size": shape.hidden_size, "head_dim": shape.head_dim,
        "num_hidden_layers": shape.num_layers, "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads, "intermediate_size": shape.intermediate_size,
        "tie_word_embeddings": shape.tied_embeddings, "max_position_embeddings": shape.max_positions,
        "rope_theta": 1e6, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(hf))
