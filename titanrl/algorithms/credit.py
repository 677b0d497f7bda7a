"""Credit assignment to turns and tokens: discounted returns, advantages per turn or token, and user-defined advantages.

Shape suffixes: N rollouts, M segments, T runs of tokens of all segments, G rollouts of a group, L tokens of the longest rollout
in the group. Everything is in the order of `RecordTable`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np

from titanrl.algorithms.advantages import Unit, checked_advantages, group_advantages, standardized
from titanrl.algorithms.contracts import GroupRewards
from titanrl.carriers.tables import SPAN, DoubleArray, RecordTable, Spans
from titanrl.carriers.types import IntArray
from titanrl.config.algorithm import ADVANTAGES


def discounted_returns(rewards: Sequence[float], discount: float) -> tuple[float, ...]:
    """Return the discounted return (reward-to-go) of each turn or token of a rollout: G_k = r_k + discount * G_(k + 1)."""
    returns = list(accumulate(reversed(rewards), lambda later, reward: reward + discount * later))
    return tuple(reversed(returns))


def returns_differ(turn_rewards: Sequence[Sequence[float]], discount: float) -> bool:
    """Return True if, for some k, the returns of the k-th turns differ among the rollouts that have a k-th turn."""
    returns = [discounted_returns(rewards, discount) for rewards in turn_rewards]
    return any(len(set(values)) > 1 for values in by_turn(returns))


def by_turn(values: Sequence[Sequence[float]]) -> list[list[float]]:
    """Convert values by rollout to values by turn; the k-th list covers all rollouts that have a k-th turn."""
    longest = max(map(len, values), default=0)
    return [[rollout[k] for rollout in values if k < len(rollout)] for k in range(longest)]


def turn_advantages(
    groups: Sequence[GroupRewards], method: str, *, discount: float = 1.0, std_ddof: int = 0
) -> list[list[list[float]]]:
    """Return the advantage of each turn, by group and rollout.

    For each k, the estimator is applied to the returns of the k-th turns of a group, over the rollouts that have a k-th turn.
    If only one rollout has a k-th turn, estimators with a baseline give it advantage 0. The REINFORCE++ estimators standardize
    over the tokens of the batch, as for rollout advantages.

    Raises:
        ValueError: See `group_advantages`.
    """
    advantages = []
    for group in groups:
        returns = [discounted_returns(rewards, discount) for rewards in group.turn_rewards]
        by_k = [iter(group_advantages(values, method, std_ddof=std_ddof)) for values in by_turn(returns)]
        advantages.append([[next(by_k[k]) for k in range(len(rollout))] for rollout in returns])
    traits = ADVANTAGES[method].traits
    if not traits.is_standardized:
        return advantages
    values = [list(chain.from_iterable(group)) for group in advantages]
    counts = [list(chain.from_iterable(group.turn_tokens)) for group in groups]
    flat = iter(chain.from_iterable(standardized(values, counts, keeps_zero_groups=not traits.keeps_equal_rewards)))
    return [[[next(flat) for _ in rollout] for rollout in group] for group in advantages]


def token_advantages(records: RecordTable, method: str, *, discount: float = 1.0, std_ddof: int = 0) -> DoubleArray:
    """Return the advantages of all loss tokens, concatenated over rollouts, `[T]`.

    For each t, the estimator is applied to the returns of the t-th tokens of a group. A rollout with fewer tokens is
    represented by the return of its last token. With a reward only at the last token and discount 1, each token thus has the
    advantage of its rollout. The REINFORCE++ estimators standardize over the tokens of the batch.

    Raises:
        ValueError: See `group_advantages`.
    """
    values: list[list[float]] = []  # of all tokens, by group
    for returns_GL, num_tokens_G in _token_returns(records, discount):
        by_returns: dict[tuple[float, ...], tuple[float, ...]] = {}  # without a discount, most tokens have equal returns
        columns = list(map(tuple, returns_GL.T.tolist()))
        for column in columns:
            if column not in by_returns:
                by_returns[column] = group_advantages(column, method, std_ddof=std_ddof)
        advantages_LG = np.array([by_returns[column] for column in columns]).reshape(-1, len(num_tokens_G))  # L may be 0
        tokens = [advantages_LG[:num_tokens, i].tolist() for i, num_tokens in enumerate(num_tokens_G)]
        values.append(list(chain.from_iterable(tokens)))
    traits = ADVANTAGES[method].traits
    by_group: Sequence[Sequence[float]] = values
    if traits.is_standardized:
        counts = [[1] * len(group) for group in values]
        by_group = standardized(values, counts, keeps_zero_groups=not traits.keeps_equal_rewards)
    return np.fromiter(chain.from_iterable(by_group), np.float64)


def token_returns_differ(records: RecordTable, discount: float) -> bool:
    """Return True if, for some t, the returns of the t-th tokens of a group differ."""
    return any(bool((returns_GL != returns_GL[:1]).any()) for returns_GL, _ in _token_returns(records, discount))


def _token_returns(records: RecordTable, discount: float) -> Iterator[tuple[DoubleArray, list[int]]]:
    """Yield the token returns of each group, `[G, L]`, and the number of loss tokens of each of its rollouts.

    Rows are padded with the return of the rollout's last token, or with the rollout's reward if it has no loss tokens.
    """
    num_tokens_N = records.num_sampled_by_rollout
    rewards_T = records.tokens.by_token(num_tokens_N)
    by_rollout = np.split(rewards_T, np.cumsum(num_tokens_N)[:-1])
    for start, count in zip(records.starts.tolist(), records.groups["num_rollouts"].tolist(), strict=True):
        num_tokens = num_tokens_N[start : start + count].tolist()
        returns_GL = np.zeros((count, max(num_tokens, default=0)))
        for i, num in enumerate(num_tokens):
            returns = discounted_returns(by_rollout[start + i].tolist(), discount)
            returns_GL[i, :num] = returns
            returns_GL[i, num:] = returns[-1] if returns else records.rewards[start + i]
        yield returns_GL, num_tokens


def custom_advantages(
    advantage: Callable[[GroupRewards], Iterable[Any]], groups: Sequence[GroupRewards], name: str, records: RecordTable
) -> tuple[DoubleArray, Spans | None]:
    """Call a user-defined advantage for each group.

    Returns:
        The advantage of each rollout, `[N]`, and the token advantages if any group has advantages per turn or token.

    Raises:
        ValueError: The function raised, or its result does not follow `contracts.Advantage`.
    """
    returned = [checked_advantages(advantage, group, name) for group in groups]
    if all(unit == "rollout" for unit, _ in returned):
        return np.fromiter(chain.from_iterable(chain.from_iterable(v) for _, v in returned), np.float64), None
    values = [_by_token(unit, by_unit, group) for (unit, by_unit), group in zip(returned, groups, strict=True)]
    flat_T = np.fromiter(chain.from_iterable(chain.from_iterable(group) for group in values), np.float64)
    return spans_of(flat_T, np.ones(len(flat_T), np.int64), records.num_sampled, records)


def _by_token(unit: Unit, values: Sequence[Sequence[float]], group: GroupRewards) -> list[list[float]]:
    """Expand the advantages of a group's rollouts or turns to one per token."""
    match unit:
        case "token":
            return [list(rollout) for rollout in values]
        case "turn":
            return [np.repeat(turns, counts).tolist() for turns, counts in zip(values, group.turn_tokens, strict=True)]
        case "rollout":
            return [list(rollout) * count for rollout, count in zip(values, group.num_tokens, strict=True)]


