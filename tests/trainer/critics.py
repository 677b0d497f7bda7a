"""Functions on critics that tests run on all ranks; see `checks`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.trainer import checks
from titanrl.carriers.tables import Row
from titanrl.carriers.types import GroupHandle
from titanrl.config.algorithm import AlgorithmConfig
from titanrl.config.device import DEVICES
from titanrl.config.sections import TrainerConfig
from titanrl.models.directory import open_model
from titanrl.trainer.agreement import check_replicas
from titanrl.trainer.checkpoint import Checkpoints, load_model
from titanrl.trainer.collate import PackedRows
from titanrl.trainer.learner import Critic, Learner

Plan = dict[str, Any]
ALGORITHM = AlgorithmConfig.model_validate({"advantage": "gae", "critic": {"learning_rate": 1e-2, "value_clip": 0.5}})


def make(model_dir: Path, trainer: Plan) -> Critic:
    config = TrainerConfig.model_validate({"row_tokens": checks.ROW_TOKENS, **trainer})
    return Critic(load_model(open_model(model_dir), config, DEVICES["cpu"], is_critic=True), ALGORITHM)


def sequences() -> list[Any]:
    """Return the random rollouts of `checks` with an advantage, a value near 0 and a return for each token."""
    random = np.random.default_rng(2)
    plans, payload = checks.sequences()
    found = []
    for plan in plans:
        count = int(np.count_nonzero(payload[plan.handle][0].mask))
        spans = tuple((0.0, 1, float(random.normal(0, 0.3)), float(random.normal(1, 1))) for _ in range(count))
        found.append(replace(plan, spans=spans))
    return found


def batches(learner: Learner, rows_per_microbatch: int, *, packed: bool) -> list[tuple[PackedRows, list[Row]]]:
    """Return this rank's micro-batches, each with the plan of its rows."""
    rows = checks.plan_rows(sequences(), packed=packed)
    own = checks.balance([1.0] * len(rows), learner.model.dp_size)[learner.model.dp_rank]
    plans = [[rows[i] for i in own[start : start + rows_per_microbatch]] for start in range(0, len(rows), rows_per_microbatch)]
    return list(zip(checks.microbatches(learner, rows, rows_per_microbatch), plans, strict=False))


def backward(critic: Critic, rows_per_microbatch: int = 4, *, packed: bool = True) -> float:
    """Accumulate the gradient of all rows; return the loss over all ranks."""
    loss = torch.zeros((), dtype=torch.float64)
    for rows, _ in batches(critic.learner, rows_per_microbatch, packed=packed):
        loss += critic.forward_backward(rows).sums.get("loss/critic", 0.0)
    dist.all_reduce(loss)
    return float(loss)


def train(critic: Critic, rows_per_microbatch: int = 4, *, packed: bool = True) -> float:
    """Take a step; return the loss over all ranks."""
    loss = backward(critic, rows_per_microbatch, packed=packed)
    metrics = critic.optim_step(checks.ADAM, completes=True)
    assert metrics["critic/grad_norm"] > 0.0
    assert not metrics["critic/skipped"]
    return loss


def learn(
    model_dir: Path, trainer: Plan, rows_per_microbatch: int, packed: bool
) -> tuple[list[float], checks.Arrays, dict[GroupHandle, tuple[list[float], float]]] | None:
    """Take a step and compute the next gradient, the first that reaches the trunk.

    Returns:
        On rank 0, the losses before and after the step, the gradient, and the values of all sequences.
    """
    critic = make(model_dir, trainer)
    losses = [step(critic, rows_per_microbatch, packed=packed) for step in (train, backward)]
    gradient = checks.gradients(critic.learner)
    own: dict[GroupHandle, tuple[list[float], float]] = {}
    for rows, plan in batches(critic.learner, rows_per_microbatch, packed=packed):
        result = critic.values(rows, plan)
        values = iter(result.values.tolist())
        for sequence, last in zip((sequence for row in plan for sequence in row), result.last.tolist(), strict=True):
            own[sequence.handle] = [next(values) for _ in sequence.spans], last
        assert next(values, None) is None
    check_replicas(critic.learner)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    everything = {handle: value for each in found for handle, value in each.items()}
    return (losses, gradient, everything) if dist.get_rank() == 0 else None


def first_loss(model_dir: Path) -> tuple[float, float]:
    """Return the loss of the first step, whose values are all 0, and the same by hand in float64."""
    expected = 0.0
    for sequence in sequences():
        for _, _, old, target in sequence.spans:
            clipped = float(np.clip(0.0, np.float32(old) - 0.5, np.float32(old) + 0.5))
            expected += sequence.weight * 0.5 * max(target**2, (clipped - target) ** 2)
    return train(make(model_dir, {})), expected


def checkpointed(critic: Critic, model_dir: Path, trainer: Plan, folder: Path) -> tuple[Learner, Checkpoints]:
    policy = checks.make_learner(model_dir, **trainer)
    return policy, Checkpoints(policy, folder, 2, critic=critic)


def save_and_continue(model_dir: Path, trainer: Plan, folder: Path) -> list[float]:
    """Save a checkpoint after a step; return the losses of two more steps."""
    critic = make(model_dir, trainer)
    train(critic)
    _, checkpoints = checkpointed(critic, model_dir, trainer, folder)
    checkpoints.save(1)
    checkpoints.finish(1)
    losses = [train(critic) for _ in range(2)]
    checkpoints.close()
    return losses


def load_and_continue(model_dir: Path, trainer: Plan, folder: Path) -> tuple[list[float], int]:
    """Load the checkpoint into a new critic; return the losses of two more steps, and its version."""
    critic = make(model_dir, trainer)
    _, checkpoints = checkpointed(critic, model_dir, trainer, folder)
    checkpoints.load(1)
    version = critic.learner.version
    losses = [train(critic) for _ in range(2)]
    checkpoints.close()
    return losses, version


def load_without(model_dir: Path, folder: Path) -> str:
    """Save a checkpoint without a critic; return the error of a run that has one."""
    plain = Checkpoints(checks.make_learner(model_dir), folder, 2)
    plain.save(1)
    plain.finish(1)
    plain.close()
    _, checkpoints = checkpointed(make(model_dir, {}), model_dir, {}, folder)
    try:
        checkpoints.load(1)
    except ValueError as error:
        return str(error)
    finally:
        checkpoints.close()
    return ""


def start_over(model_dir: Path, trainer: Plan) -> bool:
    """Check that a critic becomes a copy of the trained policy, with a zero head, and takes the same steps as a new one."""
    policy, critic = checks.make_learner(model_dir, **trainer), make(model_dir, trainer)
    first = train(critic)
    for rows, _ in batches(policy, 4, packed=True):
        policy.run(rows, checks.everything)
    policy.optim_step(checks.ADAM)
    critic.start_over(policy)
    own, others = checks.parameters(critic.learner), checks.parameters(policy)
    assert not own["lm_head.weight"].any()
    assert all((own[name] == others[name]).all() for name in own if name in others and name != "lm_head.weight")
    assert critic.learner.version == 0
    return train(critic) == first  # all values are 0 again
