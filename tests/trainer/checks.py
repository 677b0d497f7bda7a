"""Functions that tests run on all ranks of a world. Their results must be picklable."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn

from benchmarks.memory import peak_bytes
from benchmarks.packed_rollouts import Case, rl_batches
from titanrl.algorithms.batch_plan import pack_sequences, sequence_weights
from titanrl.algorithms.contracts import LossInputs, bound_loss
from titanrl.algorithms.losses import LossMetrics, ppo, weighted_sum
from titanrl.algorithms.packing import balance, pack
from titanrl.carriers.supports import Supports, supports_of, words_of
from titanrl.carriers.tables import SEQUENCE, Row, RowTable, SequencePlan
from titanrl.carriers.types import AdamParams, Datum, GroupHandle, Segment, TopTokens, sampled_datum
from titanrl.config.algorithm import AlgorithmConfig
from titanrl.config.device import DEVICES
from titanrl.config.sections import TrainerConfig
from titanrl.config.sizes import ModelShape
from titanrl.data.examples import Demonstration, mean_loss_data
from titanrl.models.directory import open_model
from titanrl.rollout.group import common_prefixes
from titanrl.trainer.checkpoint import load_model
from titanrl.trainer.collate import PackedRows, collate
from titanrl.trainer.learner import Learner, policy_objective
from titanrl.trainer.model import build_model
from titanrl.trainer.passes import Location, RowSizes, build_rows, plan_pass, run_data

ROW_TOKENS = 32
VOCAB = 112
ADAM = AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, max_grad_norm=1.0)

Arrays = Mapping[str, np.ndarray]


def make_learner(
    model_dir: Path,
    *,
    seed: int = 0,
    family: str | None = None,
    ema_decay: float | None = None,
    optimizer: Literal["adamw", "muon"] = "adamw",
    **trainer: Any,
) -> Learner:
    """Return a new learner with the model of a directory; `trainer` contains keys of the `trainer` section."""
    config = TrainerConfig.model_validate({"row_tokens": ROW_TOKENS, **trainer})
    model = load_model(open_model(model_dir, family), config, DEVICES["cpu"], seed=seed)
    return Learner(model, AlgorithmConfig(ema_decay=ema_decay, optimizer=optimizer), temperature=1.0)


@functools.cache
def shared_learner(model_dir: Path, plan: tuple[tuple[str, int], ...]) -> Learner:
    """Return a learner for tests that take no optimizer step."""
    return make_learner(model_dir, parallelism=dict(plan))


def random_segment(random: np.random.Generator, prompt_ids: np.ndarray, num_sampled: int) -> Segment:
    """Return a segment with the prompt and a random completion."""
    mask = np.arange(len(prompt_ids) + num_sampled) >= len(prompt_ids)
    token_ids = np.concatenate([prompt_ids, random.integers(1, VOCAB, num_sampled)])
    logprobs = np.where(mask, random.uniform(-6.0, -3.0, len(mask)), 0.0).astype(np.float32)
    supports = random_supports(token_ids, mask) if num_sampled % 2 else None
    if supports is not None:
        logprobs *= np.log(supports.sizes_S()).astype(np.float32) / 5
    return Segment(token_ids=token_ids, mask=mask, logprobs=logprobs, versions=np.where(mask, 0, -1), supports=supports)


def random_supports(token_ids: np.ndarray, mask: np.ndarray) -> Supports:
    """Return random supports of 1 to all entries of the vocabulary, which contain the tokens."""
    random = np.random.default_rng(int(token_ids.sum()))

    def words(token: int) -> np.ndarray:
        others = random.permutation(VOCAB)[: random.choice([1, 2, 3, 20, VOCAB]) - 1]
        return words_of(np.union1d(others, [token]).astype(np.int32), VOCAB)

    none = np.zeros(0, np.int32)
    return supports_of([words(token) if sampled else none for token, sampled in zip(token_ids, mask, strict=True)], VOCAB)


@functools.cache
def sequences() -> tuple[tuple[SequencePlan, ...], Mapping[GroupHandle, Mapping[int, Segment]]]:
    """Return 13 random rollouts of 3 to 24 tokens, with advantages of both signs and uneven loss weights."""
    random = np.random.default_rng(0)
    plans, payload = [], {}
    for index in range(13):
        length = int(random.integers(3, 25))
        num_prompt = int(random.integers(1, length - 1))
        handle = GroupHandle(shard=0, location=index, serial=1)
        payload[handle] = {0: random_segment(random, random.integers(1, VOCAB, num_prompt), length - num_prompt)}
        advantage, weight = float(random.normal()), float(random.uniform(0.002, 0.02))
        plans.append(SequencePlan(handle=handle, segment=0, length=length, advantage=advantage, weight=weight))
    return tuple(plans), payload


def plan_rows(order: Sequence[SequencePlan], *, packed: bool) -> list[Row]:
    """Return rows of sequences, packed or with one sequence per row."""
    if not packed:
        return [(sequence,) for sequence in order]
    return [tuple(order[i] for i in row) for row in pack([sequence.length for sequence in order], ROW_TOKENS)]


def microbatches(
    learner: Learner,
    rows: Sequence[Row],
    rows_per_microbatch: int,
    payload: Mapping[GroupHandle, Mapping[int, Segment]] | None = None,
) -> list[PackedRows]:
    """Return this rank's micro-batches, the same number on every rank; the default payload is that of `sequences`."""
    shares = balance([1.0] * len(rows), learner.model.dp_size)
    own = [rows[i] for i in shares[learner.model.dp_rank]]
    starts = range(0, max(map(len, shares)), rows_per_microbatch)
    return [collate(own[start : start + rows_per_microbatch], payload or sequences()[1], ROW_TOKENS) for start in starts]


