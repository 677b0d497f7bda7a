"""Build torchtitan's decoder from any config.json that `titanrl.models.dense` accepts.

torchtitan 0.3.0 builds only models of published sizes, by name. Its Qwen3 block implements all families, with or without
QK norm and biases, and with a feed-forward layer or experts. Module names, parallelization and state-dict adapter are therefore
those of torchtitan's Qwen3.

The module defines attention over packed rows, with SDPA and a dense mask for devices without a FlexAttention backward pass.
Layers with experts on torchtitan's blocks follow, with experts and router in exact arithmetic, and last the decoder.

Shape suffixes: B rows, L tokens of a row or positions, N heads, H head dimension, D hidden size, E experts, F width of an
expert, K experts of a token, R routed tokens, X any other dimension.
"""

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn.attention.flex_attention import BlockMask
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.attention import FlexAttention, QKVLinear, create_attention_mask
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config, make_routed_experts_config
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import GroupedExperts, MoE, TokenChoiceTopKRouter
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module

from titanrl.config.device import Device
from titanrl.config.sizes import ModelShape
from titanrl.models.family import HFConfig

MaskRule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Function of batch, head, query and key indices, which broadcast. It returns True where the query attends to the key."""
Order = tuple[Tensor, Tensor]
"""Columns of the rows that a rank's queries and keys are, `[Q]` and `[K]`, in their order."""


def sequence_starts(positions_BL: Tensor) -> Tensor:
    """Return True where a sequence starts, `[B, L]`: at position 0, or where the position is not the previous one plus 1."""
    continues_BL = torch.zeros_like(positions_BL, dtype=torch.bool)
    continues_BL[:, 1:] = positions_BL[:, 1:] == positions_BL[:, :-1] + 1
    return (positions_BL == 0) | ~continues_BL


def _replaced_at(positions_BL: Tensor) -> Tensor:
    """Return for each token the column of the next token with its position or a smaller one, `[B, L]`; L if there is none."""
    starts_BL, positions = sequence_starts(positions_BL).cpu().numpy(), positions_BL.cpu().numpy()
    replaced_BL = np.full_like(positions, positions.shape[1])
    for starts_L, positions_L, replaced_L in zip(starts_BL, positions, replaced_BL, strict=True):
        columns = np.flatnonzero(starts_L)
        complete = columns[positions_L[columns] == 0]
        since = complete[np.searchsorted(complete, columns) - 1]  # start of the complete sequence before
        for column, start in zip(columns[:0:-1].tolist(), since[:0:-1].tolist(), strict=True):  # the first one counts
            replaced_L[start:column][positions_L[start:column] >= positions_L[column]] = column
    return torch.from_numpy(replaced_BL).to(positions_BL.device)


def mask_rule(positions_BL: Tensor, order: Order | None = None) -> MaskRule:
    """Return the mask rule of packed rows: causal attention within each sequence and to the tokens that it shares.

    The rule follows from the positions. A sequence that starts at position p > 0 shares p tokens with sequences before it: of
    each position below p the last token. So a token is seen until a sequence starts at its position or a smaller one. Rows hold
    trees of sequences in depth-first order.

    `positions_BL` are those of whole rows. With an `order`, the rule takes indices of its queries and keys instead of columns.
    """
    replaced_BL = _replaced_at(positions_BL)

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q < replaced_BL[b, k])

    if order is None:
        return rule
    queries_Q, keys_K = order
    return lambda b, h, q, k: rule(b, h, queries_Q[q], keys_K[k])


def packed_mask(positions_BL: Tensor, order: Order | None = None) -> Tensor:
    """Return the dense mask of packed rows, bool `[B, 1, L, L]`, True where the query attends to the key.

    With an `order`, it is the mask of these queries and keys, `[B, 1, Q, K]`.
    """
    num_rows, length = positions_BL.shape
    indices_L = torch.arange(length, device=positions_BL.device)
    rows_B111 = torch.arange(num_rows, device=positions_BL.device)[:, None, None, None]
    queries_Q, keys_K = (indices_L, indices_L) if order is None else order
    return mask_rule(positions_BL)(rows_B111, torch.zeros_like(rows_B111), queries_Q[:, None], keys_K[None, :])


