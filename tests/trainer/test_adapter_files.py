"""Adapters in the format of peft: exports, imports, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.trainer import variants
from tests.trainer.test_variants import Worlds
from titanrl.config.sections import LoraConfig
from titanrl.models.directory import broken_by_adapter

LORA = {"rank": 4, "alpha": 8.0}
LAYOUTS = {"one rank": (1, {}), "fsdp x tp": (4, {"dp_shard": 2, "tp": 2})}


@pytest.fixture(scope="module")
def exported(world: Worlds, untied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the export of a policy after two steps with adapters on 4 ranks."""
    target = tmp_path_factory.mktemp("export") / "out"
    section = {"lora": LORA, "parallelism": LAYOUTS["fsdp x tp"][1]}
    world(4).run(variants.export, untied_model, section, target, 2)
    return target


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(2, 34)[None]).logits
    return found


def test_adapter_beside_the_export_is_the_difference_to_the_base(exported: Path, untied_model: Path) -> None:
    config = json.loads((exported / "adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8.0, str(untied_model))
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    tensors = load_file(exported / "adapter/adapter_model.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(untied_model, dtype=torch.float32)
    weights = dict(model.named_parameters())
    for name in [name for name in tensors if name.endswith(".lora_A.weight")]:
        stem = name.removesuffix(".lora_A.weight")
        product = tensors[f"{stem}.lora_B.weight"] @ tensors[name]
        with torch.no_grad():
            weights[stem.removeprefix("base_model.model.") + ".weight"] += 2.0 * product
    merged = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    torch.testing.assert_close(logits(model), logits(merged), atol=1e-5, rtol=0)


def test_peft_reads_the_exported_adapter(exported: Path, untied_model: Path) -> None:
    peft = pytest.importorskip("peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(untied_model, dtype=torch.float32)
    plain = logits(base)
    model = peft.PeftModel.from_pretrained(base, str(exported / "adapter"))
    merged = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    torch.testing.assert_close(logits(model), logits(merged), atol=1e-5, rtol=0)
    assert (logits(model) - plain).abs().max() > 1e-2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_starts_from_an_adapter(
    layout: str, exported: Path, world: Worlds, untied_model: Path, tmp_path: Path
) -> None:
    size, plan = LAYOUTS[layout]
    section = {"lora": {**LORA, "path": str(exported / "adapter")}, "parallelism": plan}
    world(size).run(variants.export, untied_model, section, tmp_path / "again", 0)
    before, after = (load_file(folder / "adapter/adapter_model.safetensors") for folder in (exported, tmp_path / "again"))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_adapter_of_other_targets_is_refused(exported: Path, world: Worlds, untied_model: Path) -> None:
    section = {"lora": {**LORA, "targets": ["mlp"], "path": str(exported / "adapter")}}
    with pytest.raises(
        Exception, match=r"trainer\.lora\.path: 16 tensors do not fit, such as base_model\.model\.model\.layers\.0"
    ):
        world(1).run(variants.loaded_bytes, untied_model, section)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"r": 8}, r"its r must be trainer.lora.rank, but it is 8"),
        ({"lora_alpha": 1}, "its lora_alpha must be trainer.lora.alpha, but it is 1"),
        ({"peft_type": "IA3"}, "its adapter_config.json must have the peft_type LORA"),
        ({"use_dora": True}, "its option use_dora is not supported"),
        ({"bias": "all"}, "its option bias is not supported"),
        ({"init_lora_weights": "pissa"}, "its option init_lora_weights is not supported (got 'pissa')"),
        ({"alora_invocation_tokens": [5, 6]}, "its option alora_invocation_tokens is not supported"),
        ({"of_a_later_peft": {"a": 1}}, "its option of_a_later_peft is not supported"),
        (None, "its adapter_model.safetensors must be a file that can be read, but it does not exist"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_broken_rules_of_a_directory(change: dict[str, Any] | None, rule: str, exported: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(exported / "adapter", folder)
    written = json.loads((folder / "adapter_config.json").read_text())
    harmless = {"init_lora_weights": "gaussian", "use_dora": False, "layers_to_transform": None, "peft_version": "0.21.2"}
    for more in ({}, harmless):
        (folder / "adapter_config.json").write_text(json.dumps(written | more))
        assert list(broken_by_adapter(LoraConfig(rank=4, alpha=8.0, path=folder))) == []
    if change is None:
        (folder / "adapter_model.safetensors").unlink()
    else:
        config = json.loads((folder / "adapter_config.json").read_text()) | change
        (folder / "adapter_config.json").write_text(json.dumps(config))
    (broken,) = broken_by_adapter(LoraConfig(rank=4, alpha=8.0, path=folder))
    assert broken.rule.startswith(rule)
