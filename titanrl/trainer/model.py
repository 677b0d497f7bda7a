"""The policy model of one rank: built and parallelized by torchtitan, with LoRA adapters and chunked scoring.

The module defines what a model may have, context parallelism and copies in the dtype of the passes, then the model and how it
is built, its adapters, and last the heads that replace its output layer.

Shape suffixes: B rows, L tokens of a row, C tokens of a chunk or columns of this rank, D hidden size, V vocabulary entries on
this rank, M selected tokens, N tokens, O output features and I input features of a linear layer, R rank of its adapter.
"""

import math
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import spmd_types as spmd
import torch
import torch.distributed as dist
import torchtitan.config as titan_config
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.checkpoint import checkpoint
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.decoder_sharding import dense_activation_placement, dense_param_placement
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter
from torchtitan.tools.utils import get_local_device, set_default_dtype

from titanrl.algorithms.logprobs import TeacherTokens, TokenSupports, divergence, logprobs_and_entropy
from titanrl.config.device import Device
from titanrl.config.sections import LoraConfig, TrainerConfig
from titanrl.config.sizes import LOGITS_BYTES as LOGITS_BYTES
from titanrl.models.decoder import Order, add_expert_bias, biased_layers
from titanrl.models.directory import ModelDirectory
from titanrl.models.family import Projections
from titanrl.models.preparation import WithoutDraws
from titanrl.trainer.collate import PackedRows
from titanrl.trainer.snapshots import reshard
from titanrl.weights.layout import local_part

if TYPE_CHECKING:
    from titanrl.trainer.float8 import WeightScales