def everything(rows: PackedRows, logprobs_N: torch.Tensor, entropy_N: torch.Tensor) -> tuple[torch.Tensor, LossMetrics]:
    """Compute a loss with a ratio, a KL and an entropy term."""
    mask_N, old_N = rows.mask_BL.flatten(), rows.logprobs_BL.flatten()
    tokens = LossInputs.of(logprobs_N, old_N, rows.advantages_BL.flatten(), mask_N=mask_N)
    loss_N, _ = ppo(tokens, clip_low=0.9, clip_high=50.0)
    kl_N = torch.where(mask_N, 0.5 * (logprobs_N - old_N) ** 2, 0.0)
    loss = weighted_sum(loss_N + 0.1 * kl_N - 0.3 * entropy_N, rows.weights_BL.flatten(), mask=mask_N)
    return loss, LossMetrics(sums={"loss/policy": loss.detach()}, maxima={})


def gradients(learner: Learner) -> Arrays:
    """Return the full gradient by parameter. This is a collective."""
    learner.model.reshard()
    return {
        canonical_fqn(name): whole(parameter.grad)
        for name, parameter in learner.model.module.named_parameters()
        if parameter.grad is not None
    }


def parameters(learner: Learner) -> Arrays:
    """Return the full parameters. This is a collective."""
    learner.model.reshard()
    return {canonical_fqn(name): whole(parameter) for name, parameter in learner.model.module.named_parameters()}


def local_bytes(learner: Learner) -> dict[str, bytes]:
    """Return the bytes of this rank's shard of every parameter."""
    learner.model.reshard()
    return {
        name: (value.to_local() if isinstance(value, DTensor) else value).detach().numpy().tobytes()
        for name, value in learner.model.module.named_parameters()
    }


def whole(tensor: torch.Tensor) -> np.ndarray:
    """Gather a tensor from all ranks."""
    full = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
    return full.float().numpy().copy()


