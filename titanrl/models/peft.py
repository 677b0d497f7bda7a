"""Directories of LoRA adapters in the format of the package peft: the config, and the names of the tensors.

This module does not import torch.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from titanrl.base.files import why_no_file
from titanrl.config.errors import BrokenRule
from titanrl.config.sections import LoraConfig

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Begin of the names of all tensors; the names of transformers follow."""
ENDS = {".lora_a.weight": ".lora_A.weight", ".lora_b.weight": ".lora_B.weight"}
"""Ends of the names of torchtitan and of peft."""
UNSUPPORTED = (
    *("use_dora", "use_rslora", "use_qalora", "lora_bias", "fan_in_fan_out", "modules_to_save", "rank_pattern"),
    *("alpha_pattern", "layers_to_transform", "layer_replication", "megatron_config", "trainable_token_indices"),
    "target_parameters",
)
"""Options of peft that must be off or empty, because the trainer's adapters have nothing that corresponds to them."""


def adapter_config(lora: LoraConfig, alpha: float, modules: Sequence[str], base: Path | None) -> dict[str, Any]:
    """Return the contents of `adapter_config.json` for adapters of these modules of transformers, such as `q_proj`."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else str(base),
        "r": lora.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(modules),
        "inference_mode": True,
    }


def broken_by_adapter(lora: LoraConfig) -> Iterator[BrokenRule]:
    """Yield the rules that the directory of `trainer.lora.path` breaks, except those on its tensors."""
    path = lora.path
    if path is None:
        return
    values: dict[str, object] = {"trainer.lora.path": str(path)}
    fix = "give a directory that peft's save_pretrained or an export wrote, or null"
    for name in (CONFIG, WEIGHTS):
        if why := why_no_file(path / name):
            yield BrokenRule(values, f"its {name} must be a file that can be read, but it {why}", fix)
            return
    try:
        found = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        yield BrokenRule(values, f"its {CONFIG} must be JSON: {error}", fix)
        return
    if not isinstance(found, Mapping) or found.get("peft_type") != "LORA":
        yield BrokenRule(values, f"its {CONFIG} must have the peft_type LORA", fix)
        return
    for theirs, ours, value in (("r", "rank", lora.rank), ("lora_alpha", "alpha", lora.alpha)):
        if found.get(theirs) != value:
            rule = f"its {theirs} must be trainer.lora.{ours}, but it is {found.get(theirs)!r:.100}"
            yield BrokenRule(values | {f"trainer.lora.{ours}": value}, rule, f"set trainer.lora.{ours} to it")
    used = [name for name in UNSUPPORTED if found.get(name)] + (["bias"] if found.get("bias", "none") != "none" else [])
    if used:
        yield BrokenRule(values, f"its option {used[0]} is not supported (got {found[used[0]]!r:.100})", "use another adapter")