# torchtitan's default, `spmd_types`, requires a torch version newer than 2.13 if FSDP has more than one rank.
SPMD_BACKEND = "partial_dtensor"
A, B = ".lora_a.weight", ".lora_b.weight"
HEAD = "lm_head.weight"
"""Name of the output layer's weight."""
MARKS = {torch.float32: (torch.int32, 0x7FA5A5A5), torch.bfloat16: (torch.int16, 0x7FA5)}
"""Integer dtype and bit pattern of the marker that `mark` writes, by dtype of the weights. It is a NaN with a payload that no
arithmetic produces, so checkpoints that contain NaNs can be loaded."""
ADDED_AT_ONCE = 1 << 20
"""Number of gradient values per addition. An addition of two dtypes converts one operand to a temporary tensor, which thus fits
into the cache of a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextGroup:
    """Context parallelism: a group of ranks that divide the columns of their rows, and this rank's place in it.

    Only the model computes on a part of each row. Its scores, a few numbers per token, are gathered, so losses and metrics see
    whole sequences on every rank, as without context parallelism. Each rank then propagates the gradient of its own columns,
    and FSDP, whose mesh includes the group, sums the gradients once.

    A row is cut into 2 P chunks for P ranks, and rank p computes chunks p and 2 P - 1 - p. A token attends to those before it,
    so such pairs cost about the same in a row with one sequence.
    """

    group: dist.ProcessGroup
    rank: int
    size: int

    def parts(self, length: int) -> tuple[slice, slice]:
        """Return this rank's columns of rows of a length, which must be a multiple of twice the group's size."""
        assert length % (2 * self.size) == 0, f"{self.size} ranks cannot divide rows of {length} tokens"
        return head_tail(length, self.rank, self.size)

    def cut(self, rows: PackedRows) -> PackedRows:
        """Return this rank's columns of the rows."""
        return rows.columns(*self.parts(rows.length))

    def order(self, length: int, device: torch.device) -> Order:
        """Return the columns of this rank's queries, and of the keys that attention gathers in the order of the ranks."""
        columns_L = torch.arange(length, device=device)
        by_rank = [torch.cat([columns_L[part] for part in head_tail(length, rank, self.size)]) for rank in range(self.size)]
        return by_rank[self.rank], torch.cat(by_rank)

    def whole(self, scores: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Gather scores of whole rows, `[B, L]` each, from those of the ranks, `[B, C]` each. This is a collective.

        The gradient of a rank's scores is that of its own columns, without communication, because all ranks compute the same
        loss.
        """
        gathered: tuple[Tensor, ...] = _Gather.apply(self, *scores)  # type: ignore[no-untyped-call]
        return gathered

    def select(self, hidden_BCD: Tensor, tokens_M: Tensor) -> Tensor:
        """Return the hidden states of some tokens of the flattened whole rows, `[M, D]`. This is a collective."""
        num_columns = hidden_BCD.shape[1]
        length = num_columns * self.size
        own_C, _ = self.order(length, hidden_BCD.device)
        place_L = torch.full((length,), -1, device=hidden_BCD.device)
        place_L[own_C] = torch.arange(num_columns, device=hidden_BCD.device)
        place_M = place_L[tokens_M % length]
        selected_MD = hidden_BCD[tokens_M // length, place_M.clamp(min=0)]
        selected_MD = torch.where(place_M[:, None] >= 0, selected_MD, 0.0)
        dist.all_reduce(selected_MD, group=self.group)  # each token is on one rank, and zero on the others
        return selected_MD


def head_tail(length: int, rank: int, size: int) -> tuple[slice, slice]:
    """Return the two chunks of a row that a rank computes.

    Example: of rows of 8 tokens, the first of two ranks has columns 0, 1, 6, 7, and the second 2 to 5.
    """
    width = length // (2 * size)
    last = 2 * size - 1 - rank
    return slice(rank * width, (rank + 1) * width), slice(last * width, (last + 1) * width)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, context: ContextGroup, *scores: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.parts = context.parts(scores[0].shape[1] * context.size)
        local_SBC = torch.stack(scores)
        by_rank = [torch.empty_like(local_SBC) for _ in range(context.size)]
        dist.all_gather(by_rank, local_SBC, group=context.group)
        halves = [part_SBC.chunk(2, dim=2) for part_SBC in by_rank]
        whole_SBL = torch.cat([*(head for head, _ in halves), *(tail for _, tail in reversed(halves))], dim=2)
        # Copies, because autograd does not allow changes in place of several views of one tensor.
        return tuple(score_BL.clone() for score_BL in whole_SBL)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of this rank's columns."""
        return None, *(None if g is None else torch.cat([g[:, part] for part in ctx.parts], dim=1) for g in gradients)


class CastParameters:
    """Mixed precision on one data-parallel rank: copies of the parameters in another dtype, which replace them inside `in_use`.

    FSDP would cast all parameters, and copy and reduce all gradients, in each micro-batch. These copies are cast once per
    change of the weights, and each gradient is added to that of its parameter as soon as it is complete.

    Call `weights_changed` after every change of the parameters.

    Example: `with copies.in_use(): module(tokens).sum().backward()` accumulates the gradients of the parameters themselves, in
    their own dtype.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        """Allocate the copies, without values. Parameters must not be replaced later; their values may change."""
        self._pairs: dict[nn.Parameter, nn.Parameter] = {}
        self._places: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._outdated: Collection[nn.Parameter] = ()
        for owner in module.modules():
            for name, parameter in owner.named_parameters(recurse=False):
                if parameter not in self._pairs:  # tied parameters share a copy
                    self._pairs[parameter] = _copy_of(parameter, dtype)
                self._places.append((owner, name, parameter))
        self.weights_changed()

    def weights_changed(self, *, trained_only: bool = False) -> None:
        """Cast the parameters, or only those that are trained, again before the copies are used the next time."""
        trained = [parameter for parameter in self._pairs if parameter.requires_grad]
        if not (trained_only and self._outdated):
            self._outdated = trained if trained_only else list(self._pairs)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Compute with the copies inside the context. A backward pass must end inside of it, too."""
        with torch.no_grad():
            for parameter in self._outdated:
                local_part(self._pairs[parameter]).copy_(local_part(parameter))
        self._outdated = ()
        for owner, name, parameter in self._places:
            owner.register_parameter(name, self._pairs[parameter])
        try:
            yield
        finally:
            for owner, name, parameter in self._places:
                owner.register_parameter(name, parameter)


def _copy_of(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    copy = nn.Parameter(torch.empty_like(parameter, dtype=dtype), requires_grad=parameter.requires_grad)
    if parameter.requires_grad:
        copy.register_post_accumulate_grad_hook(partial(_move_gradient, parameter))
    return copy


@torch.no_grad()
def _move_gradient(parameter: nn.Parameter, copy: Tensor) -> None:
    """Add the gradient of a copy to that of its parameter, and free it."""
    gradient, copy.grad = copy.grad, None
    assert gradient is not None
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
        return
    total, added = local_part(parameter.grad), local_part(gradient)
    if not total.is_contiguous():  # its flattened form would be a copy
        total.add_(added)
        return
    for total_N, added_N in zip(total.flatten().split(ADDED_AT_ONCE), added.flatten().split(ADDED_AT_ONCE), strict=True):
        total_N.add_(added_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyModel:
    """Parallelized model of this rank, with its meshes, state-dict adapter and device."""

    module: Decoder
    """torchtitan's model. Sharded parameters are DTensors."""
    parallel_dims: ParallelDims
    """Device meshes by name."""
    adapter: BaseStateDictAdapter
    """Converter between the state dicts of torchtitan and Hugging Face."""
    device: torch.device
    lora: LoraConfig | None
    """LoRA settings; None trains all parameters."""
    scales: "WeightScales | None"
    """Weight scales of tensor-wise float8; None without it."""
    cast: CastParameters | None
    """Parameters in the dtype of the passes; None if it is their own, or if FSDP casts them."""

    @property
    def dp_rank(self) -> int:
        """Data-parallel rank: index of this rank's share of the batch."""
        mesh = self.parallel_dims.get_optional_mesh("batch")
        return 0 if mesh is None else mesh.get_local_rank()

    @property
    def dp_size(self) -> int:
        """Data-parallel size: number of shares of the batch."""
        mesh = self.parallel_dims.get_optional_mesh("batch")
        return 1 if mesh is None else mesh.size()

    @property
    def tp_rank(self) -> int:
        """Tensor-parallel rank: index of this rank among the ranks that compute the same tokens."""
        mesh = self.parallel_dims.get_optional_mesh("tp")
        return 0 if mesh is None else mesh.get_local_rank()

    @property
    def context(self) -> ContextGroup | None:
        """Ranks that divide the columns of this rank's rows; None without context parallelism."""
        mesh = self.parallel_dims.get_optional_mesh("cp")
        return None if mesh is None else ContextGroup(group=mesh.get_group(), rank=mesh.get_local_rank(), size=mesh.size())

    @property
    def reports(self) -> bool:
        """True on one of the ranks with the same share of the batch, which have the same scores, losses and metrics."""
        return self.tp_rank == 0 and (self.context is None or self.context.rank == 0)

    @property
    def groups(self) -> list[ProcessGroup]:
        """Process groups of the collectives in forward and backward passes."""
        return [mesh.get_group() for mesh in self.parallel_dims.get_all_one_dimensional_meshes().values()]

    def reshard(self) -> None:
        """Reshard all parameters. Call this before any access to parameters outside of forward and backward."""
        reshard(self.module)

    def weights_changed(self, *, trained_only: bool = False) -> None:
        """Update what is computed from the weights. Call this after any change of them. This is a collective.

        `trained_only` states that frozen parameters, such as the base of LoRA adapters, have not changed.
        """
        if self.cast is not None:
            self.cast.weights_changed(trained_only=trained_only)
        if self.scales is not None and not (trained_only and self.lora is not None):  # adapters are never in float8
            self.reshard()
            self.scales.refresh()

    @property
    def adapter_scale(self) -> float:
        """Factor of the live adapters' output, alpha / rank."""
        scale: float = next(adapted_layers(self.module))._lora_scaling
        return scale

    def set_adapter_scale(self, scale: float) -> None:
        """Change the factor of the live adapters' output. Compiled layers are compiled again for a new factor."""
        for layer in adapted_layers(self.module):
            layer._lora_scaling = scale

    def computing(self) -> AbstractContextManager[None]:
        """Return the context for passes: inside of it, the parameters have the dtype of the passes."""
        return nullcontext() if self.cast is None else self.cast.in_use()

    def weights(self) -> dict[str, Tensor]:
        """Return the sharded parameters by name, with adapters merged. With LoRA this is a collective."""
        self.reshard()
        # state_dict() takes a fraction of the time of torch's get_model_state_dict() and returns the same tensors.
        state = {name: value for name, value in self.module.state_dict().items() if isinstance(value, Tensor)}
        return state if self.lora is None else _merged(state, self.adapter_scale)


def build_model(
    source: ModelDirectory,
    config: TrainerConfig,
    device: Device,
    *,
    seed: int = 0,
    random_weights: bool = True,
    is_critic: bool = False,
) -> PolicyModel:
    """Build the model on the meta device, parallelize it, and initialize this rank's shards.

    Args:
        source: Hugging Face directory; only its config is read.
        config: Parallelism, dtypes and model converters.
        device: Kind of device.
        seed: Seed of the LoRA adapters, the same on all ranks. With `deterministic` or `detect_anomaly`, it also seeds torch.
        random_weights: Initialize the weights randomly. False marks them as unwritten instead, for a call of `load_hf` that
            follows. Adapters and non-persistent buffers are initialized in both cases.
        is_critic: Replace the output layer by one with a single output and zero weights.
    """
    spec, plan = source.spec(device, config.row_tokens), config.parallelism
    parallelism = titan_config.ParallelismConfig(
        data_parallel_replicate_degree=plan.dp_replicate,
        data_parallel_shard_degree=plan.dp_shard,
        context_parallel_degree=plan.cp,
        tensor_parallel_degree=plan.tp,
        expert_parallel_degree=plan.ep,
        fsdp_reshard_after_forward=plan.fsdp_reshard_after_forward,
        spmd_backend=SPMD_BACKEND,
    )
    dist_utils.set_spmd_backend(SPMD_BACKEND)
    parallel_dims = ParallelDims.from_config(parallelism, plan.world_size)
    where = torch.device("cpu") if device.kind == "cpu" else get_local_device()
    if config.deterministic != "off" or config.detect_anomaly:
        debug = titan_config.DebugConfig(
            seed=seed,
            deterministic=config.deterministic != "off",
            deterministic_warn_only=config.deterministic == "warn",
            detect_anomaly=config.detect_anomaly,
        )
        dist_utils.set_determinism(parallel_dims, where, debug, distinct_seed_mesh_dims=[])
    model_config = _converted(spec.model, config, device, source.family.lora_targets)
    if is_critic:
        model_config.lm_head.out_features, model_config.enable_weight_tying = 1, False
    if config.expert_bias_rate:
        add_expert_bias(model_config, config.expert_bias_rate)
    model_config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    if is_critic and plan.tp > 1:
        # Tensor parallelism cannot split a single row, so every rank computes the whole output layer.
        whole = dense_activation_placement(tp=spmd.R)
        model_config.lm_head.sharding_config = ShardingConfig(
            state_shardings={"weight": dense_param_placement(tp=spmd.R)},
            in_src_shardings={"input": whole},
            in_dst_shardings={"input": whole},
            out_src_shardings=whole,
            out_dst_shardings=whole,
        )
    if config.compile:
        # Beyond the limit, 8 by default, torch fails. For passes with and without gradient, over one row and several, it
        # compiles layers with LoRA six times, a critic's beside it four times, and with adapters of another rank again.
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit
        torch._dynamo.config.assume_static_by_default = config.has_fixed_rows(device)  # else once for all row lengths
    with torch.device("meta"), set_default_dtype(torch_dtype(config.dtype)):
        module = model_config.build()
    module = spec.parallelize_fn(
        module,
        parallel_dims=parallel_dims,
        # By default, torchtitan reduces gradients in float32.
        training=titan_config.TrainingConfig(
            seq_len=config.row_tokens, dtype=config.dtype, mixed_precision_param=config.compute_dtype
        ),
        parallelism=parallelism,
        compile_config=titan_config.CompileConfig(enable=config.compile, components=["model"]),
        ac_config={"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}[config.activation_checkpointing],
        dump_folder="",
        skip_dp=not config.uses_fsdp,
    )
    # FSDP must sum gradients over ranks instead of averaging them, because the loss weights contain the global counts.
    # torchtitan sets the divide factor to 1, which FSDP2 implements with PREMUL_SUM. gloo does not support that, so this forces
    # a plain sum. Ranks that do not use a parameter also contribute zeros to its reduction, because gloo kills the process if
    # ranks reduce tensors of different sizes.
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.set_force_sum_reduction_for_comms(True)
            child.set_reduce_scatter_unused_params(True, recurse=False)
    module.to_empty(device=where)
    with torch.no_grad(), nullcontext() if random_weights else WithoutDraws():
        module.init_weights(buffer_device=None)
    if not random_weights:
        mark(checkpoint_state(module))
        for layer in biased_layers(module):
            local_part(layer.expert_bias_E).zero_()
    if is_critic:
        local_part(module.lm_head.weight).detach().zero_()
    for name, values in initial_adapter(module, seed).items():
        local_part(module.get_parameter(name)).detach().copy_(values)
    scales = None
    if config.float8 == "tensorwise":
        from titanrl.trainer.float8 import WeightScales

        scales = WeightScales(module, torch_dtype(config.compute_dtype))
    casts = not config.uses_fsdp and config.dtype != config.compute_dtype
    assert spec.state_dict_adapter is not None
    return PolicyModel(
        module=module,
        parallel_dims=parallel_dims,
        # With a path, torchtitan would parse the numbers of weight files in the index, and fail for names without one.
        adapter=spec.state_dict_adapter(model_config, None),
        device=where,
        lora=config.lora,
        scales=scales,
        cast=CastParameters(module, torch_dtype(config.compute_dtype)) if casts else None,
    )


def checkpoint_state(module: Decoder) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers by name, without adapters: the tensors that a checkpoint contains."""
    state = module.state_dict()
    return without_adapters({name: value for name, value in state.items() if isinstance(value, Tensor)})


def without_adapters(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a state dict that belong to no adapter."""
    return {name: value for name, value in state.items() if not name.endswith((A, B))}


def adapters_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the A and B of all adapters in a state dict."""
    return {name: value for name, value in state.items() if name.endswith((A, B))}


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of this name."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _converted(
    model: Module.Config, config: TrainerConfig, device: Device, lora_targets: Mapping[Projections, Sequence[str]]
) -> Module.Config:
    """Convert the linear layers to float8 and add LoRA adapters, as configured.

    The output layer is never converted, because the loss is most sensitive to the logits, and because its weight may be tied
    to the embedding.
    """
    if config.float8 is not None:
        from titanrl.trainer.float8 import float8_projections

        model = float8_projections(model, config.float8, emulate=device.kind == "cpu", compiled=config.compile)
    if config.lora is not None:
        from torchtitan.components.lora import LoRAConverter

        names = [name for target in config.lora.targets for name in lora_targets[target]]
        adapters = LoRAConverter.Config(rank=config.lora.rank, alpha=config.lora.alpha, target_modules=names)
        model = adapters.build().convert(model)
    return model


def mark(state: Mapping[str, Tensor]) -> None:
    """Fill this rank's shard of each tensor with the marker of `MARKS`. Tensors of other dtypes are skipped."""
    for tensor in state.values():
        if tensor.dtype in MARKS:
            kind, bits = MARKS[tensor.dtype]
            local_part(tensor.detach()).view(kind).fill_(bits)


def unwritten(state: Mapping[str, Tensor]) -> list[str]:
    """Return the sorted names of the tensors whose shard on this rank still contains the marker.

    A comparison of tensor names would miss a slice of a tensor that no file contains.
    """
    found = []
    for name, tensor in state.items():
        kind, bits = MARKS.get(tensor.dtype, (None, 0))
        if kind is not None and (local_part(tensor.detach()).view(kind) == bits).any():
            found.append(name)
    return sorted(found)


def adapted_layers(module: nn.Module) -> Iterator[Any]:
    """Yield torchtitan's layers that have an adapter; their attribute `_lora_scaling` is its scale."""
    for name, _ in module.named_parameters():
        if name.endswith(A):
            yield module.get_submodule(name.removesuffix(A))


def initial_adapter(
    module: nn.Module, seed: int, *, rank: int | None = None, trains: Callable[[str], bool] = lambda name: True
) -> dict[str, Tensor]:
    """Return this rank's shards of a new adapter, by the names of the model's parameters.

    Each A is drawn with a generator that is seeded with `seed` and its name, and each B is zero. The values depend neither on
    the layout nor on the number of ranks. With torch's initialization of a sharded tensor they would depend on both, because
    each rank draws its shard separately.

    Args:
        module: Parallelized model with adapters.
        seed: Seed of the values.
        rank: Rank of the adapter, at most that of the model's, which is the default. The values beyond it are zero, so they
            have no gradient.
        trains: Function that returns whether a layer of this name is trained. In the others, A is zero, too.
    """
    found = {}
    for wrapped, parameter in module.named_parameters():
        name = canonical_fqn(wrapped)
        if name.endswith((A, B)):
            found[wrapped] = torch.zeros_like(local_part(parameter.detach()))
        if name.endswith(A) and trains(name.removesuffix(A)):
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            bound = 1 / math.sqrt(parameter.shape[1])  # kaiming_uniform_ with a = sqrt(5), as in torchtitan
            values_RI = torch.zeros(parameter.shape)
            values_RI[:rank].uniform_(-bound, bound, generator=generator)
            found[wrapped].copy_(values_RI[local_block(parameter)])
    return found


@torch.no_grad()
def _merged(state: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return the state without adapters, in which each adapted W is replaced by W + scale * B A (arXiv:2106.09685).

    W is not modified. This is a collective: it gathers the adapters, which are small, and each rank adds the block of the
    product that belongs to its shard of W.
    """
    plain = {}
    for name, value in state.items():
        stem = name.removesuffix(".weight")
        if name.endswith((A, B)):
            continue
        if stem + A not in state:
            plain[name] = value
            continue
        adapter = (state[stem + A], state[stem + B])
        a_RI, b_OR = (part.full_tensor() if isinstance(part, DTensor) else part for part in adapter)
        rows, columns = local_block(value)
        plain[name] = torch.addmm(local_part(value), b_OR[rows], a_RI[:, columns], alpha=scale)
        if isinstance(value, DTensor):
            plain[name] = DTensor.from_local(
                plain[name], value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
            )
    return plain


def local_block(matrix: Tensor) -> tuple[slice, slice]:
    """Return the rows and columns of a matrix that this rank holds."""
    shape: tuple[int, ...] = tuple(matrix.shape)
    offset: tuple[int, ...] = (0, 0)
    if isinstance(matrix, DTensor):
        shape, offset = compute_local_shape_and_global_offset(matrix.shape, matrix.device_mesh, matrix.placements)
    return slice(offset[0], offset[0] + shape[0]), slice(offset[1], offset[1] + shape[1])


class ValueHead:
    """Replacement of `lm_head.forward` in a critic: the model returns the value of each position's target, `[B, L]`, and zeros.

    It has the interface of `ScoringHead`, whose second result is the entropies.
    """

    def __init__(self, lm_head: nn.Module) -> None:
        self._values: Callable[[Tensor], Tensor] = lm_head.forward
        lm_head.forward = self

    def scoring(
        self,
        targets_BL: Tensor,
        temperature: float,
        supports: TokenSupports | None = None,
        teacher: TeacherTokens | None = None,
    ) -> AbstractContextManager[None]:
        """Return a context without effect: values do not depend on the targets."""
        return nullcontext()

    def __call__(self, hidden_BLD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values in float32, and zeros."""
        values_BL1 = self._values(hidden_BLD)
        if isinstance(values_BL1, DTensor):
            values_BL1 = values_BL1.to_local()
        values_BL = values_BL1.float().sum(dim=-1)  # not a view, about which FSDP would warn
        return values_BL, torch.zeros_like(values_BL)


class ScoringHead:
    """Replacement of `lm_head.forward` in torchtitan's model that can return log-probabilities instead of logits.

    Inside the context `scoring`, the model returns the log-probabilities of given targets and the entropies, `[B, L]` each,
    and with a teacher the divergences from it. Inside `selecting`, it returns the logits of some tokens.
    Rows longer than a chunk are scored in chunks, and the backward pass recomputes the logits of each chunk but the last, so
    all logits never exist at a time. Because the chunks run inside one call of the module, its FSDP and TP hooks run once.
    """

    def __init__(self, lm_head: nn.Module, vocab_size: int) -> None:
        """Wrap the current `forward` of the output layer, including its tensor parallelism."""
        self._logits: Callable[[Tensor], Tensor] = lm_head.forward
        self._vocab_size = vocab_size
        self._targets_BL: Tensor | None = None
        self._supports: TokenSupports | None = None
        self._teacher: TeacherTokens | None = None
        self._selected_M: Tensor | None = None
        self._context: ContextGroup | None = None
        self._temperature = 1.0
        lm_head.forward = self

    @contextmanager
    def scoring(
        self,
        targets_BL: Tensor,
        temperature: float,
        supports: TokenSupports | None = None,
        teacher: TeacherTokens | None = None,
    ) -> Iterator[None]:
        """Make the model score targets inside the context. `supports` and `teacher` are those of the flattened targets."""
        self._targets_BL, self._temperature, self._supports, self._teacher = targets_BL, temperature, supports, teacher
        try:
            yield
        finally:
            self._targets_BL = self._supports = self._teacher = None

    @contextmanager
    def selecting(self, tokens_M: Tensor, context: ContextGroup | None = None) -> Iterator[None]:
        """Make the model return the logits of some of the flattened tokens inside the context, `[M, V]`.

        `context` has the ranks that compute the columns of the rows.
        """
        self._selected_M, self._context = tokens_M, context
        try:
            yield
        finally:
            self._selected_M = None

    def __call__(self, hidden_BLD: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the logits, `[B, L, V]`; inside `scoring`, return log-probabilities and entropies, `[B, L]` each."""
        if self._selected_M is not None:
            if self._context is None:
                selected_MD = local_part(hidden_BLD).flatten(0, 1)[self._selected_M]
            else:
                selected_MD = self._context.select(local_part(hidden_BLD), self._selected_M)
            if isinstance(hidden_BLD, DTensor):  # replicated: the hooks of the output layer have run
                selected_MD = DTensor.from_local(selected_MD, hidden_BLD.device_mesh, hidden_BLD.placements, run_check=False)
            logits = self._logits(selected_MD[None])
            return (logits.to_local() if isinstance(logits, DTensor) else logits)[0]
        if self._targets_BL is None:
            return self._logits(hidden_BLD)
        targets_BL, temperature, supports = self._targets_BL, self._temperature, self._supports
        num_rows, length = targets_BL.shape
        width = max(1, LOGITS_BYTES // (num_rows * self._vocab_size * hidden_BLD.element_size()))
        if length <= width:
            return self._score(hidden_BLD, targets_BL, temperature, supports, self._teacher)
        # The backward pass starts with the last chunk. Keeping its logits until then takes no more memory than computing them
        # again, so the chunk that may be narrower is the first.
        starts = [0, *range(length % width or width, length, width)]
        chunks = []
        for start, stop in pairwise([*starts, length]):
            part = slice(start, stop)
            inputs = (
                hidden_BLD[:, part],
                targets_BL[:, part],
                temperature,
                None if supports is None else supports.columns(num_rows, part),
                None if self._teacher is None else self._teacher.columns(num_rows, part),
            )
            if stop == length:
                chunks.append(self._score(*inputs))
            else:
                chunks.append(checkpoint(self._score, *inputs, use_reentrant=False, preserve_rng_state=False))
        return tuple(torch.cat(parts, dim=1) for parts in zip(*chunks, strict=True))

    def _score(
        self,
        hidden_BCD: Tensor,
        targets_BC: Tensor,
        temperature: float,
        supports: TokenSupports | None,
        teacher: TeacherTokens | None,
    ) -> tuple[Tensor, ...]:
        logits_BCV = self._logits(hidden_BCD)
        shard: dict[str, Any] = {"group": None}
        if isinstance(logits_BCV, DTensor):  # tensor parallelism: this rank holds some columns of the logits
            mesh, logits_BCV = logits_BCV.device_mesh, logits_BCV.to_local()
            start = -(-self._vocab_size // mesh.size()) * mesh.get_local_rank()
            shard = {"group": mesh.get_group(), "vocab_start": min(self._vocab_size, start)}
        logits_NV = logits_BCV.flatten(0, 1)
        scores: tuple[Tensor, ...] = logprobs_and_entropy(
            logits_NV, targets_BC.flatten(), temperature=temperature, supports=supports, **shard
        )
        if teacher is not None:
            scores += (divergence(logits_NV, teacher, temperature=temperature, **shard),)
        return tuple(values_N.view(targets_BC.shape) for values_N in scores)
