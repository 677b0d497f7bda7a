"""Factory of group records, and the plan of a batch of them."""

from collections.abc import Sequence
from typing import Any

from titanrl.algorithms.advantages import TaskAdvantage, WeightOf, advantages_of
from titanrl.algorithms.batch_plan import plan_batch
from titanrl.carriers.tables import BatchPlan, RecordTable, Spans
from titanrl.carriers.types import DoubleArray, GroupHandle, GroupRecord
from titanrl.config.algorithm import AlgorithmConfig


def make_record(
    index: int, rewards: Sequence[float] = (0.0, 1.0), num_sampled: Sequence[int] = (), **others: Any
) -> GroupRecord:
    """Build the record of a group, by default with two sampled tokens per completion. `others` sets additional fields."""
    num_sampled = tuple(num_sampled) or (2,) * len(rewards)
    prompt_len = others.get("prompt_len", 2)
    fields: dict[str, Any] = {
        "index": index,
        "task": "sums",
        "handle": GroupHandle(shard=0, location=index, serial=0),
        "has_payload": True,
        "rewards": tuple(rewards),
        "reward_parts": {},
        "prompt_len": prompt_len,
        "lengths": tuple(prompt_len + count for count in num_sampled),
        "num_sampled": num_sampled,
        "num_truncated": 0,
        "num_overlong": 0,
        "num_nonfinite": 0,
        "min_version": 0,
        "max_version": 0,
        "generate_s": 0.0,
        "score_s": 0.0,
    }
    return GroupRecord(**(fields | others))


def plan_rewards(
    records: RecordTable,
    *,
    algorithm: AlgorithmConfig,
    own: Any = None,
    weight_of: WeightOf = lambda part, task: 1.0,
    advantages_N: DoubleArray | None = None,
    spans: Spans | None = None,
    **options: Any,
) -> BatchPlan:
    """Plan a batch with the advantages of its rewards, by the estimator of `algorithm` or the custom estimator `own`."""
    if advantages_N is None:
        advantages_N, spans = advantages_of(records.by_index(), [TaskAdvantage(algorithm, own)], weight_of)
    return plan_batch(records, algorithm=algorithm, advantages_N=advantages_N, spans=spans, **options)
