"""Advantage estimators: compare the reward of each completion, turn or token with a baseline from its group or from the batch.

An estimator is a function of `GroupRewards` that follows the protocol `contracts.Advantage`. To add a built-in estimator,
register it in `titanrl.config.algorithm.ADVANTAGES`.

Shape suffixes: G completions of one prompt, L tokens of the longest of them, N rollouts, M segments, T runs of tokens of all
segments, in the order of `RecordTable`. In the formulas, R_i is the reward of completion i; mean and std are over the group.
Sources: GRPO (arXiv:2402.03300), Dr. GRPO (arXiv:2503.20783), RLOO (arXiv:2402.14740), REINFORCE++ (arXiv:2501.03262),
pass@k training (arXiv:2508.10751), GDPO (arXiv:2601.05242), GiGPO (arXiv:2505.10978), MaxRL (maximum-likelihood RL) as
implemented by its authors and in SkyRL.
"""

import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, chain
from typing import Any, Literal, TypeVar

import numpy as np

from titanrl.algorithms.contracts import GroupRewards, advantage_arguments, option_names
from titanrl.base.plugins import Plugins, import_object, loaded
from titanrl.carriers.tables import SPAN, RecordTable, Spans
from titanrl.carriers.types import DoubleArray, IntArray
from titanrl.config.algorithm import ADVANTAGES, AlgorithmConfig
from titanrl.config.data import TaskConfig
from titanrl.config.schema import Config

T = TypeVar("T")

EPS = 1e-6
"""Constant added to each divisor of an advantage, for numerical stability."""

Unit = Literal["rollout", "turn", "token"]
"""Granularity of an advantage."""

HUGE = 2.0**120
"""Absolute reward from which rewards are scaled down first. Squares of smaller rewards are finite, and their advantages fit
float32."""

MAX_ADVANTAGE = 3.4e38
"""Largest absolute advantage. The trainer stores advantages in float32."""

WeightOf = Callable[[str, int], float]
"""Function that maps a reward component and a task index to the component's weight in the summed reward."""


@dataclass(frozen=True, slots=True)
class TaskAdvantage:
    """Advantage estimator of a task."""

    algorithm: AlgorithmConfig
    """Configuration with the name and options of the estimator."""
    custom: Callable[..., Sequence[Any]] | None = None
    """User-defined function; None selects the built-in estimator."""


def advantages_by_task(config: Config, plugins: Plugins) -> list[TaskAdvantage]:
    """Return the advantage estimator of each task, by task index; raise `ValueError` if one cannot be loaded."""
    chosen = []
    for name, task in config.data.tasks.items():
        key = "algorithm.advantage"
        if isinstance(task, TaskConfig) and task.advantage is not None:
            key = f"{task.key(name)}.advantage"
        chosen.append(TaskAdvantage(task.algorithm(config.algorithm), loaded(plugins, key)))
    return chosen


def advantages_of(
    records: RecordTable, by_task: Sequence[TaskAdvantage], weight_of: WeightOf = lambda part, task: 1.0
) -> tuple[DoubleArray, Spans | None]:
    """Return the advantages of all rollouts, `[N]`, and the token advantages if they differ within a rollout.

    Groups of tasks with equal estimators are standardized together.

    Args:
        records: Groups of the batch, in prompt order.
        by_task: Estimator of each task, by task index. A single one is that of all tasks.
        weight_of: Weight of a reward component.

    Raises:
        ValueError: An estimator rejects a reward, or returns invalid advantages.
    """
    tasks_of: dict[tuple[object, ...], list[int]] = {}
    for task, method in enumerate(by_task):
        key = method.algorithm.advantage, method.algorithm.std_ddof, method.algorithm.pass_k, id(method.custom)
        tasks_of.setdefault(key, []).append(task)
    if len(tasks_of) == 1:
        return _advantages_by(by_task[0], records, weight_of)
    advantages_N, values_T = np.zeros(len(records.rewards)), np.zeros(int(records.num_sampled.sum()))
    group_of_T = np.repeat(records.group_of[records.rollout_of], records.num_sampled)
    has_spans = False
    for tasks in tasks_of.values():
        chosen_P = np.isin(records.tasks, tasks)
        if chosen_P.any():
            subset = records.take(np.flatnonzero(chosen_P))
            own_N, spans = _advantages_by(by_task[tasks[0]], subset, weight_of)
            advantages_N[chosen_P[records.group_of]] = own_N
            if spans is None:
                values_T[chosen_P[group_of_T]] = np.repeat(own_N[subset.rollout_of], subset.num_sampled)
            else:
                values_T[chosen_P[group_of_T]] = np.repeat(spans.table["advantage"], spans.table["num_tokens"])
                has_spans = True
    if not has_spans:
        return advantages_N, None
    return advantages_N, spans_of(values_T, np.ones(len(values_T), np.int64), records.num_sampled, records)[1]


