"""Define model families whose feed-forward layers are mixtures of experts, in the block of `titanrl.models.dense`.

Every layer has experts, and a router that computes each token with those of the highest softmax. Importing this module does not
import torch.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from titanrl.config.sections import RecipeConfig
from titanrl.config.sizes import ModelShape
from titanrl.models.dense import dense_family, spec_of, weight_shapes
from titanrl.models.family import HFConfig, ModelFamily, VllmName

RECIPE_EXPERTS, RECIPE_PER_TOKEN = 8, 2
"""Experts of each layer of the tiny model, and those that compute a token."""
SIZES = {"num_experts": 1 << 16, "num_experts_per_tok": 1 << 16, "moe_intermediate_size": 1 << 24}
OPTIONS: Mapping[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": []}
"""Supported value of each option, with which every layer has experts."""
EXPERTS = "model.layers.{}.mlp.experts.routed_experts"
VLLM_NAMES: Mapping[str, VllmName] = {
    "layers.{}.moe.router.gate.weight": VllmName("model.layers.{}.mlp.gate.weight"),
    "layers.{}.moe.routed_experts.inner_experts.w1_EFD": VllmName(f"{EXPERTS}.w13_weight", part="gate", dim=1, axis=1),
    "layers.{}.moe.routed_experts.inner_experts.w3_EFD": VllmName(f"{EXPERTS}.w13_weight", part="up", dim=1, axis=1),
    "layers.{}.moe.routed_experts.inner_experts.w2_EDF": VllmName(f"{EXPERTS}.w2_weight", dim=2),
}


def moe_family(
    model_type: str,
    architecture: str,
    *,
    qk_norm: bool = False,
    renderer: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    published: Mapping[str, ModelShape] | None = None,
) -> ModelFamily:
    """Return a family of the dense block with experts instead of its feed-forward layer. See `dense_family` for the arguments.

    LoRA adapters are possible on the attention only, and vLLM's own model cannot compute them separately.
    """

    def problems(hf: HFConfig) -> list[str]:
        found = []
        if not isinstance(normalizes := hf["norm_topk_prob"], bool):
            found.append(f"norm_topk_prob: must be true or false (got {normalizes!r:.200}). Correct config.json.")
        if hf["num_experts_per_tok"] > hf["num_experts"]:
            found.append(
                f"num_experts_per_tok: must be at most num_experts, {hf['num_experts']} (got {hf['num_experts_per_tok']}). "
                "Correct config.json."
            )
        return found

    dense = dense_family(
        model_type,
        architecture,
        qk_norm=qk_norm,
        renderer=renderer,
        defaults=defaults,
        options={**OPTIONS, **(options or {})},
        further_problems=problems,
        published=published,
    )

    def shape(hf: HFConfig) -> ModelShape:
        return replace(
            dense.shape(hf),
            intermediate_size=hf["moe_intermediate_size"],
            num_experts=hf["num_experts"],
            experts_per_token=hf["num_experts_per_tok"],
        )

    def recipe(sizes: RecipeConfig) -> dict[str, Any]:
        assert dense.recipe is not None
        return {
            **dense.recipe(sizes),
            "moe_intermediate_size": sizes.intermediate_size,
            "num_experts": RECIPE_EXPERTS,
            "num_experts_per_tok": RECIPE_PER_TOKEN,
            "norm_topk_prob": True,
        }

    return replace(
        dense,
        shape=shape,
        spec=lambda hf, attention, max_positions: spec_of(model_type, hf, shape(hf), attention, max_positions),
        vllm_names={**{ours: name for ours, name in dense.vllm_names.items() if ".feed_forward." not in ours}, **VLLM_NAMES},
        tensors=lambda hf: weight_shapes(shape(hf)),
        lora_targets={"attention": dense.lora_targets["attention"], "mlp": ()},
        vllm_lora_modules={},
        sizes=SIZES,
        aliases={"num_local_experts": "num_experts"},
        recipe=recipe,
    )