def gradient_of_groups(
    model_dir: Path, plan: tuple[tuple[str, int], ...], *, share_prompts: bool
) -> tuple[Arrays, float, int] | None:
    """Return gradient, loss and number of rows of 3 random groups of 5 and one tree of 5 under a layout, on rank 0."""
    learner = shared_learner(model_dir, plan)
    random = np.random.default_rng(1)
    sequences, payload, groups, num_shared = [], {}, [], []
    for index, num_prompt in enumerate((4, 9, 14, 6)):
        handle, prompt = GroupHandle(shard=0, location=index, serial=1), random.integers(1, VOCAB, num_prompt)
        segments = [random_segment(random, prompt, int(random.integers(1, 15))) for _ in range(5)]
        if index == 3:  # each has the first tokens of the one before as context, sampled ones, too
            for place in range(1, 5):
                context = np.append(segments[place - 1].token_ids[: 4 * place], random.integers(1, VOCAB, 2))
                segments[place] = random_segment(random, context, 5)
        payload[handle] = dict(enumerate(segments))
        groups += [index] * 5
        prefixes = common_prefixes(segments)
        num_shared += [shared for _, shared in sorted(prefixes)]
        for place in np.argsort([place for place, _ in prefixes]).tolist():
            advantage, weight = float(random.normal()), float(random.uniform(0.002, 0.02))
            length = len(segments[place].token_ids)
            sequences.append(((0, index, 1), place, place, length, advantage, weight, 0, 0))
    assert max(num_shared[15:]) > 6
    table = np.array(sequences, SEQUENCE)
    places = pack_sequences(table, np.array(groups), np.array(num_shared) if share_prompts else None, ROW_TOKENS)
    order = np.array([place for row in places for place in row])
    rows = list(RowTable(table[order], np.cumsum([len(row) for row in places])))
    loss = 0.0
    for batch in microbatches(learner, rows, 2, payload):
        loss += learner.run(batch, everything).sums.sums.get("loss/policy", 0.0)
    total = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(total)
    found = gradients(learner)
    learner.zero_grad()
    return (found, float(total), len(rows)) if dist.get_rank() == 0 else None


@functools.cache
def distillation_data() -> tuple[Datum, ...]:
    """Return 9 random samples, each with a prompt of the teacher that is shorter, longer or missing."""
    random, data = np.random.default_rng(1), []
    for index in range(9):
        prompt, tokens = random.integers(1, VOCAB, random.integers(2, 6)), random.integers(1, VOCAB, random.integers(1, 9))
        logprobs, weight = random.uniform(-6.0, -3.0, len(tokens)).astype(np.float32), float(random.uniform(0.01, 0.1))
        datum = sampled_datum(prompt, tokens, logprobs, 0.0, weight)
        hint = random.integers(1, VOCAB, random.integers(1, 20))
        data.append(datum if index == 4 else replace(datum, teacher_input=np.concatenate([hint, tokens[:-1]])))
    return tuple(data)


@functools.cache
def known_data(num_top: int) -> tuple[Datum, ...]:
    """Return the samples of `distillation_data`, all but one with random known tokens, some beyond the vocabulary."""
    random, data = np.random.default_rng(2), []
    for index, datum in enumerate(distillation_data()):
        count = int((datum.loss_fn_inputs["weights"] != 0).sum())
        ids = np.array([random.choice(VOCAB, num_top, replace=False) for _ in range(count)])
        ids[0, -1] = 10**6
        logprobs = np.log(random.dirichlet(np.ones(num_top + 1), count)[:, :-1]).astype(np.float32)
        top = None if index == 4 else TopTokens(token_ids=ids, logprobs=logprobs)
        data.append(replace(datum, teacher_input=None, teacher_top=top))
    return tuple(data)


def known_by_hand(model_dir: Path, num_top: int) -> float:
    """Return the loss of `distilled` with `num_top` on one rank, in fp64."""
    learner, total = shared_learner(model_dir, ()), 0.0
    for datum in known_data(num_top):
        if (top := datum.teacher_top) is None:
            continue
        for q, ids, logprobs in zip(
            _last_logits(learner, np.asarray(datum.model_input), len(top.token_ids)).double().softmax(-1).numpy(),
            top.token_ids,
            top.logprobs.astype(np.float64),
            strict=True,
        ):
            known = ids < len(q)
            p, q_known = np.exp(logprobs[known]), q[ids[known]]
            p_rest, q_rest = 1 - p.sum(), 1 - q_known.sum()
            divergence = (p * np.log(p / q_known)).sum() + p_rest * np.log(p_rest / q_rest)
            total += float(divergence) * float(datum.loss_fn_inputs["weights"][-1])
    return total