def _advantages_by(method: TaskAdvantage, records: RecordTable, weight_of: WeightOf) -> tuple[DoubleArray, Spans | None]:
    """Return the advantages of all rollouts with one estimator, `[N]`, and the token advantages if they differ in a rollout."""
    algorithm, custom_advantage = method.algorithm, method.custom
    if custom_advantage is not None:
        bound = partial(custom_advantage, **advantage_arguments(custom_advantage, algorithm))
        groups = list(group_rewards(records, weight_of))
        returned = [checked_advantages(bound, group, algorithm.advantage) for group in groups]
        if all(unit == "rollout" for unit, _ in returned):
            return np.fromiter(chain.from_iterable(chain.from_iterable(v) for _, v in returned), np.float64), None
        by_token = [_by_token(unit, by_unit, group) for (unit, by_unit), group in zip(returned, groups, strict=True)]
        flat_T = np.fromiter(chain.from_iterable(chain.from_iterable(group) for group in by_token), np.float64)
        return spans_of(flat_T, np.ones(len(flat_T), np.int64), records.num_sampled, records)
    if algorithm.credit in ("turn", "state"):
        turns = turn_advantages(
            list(group_rewards(records, weight_of)),
            algorithm.advantage,
            discount=algorithm.turn_discount,
            std_ddof=algorithm.std_ddof,
            state_weight=algorithm.state_weight if algorithm.credit == "state" else None,
        )
        values = np.fromiter(chain.from_iterable(chain.from_iterable(turns)), np.float64)
        return spans_of(values, records.turns.num_sampled, records.turns.num_turns, records)
    if algorithm.credit == "token":
        discount, ddof = algorithm.token_discount, algorithm.std_ddof
        values = token_advantages(records, algorithm.advantage, discount=discount, std_ddof=ddof)
        return spans_of(values, np.ones(len(values), np.int64), records.num_sampled, records)
    if algorithm.advantage_traits.compares_parts:
        by_group = decoupled_advantages(group_rewards(records, weight_of), std_ddof=algorithm.std_ddof)
    else:
        ends = np.cumsum(records.groups["num_rollouts"]).tolist()
        is_standardized = algorithm.advantage_traits.is_standardized
        by_group = batch_advantages(
            _by_group(records.rewards.tolist(), ends),
            _by_group(records.num_sampled_by_rollout.tolist(), ends) if is_standardized else (),
            algorithm.advantage,
            std_ddof=algorithm.std_ddof,
            pass_k=algorithm.pass_k,
        )
    return np.fromiter(chain.from_iterable(by_group), np.float64, len(records.rewards)), None


