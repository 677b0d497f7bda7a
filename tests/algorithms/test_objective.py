"""Gradient of a toy policy through plan, log-probabilities, loss and weights, compared with loops over the complete batch."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.records import plan_rewards
from titanrl.algorithms.logprobs import logprobs_and_entropy
from titanrl.algorithms.objective import ObjectiveInputs, lag_metrics, policy_loss
from titanrl.carriers.tables import BatchPlan, RecordTable, Row
from titanrl.carriers.types import GroupRecord, LossSums
from titanrl.config.algorithm import AlgorithmConfig
from titanrl.metrics.steps import loss_metrics, staleness_metrics

VOCAB_SIZE, PROMPT_LEN, GROUP_SIZE = 11, 2, 4
REDUCTIONS = ("sum", "token_mean", "sequence_mean", "sequence_mean_token_sum", "prompt_mean", "constant")
Payload = dict[tuple[int, int], tuple[list[int], list[float]]]
"""Token ids and the generator's log-probabilities of the sampled tokens, by group and rollout."""
Batch = tuple[list[GroupRecord], Payload]
RecordMaker = Callable[..., GroupRecord]
ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "ppo, divergence, entropy": {"kl": {"coef": 0.1, "estimator": "k3"}, "entropy_coef": 0.05},
    "gspo": {"loss": "gspo", "clip_low": 0.02, "clip_high": 0.02},
    "decoupled, sequence weights and rejection": {
        "proximal": "step_start",
        "correction": {"weight": "sequence", "max_prox_over_behavior": 1.5, "reject_geometric_prox_over_behavior": (0.9, 1.1)},
        "kl": {"coef": 0.1},
        "entropy_coef": 0.05,
    },
    "divergence in the reward": {"loss": "cispo", "kl": {"coef": 0.1, "estimator": "k1", "place": "reward"}},
}


@pytest.fixture(scope="module")
def table() -> Tensor:
    """The policy: logits of the next token for each previous token."""
    return torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def batch(make_record: RecordMaker, table: Tensor) -> Batch:
    """Six groups, one without signal; the generator's log-probabilities differ slightly from the policy's."""
    rng = random.Random(0)
    records, payload = [], {}
    for index in range(6):
        counts = [rng.randint(1, 20) for _ in range(GROUP_SIZE)]
        rewards = [1.0] * GROUP_SIZE if index == 2 else [1.0, 0.0, rng.random(), rng.random()]
        records.append(make_record(index, rewards, counts, prompt_len=PROMPT_LEN))
        for rollout, count in enumerate(counts):
            tokens = [rng.randrange(VOCAB_SIZE) for _ in range(PROMPT_LEN + count)]
            logprobs = table.log_softmax(-1)[tokens[PROMPT_LEN - 1 : -1], tokens[PROMPT_LEN:]].tolist()
            payload[index, rollout] = tokens, [logprob + rng.gauss(0, 0.2) for logprob in logprobs]
    return records, payload


@pytest.fixture(scope="module")
def reference_table(table: Tensor) -> Tensor:
    """The reference policy."""
    return table + 0.3 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))


def rows_objective(
    rows: Sequence[Row], payload: Payload, table: Tensor, reference: Tensor, algorithm: AlgorithmConfig
) -> Tensor:
    """Compute one rank's share of the objective on one micro-batch."""
    before, labels, old, advantages, weights, mask, ids = [], [], [], [], [], [], []
    for number, sequence in enumerate(sequence for row in rows for sequence in row):
        tokens, logprobs = payload[sequence.handle.location, sequence.segment]
        num_places = len(tokens) - 1
        before += tokens[:-1]
        labels += tokens[1:]
        old += [0.0] * (PROMPT_LEN - 1) + logprobs
        mask += [False] * (PROMPT_LEN - 1) + [True] * len(logprobs)
        advantages += [sequence.advantage] * num_places
        weights += [sequence.weight] * num_places
        ids += [number] * num_places
    logprobs_N, entropy_N = logprobs_and_entropy(table[before], torch.tensor(labels))
    reference_N, _ = logprobs_and_entropy(reference[before], torch.tensor(labels))
    inputs = ObjectiveInputs(
        logprobs_N=logprobs_N,
        generator_logprobs_N=torch.tensor(old),
        proximal_logprobs_N=None,
        reference_logprobs_N=reference_N,
        entropy_N=entropy_N,
        advantages_N=torch.tensor(advantages),
        weights_N=torch.tensor(weights),
        mask_N=torch.tensor(mask),
        sequence_N=torch.tensor(ids),
    )
    return policy_loss(inputs, algorithm)[0]


def gradient(plan: BatchPlan, payload: Payload, table: Tensor, reference: Tensor, name: str = "ppo") -> Tensor:
    """Sum the gradients of all micro-batches and ranks."""
    table = table.clone().requires_grad_()
    for microbatch in plan.microbatches:
        for rank in filter(None, microbatch.rows):
            rows_objective(rank, payload, table, reference, AlgorithmConfig(**ALGORITHMS[name])).backward()
    return table.grad


