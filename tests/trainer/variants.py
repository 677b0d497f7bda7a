"""Functions on models, checkpoints and losses that tests run on all ranks; see `checks`."""

import logging.handlers
import queue
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.trainer import checks
from titanrl.algorithms.losses import LossMetrics
from titanrl.base.errors import PhaseError
from titanrl.config.algorithm import AlgorithmConfig, KLConfig
from titanrl.config.device import DEVICES
from titanrl.config.sections import FileDtype, TrainerConfig
from titanrl.models.decoder import packed_mask
from titanrl.models.directory import open_model
from titanrl.trainer import model as policy_model
from titanrl.trainer.checkpoint import Checkpoints, export_hf, load_hf, load_model
from titanrl.trainer.collate import PackedRows, collate, empty_rows
from titanrl.trainer.learner import Critic, Learner, value_objective
from titanrl.trainer.model import build_model
from titanrl.weights.layout import local_part

Plan = dict[str, Any]
OptimizerName = Literal["adamw", "muon"]


def batches_of(learner: Learner, rows_per_microbatch: int | None = None) -> list[PackedRows]:
    """Return this rank's micro-batches of the random batch; by default two on up to two data-parallel ranks."""
    rows = checks.plan_rows(checks.sequences()[0], packed=True)
    return checks.microbatches(learner, rows, rows_per_microbatch or max(2, 4 // learner.model.dp_size))


def train(learner: Learner, num_steps: int = 1) -> None:
    for _ in range(num_steps):
        for batch in batches_of(learner):
            learner.run(batch, checks.everything)
        assert not learner.optim_step(checks.ADAM).skipped


def logits(model_dir: Path, token_ids: np.ndarray, family: str | None = None) -> np.ndarray:
    """Return the logits of one sequence, `[L, V]`."""
    module = checks.make_learner(model_dir, family=family, row_tokens=len(token_ids)).model.module
    tokens, positions = torch.from_numpy(token_ids)[None], torch.arange(len(token_ids))[None]
    with torch.no_grad():
        found: np.ndarray = module(tokens, positions=positions, attention_masks=packed_mask(positions))[0].numpy()
    return found


def gradient_and_loss(model_dir: Path, trainer: Plan) -> tuple[checks.Arrays, float] | None:
    """Return gradient and loss of the random batch with any trainer section, on rank 0."""
    learner = checks.make_learner(model_dir, **trainer)
    loss = torch.zeros((), dtype=torch.float64)
    for batch in batches_of(learner):
        loss += learner.run(batch, checks.everything).sums.sums.get("loss/policy", 0.0)
    dist.all_reduce(loss)
    found = checks.gradients(learner)
    return (found, float(loss)) if dist.get_rank() == 0 else None


def graphs_by_row_length(model_dir: Path, lengths: Sequence[int]) -> list[int]:
    """Return the number of compiled graphs after passes over rows of each length."""
    learner = checks.make_learner(model_dir, compile=True)
    counts = []
    for length in lengths:
        (row,) = checks.plan_rows(checks.sequences()[0][:1], packed=True)
        learner.run(collate([row], checks.sequences()[1], length), checks.everything)
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return counts


def passes_with_compiled_adapters(model_dir: Path) -> int:
    """Return the number of traced graphs after passes with and without gradient, over 1 to 3 rows, of LoRA and a critic."""
    compiled, stats = nn.Module.compile, torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    with pytest.MonkeyPatch.context() as patch:  # code of inductor would take minutes to build
        patch.setattr(nn.Module, "compile", lambda module, **_: compiled(module, backend="eager", fullgraph=True))
        policy = checks.make_learner(model_dir, compile=True, lora={"rank": 2})
        trainer = TrainerConfig(row_tokens=checks.ROW_TOKENS, compile=True)
        critic = Critic(load_model(open_model(model_dir), trainer, DEVICES["cpu"], is_critic=True), AlgorithmConfig())
    plans, payload = checks.sequences()
    for num_rows in (1, 2, 3):
        rows = collate([(plan,) for plan in plans[:num_rows]], payload, checks.ROW_TOKENS)
        for learner, objective in ((policy, checks.everything), (critic.learner, partial(value_objective, clip=None))):
            learner.logprobs(rows)
            learner.run(rows, objective)
    return int(stats["unique_graphs"] - before)


def logprobs_one_by_one(model_dir: Path, trainer: Plan) -> list[np.ndarray]:
    """Return the log-probabilities of each sequence after its first token, computed in packed rows."""
    learner = checks.make_learner(model_dir, **trainer)
    return scores(learner)


def scores(learner: Learner) -> list[np.ndarray]:
    plans, payload = checks.sequences()
    rows = checks.plan_rows(plans, packed=True)
    logprobs_BL = learner.logprobs(collate(rows, payload, checks.ROW_TOKENS)).numpy()
    found = {}
    for index, row in enumerate(rows):
        start = 0
        for sequence in row:
            found[sequence.handle.location] = logprobs_BL[index, start : start + sequence.length - 1]
            start += sequence.length
    return [found[location] for location in range(len(plans))]


def warnings_of_export(model_dir: Path, trainer: dict, target: Path) -> list[str]:
    """Set a weight on the first rank beyond float16, export the model and return the warnings."""
    learner = checks.make_learner(model_dir, **trainer)
    with torch.no_grad():
        local_part(learner.model.module.norm.weight)[0] = 7e4 if dist.get_rank() == 0 else 1.0
    found = logging.handlers.QueueHandler(queue.SimpleQueue())
    found.setLevel(logging.WARNING)
    logging.getLogger("titanrl.trainer.checkpoint").addHandler(found)
    export_hf(learner.model, model_dir, target, "float16")
    return [found.queue.get().getMessage() for _ in range(found.queue.qsize())]


def export(
    model_dir: Path, trainer: Plan, target: Path, num_steps: int, dtype: FileDtype = "float32"
) -> tuple[list[np.ndarray], dict[str, bytes]]:
    """Train some steps and export the model; return its log-probabilities and local bytes."""
    learner = checks.make_learner(model_dir, **trainer)
    train(learner, num_steps)
    export_hf(learner.model, model_dir, target, dtype)
    return scores(learner), checks.local_bytes(learner)


def loaded_bytes(model_dir: Path, trainer: Plan) -> dict[str, bytes]:
    return checks.local_bytes(checks.make_learner(model_dir, **trainer))


def tensors_after_loading(model_dir: Path, trainer: Plan, seed: int) -> None:
    """Load without random initialization; check that all tensors equal those of a model with random initialization."""
    config = TrainerConfig.model_validate({"row_tokens": checks.ROW_TOKENS, **trainer})
    source = open_model(model_dir)
    drawn = build_model(source, config, DEVICES["cpu"], seed=seed)
    load_hf(drawn, source)
    before = torch.get_rng_state()
    loaded = load_model(source, config, DEVICES["cpu"], seed=seed)
    assert torch.equal(torch.get_rng_state(), before)
    expected, found = (
        {name: local_part(value) for name, value in chain(model.module.named_parameters(), model.module.named_buffers())}
        for model in (drawn, loaded)
    )
    assert found.keys() == expected.keys()
    assert any("rope.cache" in name for name in found)
    assert any(".lora_a." in name for name in found) == (config.lora is not None)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def initial_adapters(model_dir: Path, trainer: Plan, seed: int) -> checks.Arrays:
    """Return the A matrices of new adapters. This is a collective."""
    parameters = checks.parameters(checks.make_learner(model_dir, seed=seed, **trainer))
    return {name: value for name, value in parameters.items() if name.endswith("lora_a.weight")}


def train_adapters(model_dir: Path, trainer: Plan) -> dict[str, checks.Arrays]:
    """Return the full parameters before and after two steps, and check that a snapshot contains only adapters."""
    learner = checks.make_learner(model_dir, **trainer)
    before = checks.parameters(learner)
    learner.keep_weights()
    at_0 = scores(learner)
    train(learner, 2)
    with learner.weights_at(0):
        assert all(np.array_equal(one, other) for one, other in zip(scores(learner), at_0, strict=True))
    assert all(".lora_" in name for name in learner.snapshots._held[0])
    merged = {name: checks.whole(value) for name, value in learner.weights().items()}
    return {"before": before, "after": checks.parameters(learner), "merged": merged}


def published_adapters(model_dir: Path, trainer: Plan) -> tuple[checks.Arrays, checks.Arrays, list[int]]:
    """Return what a learner publishes after two steps, its base, and the versions of the base before and after loading."""
    config = TrainerConfig.model_validate({"row_tokens": checks.ROW_TOKENS, **trainer})
    model = load_model(open_model(model_dir), config, DEVICES["cpu"], seed=0)
    learner = Learner(model, AlgorithmConfig(), temperature=1.0, publishes_adapters=True)
    train(learner, 2)
    versions = []
    for change in (0.0, 1.0):
        local_part(learner.model.module.norm.weight.detach()).add_(change)
        learner.weights_loaded()
        versions.append(learner.base_version)
        local_part(learner.model.module.norm.weight.detach()).sub_(change)
    adapters, base = (
        {name: checks.whole(value) for name, value in state.items()} for state in (learner.weights(), learner.base())
    )
    return adapters, base, versions


def chunked_gradient_is_equal(model_dir: Path, trainer: Plan) -> bool:
    """Check that scoring in chunks of a few tokens gives the same gradient as scoring all tokens together."""
    learner = checks.make_learner(model_dir, **trainer)
    batch = batches_of(learner, 8)[0]
    learner.run(batch, checks.everything)
    at_once = checks.gradients(learner)
    learner.zero_grad()
    limit, policy_model.LOGITS_BYTES = policy_model.LOGITS_BYTES, 5 * batch.tokens_BL.shape[0] * checks.VOCAB * 4
    logprobs_BL = learner.run(batch, checks.everything).logprobs_BL
    policy_model.LOGITS_BYTES = limit
    assert torch.equal(logprobs_BL, learner.logprobs(batch))
    for name, value in checks.gradients(learner).items():
        np.testing.assert_allclose(value, at_once[name], atol=1e-6)
    return True


def nan_loss_on_one_rank(model_dir: Path, plan: Plan) -> list[tuple[int, bool]]:
    """Run a step with NaN as the last rank's loss and a gradient of zero, then a good step."""
    learner = checks.make_learner(model_dir, parallelism=plan)
    live = checks.local_bytes(learner)

    def bad(rows: PackedRows, logprobs_N: torch.Tensor, entropy_N: torch.Tensor) -> tuple[torch.Tensor, LossMetrics]:
        loss, metrics = checks.everything(rows, logprobs_N, entropy_N)
        return loss + (float("nan") if dist.get_rank() == dist.get_world_size() - 1 else 0.0), metrics

    learner.run(batches_of(learner)[0], bad)
    skipped = learner.optim_step(checks.ADAM)
    assert checks.local_bytes(learner) == live
    train(learner)
    return [(skipped.version, skipped.skipped), (learner.version, checks.local_bytes(learner) == live)]


def infinite_gradient_on_one_rank(model_dir: Path, plan: Plan) -> tuple[int, bool]:
    """Run a step with an infinite gradient on the last rank."""
    learner = checks.make_learner(model_dir, parallelism=plan)
    live = checks.local_bytes(learner)

    def bad(rows: PackedRows, logprobs_N: torch.Tensor, entropy_N: torch.Tensor) -> tuple[torch.Tensor, LossMetrics]:
        if dist.get_rank() == dist.get_world_size() - 1:
            logprobs_N.register_hook(lambda gradient_N: gradient_N * float("inf"))
        return checks.everything(rows, logprobs_N, entropy_N)

    learner.run(batches_of(learner)[0], bad)
    update = learner.optim_step(checks.ADAM)
    assert checks.local_bytes(learner) == live
    return update.version, update.skipped


def step_without_loss_tokens(model_dir: Path, plan: Plan) -> float:
    """Return the gradient norm of a step in which no rank has a loss token."""
    learner = checks.make_learner(model_dir, parallelism=plan)
    result = learner.run(empty_rows(2, checks.ROW_TOKENS), checks.everything)
    assert result.sums.sums.get("loss/policy", 0.0) == 0.0
    return learner.optim_step(checks.ADAM).grad_norm


def forward_before_step(model_dir: Path, plan: Plan) -> bool:
    """Return True if a step is the same with a forward pass between backward and step."""
    plain = checks.make_learner(model_dir, parallelism=plan)
    train(plain)
    learner = checks.make_learner(model_dir, parallelism=plan)
    for batch in batches_of(learner):
        learner.run(batch, checks.everything)
        learner.logprobs(batch)
    learner.optim_step(checks.ADAM)
    return checks.local_bytes(learner) == checks.local_bytes(plain)


def gradient_norm(model_dir: Path, plan: Plan, rows_per_microbatch: int) -> float:
    return norm_and_loads(model_dir, plan, rows_per_microbatch)[0]


def norm_and_loads(model_dir: Path, plan: Plan, rows_per_microbatch: int) -> tuple[float, dict[str, float]]:
    """Return the norm of the gradient and the load of the experts in the first step on the random batch."""
    learner = checks.make_learner(model_dir, parallelism=plan)
    for batch in batches_of(learner, rows_per_microbatch):
        learner.run(batch, checks.everything)
    learner.logprobs(batch)  # not part of the step
    update = learner.optim_step(checks.ADAM)
    return update.grad_norm, dict(update.experts)


def save_and_continue(
    model_dir: Path, plan: Plan, folder: Path, in_background: bool, optimizer: OptimizerName = "adamw"
) -> dict[str, bytes]:
    """Save a checkpoint at each of three steps, then take another one; return the local bytes."""
    learner = checks.make_learner(model_dir, optimizer=optimizer, parallelism=plan)
    checkpoints = Checkpoints(learner, folder, 2, in_background=in_background)
    for step in (1, 2, 3):
        train(learner)
        checkpoints.save(step)
    checkpoints.close()
    train(learner)
    return checks.local_bytes(learner)


def load_and_continue(
    model_dir: Path, plan: Plan, folder: Path, step: int, optimizer: OptimizerName = "adamw"
) -> tuple[int, dict[str, bytes], checks.Arrays]:
    """Load a checkpoint and take a step; return the loaded version, then local bytes and full parameters."""
    learner = checks.make_learner(model_dir, optimizer=optimizer, parallelism=plan)
    torch.rand(3)  # loading restores the random state
    checkpoints = Checkpoints(learner, folder, 2)
    checkpoints.load(step)
    version = learner.version
    train(learner)
    checkpoints.close()
    return version, checks.local_bytes(learner), checks.parameters(learner)


def mixed_precision(model_dir: Path, trainer: Plan, folder: Path) -> tuple[checks.Arrays, checks.Arrays]:
    """Check that passes follow every change of the weights; return the first gradient and the weights after two steps.

    A checkpoint is written after one step, and if there is already one, it is loaded instead.
    """
    learner = checks.make_learner(model_dir, **trainer)
    assert learner.model.module.tok_embeddings.weight.dtype == getattr(torch, trainer["dtype"])
    first, *_ = batches_of(learner)
    for batch in batches_of(learner):
        learner.run(batch, checks.everything)
    gradient = checks.gradients(learner)
    learner.zero_grad()
    learner.keep_weights()
    at_start = learner.logprobs(first)
    checkpoints = Checkpoints(learner, folder, 2)
    if any(folder.glob("*")):
        checkpoints.load(1)
    else:
        train(learner)
        checkpoints.save(1)
    checkpoints.close()
    now = learner.logprobs(first)
    assert not torch.equal(now, at_start)
    if learner.snapshots.held:  # a checkpoint replaces the weights, and drops the snapshots
        with learner.weights_at(0):
            assert torch.equal(learner.logprobs(first), at_start)
    assert torch.equal(learner.logprobs(first), now)
    train(learner)
    assert learner.version == 2
    return gradient, checks.parameters(learner)


def kl_to_start(model_dir: Path, plan: Plan) -> list[float]:
    """Return the KL term before and after a step, with the reference in a snapshot, on rank 0."""
    learner = checks.make_learner(model_dir, parallelism=plan)
    learner = Learner(learner.model, AlgorithmConfig(kl=KLConfig(coef=0.5)), temperature=1.0)
    learner.keep_weights()
    terms = []
    for _ in range(2):
        reference = []
        for batch in batches_of(learner):
            with learner.weights_at(0):
                reference.append(learner.logprobs(batch))
        for batch, reference_BL in zip(batches_of(learner), reference, strict=True):
            sums = learner.forward_backward(replace(batch, reference_BL=reference_BL)).sums
        learner.optim_step(checks.ADAM)
        terms.append(sums.sums.get("loss/kl", 0.0))
    return terms


def steps_on_one_batch(model_dir: Path, plan: Plan) -> list[int]:
    """Take three optimizer steps on a batch, the last one skipped; check the rejected calls and return the versions."""
    learner = checks.make_learner(model_dir, parallelism=plan)
    batch = batches_of(learner)[0]

    def bad(rows: PackedRows, logprobs_N: torch.Tensor, entropy_N: torch.Tensor) -> tuple[torch.Tensor, LossMetrics]:
        loss, metrics = checks.everything(rows, logprobs_N, entropy_N)
        return loss * float("nan"), metrics

    found = []
    for objective, completes in ((checks.everything, False), (checks.everything, False), (bad, True)):
        learner.run(batch, objective)
        update = learner.optim_step(checks.ADAM, completes=completes)
        assert update.skipped == (objective is bad)
        found.append(update.version)
        if not completes:
            for refused in (learner.weights, learner.keep_weights, lambda: learner.require_settled("save_checkpoint")):
                with pytest.raises(PhaseError, match="between two versions"):
                    refused()
    assert learner.keep_weights() == 1
    learner.run(batch, bad)
    assert learner.optim_step(checks.ADAM, completes=False).version == 1
    learner.run(batch, bad)
    return [*found, learner.optim_step(checks.ADAM).version]