def group_rewards(records: RecordTable, weight_of: WeightOf = lambda part, task: 1.0) -> Iterator[GroupRewards]:
    """Yield the rewards of each group, without reward components that all of its rollouts lack."""
    tasks = records.tasks.tolist()
    weights = {(part, task): weight_of(part, task) for task in set(tasks) for part in records.reward_parts}
    ends = np.cumsum(records.groups["num_rollouts"]).tolist()
    indices, num_tokens = records.groups["index"].tolist(), records.num_sampled_by_rollout.tolist()
    turn_ends = np.cumsum(records.num_turns_by_rollout).tolist()
    turn_rewards = _by_group(records.turns.rewards.tolist(), turn_ends)
    turn_tokens = _by_group(records.turns.num_sampled.tolist(), turn_ends)
    turn_states = _by_group(records.turns.states.tolist(), turn_ends)
    token_rewards: Sequence[Sequence[float]] = ()  # empty if the batch has no token rewards
    if records.known_tokens is not None:
        by_token = records.known_tokens.by_token(records.num_sampled_by_rollout)
        token_rewards = _by_group(by_token.tolist(), np.cumsum(num_tokens).tolist())
    for index, task, start, end in zip(indices, tasks, [0, *ends], ends, strict=False):
        parts = {part: values[start:end].tolist() for part, values in records.reward_parts.items()}
        parts = {part: values for part, values in parts.items() if not all(map(math.isnan, values))}
        yield GroupRewards(
            rewards=records.rewards[start:end].tolist(),
            parts=parts,
            weights={part: weights[part, task] for part in parts},
            num_tokens=num_tokens[start:end],
            index=index,
            turn_rewards=turn_rewards[start:end],
            turn_tokens=turn_tokens[start:end],
            turn_states=turn_states[start:end],
            token_rewards=token_rewards[start:end],
        )


