"""Functions on the moving average of the weights that tests run on all ranks; see `checks`."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from tests.trainer import checks, variants
from titanrl.algorithms.losses import LossMetrics
from titanrl.base.errors import PhaseError
from titanrl.carriers.types import AdamParams
from titanrl.config.algorithm import AVERAGE, AlgorithmConfig, KLConfig
from titanrl.trainer.agreement import check_replicas
from titanrl.trainer.checkpoint import Checkpoints
from titanrl.trainer.collate import PackedRows
from titanrl.trainer.learner import Learner

Trainer = dict[str, Any]
DECAY = 0.75
NO_CHANGE = AdamParams(learning_rate=0.0, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, max_grad_norm=1.0)


def make(model_dir: Path, trainer: Trainer) -> Learner:
    return checks.make_learner(model_dir, ema_decay=DECAY, **trainer)


def averages(learner: Learner) -> checks.Arrays:
    """Return the full averages. This is a collective."""
    assert learner.average is not None
    return {name: checks.whole(value) for name, value in learner.average.tensors.items()}


def bytes_of(learner: Learner) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Return the bytes of this rank's weights and averages."""
    assert learner.average is not None
    parts = {name: entry.data.numpy().tobytes() for name, entry in learner.average.entries().items()}
    return checks.local_bytes(learner), parts


def follow(model_dir: Path, trainer: Trainer) -> tuple[checks.Arrays, checks.Arrays]:
    """Take two steps; return the full averages, and averages computed from the full weights after each step."""
    learner = make(model_dir, trainer)
    weights = checks.parameters(learner)
    expected = {name: weights[name] for name in averages(learner)}
    for _ in range(2):
        variants.train(learner)
        weights = checks.parameters(learner)
        expected = {name: DECAY * value + (1 - DECAY) * weights[name] for name, value in expected.items()}
    check_replicas(learner)
    return averages(learner), expected


def swap(model_dir: Path, trainer: Trainer) -> bool:
    """Check that a pass can use the average, and that the live weights are restored bit for bit."""
    learner = make(model_dir, trainer)
    at_start = variants.scores(learner)
    with learner.weights_at(AVERAGE):  # the average of one version is this version
        assert all(map(np.array_equal, variants.scores(learner), at_start))
    variants.train(learner, 2)
    live, parts = bytes_of(learner)
    before = variants.scores(learner)
    with learner.weights_at(AVERAGE):
        assert learner.version_in_use == AVERAGE
        inside = checks.local_bytes(learner)
        assert {name: inside[name] for name in parts} == parts
        assert not any(map(np.array_equal, variants.scores(learner), before))
        with pytest.raises(PhaseError, match="replaces the live weights"):
            learner.optim_step(checks.ADAM)
    assert bytes_of(learner) == (live, parts)
    assert all(map(np.array_equal, variants.scores(learner), before))
    return True


def not_finite(rows: PackedRows, logprobs_N: Tensor, entropy_N: Tensor) -> tuple[Tensor, LossMetrics]:
    """Compute a loss that is not finite."""
    loss, metrics = checks.everything(rows, logprobs_N, entropy_N)
    return loss + float("nan"), metrics


def steps_without_update(model_dir: Path) -> bool:
    """Check that a skipped step and unchanged weights keep the average, and that `start_over` resets it."""
    learner = make(model_dir, {})
    start = bytes_of(learner)
    variants.train(learner)
    live, moved = bytes_of(learner)
    assert moved != start[1]
    learner.run(variants.batches_of(learner)[0], not_finite)
    assert learner.optim_step(checks.ADAM).skipped
    assert bytes_of(learner) == (live, moved)
    learner.start_over()
    assert bytes_of(learner) == (live, live)
    for batch in variants.batches_of(learner):
        learner.run(batch, checks.everything)
    learner.optim_step(NO_CHANGE)
    assert bytes_of(learner) == (live, live)
    return True


def without_average(model_dir: Path) -> bool:
    """Check the error of a learner without moving average."""
    learner = checks.make_learner(model_dir)
    with (
        pytest.raises(ValueError, match=r"no moving average \(got ema\)\. Set algorithm\.ema_decay"),
        learner.weights_at(AVERAGE),
    ):
        pass
    return learner.average is None


def save_and_continue(model_dir: Path, trainer: Trainer, folder: Path) -> Any:
    """Save a checkpoint and a state after two steps, then take another one; return bytes of weights and averages."""
    learner = make(model_dir, trainer)
    checkpoints = Checkpoints(learner, folder, 2, in_background=True)
    variants.train(learner, 2)
    checkpoints.save(2)
    checkpoints.save_state(folder / "state")
    variants.train(learner)
    checkpoints.close()
    return bytes_of(learner)


def load_and_continue(model_dir: Path, trainer: Trainer, folder: Path) -> Any:
    """Load the checkpoint and take a step; return bytes of weights and averages, and the full averages."""
    learner = make(model_dir, trainer)
    checkpoints = Checkpoints(learner, folder, 2)
    checkpoints.load(2)
    variants.train(learner)
    after = bytes_of(learner)
    checkpoints.load_state(folder / "state", with_optimizer=True)
    variants.train(learner)
    assert bytes_of(learner) == after
    checkpoints.load_state(folder / "state", with_optimizer=False)
    live, parts = bytes_of(learner)
    assert parts == live
    checkpoints.load(2)
    variants.train(learner)
    checkpoints.close()
    return bytes_of(learner), averages(learner)


def loads_without_average(model_dir: Path, folder: Path) -> list[str]:
    """Load a checkpoint and a state without averages, and a checkpoint with unneeded averages; return the errors."""
    plain = checks.make_learner(model_dir)
    checkpoints = Checkpoints(plain, folder / "plain", 2)
    variants.train(plain)
    checkpoints.save(1)
    checkpoints.save_state(folder / "state")
    checkpoints.close()
    learner = make(model_dir, {})
    checkpoints = Checkpoints(learner, folder / "plain", 2)
    untouched, errors = bytes_of(learner), []
    for load in (
        partial(checkpoints.load, 1),
        partial(checkpoints.load_state, folder / "state", with_optimizer=True),
    ):
        with pytest.raises(ValueError, match=r"^algorithm\.ema_decay: ") as error:
            load()
        errors.append(str(error.value))
        assert bytes_of(learner) == untouched
    checkpoints.save(2)
    checkpoints.close()
    reader = Checkpoints(plain, folder / "plain", 2)
    reader.load(2)
    assert checks.local_bytes(plain) == untouched[0]
    reader.close()
    return errors


def kl_to_average(model_dir: Path, plan: Trainer) -> list[tuple[float, float]]:
    """Return the KL terms to the average and to the start in each of three steps, on rank 0."""
    learner = make(model_dir, {"parallelism": plan})
    learner = Learner(learner.model, AlgorithmConfig(ema_decay=DECAY, kl=KLConfig(coef=0.5, reference="ema")), temperature=1.0)
    learner.keep_weights()
    terms = []
    for _ in range(3):
        batches, both = variants.batches_of(learner), []
        for version in (AVERAGE, 0):
            references = []
            for batch in batches:
                with learner.weights_at(version):
                    references.append(learner.logprobs(batch))
            sums = [
                learner.forward_backward(replace(batch, reference_BL=reference_BL)).sums.sums.get("loss/kl", 0.0)
                for batch, reference_BL in zip(batches, references, strict=True)
            ]
            both.append(sum(sums))
            if version == AVERAGE:
                learner.zero_grad()
        learner.optim_step(checks.ADAM)
        terms.append((both[0], both[1]))
    return terms
