"""The parts together: plan, log-probabilities, loss and weights of a toy policy, against loops over the whole batch."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from titanrl.algorithms.logprobs import logprobs_and_entropy
from titanrl.algorithms.losses import ppo_clip, weighted_sum
from titanrl.algorithms.planning import plan_batch
from titanrl.config.sections import AlgorithmConfig
from titanrl.types import BatchPlan, GroupRecord, Row

VOCAB_SIZE, PROMPT_LEN, GROUP_SIZE = 11, 2, 4
REDUCTIONS = ("sum", "token_mean", "sequence_mean", "sequence_mean_token_sum", "prompt_mean", "constant")
Payload = dict[tuple[int, int], tuple[list[int], list[float]]]
"""Tokens and the generator's log-probability of each sampled one, by group and rollout."""
Batch = tuple[list[GroupRecord], Payload]
RecordMaker = Callable[..., GroupRecord]


@pytest.fixture(scope="module")
def table() -> Tensor:
    """The policy: logits of the next token, by the token before it."""
    return torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def batch(make_record: RecordMaker, table: Tensor) -> Batch:
    """Six groups, one of them without signal; the generator is a little off the policy."""
    rng = random.Random(0)
    records, payload = [], {}
    for index in range(6):
        counts = [rng.randint(1, 20) for _ in range(GROUP_SIZE)]
        rewards = [1.0] * GROUP_SIZE if index == 2 else [1.0, 0.0, rng.random(), rng.random()]
        records.append(make_record(index, rewards, counts, prompt_len=PROMPT_LEN, has_payload=index != 2))
        for rollout, count in enumerate(counts):
            tokens = [rng.randrange(VOCAB_SIZE) for _ in range(PROMPT_LEN + count)]
            logprobs = table.log_softmax(-1)[tokens[PROMPT_LEN - 1 : -1], tokens[PROMPT_LEN:]].tolist()
            payload[index, rollout] = tokens, [logprob + rng.gauss(0, 0.2) for logprob in logprobs]
    return records, payload


def row_objective(row: Row, payload: Payload, table: Tensor) -> Tensor:
    """What one packed row adds to the objective."""
    before, labels, old, advantages, weights, mask = [], [], [], [], [], []
    for sequence in row:
        tokens, logprobs = payload[sequence.handle.slot, sequence.rollout]
        num_places = len(tokens) - 1
        before += tokens[:-1]
        labels += tokens[1:]
        old += [0.0] * (PROMPT_LEN - 1) + logprobs
        mask += [False] * (PROMPT_LEN - 1) + [True] * len(logprobs)
        advantages += [sequence.advantage] * num_places
        weights += [sequence.weight] * num_places
    logprobs_N, _ = logprobs_and_entropy(table[before], torch.tensor(labels))
    mask_N = torch.tensor(mask)
    loss_N, _ = ppo_clip(logprobs_N, torch.tensor(old), torch.tensor(advantages), clip_low=0.2, clip_high=0.2, mask=mask_N)
    return weighted_sum(loss_N, torch.tensor(weights), mask=mask_N)


def gradient(plan: BatchPlan, payload: Payload, table: Tensor) -> Tensor:
    """Gradients of all micro-batches and ranks, added up."""
    table = table.clone().requires_grad_()
    for microbatch in plan.microbatches:
        for rank in microbatch.rows:
            for row in rank:
                row_objective(row, payload, table).backward()
    return table.grad


def reference_gradient(records: list[GroupRecord], payload: Payload, table: Tensor, reduction: str) -> Tensor:
    """The objective by its definition, in fp64, over every token of every group, with or without signal."""
    table = table.double().requires_grad_()
    sequences = []
    for record in records:
        for rollout in range(GROUP_SIZE):
            tokens, old = payload[record.index % 6, rollout]
            advantage = record.rewards[rollout] - sum(record.rewards) / GROUP_SIZE
            ratios = [
                (table[tokens[t - 1]].log_softmax(-1)[tokens[t]] - old[t - PROMPT_LEN]).exp()
                for t in range(PROMPT_LEN, len(tokens))
            ]
            losses = [-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) for ratio in ratios]
            sequences.append((record.index, losses))
    token_sums = [sum(losses) for _, losses in sequences]
    prompts = {prompt for prompt, _ in sequences}
    match reduction:
        case "sum":
            objective = sum(token_sums)
        case "token_mean":
            objective = sum(token_sums) / sum(len(losses) for _, losses in sequences)
        case "sequence_mean":
            objective = sum(sum(losses) / len(losses) for _, losses in sequences) / len(sequences)
        case "sequence_mean_token_sum":
            objective = sum(token_sums) / len(sequences)
        case "constant":
            objective = sum(token_sums) / 26 / len(sequences)
        case "prompt_mean":
            of_prompt = [[loss for owner, losses in sequences if owner == prompt for loss in losses] for prompt in prompts]
            objective = sum(sum(losses) / len(losses) for losses in of_prompt) / len(prompts)
    objective.backward()
    return table.grad.float()


def plan(
    records: list[GroupRecord], reduction: str = "token_mean", *, row_tokens=50, rows_per_microbatch=2, dp_size=1
) -> BatchPlan:
    return plan_batch(
        records,
        algorithm=AlgorithmConfig(reduction=reduction),
        constant_length=26,
        row_tokens=row_tokens,
        rows_per_microbatch=rows_per_microbatch,
        dp_size=dp_size,
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradient_is_that_of_the_definition(batch: Batch, table: Tensor, reduction: str) -> None:
    records, payload = batch
    expected = reference_gradient(records, payload, table, reduction)
    torch.testing.assert_close(
        gradient(plan(records, reduction), payload, table), expected, atol=1e-6 * expected.abs().max(), rtol=0
    )


@pytest.mark.parametrize("row_tokens", [22, 50, 400])
@pytest.mark.parametrize(("rows_per_microbatch", "dp_size"), [(1, 1), (2, 1), (8, 1), (1, 2), (4, 2), (1, 4), (8, 4)])
def test_gradient_does_not_depend_on_rows_micro_batches_or_ranks(
    batch: Batch, table: Tensor, row_tokens: int, rows_per_microbatch: int, dp_size: int
) -> None:
    records, payload = batch
    one_by_one = gradient(plan(records), payload, table)
    layout = plan(records, row_tokens=row_tokens, rows_per_microbatch=rows_per_microbatch, dp_size=dp_size)
    torch.testing.assert_close(gradient(layout, payload, table), one_by_one, atol=1e-7, rtol=0)


def test_order_of_groups_changes_no_bit_of_the_gradient(batch: Batch, table: Tensor) -> None:
    records, payload = batch
    assert torch.equal(gradient(plan(records[::-1]), payload, table), gradient(plan(records), payload, table))


@pytest.mark.parametrize(("reduction", "factor"), [("token_mean", 1), ("sequence_mean", 1), ("prompt_mean", 1), ("sum", 2)])
def test_a_batch_given_twice_changes_only_the_gradient_of_the_sum(
    batch: Batch, make_record: RecordMaker, table: Tensor, reduction: str, factor: int
) -> None:
    records, payload = batch
    again = [
        make_record(r.index + 6, r.rewards, r.num_sampled, prompt_len=PROMPT_LEN, has_payload=r.has_payload) for r in records
    ]
    twice = payload | {(index + 6, rollout): value for (index, rollout), value in payload.items()}
    once = gradient(plan(records, reduction), payload, table)
    torch.testing.assert_close(gradient(plan(records + again, reduction), twice, table), factor * once, atol=1e-6, rtol=1e-5)
