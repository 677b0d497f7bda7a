"""Layers with experts on torchtitan's blocks: experts and router in exact arithmetic, and the experts' tensors by name.

Shape suffixes: B rows, L tokens of a row, D hidden size, E experts, F width of an expert, K experts of a token, R routed
tokens, X any other dimension.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torchtitan.models.common import Linear
from torchtitan.models.common.config_utils import make_routed_experts_config
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import GroupedExperts, MoE, TokenChoiceTopKRouter

from titanrl.config.sizes import ModelShape

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