def distilled(
    model_dir: Path, plan: tuple[tuple[str, int], ...], loss: str, sizes: RowSizes, at_version: int | None, num_top: int = 0
) -> tuple[Arrays, float] | None:
    """Return gradient and loss of a divergence from the same model with other prompts, on rank 0.

    With `num_top`, some data instead have random tokens as the most likely ones of another model. With `at_version`, the
    teacher has weights that are twice as large, kept under this version.
    """
    learner = shared_learner(model_dir, plan)
    if at_version is not None and at_version not in learner.snapshots.held:
        for factor in (2.0, 0.5):  # powers of two restore the weights exactly
            learner.model.reshard()
            with torch.no_grad():
                for parameter in learner.model.module.parameters():
                    parameter.mul_(factor)
            if factor == 2.0:
                learner.keep_weights()
    options = {} if at_version is None else {"at_version": at_version}
    data = known_data(num_top) if num_top else distillation_data()
    planned = plan_pass(learner.model, data, sizes, loss, options)
    total = torch.tensor(sum(part.sums.get("loss/policy", 0.0) for part in run_data(learner, planned, backward=True).sums))
    dist.all_reduce(total)
    found = gradients(learner)
    learner.zero_grad()
    learner.drop_snapshots()
    return (found, float(total)) if dist.get_rank() == 0 else None


def divergence_by_hand(model_dir: Path, loss: str) -> float:
    """Return the loss of `distilled` on one rank: sequence by sequence, from all logits, in fp64."""
    learner, total = shared_learner(model_dir, ()), 0.0
    for datum in distillation_data():
        count = int((datum.loss_fn_inputs["weights"] != 0).sum())
        inputs = (datum.model_input, datum.model_input if datum.teacher_input is None else datum.teacher_input)
        q, p = (_last_logits(learner, np.asarray(tokens), count).double().softmax(-1) for tokens in inputs)
        m = (p + q) / 2
        terms = {"forward_kl": p * (p / q).log(), "reverse_kl": q * (q / p).log()}
        terms["jsd"] = (p * (p / m).log() + q * (q / m).log()) / 2
        total += float(terms[loss].sum()) * float(datum.loss_fn_inputs["weights"][-1])
    return total


def _last_logits(learner: Learner, tokens: np.ndarray, count: int) -> torch.Tensor:
    datum = Datum(model_input=tokens, loss_fn_inputs={"target_tokens": tokens})
    sizes = RowSizes(row_tokens=ROW_TOKENS, rows_per_microbatch=1, multiple=1)
    rows = build_rows([datum], [Location(0, 0, slice(0, len(tokens)))], sizes)
    return learner.logits(rows, torch.arange(len(tokens) - count, len(tokens)))


