"""Credit for the turns and tokens of a rollout: discounted returns, advantages per turn and token, and those of the user.

Shape suffixes: N rollouts, M segments, T runs of tokens of all segments, G rollouts of a group, L tokens of its longest one.
The order is that of `RecordTable`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np

from titanrl.algorithms.advantages import Unit, checked_advantages, group_advantages, standardized
from titanrl.algorithms.contracts import GroupRewards
from titanrl.config.registry import ADVANTAGES
from titanrl.tables import SPAN, DoubleArray, RecordTable, Spans
from titanrl.types import IntArray


def discounted_returns(rewards: Sequence[float], discount: float) -> tuple[float, ...]:
    """Return the discounted return of each turn or token of a rollout: G_k = r_k + discount * G_(k + 1)."""
    returns = list(accumulate(reversed(rewards), lambda later, reward: reward + discount * later))
    return tuple(reversed(returns))


def returns_differ(turn_rewards: Sequence[Sequence[float]], discount: float) -> bool:
    """Return True if the returns of any turn differ among the rollouts that have it."""
    returns = [discounted_returns(rewards, discount) for rewards in turn_rewards]
    return any(len(set(values)) > 1 for values in by_turn(returns))


def by_turn(values: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the values of the first turns of all rollouts, of their second turns, and so on."""
    longest = max(map(len, values), default=0)
    return [[own[k] for own in values if k < len(own)] for k in range(longest)]


def turn_advantages(
    groups: Sequence[GroupRewards], method: str, *, discount: float = 1.0, std_ddof: int = 0
) -> list[list[list[float]]]:
    """Return the advantage of each turn, by group and rollout.

    The returns of the k-th turns of a group are compared by the method, among the rollouts that have so many turns. A turn that
    only one rollout has is compared with nothing, so the methods with a baseline give it 0. The REINFORCE++ methods standardize
    over the tokens of the batch, as they do for rollouts.

    Raises:
        ValueError: See `group_advantages`.
    """
    advantages = []
    for group in groups:
        returns = [discounted_returns(rewards, discount) for rewards in group.turn_rewards]
        compared = [iter(group_advantages(values, method, std_ddof=std_ddof)) for values in by_turn(returns)]
        advantages.append([[next(compared[k]) for k in range(len(own))] for own in returns])
    if not ADVANTAGES[method].traits.is_standardized:
        return advantages
    values = [list(chain.from_iterable(group)) for group in advantages]
    counts = [list(chain.from_iterable(group.turn_tokens)) for group in groups]
    flat = iter(chain.from_iterable(standardized(values, counts)))
    return [[[next(flat) for _ in own] for own in group] for group in advantages]


def token_advantages(records: RecordTable, method: str, *, discount: float = 1.0, std_ddof: int = 0) -> DoubleArray:
    """Return the advantage of each token that counts in the loss, one rollout after another, `[T]`.

    The returns of the t-th tokens of a group are compared by the method. A rollout with fewer tokens enters with the return of
    its last one, so with rewards at the ends only and no discount all tokens have the advantage of their rollout. The
    REINFORCE++ methods standardize over the tokens of the batch.

    Raises:
        ValueError: See `group_advantages`.
    """
    values: list[DoubleArray] = []
    for returns_GL, num_tokens_G in _token_returns(records, discount):
        compared: dict[tuple[float, ...], tuple[float, ...]] = {}  # without a discount, most tokens have equal returns
        columns = list(map(tuple, returns_GL.T.tolist()))
        for column in columns:
            if column not in compared:
                compared[column] = group_advantages(column, method, std_ddof=std_ddof)
        advantages_LG = np.array([compared[column] for column in columns])
        values += [advantages_LG[:num_tokens, place] for place, num_tokens in enumerate(num_tokens_G)]
    if ADVANTAGES[method].traits.is_standardized:
        by_rollout = [own.tolist() for own in values]
        return np.fromiter(chain.from_iterable(standardized(by_rollout, [[1] * len(own) for own in values])), np.float64)
    return np.concatenate(values) if values else np.zeros(0)