def packed_block_mask(positions_BL: Tensor, block_size: int | tuple[int, int], order: Order | None = None) -> BlockMask:
    """Return the mask of `packed_mask` as a `BlockMask` for FlexAttention."""
    num_rows, length = positions_BL.shape
    num_queries, num_keys = (length, length) if order is None else (len(order[0]), len(order[1]))
    mask: BlockMask = create_attention_mask(
        mask_rule(positions_BL, order), num_rows, None, num_queries, num_keys, device=positions_BL.device, BLOCK_SIZE=block_size
    )
    return mask


class PackedAttention(FlexAttention):
    """Inner attention for torchtitan that uses SDPA with the mask of `packed_mask`.

    It derives from FlexAttention because torchtitan gathers the keys and values of context parallelism for this class only.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        """Configuration with the fields of FlexAttention, which are not used."""

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Tensor,
        scale: float | None = None,
        enable_gqa: bool = False,
        **_: Any,
    ) -> Tensor:
        """Compute attention. The output has the shape of the queries, `[B, L, N, H]`."""
        q_BNLH, k_BNLH, v_BNLH = (tensor.transpose(1, 2) for tensor in (q_BLNH, k_BLNH, v_BLNH))
        out_BNLH = F.scaled_dot_product_attention(
            q_BNLH, k_BNLH, v_BNLH, attn_mask=attention_masks, scale=scale, enable_gqa=enable_gqa
        )
        return out_BNLH.transpose(1, 2)


def attention_for(device: Device) -> Module.Config:
    """Return the config of the attention for packed rows on a device."""
    return FlexAttention.Config() if device.attention == "flex" else PackedAttention.Config()


PARTS = {"w1_EFD": "gate_proj", "w2_EDF": "down_proj", "w3_EFD": "up_proj"}
"""Projections of Hugging Face's experts by the name of torchtitan's tensor, which has those of all experts."""
EXPERTS = ".moe.routed_experts.inner_experts."
"""Part of the names of these tensors."""
EXPERT_BIAS = ".moe.expert_bias_E"
"""End of the name of a layer's bias of experts."""


def moe_config(shape: ModelShape, *, normalize: bool, init: dict[str, Any], experts_init: dict[str, Any]) -> MoE.Config:
    """Return the config of a layer of experts. `init` of the router and `experts_init` initialize parameters by name.

    The router's weights of the chosen experts are its softmax, divided by their sum with `normalize`.
    """
    sizes = {"dim": shape.hidden_size, "hidden_dim": shape.intermediate_size, "num_experts": shape.num_experts}
    routed = make_routed_experts_config(
        **sizes, top_k=shape.experts_per_token, param_init=experts_init, comm_backend="standard"
    )
    routed.inner_experts = ExactExperts.Config(**sizes, param_init=experts_init)
    router = Router.Config(
        num_experts=shape.num_experts,
        gate=Gate.Config(in_features=shape.hidden_size, out_features=shape.num_experts, bias=False, param_init=init),
        top_k=shape.experts_per_token,
        score_func="softmax",
        route_norm=normalize,
    )
    return ExpertLayer.Config(num_experts=shape.num_experts, router=router, routed_experts=routed, load_balance_coeff=None)


def add_expert_bias(model: Decoder.Config, rate: float) -> None:
    """Give each layer of a model's config a bias of its experts, initially 0, which changes by `rate` per optimizer step."""
    for layer in model.layers:
        assert layer.moe is not None, "a layer without experts"
        layer.moe.load_balance_coeff = rate


class ExpertLayer(MoE):
    """torchtitan's layer of router and experts."""

    @dataclass(kw_only=True, slots=True)
    class Config(MoE.Config):
        """Configuration with the fields of torchtitan's layer."""

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Return the sum of the chosen experts' outputs, `[B, L, D]`."""
        if isinstance(x_BLD, DTensor) and isinstance(x_BLD._local_tensor, AsyncCollectiveTensor):
            # `local_map` of torch 2.13 would wait for it, too, but lose the gradient. It happens with one row.
            x_BLD._local_tensor = x_BLD._local_tensor.wait()
        output_BLD: Tensor = super().forward(x_BLD)
        return output_BLD


