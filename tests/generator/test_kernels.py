"""vLLM's kernels against torchtitan's own modules."""

import pytest
import torch
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import CosSinRoPE

from titanrl.device import DEVICES
from titanrl.generator.kernels import half_width, rms_norm, rotate
from titanrl.models.titan import prepare_torchtitan


@pytest.fixture(scope="module", autouse=True)
def _torchtitan() -> None:
    prepare_torchtitan(DEVICES["cpu"])


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("shape", [(1, 9, 32), (1, 9, 4, 32)])
def test_the_norm_is_torchtitans(shape: tuple[int, ...]) -> None:
    norm = RMSNorm.Config(normalized_shape=32, eps=1e-6).build()
    with torch.no_grad():
        norm.weight.copy_(1 + 0.1 * random(32))
        torch.testing.assert_close(rms_norm(norm, random(*shape)), norm(random(*shape)), atol=1e-6, rtol=1e-6)
        of_a_view = random(1, 32, 9).transpose(1, 2)
        torch.testing.assert_close(rms_norm(norm, of_a_view), norm(of_a_view), atol=1e-6, rtol=1e-6)


def test_the_rotation_is_torchtitans() -> None:
    rope = CosSinRoPE.Config(dim=32, max_seq_len=64, theta=10000.0).build()
    positions = torch.tensor([[0, 5, 6, 63, 1]])
    query, key = random(1, 5, 4, 32), random(1, 5, 2, 32)
    expected = rope(query, key, positions)
    torch.testing.assert_close(rotate(half_width(rope.cache), query.clone(), key.clone(), positions), expected)