def token_returns_differ(records: RecordTable, discount: float) -> bool:
    """Return True if the returns of any token differ in a group."""
    return any(bool((returns_GL != returns_GL[:1]).any()) for returns_GL, _ in _token_returns(records, discount))


def _token_returns(records: RecordTable, discount: float) -> Iterator[tuple[DoubleArray, list[int]]]:
    """Yield the returns of the tokens of each group, `[G, L]`, and the number of tokens of each rollout.

    Behind the last token of a rollout its return is repeated; a rollout without a token has its reward.
    """
    num_tokens_N = records.num_sampled_by_rollout
    rewards_T = records.tokens.by_token(num_tokens_N)
    by_rollout = np.split(rewards_T, np.cumsum(num_tokens_N)[:-1])
    for start, count in zip(records.starts.tolist(), records.groups["num_rollouts"].tolist(), strict=True):
        num_tokens = num_tokens_N[start : start + count].tolist()
        returns_GL = np.zeros((count, max(num_tokens, default=0)))
        for place, num in enumerate(num_tokens):
            own = discounted_returns(by_rollout[start + place].tolist(), discount)
            returns_GL[place, :num] = own
            returns_GL[place, num:] = own[-1] if own else records.rewards[start + place]
        yield returns_GL, num_tokens


def own_advantages(
    advantage: Callable[[GroupRewards], Iterable[Any]], groups: Sequence[GroupRewards], name: str, records: RecordTable
) -> tuple[DoubleArray, Spans | None]:
    """Call an advantage of the user for each group; return the advantage of each rollout, and of its tokens if they differ.

    Raises:
        ValueError: The function raised, or returned something else than `contracts.Advantage` allows.
    """
    returned = [checked_advantages(advantage, group, name) for group in groups]
    if all(unit == "rollout" for unit, _ in returned):
        return np.fromiter(chain.from_iterable(chain.from_iterable(v) for _, v in returned), np.float64), None
    values = [_by_token(unit, own, group) for (unit, own), group in zip(returned, groups, strict=True)]
    flat_T = np.fromiter(chain.from_iterable(chain.from_iterable(group) for group in values), np.float64)
    return spans_of(flat_T, np.ones(len(flat_T), np.int64), records.num_sampled, records)


def _by_token(unit: Unit, values: Sequence[Sequence[float]], group: GroupRewards) -> list[list[float]]:
    """Return the advantages of a group per token."""
    match unit:
        case "token":
            return [list(own) for own in values]
        case "turn":
            return [np.repeat(own, counts).tolist() for own, counts in zip(values, group.turn_tokens, strict=True)]
        case "rollout":
            return [list(own) * count for own, count in zip(values, group.num_tokens, strict=True)]


def spans_of(
    values_T: DoubleArray, counts_T: IntArray, num_values_M: IntArray, records: RecordTable
) -> tuple[DoubleArray, Spans]:
    """Return the mean advantage of each rollout over its tokens, `[N]`, and the advantages of the tokens.

    Args:
        values_T: Advantages of runs of tokens, those of one segment after another.
        counts_T: Tokens of each run that count in the loss.
        num_values_M: Runs of each segment.
        records: Groups of the segments.
    """
    num_tokens_N = records.num_sampled_by_rollout
    segment_of_T = np.repeat(np.arange(len(num_values_M)), num_values_M)
    sums_N = np.bincount(records.rollout_of[segment_of_T], values_T * counts_T, len(num_tokens_N))
    means_N = np.divide(sums_N, num_tokens_N, out=np.zeros(len(num_tokens_N)), where=num_tokens_N > 0)
    return means_N, _spans(values_T, counts_T, segment_of_T, len(num_values_M))


def _spans(values_T: DoubleArray, counts_T: IntArray, segment_of_T: IntArray, num_segments: int) -> Spans:
    """Join runs of the same segment and advantage, and leave out those without tokens."""
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
