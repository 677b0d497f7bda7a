"""A mixture of experts on every layout: gradient, clipping, loading, export and checkpoints equal those of one rank."""

import logging
import logging.handlers
import queue
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from tests.models.tiny import write_model
from tests.trainer import checks, variants
from tests.trainer.ranks import World
from tests.trainer.test_gradients import OBJECTIVES
from titanrl.config.algorithm import AlgorithmConfig
from titanrl.models.decoder import PARTS, biased_layers
from titanrl.trainer.checkpoint import Checkpoints, export_hf
from titanrl.trainer.learner import bias_change, load_metrics
from titanrl.weights.layout import local_part

Worlds = Callable[[int], World]
TOLERANCE = 1e-6
LAYOUTS = {
    "fsdp 2": (2, {"dp_shard": 2}),
    "fsdp 2, ep 2": (2, {"dp_shard": 2, "ep": 2}),
    "cp 2": (2, {"cp": 2}),
    "cp 2, ep 2": (2, {"cp": 2, "ep": 2}),
    "tp 2": (2, {"tp": 2}),
    "tp 2, ep 2": (2, {"tp": 2, "ep": 2}),
    "fsdp 4, ep 2": (4, {"dp_shard": 4, "ep": 2}),
    "fsdp 4, ep 4": (4, {"dp_shard": 4, "ep": 4}),
    "cp 2 x tp 2, ep 2": (4, {"cp": 2, "tp": 2, "ep": 2}),
    "hsdp 2 x 2, ep 2": (4, {"dp_replicate": 2, "dp_shard": 2, "ep": 2}),
    "fsdp 2 x tp 2": (4, {"dp_shard": 2, "tp": 2}),
    "fsdp 2 x tp 2, ep 2": (4, {"dp_shard": 2, "tp": 2, "ep": 2}),
    "fsdp 2 x tp 2, ep 4": (4, {"dp_shard": 2, "tp": 2, "ep": 4}),
}
CASES = [pytest.param(name, marks=pytest.mark.slow if size > 2 else ()) for name, (size, _) in LAYOUTS.items()]
# The biases follow the loads of experts, which are compared on every layout.
BIASED = [
    pytest.param(name, marks=pytest.mark.slow if size > 2 else ()) for name, (size, plan) in LAYOUTS.items() if "ep" in plan
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with small weights: larger ones amplify the rounding of partial sums."""
    return write_model("qwen3_moe", tmp_path_factory.mktemp("experts") / "model", std=0.02)


@pytest.fixture(scope="module")
def gradient_and_loads(world: Worlds, model: Path) -> tuple[checks.Arrays, float, dict[str, float]]:
    """Gradient, loss and loads of experts on one rank."""
    gradient, loss = world(1).run(checks.gradient_of, model, (), 4, True)[0]
    (_, loads), *_ = world(1).run(variants.norm_and_loads, model, {}, 4)
    return gradient, loss, loads


@pytest.mark.parametrize("layout", CASES)
def test_gradient_its_norm_and_loads_of_experts_equal_those_of_one_rank(
    layout: str, world: Worlds, model: Path, gradient_and_loads: tuple[checks.Arrays, float, dict[str, float]]
) -> None:
    size, plan = LAYOUTS[layout]
    expected, loss, loads = gradient_and_loads
    assert 1 < loads["experts/max_load"] <= loads["experts/worst_load"] < 8
    assert 0 < loads["experts/entropy"] < 1
    for part in PARTS:
        assert any(name.endswith(part) for name in expected)
    largest = max(float(np.abs(gradient).max()) for gradient in expected.values())
    found, same_loss = world(size).run(checks.gradient_of, model, tuple(plan.items()), 2, True)[0]
    assert same_loss == pytest.approx(loss, abs=1e-6)
    assert found.keys() == expected.keys()
    assert max(float(np.abs(found[name] - expected[name]).max()) for name in expected) <= TOLERANCE * largest
    norm = np.sqrt(sum(float(np.square(gradient, dtype=np.float64).sum()) for gradient in expected.values()))
    for same_norm, same_loads in world(size).run(variants.norm_and_loads, model, plan, 2):
        assert same_norm == pytest.approx(norm, rel=1e-6)
        assert same_loads == pytest.approx(loads)


@pytest.mark.parametrize("objective", ["sequence weights", pytest.param("gspo", marks=pytest.mark.slow)])
def test_terms_over_sequences_equal_those_of_one_rank(objective: str, world: Worlds, model: Path) -> None:
    algorithm = AlgorithmConfig.model_validate(OBJECTIVES[objective])
    expected, metrics, _ = world(1).run(checks.objective_of, model, (), algorithm)[0]
    largest = max(float(np.abs(part).max()) for part in expected.values())
    assert largest > 1e-4
    for layout in ("fsdp 2, ep 2", "cp 2, ep 2", "tp 2, ep 2"):
        size, plan = LAYOUTS[layout]
        found, same, _ = world(size).run(checks.objective_of, model, tuple(plan.items()), algorithm)[0]
        worst = max(float(np.abs(found[name] - part).max()) for name, part in expected.items()) / largest
        print(f"{objective}, {layout}: worst gradient {worst:.1e}")
        assert worst <= TOLERANCE, layout
        assert same == pytest.approx(metrics, rel=1e-5, abs=1e-6), layout


@pytest.mark.parametrize("layout", CASES)
def test_export_is_bitwise_the_loaded_model(layout: str, world: Worlds, model: Path, tmp_path: Path) -> None:
    size, plan = LAYOUTS[layout]
    world(size).run(variants.export, model, {"parallelism": plan}, tmp_path / "out", 0)
    expected, found = load_file(model / "model.safetensors"), load_file(next((tmp_path / "out").glob("*.safetensors")))
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("layout", ["fsdp 2, ep 2", "tp 2, ep 2"])
def test_trained_experts_are_exported_and_loaded_bitwise_equal(layout: str, world: Worlds, model: Path, tmp_path: Path) -> None:
    size, plan = LAYOUTS[layout]
    written = world(size).run(variants.export, model, {"parallelism": plan}, tmp_path / "out", 1)
    assert world(size).run(variants.loaded_bytes, tmp_path / "out", {"parallelism": plan}) == [own for _, own in written]
    before, after = load_file(model / "model.safetensors"), load_file(next((tmp_path / "out").glob("*.safetensors")))
    assert all((before[name] != after[name]).any() for name in before)


def test_checkpoint_continues_on_another_layout(world: Worlds, model: Path, tmp_path: Path) -> None:
    expected = world(2).run(variants.save_and_continue, model, {"dp_shard": 2, "ep": 2}, tmp_path / "steps", False)
    same = world(2).run(variants.load_and_continue, model, {"dp_shard": 2, "ep": 2}, tmp_path / "steps", 3)
    assert [own for _, own, _ in same] == expected
    version, _, found = world(2).run(variants.load_and_continue, model, {"tp": 2, "ep": 2}, tmp_path / "steps", 3)[0]
    assert version == 3
    for name, value in found.items():
        np.testing.assert_allclose(value, same[0][2][name], atol=2e-4)


@pytest.mark.parametrize(("kind", "plan"), [("full", {}), ("selective", {"dp_shard": 2, "ep": 2})], ids=["one rank", "ep"])
def test_activation_checkpointing_does_not_change_gradient(plan: dict, kind: str, world: Worlds, model: Path) -> None:
    plain, loss = world(1).run(variants.gradient_and_loss, model, {})[0]
    section = {"parallelism": plan, "activation_checkpointing": kind}
    found, same_loss = world(2 if plan else 1).run(variants.gradient_and_loss, model, section)[0]
    assert same_loss == pytest.approx(loss, abs=1e-6)
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, plain[name], atol=1e-6)


def test_adapters_of_the_attention_leave_experts_unchanged(world: Worlds, model: Path) -> None:
    section = {"lora": {"rank": 4, "alpha": 8.0, "targets": ["attention"]}, "parallelism": {"dp_shard": 2, "ep": 2}}
    found = world(2).run(variants.train_adapters, model, section)[0]
    experts = [name for name in found["before"] if name.endswith(tuple(PARTS))]
    assert len(experts) == 6
    assert all(np.array_equal(found["before"][name], found["merged"][name]) for name in experts)


RATE = 0.0625


def balanced(model_dir: Path, plan: dict, rows_per_microbatch: int, folder: Path) -> tuple[np.ndarray, np.ndarray, float]:
    """Return the counts of two steps, on one rank, the biases after each, and their metric; check snapshot and checkpoint."""
    learner = checks.make_learner(model_dir, parallelism=plan, expert_bias_rate=RATE)
    learner.check_snapshots(checks.ROW_TOKENS)
    layers = biased_layers(learner.model.module)

    def biases() -> np.ndarray:
        return np.stack([checks.whole(layer.expert_bias_E) for layer in layers])

    counts, found = [], []
    learner.keep_weights()
    at_0 = variants.scores(learner)
    for _ in range(2):
        counts.append(np.zeros((len(layers), layers[0].router.num_experts), np.int64))
        for batch in variants.batches_of(learner, rows_per_microbatch):
            learner.run(batch, checks.everything)
            for count_E, layer in zip(counts[-1], [] if plan else layers, strict=not plan):
                count_E += np.bincount(layer.router.chosen_BLK[batch.mask_BL].flatten(), minlength=len(count_E))
        learner.logprobs(batch)  # not part of the step
        metrics = learner.optim_step(checks.ADAM).experts
        found.append(biases())
    assert learner.optim_step(checks.ADAM).is_empty
    np.testing.assert_array_equal(biases(), found[-1])
    live = variants.scores(learner)
    with learner.weights_at(0):
        assert not biases().any()
        assert all(np.array_equal(one, other) for one, other in zip(variants.scores(learner), at_0, strict=True))
    np.testing.assert_array_equal(biases(), found[-1])
    assert all(np.array_equal(one, other) for one, other in zip(variants.scores(learner), live, strict=True))
    assert not np.array_equal(at_0[0], live[0])
    Checkpoints(learner, folder, 2).save(1)
    loaded = checks.make_learner(model_dir, parallelism=plan, expert_bias_rate=RATE)
    Checkpoints(loaded, folder, 2).load(1)
    assert all(np.array_equal(one, two) for one, two in zip(variants.scores(loaded), live, strict=True))
    loaded.start_over()
    assert not any(layer.expert_bias_E.any() for layer in biased_layers(loaded.model.module))
    return np.stack(counts), np.stack(found), metrics["experts/max_bias"]


@pytest.fixture(scope="module")
def on_one_rank(world: Worlds, model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[np.ndarray, np.ndarray, float]:
    return world(1).run(balanced, model, {}, 4, tmp_path_factory.mktemp("bias") / "steps")[0]


def test_bias_moves_against_the_load_of_loss_tokens(on_one_rank: tuple[np.ndarray, np.ndarray, float]) -> None:
    counts, biases, largest = on_one_rank
    expected = np.zeros(counts.shape[1:])
    for counts_YE, bias_YE in zip(counts, biases, strict=True):
        signs_YE = np.sign(counts_YE.mean(-1, keepdims=True) - counts_YE)
        expected += RATE * (signs_YE - signs_YE.mean(-1, keepdims=True))
        np.testing.assert_allclose(bias_YE, expected, atol=1e-7)
    assert counts.any(-1).all()
    assert largest == np.abs(biases[-1]).max() > RATE


@pytest.mark.parametrize("layout", BIASED)
def test_biases_are_those_of_one_rank(
    layout: str, world: Worlds, model: Path, tmp_path: Path, on_one_rank: tuple[np.ndarray, np.ndarray, float]
) -> None:
    size, plan = LAYOUTS[layout]
    for _, biases, largest in world(size).run(balanced, model, plan, 2, tmp_path / "steps"):
        np.testing.assert_array_equal(biases, on_one_rank[1])
        assert largest == on_one_rank[2]


def test_bias_change_by_hand() -> None:
    # Means 5, 2 and 2. Signs of mean - count: 0 0 0 0; -1 0 0 1; -1 1 1 1, whose mean 0.5 is subtracted.
    counts = torch.tensor([[5, 5, 5, 5], [4, 2, 2, 0], [5, 1, 1, 1]])
    found = bias_change(counts, 0.5)
    assert found.dtype == torch.float64
    assert found.tolist() == [[0, 0, 0, 0], [-0.5, 0, 0, 0.5], [-0.75, 0.25, 0.25, 0.25]]
    assert not bias_change(torch.zeros(2, 4, dtype=torch.int64), 0.5).any()


def test_export_says_that_it_has_no_bias(world: Worlds, model: Path, tmp_path: Path) -> None:
    plan = {"parallelism": {"dp_shard": 2, "ep": 2}, "expert_bias_rate": RATE}
    warnings, *_ = world(2).run(warnings_of_export, model, plan, tmp_path / "out")
    assert warnings == [
        f"export: the bias of the experts in 2 layers, 16 numbers up to {RATE:.3g}, is not part of the exported model: its "
        "routers choose without it (trainer.expert_bias_rate)"
    ]


def warnings_of_export(model_dir: Path, trainer: dict, target: Path) -> list[str]:
    """Set the bias of one expert, export the model and return the warnings."""
    learner = checks.make_learner(model_dir, **trainer)
    local_part(biased_layers(learner.model.module)[1].expert_bias_E)[3] = -RATE
    found = logging.handlers.QueueHandler(queue.SimpleQueue())
    found.setLevel(logging.WARNING)
    logging.getLogger("titanrl.trainer.checkpoint").addHandler(found)
    export_hf(learner.model, model_dir, target, "float32")
    return [found.queue.get().getMessage() for _ in range(found.queue.qsize())]


def test_load_metrics_by_hand() -> None:
    # Layer 0 is even. In layer 1, one of four experts has half of the tokens, two a quarter each: entropy 1.5 of 2 bits.
    found = load_metrics(torch.tensor([[5, 5, 5, 5], [4, 2, 2, 0]]))
    assert found == pytest.approx({"experts/max_load": 1.5, "experts/worst_load": 2.0, "experts/entropy": 0.875})
    assert load_metrics(torch.zeros(2, 4)) == {}
