"""Functions on snapshots of the weights that tests run on all ranks; see `checks`."""

from pathlib import Path

import pytest
import torch

from tests.trainer import checks, variants
from titanrl.base.errors import GatheredParameterError, PhaseError, SnapshotMismatchError
from titanrl.trainer.learner import Learner
from titanrl.trainer.snapshots import changing_tensors, check_recoverable, layout_of, write

Plan = dict[str, object]


def make(model_dir: Path, plan: Plan) -> tuple[Learner, list[checks.PackedRows]]:
    learner = checks.make_learner(model_dir, parallelism=plan)
    return learner, variants.batches_of(learner)


def scores(learner: Learner, batches: list[checks.PackedRows]) -> list[bytes]:
    return [learner.logprobs(batch).numpy().tobytes() for batch in batches]


def swap_and_restore(model_dir: Path, plan: Plan) -> bool:
    """Check that an old version computes its old log-probabilities, and that training continues as if never interrupted."""
    learner, batches = make(model_dir, plan)
    learner.check_snapshots(checks.ROW_TOKENS)
    at_0 = scores(learner, batches)
    assert learner.keep_weights() == 0
    variants.train(learner)
    live, at_1 = checks.local_bytes(learner), scores(learner, batches)
    assert at_1 != at_0
    with learner.weights_at(0):
        assert learner.version_in_use == 0
        assert scores(learner, batches) == at_0
    assert learner.version_in_use == 1
    assert checks.local_bytes(learner) == live
    assert scores(learner, batches) == at_1
    variants.train(learner)
    if "fsdp_reshard_after_forward" not in plan:
        undisturbed, batches = make(model_dir, plan)
        variants.train(undisturbed, 2)
        assert checks.local_bytes(learner) == checks.local_bytes(undisturbed)
    return True


def refused_calls(model_dir: Path, plan: Plan) -> bool:
    """Check that every use that would mix versions is refused and changes nothing."""
    learner, batches = make(model_dir, plan)
    learner.keep_weights()
    variants.train(learner)
    live = checks.local_bytes(learner)

    def untouched() -> None:
        assert checks.local_bytes(learner) == live
        assert learner.version_in_use == 1

    with pytest.raises(ValueError, match=r"not kept \(got 7; kept: \[0\]\)"), learner.weights_at(7):
        pass
    untouched()
    with learner.weights_at(0):
        for refused in (
            lambda: learner.weights_at(0).__enter__(),
            lambda: learner.optim_step(checks.ADAM),
            lambda: learner.run(batches[0], checks.everything),
            learner.weights,
            learner.keep_weights,
            learner.start_over,
        ):
            with pytest.raises(PhaseError, match="version 0 replaces the live weights"):
                refused()
    untouched()
    with pytest.raises(RuntimeError, match="the caller's"), learner.weights_at(0):
        raise RuntimeError("the caller's own error")
    untouched()
    learner.run(batches[0], checks.everything)
    with pytest.raises(PhaseError, match="gradients of 1 backward passes are pending"), learner.weights_at(0):
        pass
    learner.zero_grad()
    untouched()
    with learner.weights_at(1):  # the live version: nothing needs to be swapped
        assert scores(learner, batches[:1])
    return True


def mismatched_snapshots(model_dir: Path, plan: Plan) -> bool:
    """Check that a snapshot with another dtype or other names is refused by tensor name before any write."""
    learner, _ = make(model_dir, plan)
    learner.keep_weights()
    entries = dict(learner.snapshots._held[0])
    live = checks.local_bytes(learner)
    entry = entries["norm.weight"]
    other = layout_of(torch.zeros(entry.layout.shape, dtype=torch.float16))
    wrong = {
        "type": {**entries, "norm.weight": type(entry)(other, entry.data)},
        "missing": {name: value for name, value in entries.items() if name != "norm.weight"},
        "extra": {**entries, "norm.weight2": entry},
    }
    for name, value in wrong.items():
        with pytest.raises(SnapshotMismatchError, match=r"norm\.weight"):
            write(learner.model.module, {key: type(part)(part.layout, part.data + 1) for key, part in value.items()})
        assert checks.local_bytes(learner) == live, name
    return True


def gathered_parameter(model_dir: Path) -> bool:
    """Check the error of a snapshot while parameters are gathered."""
    learner, _ = make(model_dir, {"dp_shard": 2})
    learner.model.module.norm.unshard()
    with pytest.raises(GatheredParameterError, match=r"norm\.weight is gathered, with shape \(64,\)"):
        changing_tensors(learner.model.module)
    learner.model.reshard()
    assert "norm.weight" in changing_tensors(learner.model.module)
    return True


def nothing_gathered(model_dir: Path, plan: Plan) -> bool:
    """Check that every pass leaves all parameters sharded, so that the next one does not depend on when a push reshards."""
    learner, batches = make(model_dir, plan)
    rows = checks.plan_rows(checks.sequences()[0][:3], packed=False)
    for run in (
        lambda: learner.logprobs(batches[0]),
        lambda: learner.run(batches[0], checks.everything, backward=False),
        lambda: learner.run(batches[0], checks.everything),
        lambda: learner.logits(batches[0], torch.tensor([1, 2])),
        lambda: learner.measure_correction(batches[0], rows[:1]),
    ):
        run()
        changing_tensors(learner.model.module)  # refuses gathered parameters
    return True


def torch_without_reshard(model_dir: Path) -> bool:
    """Check that `check_recoverable` names a parameter that has new memory after a forward pass."""
    learner, _ = make(model_dir, {"dp_shard": 2})
    norm = learner.model.module.norm

    def forward() -> None:
        norm.weight = torch.nn.Parameter(norm.weight.detach().clone())

    with pytest.raises(RuntimeError, match=rf"norm\.weight .*torch {torch.__version__.split('+')[0]}"):
        check_recoverable(learner.model.module, forward)
    return True


def interval_logprobs(model_dir: Path, plan: Plan) -> bool:
    """Check that the log-probabilities of the interval's start do not change over its three steps."""
    learner, _ = make(model_dir, plan)
    plans, payload = checks.sequences()
    rows = [checks.collate([row], payload, checks.ROW_TOKENS) for row in checks.plan_rows(plans[:3], packed=False)]
    before = scores(learner, rows)
    start = learner.keep_weights()
    for k in range(3):
        with learner.weights_at(start):
            assert learner.logprobs(rows[k]).numpy().tobytes() == before[k]
        variants.train(learner)
    return True
