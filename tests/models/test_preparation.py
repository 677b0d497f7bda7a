"""torchtitan uses the prepared device, and modules are built without random initialization."""

import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

from tests.models.tiny import write_model
from tests.trainer.ranks import World
from titanrl.config.device import DEVICES
from titanrl.models.directory import open_model
from titanrl.models.preparation import WithoutDraws

Worlds = Callable[[int], World]


def test_torchtitan_version_matches_our_patches() -> None:
    assert version("torchtitan") == "0.3.0"


class Part(nn.Module):
    """Module whose `reset_parameters` sets random, constant and computed values."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = nn.Parameter(torch.empty(3, 4))
        self.uniform = nn.Parameter(torch.empty(3, 4))
        self.kaiming = nn.Parameter(torch.empty(3, 4))
        self.truncated = nn.Parameter(torch.empty(3, 4))
        self.gain = nn.Parameter(torch.empty(4))
        self.noise: torch.Tensor
        self.register_buffer("noise", torch.empty(4))
        for name, parameter in self.named_parameters():
            nn.init.constant_(parameter, 7.0 if name != "gain" else 1.0)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.drawn, std=0.02)
        with torch.no_grad():
            self.uniform.uniform_(-1e-3, 1e-3)
        nn.init.kaiming_uniform_(self.kaiming)
        nn.init.trunc_normal_(self.truncated)
        nn.init.ones_(self.gain)
        self.noise.normal_()


def test_parameter_draws_become_zeros_and_keep_random_state() -> None:
    part = Part()
    before = torch.get_rng_state()
    with WithoutDraws():
        nn.init.normal_(part.drawn)
        nn.init.kaiming_uniform_(part.kaiming)
        nn.init.trunc_normal_(part.truncated)
        with torch.no_grad():
            part.uniform.uniform_(-1.0, 1.0, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.get_rng_state(), before)
    for parameter in (part.drawn, part.uniform, part.kaiming, part.truncated):
        assert torch.equal(parameter, torch.zeros(3, 4))


def test_constants_and_buffers_are_initialized_as_usual() -> None:
    part, plain = Part(), Part()
    torch.manual_seed(1)
    noise = torch.randn(4)
    torch.manual_seed(1)
    with WithoutDraws():
        part.reset_parameters()
    assert torch.equal(part.gain, torch.ones(4))
    assert torch.equal(part.noise, noise)
    plain.reset_parameters()
    assert plain.drawn.std() > 0
    assert len(plain.uniform.unique()) == 12


def build_a_decoder(model: Path) -> set[str]:
    """Build the configuration of a decoder in a process that `tests.trainer.preload` has prepared; return what it imported."""
    import torchtitan.distributed.parallel_dims as parallel_dims
    from torchtitan.config import ParallelismConfig
    from torchtitan.tools import utils

    assert parallel_dims.device_type == "cpu"
    assert utils.device_module is torch.cpu  # read once per process
    config = open_model(model, None).spec(DEVICES["cpu"], 8).model
    config.update_from_config(config=SimpleNamespace(parallelism=ParallelismConfig()))
    assert config.layers[0].attention.sharding_config is not None, "the plan was not applied"
    imported = {"datasets", "pandas", "pyarrow", "torchdata", "torchtitan.trainer"} & sys.modules.keys()
    import torchtitan.trainer

    assert torchtitan.trainer.Trainer.Config.__dataclass_fields__, "a placeholder remains"
    return imported


def test_model_is_built_for_the_prepared_device_without_torchtitans_trainer(world: Worlds, tmp_path: Path) -> None:
    """The trainer would import `datasets`, pandas and pyarrow, only to check the class of a configuration."""
    assert world(1).run(build_a_decoder, write_model("qwen3", tmp_path)) == [set()]