def summed_gradients(model_dir: Path, plan: tuple[tuple[str, int], ...], weight: float) -> list[Arrays] | None:
    """Return the gradients of rollouts, of examples, and of both in one optimizer step, on rank 0."""
    learner, random = shared_learner(model_dir, plan), np.random.default_rng(7)
    lengths = (7, 31, 12, 20)
    examples = [Demonstration(token_ids=random.integers(1, VOCAB, n), mask=np.arange(n) >= n // 2) for n in lengths]
    sizes = RowSizes(row_tokens=ROW_TOKENS, rows_per_microbatch=2, multiple=1)
    planned = plan_pass(learner.model, mean_loss_data(examples, weight), sizes, "cross_entropy", {})

    def of_rollouts() -> None:
        for rows in microbatches(learner, plan_rows(sequences()[0], packed=True), 2):
            learner.forward_backward(rows)

    def of_examples() -> None:
        run_data(learner, planned, backward=True)

    found = []
    for passes in ((of_rollouts,), (of_examples,), (of_examples, of_rollouts)):
        for run in passes:
            run()
        found.append(gradients(learner))
        learner.zero_grad()
    return found if dist.get_rank() == 0 else None


def objective_of(
    model_dir: Path, plan: tuple[tuple[str, int], ...], algorithm: AlgorithmConfig
) -> tuple[Arrays, Mapping[str, float], list[np.ndarray]] | None:
    """Return gradient, metrics and log-probabilities of the objective of a configuration on packed rows, on rank 0.

    The loss weights are those of its reduction, where each two sequences have the same prompt. Proximal and reference
    log-probabilities are random.
    """
    learner = shared_learner(model_dir, plan)
    plans, payload = sequences()
    counts = [int(payload[sequence.handle][0].mask.sum()) for sequence in plans]
    prompts = [index // 2 for index in range(len(plans))]
    weights = sequence_weights(algorithm.reduction, num_sampled=counts, prompt_of=prompts, constant_length=24)
    weighted = [replace(sequence, weight=float(weight)) for sequence, weight in zip(plans, weights, strict=True)]
    objective = partial(policy_objective, algorithm=algorithm, loss=bound_loss(algorithm), mean_weight=0.9, version=1)
    values: dict[str, torch.Tensor] = {}
    scores = []
    for batch in microbatches(learner, plan_rows(weighted, packed=True), 2):
        noise_2BL = torch.sin(batch.tokens_BL + torch.tensor([1.0, 2.0])[:, None, None])
        proximal_BL, reference_BL = (batch.logprobs_BL + 0.3 * noise_BL for noise_BL in noise_2BL)
        batch = replace(batch, proximal_BL=proximal_BL, reference_BL=reference_BL)
        result = learner.run(batch, objective)
        scores.append(result.logprobs_BL.numpy())
        for name, value in {**result.sums.sums, **{f"max {name}": v for name, v in result.sums.maxima.items()}}.items():
            before = values.get(name, torch.zeros((), dtype=torch.float64))
            values[name] = torch.maximum(before, torch.tensor(value)) if name.startswith("max ") else before + value
    ranks: list[dict[str, torch.Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(ranks, values)
    reported = [rank for rank in ranks if rank]
    totals = {name: float((max if name.startswith("max ") else sum)(rank[name] for rank in reported)) for name in reported[0]}
    found = gradients(learner)
    learner.zero_grad()
    return (found, totals, scores) if dist.get_rank() == 0 else None


def muon_steps(model_dir: Path, plan: tuple[tuple[str, int], ...]) -> tuple[Arrays, Arrays, Arrays] | None:
    """Return gradient, weights, and weights after the first step with Muon on rank 0.

    The optimizer state is saved and loaded before a second step, whose result is in the third return value under `second/NAME`.
    """
    learner = make_learner(model_dir, optimizer="muon", parallelism=dict(plan))
    params = replace(ADAM, weight_decay=0.1, max_grad_norm=1e6)
    for batch in microbatches(learner, plan_rows(sequences()[0], packed=True), 8):
        learner.run(batch, everything)
    found, before = copied(gradients(learner)), copied(parameters(learner))
    learner.optim_step(params)
    after = dict(copied(parameters(learner)))
    saved = learner.optimizers.state_dict()
    state = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in saved.items()}
    learner.reset_optimizer()
    learner.optimizers.load_state_dict(state)
    for batch in microbatches(learner, plan_rows(sequences()[0], packed=True), 8):
        learner.run(batch, everything)
    learner.optim_step(params)
    after |= {f"second/{name}": value for name, value in parameters(learner).items()}
    return (found, before, after) if dist.get_rank() == 0 else None


def copied(arrays: Arrays) -> Arrays:
    return {name: values.copy() for name, values in arrays.items()}


def gradient_of(
    model_dir: Path,
    plan: tuple[tuple[str, int], ...],
    rows_per_microbatch: int,
    packed: bool,
    order: Sequence[int] | None = None,
) -> tuple[Arrays, float] | None:
    """Return gradient and loss of the random batch under a layout, on rank 0."""
    learner = shared_learner(model_dir, plan)
    plans = sequences()[0]
    rows = plan_rows([plans[i] for i in order] if order else plans, packed=packed)
    loss = 0.0
    for batch in microbatches(learner, rows, rows_per_microbatch):
        loss += learner.run(batch, everything).sums.sums.get("loss/policy", 0.0)
    total = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(total)
    found = gradients(learner)
    learner.zero_grad()
    return (found, float(total)) if dist.get_rank() == 0 else None


def peak_bytes_of(model_dir: Path, shape: ModelShape, trainer: TrainerConfig) -> int:
    """Return the peak bytes of all tensors while a learner is built and takes two steps of full micro-batches."""
    batches, _, _ = rl_batches(Case(shape=shape, trainer=trainer, num_microbatches=2, median_tokens=trainer.row_tokens // 3))

    def train() -> None:
        learner = Learner(build_model(open_model(model_dir), trainer, DEVICES["cpu"]), AlgorithmConfig(), temperature=1.0)
        for _ in range(2):
            for batch in batches:
                learner.forward_backward(batch)
            learner.optim_step(ADAM)

    return peak_bytes(train, torch.device("cpu"))
