"""vLLM's kernels against torchtitan's own modules."""

import pytest
import torch
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import CosSinRoPE

from titanrl.config.device import DEVICES
from titanrl.generator.titan import half_width, rms_norm, rotate
from titanrl.models.preparation import prepare_torchtitan

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(scope="module", autouse=True)
def _torchtitan() -> None:
    prepare_torchtitan(DEVICES["cpu"])


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 9, 32), (1, 9, 4, 32)])
def test_norm_kernel_equals_torchtitan(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    norm = RMSNorm.Config(normalized_shape=32, eps=1e-6).build().to(dtype)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2  # bfloat16 has 8 bits
    with torch.no_grad():
        norm.weight.copy_(1 + 0.1 * random(32, dtype=dtype))
        for values in (random(*shape, dtype=dtype), random(1, 32, 9, dtype=dtype).transpose(1, 2)):
            torch.testing.assert_close(rms_norm(norm, values), norm(values), atol=tolerance, rtol=tolerance)


@DTYPES
def test_rotary_kernel_equals_torchtitan(dtype: torch.dtype) -> None:
    rope = CosSinRoPE.Config(dim=32, max_seq_len=64, theta=10000.0).build()
    positions = torch.tensor([[0, 5, 6, 63, 1]])
    query, key = random(1, 5, 4, 32, dtype=dtype), random(1, 5, 2, 32, dtype=dtype)
    expected = rope(query, key, positions)
    torch.testing.assert_close(rotate(half_width(rope.cache), query.clone(), key.clone(), positions), expected)
