"""Loss and gradient do not depend on micro-batches, packing, order or layout."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer import checks
from tests.trainer.ranks import World
from titanrl.config.algorithm import AlgorithmConfig
from titanrl.config.sections import RecipeConfig
from titanrl.models.recipe import create_model
from titanrl.trainer.passes import RowSizes

Worlds = Callable[[int], World]
LAYOUTS = {
    "one rank": (1, ()),
    "fsdp 2": (2, (("dp_shard", 2),)),
    "tp 2": (2, (("tp", 2),)),
    "fsdp 4": (4, (("dp_shard", 4),)),
    "fsdp 2 x tp 2": (4, (("dp_shard", 2), ("tp", 2))),
    "hsdp 2 x 2": (4, (("dp_replicate", 2), ("dp_shard", 2))),
    "cp 2": (2, (("cp", 2),)),
    "cp 4": (4, (("cp", 4),)),
    "fsdp 2 x cp 2": (4, (("dp_shard", 2), ("cp", 2))),
    "cp 2 x tp 2": (4, (("cp", 2), ("tp", 2))),
}
GRADIENT_LAYOUTS = ("one rank", "tp 2", "fsdp 4", "fsdp 2 x tp 2", "hsdp 2 x 2", "cp 4")
TOLERANCE = 1e-6


def gradient(world: Worlds, model: Path, layout: str, *cut: object) -> tuple[checks.Arrays, float]:
    size, plan = LAYOUTS[layout]
    return world(size).run(checks.gradient_of, model, plan, *cut)[0]


def largest_difference(one: checks.Arrays, other: checks.Arrays) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


@pytest.fixture(scope="module")
def reference(world: Worlds, tiny_model: Path) -> tuple[checks.Arrays, float]:
    return gradient(world, tiny_model, "one rank", 100, False)


@pytest.mark.parametrize("layout", GRADIENT_LAYOUTS)
def test_gradient_does_not_depend_on_layout_or_micro_batches(
    layout: str, world: Worlds, tiny_model: Path, reference: tuple[checks.Arrays, float]
) -> None:
    size = max(float(np.abs(part).max()) for part in reference[0].values())
    assert size > 1e-2, "a gradient this small would be equal to anything"
    for rows_per_microbatch, packed in ((1, True), (8, True), (4, False)) if layout == "one rank" else ((1, True), (4, False)):
        found, loss = gradient(world, tiny_model, layout, rows_per_microbatch, packed)
        assert largest_difference(found, reference[0]) <= TOLERANCE, (rows_per_microbatch, packed)
        assert loss == pytest.approx(reference[1], abs=TOLERANCE)


def test_order_of_sequences_does_not_change_gradient(
    world: Worlds, tiny_model: Path, reference: tuple[checks.Arrays, float]
) -> None:
    order = np.random.default_rng(1).permutation(13).tolist()
    for layout in ("one rank", "fsdp 4"):
        found, _ = gradient(world, tiny_model, layout, 2, True, order)
        assert largest_difference(found, reference[0]) <= TOLERANCE


def test_tp_4_has_gradient_of_one_rank(world: Worlds, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = tmp_path_factory.mktemp("models") / "four_heads"
    recipe = RecipeConfig(hidden_size=64, num_layers=1, num_heads=8, num_kv_heads=4, head_dim=32, intermediate_size=96)
    create_model(model, recipe, seed=3)
    alone, loss = world(1).run(checks.gradient_of, model, (), 2, True)[0]
    found, same_loss = world(4).run(checks.gradient_of, model, (("tp", 4),), 2, True)[0]
    assert largest_difference(found, alone) <= TOLERANCE
    assert same_loss == pytest.approx(loss, abs=TOLERANCE)


@pytest.mark.parametrize("layout", ["fsdp 2", "tp 2"])
def test_gradient_with_examples_is_the_sum_of_both_gradients(layout: str, world: Worlds, tiny_model: Path) -> None:
    size, plan = LAYOUTS[layout]
    rollouts, examples, both = world(size).run(checks.summed_gradients, tiny_model, plan, 0.5)[0]
    for name, values in both.items():
        largest = max(float(np.abs(part[name]).max()) for part in (rollouts, examples))
        assert np.abs(values - (rollouts[name] + examples[name])).max() <= TOLERANCE * largest, name
    assert min(max(float(np.abs(part).max()) for part in parts.values()) for parts in (rollouts, examples)) > 1e-3


OBJECTIVES: dict[str, dict[str, Any]] = {
    "gspo": {"loss": "gspo", "clip_low": 0.2, "clip_high": 0.3, "reduction": "sequence_mean"},
    "sequence weights": {
        "loss": "reinforce",
        "reduction": "prompt_mean",
        "correction": {"weight": "sequence", "max_prox_over_behavior": 1.5, "reject_geometric_prox_over_behavior": [0.8, 1.2]},
        "kl": {"coef": 0.2, "place": "reward", "estimator": "k1"},
        "entropy_coef": 0.1,
    },
    "veto": {
        "loss": "ppo",
        "reduction": "token_mean",
        "kl": {"coef": 0.1},
        "correction": {"veto_prox_over_behavior": [0.6, 1.3]},
    },
}


@pytest.mark.parametrize(
    ("objective", "other"), [("gspo", "fsdp 2 x cp 2"), ("sequence weights", "cp 2 x tp 2"), ("veto", "fsdp 2 x cp 2")]
)
def test_context_parallel_ranks_compute_the_objective_of_one_rank(
    objective: str, other: str, world: Worlds, tiny_model: Path
) -> None:
    """Terms over whole sequences include the tokens of all ranks, and each metric and gradient counts every token once."""
    algorithm = AlgorithmConfig.model_validate(OBJECTIVES[objective])
    expected, metrics, scores = world(1).run(checks.objective_of, tiny_model, (), algorithm)[0]
    largest = max(float(np.abs(part).max()) for part in expected.values())
    assert largest > 1e-4
    for layout in ("cp 2", other):
        size, plan = LAYOUTS[layout]
        found, same, same_scores = world(size).run(checks.objective_of, tiny_model, plan, algorithm)[0]
        worst = largest_difference(found, expected) / largest
        print(f"{objective}, {layout}: worst gradient {worst:.1e}, loss {same['loss/total']:.6f}")
        assert worst <= (2e-6 if "tp" in layout else 1e-6), layout
        assert same == pytest.approx(metrics, rel=1e-5, abs=1e-6), layout
        if "fsdp" not in layout:  # whose ranks have other rows
            for one, expected_one in zip(same_scores, scores, strict=True):
                np.testing.assert_allclose(one, expected_one, atol=2e-6, rtol=0)


def orthogonal(gradient: np.ndarray) -> np.ndarray:
    """Compute five Newton-Schulz steps of Muon in fp64."""
    a, b, c = 3.4445, -4.775, 2.0315
    x = gradient.astype(np.float64)
    x = x.T if x.shape[0] > x.shape[1] else x
    x = x / np.linalg.norm(x)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if gradient.shape[0] > gradient.shape[1] else x


def test_muon_orthogonalizes_updates_of_layers_and_leaves_the_rest_to_adamw(world: Worlds, tiny_model: Path) -> None:
    rate = checks.ADAM.learning_rate
    gradient, before, after = world(1).run(checks.muon_steps, tiny_model, ())[0]
    hidden = [name for name, values in before.items() if values.ndim == 2 and "layers." in name]
    assert len(hidden) >= 7
    for name, values in before.items():
        update = (values * (1 - rate * 0.1) - after[name]) / rate
        if name in hidden:
            expected = 0.2 * np.sqrt(max(values.shape)) * orthogonal(gradient[name])
            # Rounding to bfloat16 matters where a singular value is small.
            assert np.linalg.norm(update - expected) < 0.1 * np.linalg.norm(expected), name
        else:
            expected = gradient[name] / (np.abs(gradient[name]) + 1e-8)
            np.testing.assert_allclose(update, expected, atol=1e-3, err_msg=name)


def test_steps_of_muon_do_not_depend_on_layout(world: Worlds, tiny_model: Path) -> None:
    _, _, reference = world(1).run(checks.muon_steps, tiny_model, ())[0]
    size, plan = LAYOUTS["fsdp 2 x tp 2"]
    _, before, found = world(size).run(checks.muon_steps, tiny_model, plan)[0]
    for name, values in reference.items():
        change = values - before[name.removeprefix("second/")]
        assert np.linalg.norm(found[name] - values) < 0.1 * np.linalg.norm(change), name


@pytest.mark.parametrize("layout", ["one rank", "tp 2", "cp 2"])
def test_shared_prompts_give_same_gradient_in_fewer_rows(layout: str, world: Worlds, tiny_model: Path) -> None:
    size, plan = LAYOUTS[layout]
    apart, loss, num_rows = world(size).run(partial(checks.gradient_of_groups, share_prompts=False), tiny_model, plan)[0]
    shared, same_loss, fewer_rows = world(size).run(partial(checks.gradient_of_groups, share_prompts=True), tiny_model, plan)[0]
    assert fewer_rows < num_rows
    assert max(float(np.abs(part).max()) for part in apart.values()) > 1e-2
    assert largest_difference(shared, apart) <= TOLERANCE
    assert same_loss == pytest.approx(loss, abs=TOLERANCE)


def distilled(
    world: Worlds,
    model: Path,
    layout: str,
    loss: str,
    rows_per_microbatch: int,
    at_version: int | None = None,
    num_top: int = 0,
) -> tuple[checks.Arrays, float]:
    size, plan = LAYOUTS[layout]
    sizes = RowSizes(row_tokens=checks.ROW_TOKENS, rows_per_microbatch=rows_per_microbatch, multiple=8)
    return world(size).run(checks.distilled, model, plan, loss, sizes, at_version, num_top)[0]


@pytest.mark.parametrize("loss", ["forward_kl", "reverse_kl", "jsd"])
def test_divergence_equals_fp64_and_does_not_depend_on_layout(loss: str, world: Worlds, tiny_model: Path) -> None:
    reference, value = distilled(world, tiny_model, "one rank", loss, 100)
    assert max(float(np.abs(part).max()) for part in reference.values()) > 1e-4
    (by_hand,) = world(1).run(checks.divergence_by_hand, tiny_model, loss)
    assert value == pytest.approx(by_hand, rel=1e-5)
    # The losses differ in their terms over the vocabulary, which tp splits.
    layouts = [("one rank", 1), ("tp 2", 2), ("cp 2", 2)]
    for layout, rows_per_microbatch in layouts + [("fsdp 2 x tp 2", 1)] * (loss == "jsd"):
        found, same = distilled(world, tiny_model, layout, loss, rows_per_microbatch)
        assert largest_difference(found, reference) <= TOLERANCE, layout
        assert same == pytest.approx(value, abs=TOLERANCE)


def test_divergence_over_known_tokens_equals_fp64_and_does_not_depend_on_layout(world: Worlds, tiny_model: Path) -> None:
    reference, value = distilled(world, tiny_model, "one rank", "forward_kl", 100, None, 5)
    (by_hand,) = world(1).run(checks.known_by_hand, tiny_model, 5)
    assert value == pytest.approx(by_hand, rel=1e-5)
    for layout, rows_per_microbatch in (("one rank", 1), ("cp 2", 1), ("cp 2", 2), ("fsdp 2 x cp 2", 1), ("fsdp 2 x tp 2", 1)):
        found, same = distilled(world, tiny_model, layout, "forward_kl", rows_per_microbatch, None, 5)
        assert largest_difference(found, reference) <= TOLERANCE, layout
        assert same == pytest.approx(value, abs=TOLERANCE)


def test_teacher_with_kept_weights_replaces_them_between_micro_batches(world: Worlds, tiny_model: Path) -> None:
    current, _ = distilled(world, tiny_model, "one rank", "jsd", 100)
    reference, value = distilled(world, tiny_model, "one rank", "jsd", 100, 0)
    assert largest_difference(reference, current) > 1e-4
    for layout in ("one rank", "fsdp 2", "cp 2"):
        found, same = distilled(world, tiny_model, layout, "jsd", 1, 0)
        assert largest_difference(found, reference) <= TOLERANCE, layout
        assert same == pytest.approx(value, abs=TOLERANCE)