class ExactExperts(GroupedExperts):
    """torchtitan's experts, computed in the dtype of their parameters; torchtitan's own code rounds everything to bfloat16."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """Configuration with the fields of torchtitan's experts."""

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Apply each expert to its tokens, which are sorted by expert. Tokens beyond the sum of the counts are padding."""
        parameters = (self.w1_EFD, self.w3_EFD, self.w2_EDF)
        if x_RD.is_cuda and self.w1_EFD.dtype == torch.bfloat16:
            output_RD: Tensor = super().forward(x_RD, num_tokens_per_expert_E)
            return output_RD
        counts = num_tokens_per_expert_E.tolist()
        *inputs, padding = x_RD.split([*counts, len(x_RD) - sum(counts)])
        # `unbind`, because the gradient of an index would be a tensor of zeros for all experts.
        weights = zip(*((p.to_local() if isinstance(p, DTensor) else p).unbind() for p in parameters), strict=True)
        outputs = [
            F.linear(F.silu(F.linear(x, w1_FD)) * F.linear(x, w3_FD), w2_DF)
            for x, (w1_FD, w3_FD, w2_DF) in zip(inputs, weights, strict=True)
        ]
        return torch.cat([*outputs, torch.zeros_like(padding)])


class Gate(Linear):
    """Linear layer of a router, computed in float32, because small differences of its output choose other experts."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """Configuration with the fields of torchtitan's linear layer."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the logits of the experts in float32."""
        return F.linear(input.float(), self.weight.float())


