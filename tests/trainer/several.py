"""Functions on several adapters of a model that tests run on all ranks; see `checks`."""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.trainer import checks
from titanrl.algorithms.losses import LossMetrics
from titanrl.carriers.types import AdapterSpec
from titanrl.models.directory import open_model
from titanrl.trainer.adapters import FACTS, Adapters
from titanrl.trainer.agreement import named_tensors
from titanrl.trainer.collate import PackedRows
from titanrl.trainer.learner import Learner
from titanrl.weights.layout import local_part

Plan = dict[str, Any]
RANK = 8
SPECS = {
    "a": AdapterSpec(rank=8, alpha=16.0, seed=1),
    "b": AdapterSpec(rank=3, alpha=6.0, seed=2, train_attn=False),
}
DECAYED = replace(checks.ADAM, weight_decay=0.1)


def make(model_dir: Path, trainer: Plan, *, rank: int = RANK, alpha: float = 8.0, **options: Any) -> Adapters:
    lora = {"rank": rank, "alpha": alpha, "max_models": 2}
    learner = checks.make_learner(model_dir, **{"lora": lora, **trainer}, **options)
    return Adapters(learner, open_model(model_dir).family.lora_targets["mlp"], seed=0)


def batches_of(learner: Learner, name: str | None) -> list[PackedRows]:
    """Return two micro-batches of four rows over all ranks, other ones for each model."""
    plans = checks.sequences()[0]
    chosen = {None: plans[:8], "a": plans[4:12], "b": plans[5:13]}[name]
    return checks.microbatches(learner, checks.plan_rows(chosen, packed=False), 4 // learner.model.dp_size)


def curve(adapters: Adapters, name: str | None, num_steps: int = 2) -> Iterator[tuple[object, ...]]:
    """Train a model; yield after each of its passes and steps, with everything that it returned."""
    for _ in range(num_steps):
        for index in range(2):
            learner = adapters.use(name)
            result = learner.run(batches_of(learner, name)[index], checks.everything)
            yield result.sums, result.logprobs_BL.numpy().tobytes()
        yield (adapters.use(name).optim_step(DECAYED),)


def state(adapters: Adapters, name: str | None) -> dict[str, bytes]:
    """Return the bytes of this rank's parameters, optimizer state and moving averages of a model."""
    tensors = named_tensors(adapters.use(name))
    return {
        key: local_part(value.detach()).flatten().contiguous().view(torch.uint8).numpy().tobytes() for key, value in tensors
    }


def interleaved(model_dir: Path, trainer: Plan, ema_decay: float | None = None) -> bool:
    """Check that three models whose passes and steps alternate train bit for bit as each of them alone."""
    alone, states = {}, {}
    for name in (None, *SPECS):
        adapters = make(model_dir, trainer, ema_decay=ema_decay)
        if name is not None:
            adapters.add(name, SPECS[name])
        alone[name], states[name] = list(curve(adapters, name)), state(adapters, name)
    adapters = make(model_dir, trainer, ema_decay=ema_decay)
    for name, spec in SPECS.items():
        adapters.add(name, spec)
    curves: dict[str | None, list[tuple[object, ...]]] = {name: [] for name in alone}
    running = {name: curve(adapters, name) for name in alone}
    order = np.random.default_rng(0).permutation([name for name in alone for _ in range(6)])
    for name in order:
        curves[name].append(next(running[name]))
    assert curves == alone
    assert all(len(found) == 6 for found in curves.values())
    for name, expected in states.items():
        assert state(adapters, name) == expected, name
    assert adapters.own.weights() is not None
    return True


def merged_weights(model_dir: Path, trainer: Plan) -> bool:
    """Check that the merged weights of the session's own policy do not depend on which adapter is live."""
    adapters = make(model_dir, trainer)
    list(curve(adapters, None, 1))
    before = {name: checks.whole(value) for name, value in adapters.own.weights().items()}
    adapters.add("a", SPECS["a"])
    list(curve(adapters, "a", 1))
    assert adapters.live == "a"
    after = {name: checks.whole(value) for name, value in adapters.own.weights().items()}
    assert all(np.array_equal(before[name], after[name]) for name in before)
    return True


def padded(model_dir: Path, trainer: Plan) -> tuple[float, float]:
    """Train an adapter of rank 3 that is padded to 8, and one of a model with rank 3.

    Return the largest differences of their first gradients, and of their log-probabilities after two steps.
    """
    spec = AdapterSpec(rank=3, alpha=6.0, seed=5)
    narrow, wide = make(model_dir, trainer, rank=3, alpha=6.0, seed=5), make(model_dir, trainer)
    wide.add("b", spec)
    found = []
    for adapters, name in ((narrow, None), (wide, "b")):
        learner = adapters.use(name)
        first, *_ = batches_of(learner, "b")
        learner.run(first, checks.everything)
        gradients = checks.gradients(learner)
        learner.zero_grad()
        for _ in range(2):
            for batch in batches_of(learner, "b"):
                learner.run(batch, checks.everything)
            learner.optim_step(DECAYED)
        found.append((gradients, learner.logprobs(first).numpy(), checks.parameters(learner)))
    (small, narrow_BL, trained), (large, wide_BL, others) = found
    gap = 0.0
    for name, value in small.items():
        one = large[name] if value.shape == large[name].shape else trimmed(name, large[name], 3)
        gap = max(gap, float(np.abs(one - value).max()))
    for name, value in others.items():
        if ".lora_" in name:
            rest = value[3:] if ".lora_a." in name else value[:, 3:]
            assert rest.size
            assert not rest.any(), name
            assert trimmed(name, value, 3).any(), name
            assert trained[name].shape == trimmed(name, value, 3).shape
    return gap, float(np.abs(narrow_BL - wide_BL).max())


def trimmed(name: str, value: np.ndarray, rank: int) -> np.ndarray:
    return value[:rank] if ".lora_a." in name else value[:, :rank]


def untrained_layers(model_dir: Path, trainer: Plan) -> bool:
    """Check that layers that a model does not train keep an adapter of zeros, and that their gradients are zero."""
    adapters = make(model_dir, trainer)
    adapters.add("b", SPECS["b"])
    list(curve(adapters, "b"))
    learner = adapters.use("b")
    for name, value in checks.parameters(learner).items():
        if ".lora_" in name:
            assert value.any() == (".feed_forward." in name), name
    assert learner.version == 2
    return True


def saved(model_dir: Path, trainer: Plan, folder: Path, rank: int = RANK) -> tuple[list[object], checks.Arrays]:
    """Save a model after two steps, and take another one; return what it returned, and the adapter at the end."""
    adapters = make(model_dir, trainer, rank=rank, ema_decay=0.5)
    adapters.add("b", SPECS["b"])
    list(curve(adapters, "b", 2))
    list(curve(adapters, None, 1))
    assert adapters.save("b", folder)
    names = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    assert all(".lora_" in name for name in names if name != FACTS)  # the base is not saved
    rest: list[object] = list(curve(adapters, "b", 1))
    return rest, arrays(adapters, "b")


def loaded(model_dir: Path, trainer: Plan, folder: Path, rank: int = RANK) -> tuple[list[object], checks.Arrays, bool]:
    """Load a saved model beside another one, and take a step; return as `saved` does.

    The last value is whether another model kept its state.
    """
    adapters = make(model_dir, trainer, rank=rank, ema_decay=0.5)
    adapters.add("other", SPECS["b"])
    list(curve(adapters, None, 1))
    own = state(adapters, None)
    adapters.load("other", folder, with_optimizer=True)
    assert adapters.use("other").version == 2
    adapters.add("b", SPECS["b"])
    adapters.load("b", folder, with_optimizer=True)
    rest: list[object] = list(curve(adapters, "b", 1))
    return rest, arrays(adapters, "b"), state(adapters, None) == own


def arrays(adapters: Adapters, name: str) -> checks.Arrays:
    """Return the A and B of a model with the specification of `b`, without padding."""
    parameters, rank = checks.parameters(adapters.use(name)), SPECS["b"].rank
    return {key: trimmed(key, value, rank) for key, value in parameters.items() if ".lora_" in key}


def loaded_without_optimizer(model_dir: Path, trainer: Plan, folder: Path) -> bool:
    """Check that the optimizer and the moving average start again, and that wrong states change nothing."""
    adapters = make(model_dir, trainer, ema_decay=0.5)
    adapters.add("b", SPECS["b"])
    adapters.load("b", folder, with_optimizer=False)
    learner = adapters.use("b")
    assert learner.version == 2
    assert not any(optimizer.state for optimizer in learner.optimizers)
    assert learner.average is not None
    for name, parameter in checks.parameters(learner).items():
        if ".lora_" in name:
            assert np.array_equal(checks.whole(learner.average.tensors[name]), parameter)
    adapters.add("a", SPECS["a"])
    before = state(adapters, "a")
    with pytest.raises(ValueError, match=r"an adapter with rank=3, alpha=6, train_attn=False, train_mlp=True \(got .*these"):
        adapters.load("a", folder, with_optimizer=False)
    assert {key: value for key, value in state(adapters, "a").items() if "(" not in key} == {
        key: value for key, value in before.items() if "(" not in key
    }
    plain = make(model_dir, trainer)
    plain.add("b", SPECS["b"])
    plain.save("b", folder.with_name("plain"))
    with pytest.raises(ValueError, match=r"load_state: average\..* is not in the state"):
        adapters.load("b", folder.with_name("plain"), with_optimizer=True)
    return True


def failed_pass(model_dir: Path, trainer: Plan) -> bool:
    """Check that a failed pass, and a loss that is not finite, concern only their model."""

    def broken(rows: PackedRows, logprobs_N: torch.Tensor, entropy_N: torch.Tensor) -> tuple[torch.Tensor, LossMetrics]:
        raise RuntimeError("the loss itself is broken")

    def infinite(rows: PackedRows, logprobs_N: torch.Tensor, entropy_N: torch.Tensor) -> tuple[torch.Tensor, LossMetrics]:
        loss, metrics = checks.everything(rows, logprobs_N, entropy_N)
        return loss * float("nan"), metrics

    alone = make(model_dir, trainer)
    alone.add("b", SPECS["b"])
    expected = list(curve(alone, "b", 3))
    adapters = make(model_dir, trainer)
    for name, spec in SPECS.items():
        adapters.add(name, spec)
    running = curve(adapters, "b", 3)
    found = []
    for failing in (broken, infinite, broken):
        found += [next(running), next(running)]
        learner = adapters.use("a")
        if failing is broken:
            with pytest.raises(RuntimeError, match="the loss itself is broken"):
                learner.run(batches_of(learner, "a")[0], failing)
        else:
            learner.run(batches_of(learner, "a")[0], failing)
            assert learner.optim_step(DECAYED).skipped
        found.append(next(running))
    assert found == expected
    adapters.use("a").zero_grad()
    alone.add("a", SPECS["a"])
    assert list(curve(adapters, "a")) == list(curve(alone, "a"))
    return True


def refused(model_dir: Path) -> list[str]:
    """Return the messages of models that cannot be created, and check that freeing makes room and releases memory."""
    adapters, messages = make(model_dir, {}), list[str]()

    def refuse(add: Any, *args: Any) -> None:
        with pytest.raises(ValueError, match="got") as error:
            add(*args)
        messages.append(str(error.value))

    refuse(adapters.use, "a")
    adapters.add("a", SPECS["a"])
    refuse(adapters.add, "a", SPECS["a"])
    refuse(adapters.add, "wide", AdapterSpec(rank=9, alpha=1.0))
    adapters.add("b", SPECS["b"])
    refuse(adapters.add, "c", SPECS["a"])
    list(curve(adapters, "b", 1))
    adapters.use("b").keep_weights()
    held = adapters._held["b"]
    gone = [weakref.ref(value) for value in (held.learner, *held.weights)]
    gone += [weakref.ref(value) for state in held.learner.optimizers.optimizers[0].state.values() for value in state.values()]
    del held
    adapters.free("b")
    gc.collect()
    assert len(gone) > 20
    assert all(reference() is None for reference in gone)
    assert adapters.live is None
    refuse(adapters.use, "b")
    refuse(adapters.free, "b")
    adapters.add("c", SPECS["a"])
    attention = make(model_dir, {"lora": {"rank": 4, "targets": ["attention"]}})
    refuse(attention.add, "a", AdapterSpec(rank=4, alpha=1.0))
    refuse(make(model_dir, {"lora": None}).add, "a", SPECS["a"])
    return messages


def snapshots(model_dir: Path, trainer: Plan) -> bool:
    """Check that each model has versions of its own."""
    adapters = make(model_dir, trainer)
    for name, spec in SPECS.items():
        adapters.add(name, spec)
    scores: dict[tuple[str, int], bytes] = {}
    for name in SPECS:
        learner = adapters.use(name)
        learner.keep_weights()
        scores[name, 0] = learner.logprobs(batches_of(learner, "a")[0]).numpy().tobytes()
        list(curve(adapters, name, 1))
        scores[name, 1] = learner.logprobs(batches_of(learner, "a")[0]).numpy().tobytes()
    for name in SPECS:
        learner = adapters.use(name)
        assert learner.snapshots.held == (0,)
        with learner.weights_at(0):
            assert learner.logprobs(batches_of(learner, "a")[0]).numpy().tobytes() == scores[name, 0]
        assert learner.logprobs(batches_of(learner, "a")[0]).numpy().tobytes() == scores[name, 1]
    assert len(set(scores.values())) == 3  # at version 0, both equal the base
    return True
