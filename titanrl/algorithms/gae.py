"""Advantages from the values of a critic: generalized advantage estimation (GAE, arXiv:1506.02438) over tokens and turns.

The value of a token is the critic's prediction of the return from this token on, made before the token is known.

Shape suffixes: N rollouts, M segments, S sequences, T loss tokens of all segments.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from titanrl.algorithms.advantages import EPS
from titanrl.carriers.tables import CRITIC_SPAN, MicroBatch, RecordTable, Spans, ranges
from titanrl.carriers.types import BoolArray, DoubleArray, FloatArray, IntArray, RankValues
from titanrl.config.algorithm import AlgorithmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenValues:
    """Values of the loss tokens of many groups, all predicted by the same weights of the critic."""

    values_T: FloatArray
    """Value of each loss token, in the order of the segments, `[T]`."""
    last_N: FloatArray
    """Value after the last token of each rollout, `[N]`."""


def collect_values(
    records: RecordTable, microbatches: Iterable[MicroBatch], replies: Iterable[Sequence[RankValues]]
) -> TokenValues:
    """Put the values that the ranks computed into the order of the records. Tokens that no rank had keep the value 0.

    `replies` has, for each pass over rows, the values of every data-parallel rank.
    """
    group_of = {handle: group for group, handle in enumerate(records.handles.tolist())}
    starts_M = np.cumsum(records.num_sampled) - records.num_sampled
    values_T, last_M = np.zeros(int(records.num_sampled.sum()), np.float32), np.zeros(len(records.lengths), np.float32)
    for microbatch, ranks in zip(microbatches, replies, strict=True):
        for rank in ranks:
            sequences = microbatch.rows[rank.dp_rank].sequences
            groups_S = np.array([group_of[handle] for handle in sequences["handle"].tolist()], np.int64)
            segments_S = records.segment_starts[records.starts[groups_S]] + sequences["segment"]
            values_T[ranges(starts_M[segments_S], records.num_sampled[segments_S])] = rank.values
            last_M[segments_S] = rank.last
    last_N = np.zeros(len(records.rewards), np.float32)
    has_tokens_M = records.num_sampled > 0
    last_N[records.rollout_of[has_tokens_M]] = last_M[has_tokens_M]  # of a rollout's segments, the last one remains
    return TokenValues(values_T=values_T, last_N=last_N)


def critic_advantages(records: RecordTable, values: TokenValues, algorithm: AlgorithmConfig) -> tuple[DoubleArray, Spans]:
    """Return the mean advantage of each rollout, `[N]`, and the advantage, value and target of each token as spans.

    The target of the critic is the advantage before standardization, plus the value. Raise `ValueError` if a value is not
    finite.
    """
    critic, num_tokens_N = algorithm.critic, records.num_sampled_by_rollout
    values_T, last_N = values.values_T.astype(np.float64), values.last_N.astype(np.float64)
    if not (np.isfinite(values_T).all() and np.isfinite(last_N).all()):
        fix = "Lower algorithm.critic.learning_rate, or continue from an earlier checkpoint."
        raise ValueError(f"algorithm.critic: the values of the critic are not finite (got {values_T.sum()}). {fix}")
    is_turn_end_T = np.zeros(len(values_T), np.bool_)
    is_turn_end_T[np.cumsum(records.turns.num_sampled)[records.turns.num_sampled > 0] - 1] = True
    advantages_T = gae(
        records.tokens.by_token(num_tokens_N),
        values_T,
        num_tokens_N,
        np.where(records.is_truncated & critic.bootstrap_truncated, last_N, 0.0),
        is_turn_end_T,
        discounts=(algorithm.token_discount, algorithm.turn_discount),
        lambdas=(critic.token_lambda, critic.turn_lambda),
    )
    table = np.zeros(len(values_T), CRITIC_SPAN)
    table["value"], table["target"], table["num_tokens"] = values_T, advantages_T + values_T, 1
    if critic.standardize and len(values_T):
        deviations_T = advantages_T - advantages_T.mean()
        advantages_T = deviations_T / (np.sqrt(np.square(deviations_T).mean()) + EPS)
    table["advantage"] = advantages_T
    rollout_of_T = np.repeat(np.arange(len(num_tokens_N)), num_tokens_N)
    means_N = np.bincount(rollout_of_T, advantages_T, len(num_tokens_N)) / np.maximum(num_tokens_N, 1)
    return means_N, Spans(table=table, num_spans=records.num_sampled)


def gae(
    rewards_T: DoubleArray,
    values_T: DoubleArray,
    num_tokens_N: IntArray,
    after_N: DoubleArray,
    is_turn_end_T: BoolArray,
    *,
    discounts: tuple[float, float],
    lambdas: tuple[float, float],
) -> DoubleArray:
    """Return the advantage of each token, A_t = r_t + g V_(t+1) - V_t + g l A_(t+1), `[T]`. A is 0 after the last token.

    g and l are the discount and lambda for tokens, or those for turns if t is the last token of its turn; `discounts` and
    `lambdas` are these pairs. Tokens are in the order of the rollouts. `after_N` is the value after the last token of each
    rollout; 0 if the rollout ended there. Source: GAE (arXiv:1506.02438, equation 16), with g and l that depend on t.
    """
    discount_T, lambda_T = (np.where(is_turn_end_T, of_turn, of_token) for of_token, of_turn in (discounts, lambdas))
    ends_N = np.cumsum(num_tokens_N)
    next_T = np.append(values_T[1:], 0.0)[: len(values_T)]
    has_tokens_N = num_tokens_N > 0
    next_T[ends_N[has_tokens_N] - 1] = after_N[has_tokens_N]
    advantages_T: DoubleArray = rewards_T + discount_T * next_T - values_T
    # From the last token back, for all rollouts at a time: those with more than `back` tokens come first.
    order = np.argsort(-num_tokens_N, kind="stable")
    ends, lengths = ends_N[order], num_tokens_N[order]
    for back in range(1, int(num_tokens_N.max(initial=0))):
        tokens = ends[: np.count_nonzero(lengths > back)] - 1 - back
        advantages_T[tokens] += discount_T[tokens] * lambda_T[tokens] * advantages_T[tokens + 1]
    return advantages_T


def value_metrics(spans: Spans) -> dict[str, float]:
    """Return the means of values and targets over the tokens of a batch, and the explained variance of the targets.

    The explained variance is 1 - Var(target - value) / Var(target): 1 if the values are exact, 0 if they are constant. It is 0
    if the targets are equal.
    """
    values_T, targets_T = (spans.table[name].astype(np.float64) for name in ("value", "target"))
    if not len(values_T):
        return {}
    variance = float(targets_T.var())
    return {
        "critic/value_mean": float(values_T.mean()),
        "critic/return_mean": float(targets_T.mean()),
        "critic/explained_variance": 1.0 - float((targets_T - values_T).var()) / variance if variance else 0.0,
    }
