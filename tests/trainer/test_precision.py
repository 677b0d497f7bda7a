"""Float8 with cached scales, torchtitan's deterministic and debug flags, and odd lengths under sequence parallelism."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.trainer import precision
from tests.trainer.ranks import World

Worlds = Callable[[int], World]
FSDP, TP, BOTH = {"dp_shard": 2}, {"tp": 2}, {"dp_shard": 2, "tp": 2}
LAYOUTS = {"one rank": (1, {}), "fsdp": (2, FSDP), "tp": (2, TP), "fsdp x tp": (4, BOTH)}


@pytest.mark.parametrize("layout", ["one rank", "fsdp x tp"])
def test_cached_float8_scales_give_gradient_of_torchao_bitwise(layout: str, world: Worlds, tiny_model: Path) -> None:
    size, plan = LAYOUTS[layout]
    assert all(world(size).run(precision.cached_scales_equal_torchao, tiny_model, plan))


@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_float8_scales_follow_weights_in_use(layout: str, world: Worlds, tiny_model: Path, tmp_path: Path) -> None:
    size, plan = LAYOUTS[layout]
    assert all(world(size).run(precision.scales_follow_the_weights, tiny_model, plan, tmp_path))


@pytest.mark.parametrize("length", [23, 31])
def test_odd_lengths_under_sequence_parallelism_keep_gradient(length: int, world: Worlds, tiny_model: Path) -> None:
    expected = world(1).run(precision.gradient_of_odd_rows, tiny_model, {}, length)[0]
    found = world(2).run(precision.gradient_of_odd_rows, tiny_model, TP, length)[0]
    assert max(float(np.abs(gradient).max()) for gradient in expected.values()) > 1e-2
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[name], gradient, atol=1e-6, rtol=0, err_msg=name)


@pytest.mark.parametrize("plan", [{}, FSDP], ids=["one rank", "fsdp"])
def test_debug_flags_reach_torch_and_keep_gradient(plan: dict, world: Worlds, tiny_model: Path) -> None:
    ranks = world(2 if plan else 1)
    plain, off = ranks.run(precision.torch_flags, tiny_model, {"parallelism": plan})[0]
    assert not any(off.values())
    sections = {
        "error": ({"deterministic": "error"}, {"deterministic": True, "warn_only": False, "anomaly": False}),
        "warn": ({"deterministic": "warn"}, {"deterministic": True, "warn_only": True, "anomaly": False}),
        "anomaly": ({"detect_anomaly": True}, {"deterministic": False, "warn_only": False, "anomaly": True}),
    }
    for name, (section, flags) in sections.items():
        for found, got in ranks.run(precision.torch_flags, tiny_model, {"parallelism": plan, **section}):
            assert got == flags, name
            assert all(np.array_equal(found[key], plain[key]) for key in plain), name