class Router(TokenChoiceTopKRouter):
    """torchtitan's router with softmax. It keeps the experts of the last pass, and can use those that a generator recorded."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        """Configuration with the fields of torchtitan's router."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.chosen_BLK: Tensor | None = None
        """Experts of the tokens of the last pass on this rank. With expert and tensor parallelism, these are a part of L."""
        self.mode: Literal["own", "compared", "replayed"] = "own"
        """Use of recorded experts: none, to be compared with those of the highest scores, or in place of these."""
        self.recorded_BLK: Tensor | None = None
        """Recorded experts of all tokens of the rows, as `ExpertIds` defines; None without. They also serve the passes that
        activation checkpointing repeats, so they stay until the next forward pass."""
        self.tp_rank = 0
        """Index of this rank's part among the ranks that see a part of L."""
        self.differs_BL: Tensor | None = None
        """True for tokens of the last pass whose recorded experts are not those that this router would choose."""

    def forward(self, x_BLD: Tensor, expert_bias_E: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return weights and indices of the chosen experts, `[B, L, K]` each, and the scores of all experts, `[B, L, E]`.

        `expert_bias_E` balances the load: it is added to the scores only for the choice.
        """
        scores_BLE = self.gate(x_BLD).softmax(-1)
        choice_BLE = scores_BLE if expert_bias_E is None else scores_BLE + expert_bias_E
        ids_BLK = choice_BLE.topk(self.top_k, dim=-1, sorted=False).indices
        local_BLK = ids_BLK.to_local() if isinstance(ids_BLK, DTensor) else ids_BLK
        if self.recorded_BLK is not None:
            local_BLK = self._compared(local_BLK, self.recorded_BLK)
            if isinstance(ids_BLK, DTensor):
                shape, stride = ids_BLK.shape, ids_BLK.stride()
                ids_BLK = DTensor.from_local(
                    local_BLK, ids_BLK.device_mesh, ids_BLK.placements, run_check=False, shape=shape, stride=stride
                )
            else:
                ids_BLK = local_BLK
        self.chosen_BLK = local_BLK.detach()
        weights_BLK = scores_BLE.gather(-1, ids_BLK)
        if self.route_norm:
            weights_BLK = weights_BLK / weights_BLK.sum(-1, keepdim=True)
        return weights_BLK, ids_BLK, scores_BLE

    def _compared(self, own_BLK: Tensor, recorded_BLK: Tensor) -> Tensor:
        """Compare the choice on this rank's part of L with the recorded one; return the experts to use."""
        length = own_BLK.shape[1]
        start = 0 if length == recorded_BLK.shape[1] else self.tp_rank * length
        none = torch.iinfo(recorded_BLK.dtype).max
        recorded_BLK = recorded_BLK[:, start : start + length].to(torch.int64)
        has_ids_BL = (recorded_BLK != none).any(-1)
        self.differs_BL = has_ids_BL & (own_BLK.sort(-1).values != recorded_BLK.sort(-1).values).any(-1)
        return torch.where(has_ids_BL[..., None], recorded_BLK, own_BLK) if self.mode == "replayed" else own_BLK


def routers_of(module: nn.Module) -> list[Router]:
    """Return the routers of a model in the order of its layers; none for a dense model."""
    return [child for child in module.modules() if isinstance(child, Router)]


def biased_layers(module: nn.Module) -> list[ExpertLayer]:
    """Return the layers whose experts have a bias, in order: all of a mixture of experts, or none."""
    return [child for child in module.modules() if isinstance(child, ExpertLayer) and child.expert_bias_E is not None]


def expert_tensors(layer: str, part: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of Hugging Face of the experts that this rank holds, by name, as views of torchtitan's tensor.

    `value` is the tensor `part` (a key of `PARTS`) of all experts of the layer with this index.
    """
    local_EXX, first, make = value, 0, None
    if isinstance(value, DTensor):
        shape, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
        local_EXX, first, make = value.to_local(), offset[0], _expert_sharding(value)
        assert tuple(local_EXX.shape) == tuple(shape), f"torch shards {part} of layer {layer} in another way"
    for number, local_XX in enumerate(local_EXX.unbind()):
        name = f"model.layers.{layer}.mlp.experts.{first + number}.{PARTS[part]}.weight"
        yield name, local_XX if make is None else DTensor.from_local(local_XX, **make)


def _expert_sharding(value: DTensor) -> dict[str, Any] | None:
    """Return the arguments of `DTensor.from_local` for one expert of a sharded tensor; None if experts are not divided."""
    mesh = value.device_mesh
    names: list[str] = []
    placements: list[Placement] = []
    for name, placement in zip(mesh.mesh_dim_names or (), value.placements, strict=True):
        if isinstance(placement, _StridedShard) and placement.dim > 0:
            names.append(name)
            placements.append(_StridedShard(placement.dim - 1, split_factor=placement.split_factor))
        elif isinstance(placement, Shard) and placement.dim > 0:
            names.append(name)
            placements.append(Shard(placement.dim - 1))
    if not names:
        return None
    rows, columns = value.shape[1:]
    return {
        "device_mesh": mesh[tuple(names)],
        "placements": placements,
        "run_check": False,
        "shape": torch.Size((rows, columns)),
        "stride": (columns, 1),
    }


TRAINER = "torchtitan.trainer"
"""Module of torchtitan's own trainer, which imports `datasets`, pandas and pyarrow."""
_NORMAL = {"weight": partial(nn.init.normal_, std=0.02), "bias": nn.init.zeros_}
_ONES = {"weight": nn.init.ones_}
_EXPERTS = {name: partial(nn.init.normal_, std=0.02) for name in ("w1_EFD", "w2_EDF", "w3_EFD")}


class Llama3RoPE(CosSinRoPE):
    """Rotary embedding with the frequency scaling of Llama 3.1. It rotates halves, like transformers.

    torchtitan 0.3.0 implements this scaling only for the variant that rotates pairs, which needs permuted weights.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        """Configuration with the fields of torchtitan's `scaling: llama`."""

    def _precompute_cache(self) -> Tensor:
        """Return cosine and sine of each position, `[L, 2 H]`. Source: `_compute_llama3_parameters` of transformers."""
        config = self.config
        original, low, high = config.original_max_position_embeddings, config.low_freq_factor, config.high_freq_factor
        frequencies = 1.0 / (config.theta ** (torch.arange(0, config.dim, 2).float() / config.dim))
        wavelengths = 2 * math.pi / frequencies
        scaled = torch.where(wavelengths > original / low, frequencies / config.scaling_factor, frequencies)
        smooth = (original / wavelengths - low) / (high - low)
        smoothed = (1 - smooth) * scaled / config.scaling_factor + smooth * scaled
        is_medium = ~(wavelengths < original / high) & ~(wavelengths > original / low)
        positions_L = torch.arange(config.max_seq_len, dtype=torch.float32)
        angles = torch.outer(positions_L, torch.where(is_medium, smoothed, scaled))
        angles_LH = torch.cat([angles, angles], dim=-1)
        return torch.cat([angles_LH.cos(), angles_LH.sin()], dim=-1)


class TitanDecoder(Qwen3Model):
    """torchtitan's Qwen3 model, whose configuration is applied without importing torchtitan's trainer."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        """Configuration with the fields of torchtitan's Qwen3."""

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Check and apply a parallelism plan.

            torchtitan 0.3.0 imports its trainer here to check whether it got the trainer's own configuration, which is never
            the case. The import would take a second of CPU time in every process that builds a model. A module whose
            configuration class has no instances replaces it.
            """
            is_imported = TRAINER in sys.modules
            if not is_imported:
                placeholder: Any = ModuleType(TRAINER)
                placeholder.Trainer = SimpleNamespace(Config=type("Config", (), {}))
                sys.modules[TRAINER] = placeholder
            try:
                Qwen3Model.Config.update_from_config(self, config=config, **kwargs)
            finally:
                if not is_imported:
                    del sys.modules[TRAINER]


class DecoderStateDictAdapter(Qwen3StateDictAdapter):
    """torchtitan's Qwen3 adapter, extended by the biases of the query, key and value projections, and for sharded experts.

    torchtitan's own conversion of experts fails for replicated ones and for numbers that the ranks do not divide. Here, each
    rank has the tensors of its experts. They share the memory of the model, so that loading them fills it.
    """

    def __init__(self, model_config: Qwen3Model.Config, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        self.from_hf_map |= {
            f"model.layers.{{}}.self_attn.{name}_proj.bias": f"layers.{{}}.attention.qkv_linear.w{name}.bias" for name in "qkv"
        }

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the tensors of this rank by Hugging Face name."""
        rest = {name: value for name, value in state_dict.items() if EXPERTS not in name}
        found: dict[str, Any] = super().to_hf(rest)
        for name, value in state_dict.items():
            if match := re.fullmatch(rf"layers\.(\d+){re.escape(EXPERTS)}(\w+)", name):
                found |= expert_tensors(match[1], match[2], value)
        return found

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the tensors by torchtitan's name, without experts, whose tensors from `to_hf` are views of the model."""
        found: dict[str, Any] = super().from_hf(
            {name: value for name, value in hf_state_dict.items() if ".experts." not in name}
        )
        return found


def decoder_spec(
    name: str,
    hf: HFConfig,
    shape: ModelShape,
    rope: Mapping[str, Any],
    attention: Module.Config,
    max_positions: int,
) -> ModelSpec:
    """Return the spec with which torchtitan builds, parallelizes, loads and saves the model of `hf`, a config.json.

    The query, key and value projections are not fused. With torchtitan's fused projection, `state_dict()` is a collective that
    replicates the weights, and the parameter names differ from those of the checkpoint.

    `attention` configures the inner attention of each layer, and `rope` (`rope_parameters`) its RoPE table, which has at most
    `max_positions` positions. `name` is the model family's.
    """
    dim, vocab = shape.hidden_size, shape.vocab_size
    sizes: dict[str, Any] = {
        "dim": shape.head_dim,
        "max_seq_len": min(max_positions, shape.max_positions),
        "theta": float(rope["rope_theta"]),
    }
    if rope["rope_type"] == "default":
        rotary = CosSinRoPE.Config(**sizes)
    else:
        rotary = Llama3RoPE.Config(
            **sizes,
            scaling="llama",
            scaling_factor=rope["factor"],
            low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
            original_max_position_embeddings=rope["original_max_position_embeddings"],
        )

    def norm(width: int) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=width, eps=hf["rms_norm_eps"], param_init=_ONES)

    def block() -> Qwen3TransformerBlock.Config:
        gqa = make_gqa_config(
            dim=dim,
            n_heads=shape.num_heads,
            n_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            wqkv_param_init=_NORMAL,
            wo_param_init=_NORMAL,
            inner_attention=attention,
            fuse_qkv=False,
            rope=rotary,
            qk_norm=norm(shape.head_dim) if shape.qk_norm else None,
        )
        assert isinstance(gqa.qkv_linear, QKVLinear.Config)
        gqa.qkv_linear.wq.bias = gqa.qkv_linear.wkv.bias = shape.qkv_bias
        shared: dict[str, Any] = {"attention_norm": norm(dim), "ffn_norm": norm(dim), "attention": gqa}
        if shape.num_experts:
            moe = moe_config(shape, normalize=hf["norm_topk_prob"], init=_NORMAL, experts_init=_EXPERTS)
            return Qwen3TransformerBlock.Config(**shared, moe=moe)
        feed_forward = make_ffn_config(
            dim=dim, hidden_dim=shape.intermediate_size, w1_param_init=_NORMAL, w2w3_param_init=_NORMAL
        )
        return Qwen3TransformerBlock.Config(**shared, feed_forward=feed_forward)

    model = TitanDecoder.Config(
        vocab_size=vocab,
        dim=dim,
        norm=norm(dim),
        enable_weight_tying=hf["tie_word_embeddings"],
        tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=dim, param_init=_NORMAL),
        lm_head=Linear.Config(in_features=dim, out_features=vocab, param_init=_NORMAL),
        layers=[block() for _ in range(shape.num_layers)],
    )
    return ModelSpec(
        name=name,
        flavor="",
        model=model,
        parallelize_fn=parallelize_qwen3,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=DecoderStateDictAdapter,
    )
