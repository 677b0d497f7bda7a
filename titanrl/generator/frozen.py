"""Load the weights of a model directory into vLLM's own model, from the files that the trainer would read.

vLLM's loader merges all safetensors files of a directory without an index, and prefers `consolidated*.safetensors`.
"""

from collections.abc import Iterator
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from titanrl.models.directory import ModelDirectory
from titanrl.models.vllm_limits import LOAD_FORMAT


def register_loader(source: ModelDirectory) -> None:
    """Register a loader of the directory's weights with vLLM, as `load_format` `LOAD_FORMAT`."""

    class Loader(BaseModelLoader):
        def download_model(self, model_config: ModelConfig) -> None:
            """Do nothing, because the directory is on this machine."""

        def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
            """Load all weights.

            Raises:
                ValueError: The weight files cannot be read, or do not fit the model.
            """
            native: Any = model
            loaded: set[str] = native.load_weights(weights_of(source))
            if left := sorted({name for name, _ in model.named_parameters()} - loaded):
                raise ValueError(
                    f"model.path: {len(left)} parameters of vLLM's model have no weights, such as {left[0]} "
                    f"(got {source.path}). Give a directory whose config.json and weights belong together."
                )

    register_model_loader(LOAD_FORMAT)(Loader)


def weights_of(source: ModelDirectory) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model directory that the model uses, by name."""
    found = source.weight_files()
    wanted = found.tensors.keys() if source.tensors is None else source.tensors.keys()
    for file in found.files:
        with safe_open(file, framework="pt") as tensors:
            yield from ((name, tensors.get_tensor(name)) for name in sorted(wanted & set(tensors.keys())))