def _by_group(values: list[T], ends: list[int]) -> list[list[T]]:
    return [values[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def batch_advantages(
    groups: Sequence[Sequence[float]],
    num_sampled: Sequence[Sequence[int]],
    method: str,
    *,
    std_ddof: int = 0,
    pass_k: int | None = None,
) -> list[tuple[float, ...]]:
    """Compute the advantages of all groups of a step, in the order of the groups.

    The advantage of a completion depends on its reward and on the rewards of its group, but not on their order. The REINFORCE++
    estimators also standardize the result of `group_advantages` over the batch, for which `num_sampled` are the numbers of loss
    tokens of the completions.
    """
    known: dict[tuple[float, ...], dict[float, float]] = {}  # many groups have the same rewards, in some order
    advantages = []
    for rewards in groups:
        ordered = tuple(sorted(rewards))
        if ordered not in known:
            values = group_advantages(rewards, method, std_ddof=std_ddof, pass_k=pass_k)
            known[ordered] = dict(zip(rewards, values, strict=True))
        advantages.append(tuple(map(known[ordered].__getitem__, rewards)))
    traits = ADVANTAGES[method].traits
    if not traits.is_standardized:
        return advantages
    return standardized(advantages, num_sampled, keeps_zero_groups=not traits.keeps_equal_rewards)


def group_advantages(
    rewards_G: Sequence[float],
    method: str,
    *,
    std_ddof: int = 0,
    pass_k: int | None = None,
    eps: float = EPS,
) -> tuple[float, ...]:
    """Compute the advantages of one group with a built-in estimator, `[G]`.

    The result of the REINFORCE++ estimators is not standardized yet; `standardized` does that over the batch. Groups of one
    completion and groups of equal rewards have advantages of exactly 0, except with `reinforce_pp`. Raise `ValueError` if a
    reward is not finite, a reward is negative with `maxrl`, or an advantage does not fit float32.
    """
    if not all(map(math.isfinite, rewards_G)):
        i, reward = next((i, reward) for i, reward in enumerate(rewards_G) if not math.isfinite(reward))
        raise ValueError(f"rewards[{i}]: not a finite number (got {reward}). Make the reward return finite numbers.")
    if method not in ADVANTAGES:
        raise ValueError(f"method: no such estimator (got {method!r}). Choose one of {', '.join(ADVANTAGES)}.")
    traits = ADVANTAGES[method].traits
    # The rounded mean of equal rewards can leave a residue such as 1e-17, which grpo would multiply by 1 / eps.
    if not traits.keeps_equal_rewards and len(set(rewards_G)) <= 1:
        return (0.0,) * len(rewards_G)
    if traits.divides_by_mean and min(rewards_G) < 0.0:
        fix = "Make the reward return numbers from 0 up, or choose another algorithm.advantage."
        raise ValueError(f"rewards: {method} divides by their mean, so none may be negative (got {min(rewards_G)}). {fix}")
    is_huge = max(rewards_G) >= HUGE or min(rewards_G) <= -HUGE
    if not is_huge or traits.keeps_equal_rewards:
        return tuple(_built_in(method, std_ddof, pass_k, eps)(GroupRewards(rewards=rewards_G)))
    scale = power_of_two_scale(rewards_G)
    function = _built_in(method, std_ddof, pass_k, eps / scale)
    scaled_G = tuple(function(GroupRewards(rewards=[reward / scale for reward in rewards_G])))
    if traits.is_scale_free:
        return scaled_G
    advantages_G = tuple(advantage * scale for advantage in scaled_G)
    # Advantages that are standardized later only have to fit float64 here.
    if max(map(abs, advantages_G)) > (sys.float_info.max if traits.is_standardized else MAX_ADVANTAGE):
        largest = max(rewards_G, key=abs)
        fix = "Make the reward return smaller numbers, or set algorithm.advantage to grpo."
        raise ValueError(f"rewards[{rewards_G.index(largest)}]: the advantage does not fit float32 (got {largest:g}). {fix}")
    return advantages_G


def grpo(group: GroupRewards, *, std_ddof: int = 0, eps: float = EPS) -> tuple[float, ...]:
    """Return (R_i - mean) / (std + eps). Source: GRPO with outcome rewards (arXiv:2402.03300)."""
    mean = _mean(group.rewards)
    variance = math.fsum((reward - mean) ** 2 for reward in group.rewards) / (len(group.rewards) - std_ddof)
    scale = 1.0 / (math.sqrt(variance) + eps)
    return tuple((reward - mean) * scale for reward in group.rewards)


def dr_grpo(group: GroupRewards) -> tuple[float, ...]:
    """Return R_i - mean. Source: Dr. GRPO (arXiv:2503.20783)."""
    mean = _mean(group.rewards)
    return tuple(reward - mean for reward in group.rewards)


def rloo(group: GroupRewards) -> tuple[float, ...]:
    """Return R_i - mean of the other rewards in the group. Source: RLOO (arXiv:2402.14740)."""
    mean, size = _mean(group.rewards), len(group.rewards)
    scale = size / (size - 1)
    return tuple((reward - mean) * scale for reward in group.rewards)


def maxrl(group: GroupRewards, *, eps: float = EPS) -> tuple[float, ...]:
    """Return (R_i - mean) / (mean + eps), for rewards >= 0. Source: MaxRL, as implemented by its authors and in SkyRL."""
    mean = _mean(group.rewards)
    scale = 1.0 / (mean + eps)
    return tuple((reward - mean) * scale for reward in group.rewards)


def reinforce_pp(group: GroupRewards) -> tuple[float, ...]:
    """Return R_i, which `batch_advantages` then standardizes over the batch. Source: REINFORCE++ (arXiv:2501.03262)."""
    return tuple(group.rewards)


def pass_at_k(group: GroupRewards, *, pass_k: int, eps: float = EPS) -> tuple[float, ...]:
    """Return the contribution of each completion to the best-of-k reward, in standard deviations of that reward, `[G]`.

    M(S) is the largest reward in S, where S ranges over all k-subsets of the group. Then
    A_i = (mean of M(S) over all S that contain i - mean of M(S)) / (std of M(S) + eps). If failed rewards left the group with
    fewer than `pass_k` completions, all advantages are 0.

    For rewards of 0 and 1 this is the advantage of pass@k training (arXiv:2508.10751).
    """
    k, size, ordered = pass_k, len(group.rewards), sorted(group.rewards)
    if size < k or ordered[k - 1] == ordered[-1]:  # in the latter case, every k completions include the best reward
        return (0.0,) * size
    # In comb(j, k - 1) of all k-subsets, the largest reward is at index j.
    shares = [math.comb(j, k - 1) / math.comb(size, k) for j in range(size)]
    mean = math.fsum(share * reward for share, reward in zip(shares, ordered, strict=True))
    variance = math.fsum(share * (reward - mean) ** 2 for share, reward in zip(shares, ordered, strict=True))
    best_with = {ordered[index]: _best_with(ordered, index, k) for index in range(size)}
    return tuple((best_with[reward] - mean) / (math.sqrt(variance) + eps) for reward in group.rewards)


def _best_with(ordered: Sequence[float], index: int, k: int) -> float:
    """Return the mean of the largest reward over all k-subsets that contain `ordered[index]`; `ordered` is ascending."""
    if k == 1:
        return ordered[index]
    others = [*ordered[:index], *ordered[index + 1 :]]
    num_subsets = math.comb(len(others), k - 1)
    # In comb(j, k - 2) of these subsets, the largest of the k - 1 other rewards is at index j.
    return math.fsum(math.comb(j, k - 2) / num_subsets * max(other, ordered[index]) for j, other in enumerate(others))


def standardized(
    values: Sequence[Sequence[float]], num_sampled: Sequence[Sequence[int]], *, keeps_zero_groups: bool, eps: float = EPS
) -> list[tuple[float, ...]]:
    """Return (value - mean) / (std + eps), with mean and variance over the loss tokens of the batch.

    Each value is weighted by its entry in `num_sampled`, the number of loss tokens that share it. If all values are equal, the
    result is exactly 0. Source: the global normalization of REINFORCE++ (arXiv:2501.03262).

    With `keeps_zero_groups`, a group whose values are all 0 stays at 0, although the mean is rarely exactly 0. With a baseline,
    such a group has no signal, and its tokens may not be stored. It still counts in mean and std.
    """
    flat = zip((v for group in values for v in group), (n for group in num_sampled for n in group), strict=True)
    counted = [(value, count) for value, count in flat if count]
    distinct = {value for value, _ in counted}
    if len(distinct) <= 1:
        return [(0.0,) * len(group) for group in values]
    if max(distinct) >= HUGE or min(distinct) <= -HUGE:
        scale = power_of_two_scale(distinct)
        scaled = [[value / scale for value in group] for group in values]
        return standardized(scaled, num_sampled, keeps_zero_groups=keeps_zero_groups, eps=eps / scale)
    total = sum(count for _, count in counted)
    mean = math.fsum(count * value for value, count in counted) / total
    std = math.sqrt(math.fsum(count * (value - mean) ** 2 for value, count in counted) / total)
    return [
        tuple(group) if keeps_zero_groups and not any(group) else tuple((value - mean) / (std + eps) for value in group)
        for group in values
    ]


def decoupled_advantages(groups: Iterable[GroupRewards], *, std_ddof: int = 0, eps: float = EPS) -> list[tuple[float, ...]]:
    """Return the GDPO advantages of all groups of a step: `gdpo` of each group, divided by the std over the batch.

    The paper (arXiv:2601.05242) also subtracts the mean over the completions of the batch. That mean is 0, because the
    normalized values of each reward component sum to 0 in a group, and so does their weighted sum. For the same reason, a group
    whose components are all equal has advantages of exactly 0.
    """
    sums = [gdpo(group, std_ddof=std_ddof, eps=eps) for group in groups]
    flat = [value for group in sums for value in group]
    largest = max(map(abs, flat), default=0.0)
    if largest == 0.0:
        return sums
    # Dividing by the largest value keeps the squares from overflowing and underflowing.
    std = largest * math.sqrt(math.fsum((value / largest) ** 2 for value in flat) / len(flat))
    return [tuple(value / (std + eps) for value in group) for group in sums]


def gdpo(group: GroupRewards, *, std_ddof: int = 0, eps: float = EPS) -> tuple[float, ...]:
    """Return the sum over reward components of weight * (r_i - mean) / (std + eps), with mean and std of that component.

    A completion that lacks a component contributes 0 for it and is excluded from its mean and std. Rewards without components
    are treated as one component of weight 1. `decoupled_advantages` normalizes the sums over the batch. Source: GDPO
    (arXiv:2601.05242). Raise `ValueError` if the weights are so large that a sum is not finite.
    """
    sums = [0.0] * len(group.rewards)
    for part, values in (group.parts or {"": group.rewards}).items():
        weight = group.weights.get(part, 1.0)
        present = [i for i, value in enumerate(values) if not math.isnan(value)]
        by_part = _normalized(tuple([values[i] for i in present]), std_ddof, eps)
        for i, advantage in zip(present, by_part, strict=True):
            sums[i] += weight * advantage
    if not all(map(math.isfinite, sums)):
        largest = max(group.weights, key=lambda part: abs(group.weights[part]))
        raise ValueError(
            "data.rewards: the weighted sum of the normalized rewards is not finite "
            f"(got weight {group.weights[largest]:g} for {largest}). Use smaller weights."
        )
    return tuple(sums)


def power_of_two_scale(values: Collection[float]) -> float:
    """Return a power of two that scales the largest absolute value below `HUGE`. Dividing by a power of two is exact."""
    return 2.0 ** (math.frexp(max(map(abs, values)))[1] - 120)


def checked_advantages(
    advantage: Callable[[GroupRewards], Iterable[Any]], group: GroupRewards, name: str
) -> tuple[Unit, list[list[float]]]:
    """Call a user-defined advantage for one group and check the result; `name` is for error messages.

    Return the granularity of the advantages, and those of each completion: one, or one per turn or token. Raise `ValueError` if
    the function raised, or did not return one finite number per completion, turn or token.
    """
    rewards = list(group.rewards)
    try:
        returned: Any = advantage(group)
        is_list = not isinstance(returned, Mapping | Set | str)  # whose items are not one advantage each, in order
        values = list(returned) if is_list else []
        is_nested = any(np.ndim(value) for value in values)
        numbers = [[float(number) for number in value] if is_nested else [float(value)] for value in values]
    except Exception as error:  # user-defined code may raise anything
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(f"algorithm.advantage: {name} raised {cause} (got the rewards {rewards}). Correct it.") from error
    counts = list(map(len, numbers))
    unit: Unit | None = None
    if not is_nested:
        unit = "rollout" if len(counts) == len(rewards) else None
    elif counts == list(map(len, group.turn_rewards)):
        unit = "turn"
    elif counts == list(group.num_tokens):
        unit = "token"
    if unit is None or not all(abs(number) <= MAX_ADVANTAGE for values in numbers for number in values):
        got = numbers if is_nested else [number for values in numbers for number in values] if is_list else returned
        raise ValueError(
            f"algorithm.advantage: {name} must return one finite number per completion (got {got} for the rewards {rewards}), "
            "or for each completion a list of one number per turn or per token. Correct it."
        )
    return unit, numbers


@lru_cache(maxsize=4096)
def _normalized(values_G: tuple[float, ...], std_ddof: int, eps: float) -> tuple[float, ...]:
    """Return the `grpo` advantages of one reward component. The cache helps because many groups have equal values."""
    return group_advantages(values_G, "grpo", std_ddof=std_ddof, eps=eps)


@lru_cache(maxsize=64)
def _built_in(method: str, std_ddof: int, pass_k: int | None, eps: float) -> Callable[[GroupRewards], Sequence[float]]:
    """Return a built-in estimator with the options that it takes."""
    function = import_object(ADVANTAGES[method].path, key="algorithm.advantage")
    names = option_names(function) or ()
    given = {"std_ddof": std_ddof, "pass_k": pass_k, "eps": eps}
    return partial(function, **{name: value for name, value in given.items() if name in names})


def _mean(rewards_G: Sequence[float]) -> float:
    return math.fsum(rewards_G) / len(rewards_G)


def discounted_returns(rewards: Sequence[float], discount: float) -> tuple[float, ...]:
    """Return the discounted return (reward-to-go) of each turn or token of a rollout: G_k = r_k + discount * G_(k + 1)."""
    returns = list(accumulate(reversed(rewards), lambda later, reward: reward + discount * later))
    return tuple(reversed(returns))


def returns_differ(
    turn_rewards: Sequence[Sequence[float]], discount: float, states: Sequence[Sequence[int]] | None = None
) -> bool:
    """Return True if the returns differ among the k-th turns of the rollouts, for some k, or with `states` among the turns in
    some state."""
    returns = [discounted_returns(rewards, discount) for rewards in turn_rewards]
    return any(len(set(values)) > 1 for values in by_key(returns, _keys(turn_rewards, states)).values())


def by_key(values: Sequence[Sequence[float]], keys: Sequence[Sequence[int]]) -> dict[int, list[float]]:
    """Group the values of turns by the keys of the turns, in the order of the rollouts, without those of the key 0."""
    found: dict[int, list[float]] = {}
    for own, own_keys in zip(values, keys, strict=True):
        for value, key in zip(own, own_keys, strict=True):
            if key:
                found.setdefault(key, []).append(value)
    return found


def _keys(turns: Sequence[Sequence[float]], states: Sequence[Sequence[int]] | None) -> Sequence[Sequence[int]]:
    """Return the key of each turn, which is equal for turns that are compared: its state, or else its number from 1. The key 0,
    an unknown state, is compared with nothing."""
    return [range(1, len(rollout) + 1) for rollout in turns] if states is None else states


def turn_advantages(
    groups: Sequence[GroupRewards],
    method: str,
    *,
    discount: float = 1.0,
    std_ddof: int = 0,
    state_weight: float | None = None,
) -> list[list[list[float]]]:
    """Return the advantage of each turn, by group and rollout.

    For each k, the estimator is applied to the returns of the k-th turns of a group, over the rollouts that have a k-th turn.
    If only one rollout has a k-th turn, estimators with a baseline give it advantage 0. The REINFORCE++ estimators standardize
    over the tokens of the batch, as for rollout advantages.

    With `state_weight`, the estimator is applied to the returns of the turns of a group that have the same state, also of one
    rollout, and the result times `state_weight` is added to the advantage of the rollout. Source: GiGPO (arXiv:2505.10978).
    """
    advantages = []
    for group in groups:
        returns = [discounted_returns(rewards, discount) for rewards in group.turn_rewards]
        keys = _keys(returns, None if state_weight is None else group.turn_states)
        compared = by_key(returns, keys).items()
        found = {key: iter(group_advantages(values, method, std_ddof=std_ddof)) for key, values in compared}
        of_turns = [[next(found[key]) if key else 0.0 for key in own] for own in keys]
        if state_weight is not None:
            of_rollouts = group_advantages(group.rewards, method, std_ddof=std_ddof)
            of_turns = [[all_ + state_weight * own for own in turns] for all_, turns in zip(of_rollouts, of_turns, strict=True)]
        advantages.append(of_turns)
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

    `values_T` and `counts_T` are the advantages and numbers of loss tokens of runs of consecutive tokens, concatenated over
    segments; `num_values_M` is the number of runs in each segment.
    """
    num_tokens_N = records.num_sampled_by_rollout
    segment_of_T = np.repeat(np.arange(len(num_values_M)), num_values_M)
    sums_N = np.bincount(records.rollout_of[segment_of_T], values_T * counts_T, len(num_tokens_N))
    means_N = np.divide(sums_N, num_tokens_N, out=np.zeros(len(num_tokens_N)), where=num_tokens_N > 0)
    # Merge adjacent runs of a segment that have equal advantages, and drop runs without tokens.
    has_tokens = counts_T > 0
    values_T, counts_T, segment_of_T = values_T[has_tokens], counts_T[has_tokens], segment_of_T[has_tokens]
    begins = np.ones(len(values_T), np.bool_)
    begins[1:] = (np.diff(segment_of_T) != 0) | (values_T[1:] != values_T[:-1])
    starts = np.flatnonzero(begins)
    table = np.zeros(len(starts), SPAN)
    table["advantage"] = values_T[starts]
    if len(starts):
        table["num_tokens"] = np.add.reduceat(counts_T, starts)
    num_spans = np.bincount(segment_of_T[starts], minlength=len(num_values_M)).astype(np.int64)
    return means_N, Spans(table=table, num_spans=num_spans)
