"""Functions that tests run on all ranks, where one rank diverges from the others; see `checks`."""

import functools
import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import Store, TCPStore

from tests.trainer import checks, variants
from titanrl.algorithms.losses import LossMetrics
from titanrl.base.errors import DriftError, RankError
from titanrl.config.device import DEVICES
from titanrl.models.directory import open_model
from titanrl.trainer.agreement import Agreement, agreement_of, check_replicas, named_tensors
from titanrl.trainer.checkpoint import Checkpoints
from titanrl.trainer.collate import PackedRows
from titanrl.trainer.learner import Learner
from titanrl.weights.layout import local_part

Plan = dict[str, Any]
ODD = 2
"""Rank that diverges, in a world of four."""


@functools.cache
def connections() -> tuple[Store, Store]:
    """Connect to the store twice. torch looks up the name of each address, which takes 5 s where the name server is slow."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    one, other = (TCPStore(address, port, is_master=False, wait_for_workers=False) for _ in range(2))
    return one, other


def new_agreement(name: str) -> Agreement:
    """Return an agreement of this rank that can be used together with others."""
    return Agreement(dist.get_rank(), dist.get_world_size(), iter(connections()).__next__, wait_s=30.0, name=name)


def run_pass(agreement: Agreement, learner: Learner, batch: PackedRows, objective: Any = checks.everything) -> None:
    """Run one micro-batch as the trainer's actor does."""
    with agreement.phase("forward_backward") as agree:
        agree(lambda: {"micro-batches": learner.num_pending + 1, "steps taken": learner.version})
        learner.run(batch, objective)


def take_step(agreement: Agreement, learner: Learner) -> None:
    """Take an optimizer step as the trainer's actor does."""
    with agreement.phase("optim_step") as agree:
        agree(lambda: {"micro-batches": learner.num_pending, "steps taken": learner.version})
        learner.optim_step(checks.ADAM)


def one_pass_fewer(model_dir: Path, plan: Plan) -> tuple[int, str, float]:
    """Take a step, then one with a micro-batch fewer on one rank; return phases, error and the seconds until the error."""
    learner = checks.make_learner(model_dir, parallelism=plan)
    agreement = new_agreement("fewer")
    batches = variants.batches_of(learner, 1)[:2] * 2
    for batch in batches:
        run_pass(agreement, learner, batch)
    take_step(agreement, learner)
    started = time.perf_counter()
    try:
        for batch in batches[: 3 if dist.get_rank() == ODD else 4]:
            run_pass(agreement, learner, batch)
        take_step(agreement, learner)
    except RankError as error:
        return agreement.num_phases, str(error), time.perf_counter() - started
    finally:
        agreement.close()
    raise AssertionError("no rank noticed")


def phases_of_replayed_steps(model_dir: Path, plan: Plan, folder: Path) -> list[int]:
    """Take two steps, load the checkpoint from before, and repeat the steps; return the number of phases of each step."""
    learner = checks.make_learner(model_dir, parallelism=plan)
    agreement, checkpoints = new_agreement("replayed"), Checkpoints(learner, folder, 2)
    checkpoints.save(1)
    numbers, weights = [], []
    for _ in range(2):
        for _ in range(2):
            before = agreement.num_phases
            for batch in variants.batches_of(learner):
                run_pass(agreement, learner, batch)
            take_step(agreement, learner)
            numbers.append(agreement.num_phases - before)
            check_replicas(learner)
        weights.append(checks.local_bytes(learner))
        checkpoints.load(1)
        check_replicas(learner)
    assert weights[0] == weights[1]
    checkpoints.close()
    agreement.close()
    return numbers


def failing_pass(model_dir: Path, plan: Plan) -> tuple[str, str, float]:
    """Raise on the last rank after its forward pass, while the others run backward; return type, message and seconds."""
    learner = checks.make_learner(model_dir, parallelism=plan)
    agreement = agreement_of(30.0, [dist.group.WORLD, *learner.model.groups])
    batch = variants.batches_of(learner)[0]
    run_pass(agreement, learner, batch)

    def broken(rows: PackedRows, logprobs_N: torch.Tensor, entropy_N: torch.Tensor) -> tuple[torch.Tensor, LossMetrics]:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise MemoryError("no memory for this rank")
        return checks.everything(rows, logprobs_N, entropy_N)

    started = time.perf_counter()
    try:
        run_pass(agreement, learner, batch, broken)
    except (RankError, MemoryError) as error:
        return type(error).__name__, str(error), time.perf_counter() - started
    raise AssertionError("no rank noticed")


def drift(model_dir: Path, trainer: Plan, name: str) -> tuple[int, str]:
    """Train, compare the replicas, change one value on one rank and compare again; return number of tensors and error."""
    learner = checks.make_learner(model_dir, **trainer)
    variants.train(learner)
    check_replicas(learner)
    tensors = dict(named_tensors(learner))
    if dist.get_rank() == ODD:
        with torch.no_grad():
            local_part(tensors[name]).view(-1)[3] += 1e-3
    try:
        check_replicas(learner)
    except DriftError as error:
        return len(tensors), str(error)
    return len(tensors), ""


def load_other_weights(model_dir: Path, other_dir: Path, plan: Plan) -> str:
    """Load a different model on one rank; return the error."""
    learner = checks.make_learner(other_dir if dist.get_rank() == ODD else model_dir, parallelism=plan)
    try:
        check_replicas(learner)
    except DriftError as error:
        return str(error)
    return ""


def headed_learner(model_dir: Path, plan: Plan) -> Learner:
    """Return a learner with an auxiliary head that no layer uses.

    It is named like an adapter, which checkpoints lack, and whose initial values are the same on every layout.
    """
    owner = type(open_model(model_dir).spec(DEVICES["cpu"], checks.ROW_TOKENS).model)
    build = owner.build

    def with_head(config: Any, **options: Any) -> nn.Module:
        module: nn.Module = build(config, **options)
        module.register_module("aux", nn.ModuleDict({"lora_a": nn.Linear(64, 3, bias=False)}))
        return module

    with patch.object(owner, "build", with_head):
        return checks.make_learner(model_dir, parallelism=plan)


def train_with_head(model_dir: Path, plan: Plan) -> list[checks.Arrays]:
    """Take a step without the head, then one where only data-parallel rank 0 uses it; return gradients and parameters."""
    learner = headed_learner(model_dir, plan)

    def using(rows: PackedRows, logprobs_N: torch.Tensor, entropy_N: torch.Tensor) -> tuple[torch.Tensor, LossMetrics]:
        loss, metrics = checks.everything(rows, logprobs_N, entropy_N)
        if learner.model.dp_rank == 0:
            loss = loss + learner.model.module.aux["lora_a"](torch.ones(64)).square().sum()
        return loss, metrics

    found = []
    for objective in (checks.everything, using):
        (batch,) = variants.batches_of(learner, 8)
        learner.run(batch, objective)
        found.append(checks.gradients(learner))
        assert not learner.optim_step(checks.ADAM).skipped
        check_replicas(learner)
    return [*found, checks.parameters(learner)]
