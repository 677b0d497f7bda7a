"""Experts of a mixture of experts that the generator chose for each token: one small integer by token, layer and choice.

Shape suffixes: S tokens, Y layers, K experts of a token.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

ExpertIds = npt.NDArray[Any]
"""Ids, `[S, Y, K]`, uint8 or uint16. The largest value of the type at all ids of a token states that none were recorded.

Example: two layers with two of 8 experts, of three tokens, the last of which has none:
`[[[0, 5], [7, 1]], [[5, 2], [1, 3]], [[255, 255], [255, 255]]]`, 4 bytes per token.
"""


def id_dtype(num_experts: int) -> Any:
    """Return the smallest type that holds the ids of `num_experts` experts and the value for none."""
    return np.dtype(np.uint8 if num_experts <= np.iinfo(np.uint8).max else np.uint16)


def has_ids_S(experts: ExpertIds) -> npt.NDArray[np.bool_]:
    """Return True for the tokens whose ids were recorded."""
    found: npt.NDArray[np.bool_] = (experts != np.iinfo(experts.dtype).max).any((1, 2))
    return found


def first_recorded(parts: Iterable[ExpertIds], num_tokens: int) -> ExpertIds | None:
    """Combine ids, all from token 0 on, into those of `num_tokens` tokens; return None without parts.

    Each token has the ids of the first part that has them.
    """
    merged: ExpertIds | None = None
    for part in parts:
        if merged is None:
            merged = np.full((num_tokens, *part.shape[1:]), np.iinfo(part.dtype).max, part.dtype)
        missing = np.flatnonzero(~has_ids_S(merged[: len(part)]))
        merged[missing] = part[missing]
    return merged


def joined_experts(parts: Sequence[tuple[ExpertIds | None, int]]) -> ExpertIds | None:
    """Join ids, each with its number of tokens; parts without ids get none. Return None if no part has any."""
    known = next((ids for ids, _ in parts if ids is not None), None)
    if known is None:
        return None
    none = np.iinfo(known.dtype).max
    return np.concatenate([np.full((num, *known.shape[1:]), none, known.dtype) if ids is None else ids for ids, num in parts])


def experts_bytes(experts: ExpertIds | None) -> tuple[Any, ...] | None:
    """Return the arguments of `experts_from`, which pickle faster than an array."""
    return None if experts is None else (experts.tobytes(), experts.dtype.str, *experts.shape[1:])


def experts_from(data: bytes, dtype: str, num_layers: int, per_token: int) -> ExpertIds:
    """Rebuild ids, `[S, num_layers, per_token]`, from the result of `experts_bytes`."""
    return np.frombuffer(data, dtype).reshape(-1, num_layers, per_token)