def spans_of(
    values_T: DoubleArray, counts_T: IntArray, num_values_M: IntArray, records: RecordTable
) -> tuple[DoubleArray, Spans]:
    """Return the mean advantage of each rollout over its loss tokens, `[N]`, and the token advantages as spans.

    Args:
        values_T: Advantage of each run of consecutive tokens, concatenated over segments.
        counts_T: Number of loss tokens in each run.
        num_values_M: Number of runs in each segment.
        records: Groups of the segments.
    """
    num_tokens_N = records.num_sampled_by_rollout
    segment_of_T = np.repeat(np.arange(len(num_values_M)), num_values_M)
    sums_N = np.bincount(records.rollout_of[segment_of_T], values_T * counts_T, len(num_tokens_N))
    means_N = np.divide(sums_N, num_tokens_N, out=np.zeros(len(num_tokens_N)), where=num_tokens_N > 0)
    return means_N, _spans(values_T, counts_T, segment_of_T, len(num_values_M))


def _spans(values_T: DoubleArray, counts_T: IntArray, segment_of_T: IntArray, num_segments: int) -> Spans:
    """Merge adjacent runs of a segment that have equal advantages, and drop runs without tokens."""
    has_tokens = counts_T > 0
    values_T, counts_T, segment_of_T = values_T[has_tokens], counts_T[has_tokens], segment_of_T[has_tokens]
    begins = np.ones(len(values_T), np.bool_)
    begins[1:] = (np.diff(segment_of_T) != 0) | (values_T[1:] != values_T[:-1])
    starts = np.flatnonzero(begins)
    table = np.zeros(len(starts), SPAN)
    table["advantage"] = values_T[starts]
    if len(starts):
        table["num_tokens"] = np.add.reduceat(counts_T, starts)
    return Spans(table=table, num_spans=np.bincount(segment_of_T[starts], minlength=num_segments).astype(np.int64))