def reference_gradient(
    records: list[GroupRecord], payload: Payload, table: Tensor, reference: Tensor, reduction: str, *, more_terms: bool
) -> Tensor:
    """Compute the gradient of the objective's definition, in fp64, over all tokens of all groups."""
    table = table.double().requires_grad_()
    logp, reference_logp = table.log_softmax(-1), reference.double().log_softmax(-1)
    sequences = []
    for record in records:
        for rollout in range(GROUP_SIZE):
            tokens, old = payload[record.index % 6, rollout]
            advantage = record.rewards[rollout] - sum(record.rewards) / GROUP_SIZE
            losses = []
            for t in range(PROMPT_LEN, len(tokens)):
                now, ref = logp[tokens[t - 1], tokens[t]], reference_logp[tokens[t - 1], tokens[t]]
                ratio = (now - old[t - PROMPT_LEN]).exp()
                loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                if more_terms:
                    entropy = -(logp[tokens[t - 1]].exp() * logp[tokens[t - 1]]).sum()
                    loss = loss + 0.1 * ratio.detach() * ((ref - now).exp() - 1 + now - ref) - 0.05 * entropy
                losses.append(loss)
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
    records: list[GroupRecord],
    reduction: str = "token_mean",
    name: str = "ppo",
    *,
    row_tokens: int = 50,
    rows_per_microbatch: int = 2,
    dp_size: int = 1,
) -> BatchPlan:
    return plan_rewards(
        RecordTable.of(records),
        algorithm=AlgorithmConfig(reduction=reduction, **ALGORITHMS[name]),
        constant_length=26,
        row_tokens=row_tokens,
        rows_per_microbatch=rows_per_microbatch,
        dp_size=dp_size,
    )


@pytest.mark.parametrize("name", ["ppo", "ppo, divergence, entropy"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradient_matches_definition(batch: Batch, table: Tensor, reference_table: Tensor, reduction: str, name: str) -> None:
    records, payload = batch
    expected = reference_gradient(records, payload, table, reference_table, reduction, more_terms=name != "ppo")
    torch.testing.assert_close(
        gradient(plan(records, reduction, name), payload, table, reference_table, name),
        expected,
        atol=1e-6 * expected.abs().max(),
        rtol=0,
    )


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("row_tokens", [22, 50, 400])
@pytest.mark.parametrize(("rows_per_microbatch", "dp_size"), [(1, 1), (2, 1), (8, 1), (1, 2), (4, 2), (1, 4), (8, 4)])
def test_gradient_does_not_depend_on_rows_micro_batches_or_ranks(
    batch: Batch, table: Tensor, reference_table: Tensor, name: str, row_tokens: int, rows_per_microbatch: int, dp_size: int
) -> None:
    records, payload = batch
    one_by_one = gradient(plan(records, name=name), payload, table, reference_table, name)
    layout = plan(records, name=name, row_tokens=row_tokens, rows_per_microbatch=rows_per_microbatch, dp_size=dp_size)
    torch.testing.assert_close(gradient(layout, payload, table, reference_table, name), one_by_one, atol=2e-7, rtol=0)


def sums_and_maxima() -> LossSums:
    logprobs = torch.tensor([-1.0, -1.0, -2.0, -3.0, -1.0, -9.0], requires_grad=True)
    generator = torch.tensor([-1.1, -1.0, -2.5, -4.0, -1.3, 0.0])
    lags = torch.tensor([0, 0, 1, 7, 4, 1])
    mask = torch.tensor([True, True, True, True, True, False])
    sums, maxima = lag_metrics(logprobs, generator, lags, mask)
    return LossSums(
        sums={name: value.item() for name, value in sums.items()},
        maxima={name: value.item() for name, value in maxima.items()},
    )


def test_differences_of_unmasked_tokens_are_summed_by_lag() -> None:
    losses = sums_and_maxima()
    assert [losses.sums[f"lag/{age}"] for age in range(5)] == [2, 1, 0, 0, 2]
    assert [losses.sums[f"lag/{age}/logprob_abs"] for age in range(5)] == pytest.approx([0.1, 0.5, 0.0, 0.0, 1.3])


def test_mismatch_is_split_into_numerics_and_staleness() -> None:
    values = staleness_metrics(sums_and_maxima())
    assert values["staleness/lag_0_frac"] == pytest.approx(0.4)
    assert values["mismatch/numeric/logprob_abs_mean"] == pytest.approx(0.05)
    assert values["mismatch/numeric/logprob_abs_max"] == pytest.approx(0.1)
    assert values["mismatch/stale/logprob_abs_mean"] == pytest.approx(0.6)
    assert values["mismatch/stale/logprob_abs_max"] == pytest.approx(1.0)
    assert values["mismatch/stale/logprob_abs_mean_lag_4"] == pytest.approx(0.65)
    assert "mismatch/stale/logprob_abs_mean_lag_2" not in values


@pytest.mark.parametrize(("lag", "kind", "other"), [(0, "numeric", "stale"), (1, "stale", "numeric")])
def test_batch_of_one_lag_has_no_metrics_of_the_other(lag: int, kind: str, other: str) -> None:
    sums = {"lag/0": 0.0, "lag/0/logprob_abs": 0.0, "lag/1": 0.0, "lag/1/logprob_abs": 0.0}
    sums |= {f"lag/{lag}": 4.0, f"lag/{lag}/logprob_abs": 0.4}
    losses = LossSums(sums={**sums, "num_tokens": 4.0}, maxima={"lag/0/logprob_abs": 0.2, "lag/stale/logprob_abs": 0.2})
    values = staleness_metrics(losses)
    assert values[f"mismatch/{kind}/logprob_abs_mean"] == pytest.approx(0.1)
    assert values[f"mismatch/{kind}/logprob_abs_max"] == pytest.approx(0.2)
    assert not any(name.startswith(f"mismatch/{other}") for name in values)
    assert loss_metrics(losses) == {}
