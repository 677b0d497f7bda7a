"""Functions for float8, determinism and odd lengths that tests run on all ranks; see `checks`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.trainer import checks, variants
from titanrl.trainer.collate import collate
from titanrl.trainer.learner import Learner

Plan = dict[str, Any]


def gradient(learner: Learner) -> checks.Arrays:
    for batch in variants.batches_of(learner):
        learner.run(batch, checks.everything)
    found = checks.gradients(learner)
    learner.zero_grad()
    return found


def projections(learner: Learner) -> list[Any]:
    from titanrl.trainer.float8 import TensorwiseLinear

    found = [part for part in learner.model.module.modules() if isinstance(part, TensorwiseLinear)]
    assert len(found) == 2 * 7
    return found


def scales(learner: Learner) -> list[float]:
    return [float(projection.weight_scale) for projection in projections(learner)]


def expected_scales(learner: Learner) -> list[float]:
    """Return 448 (the maximum of e4m3) divided by the largest absolute value of each weight. This is a collective."""
    learner.model.reshard()
    return [448.0 / float(np.abs(checks.whole(projection.weight)).max()) for projection in projections(learner)]


def cached_scales_equal_torchao(model_dir: Path, plan: Plan) -> bool:
    """Check that the gradient equals bit for bit that of torchao's linear layer, which computes scales in every pass."""
    from torchtitan.components.quantization.float8 import Float8Linear

    learner = checks.make_learner(model_dir, parallelism=plan, float8="tensorwise")
    kept = gradient(learner)
    for projection in projections(learner):
        projection.__class__ = Float8Linear
    computed = gradient(learner)
    return all(np.array_equal(kept[name], value) for name, value in computed.items())


def scales_follow_the_weights(model_dir: Path, plan: Plan, folder: Path) -> bool:
    """Check the scales after a step, inside and after a snapshot, and after a state was loaded."""
    from titanrl.trainer.checkpoint import Checkpoints

    learner = checks.make_learner(model_dir, parallelism=plan, float8="tensorwise")
    first = scales(learner)
    np.testing.assert_allclose(first, expected_scales(learner), rtol=1e-6)
    learner.keep_weights()
    checkpoints = Checkpoints(learner, folder / "checkpoints", 2)
    checkpoints.save_state(folder / "state")
    variants.train(learner)
    second = scales(learner)
    assert second != first
    np.testing.assert_allclose(second, expected_scales(learner), rtol=1e-6)
    with learner.weights_at(0):
        assert scales(learner) == first
    assert scales(learner) == second
    checkpoints.load_state(folder / "state", with_optimizer=True)
    assert scales(learner) == first
    return True


def gradient_of_odd_rows(model_dir: Path, plan: Plan, length: int) -> checks.Arrays | None:
    """Return the gradient of rows of an odd length, each with one sequence of an odd number of tokens, on rank 0."""
    plans, payload = checks.sequences()
    rows = [(sequence,) for sequence in plans if sequence.length % 2 == 1 and sequence.length <= length]
    assert len(rows) > 2
    learner = checks.shared_learner(model_dir, tuple(plan.items()))
    learner.run(collate(rows, payload, length), checks.everything)
    found = checks.gradients(learner)
    learner.zero_grad()
    return found if dist.get_rank() == 0 else None


def torch_flags(model_dir: Path, trainer: Plan) -> tuple[checks.Arrays, dict[str, bool]]:
    """Return a gradient computed with the flags of the `trainer` section, and torch's flags; then disable the flags."""
    try:
        found = gradient(checks.make_learner(model_dir, **trainer))
        flags = {
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
            "anomaly": torch.is_anomaly_enabled(),
        }
        zeros, indices = torch.zeros(3), torch.tensor([1, 1])
        if trainer.get("deterministic") == "error":
            with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
                zeros.put_(indices, torch.ones(2))
        else:
            zeros.put_(indices, torch.ones(2))
        return found, flags
    finally:
        torch.use_deterministic_algorithms(False)
        torch.autograd.set_detect_anomaly(False)
